"""Scripts that measure, one per claim, and what several of them share."""
