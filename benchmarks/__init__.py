"""Benchmark scripts, one per claim, and the helpers that they share."""
