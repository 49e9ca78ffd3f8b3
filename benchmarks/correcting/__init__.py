"""Benchmarks of corrections of predictions."""
