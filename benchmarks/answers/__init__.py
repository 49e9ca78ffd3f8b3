"""What the studies of answer lengths share: reading several files, and their tables."""
