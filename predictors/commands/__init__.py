"""Commands of this package, one per file."""
