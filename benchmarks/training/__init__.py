"""Benchmarks of fitting and training."""
