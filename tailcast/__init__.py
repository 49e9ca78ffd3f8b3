"""Commands that combine packages which do not import each other."""
