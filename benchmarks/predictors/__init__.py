"""Benchmarks of what predictors predict, and how fast."""
