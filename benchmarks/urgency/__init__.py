"""Benchmarks of urgency predictions."""
