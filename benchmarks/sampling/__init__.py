"""Benchmarks of sampling outputs."""
