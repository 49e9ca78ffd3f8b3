"""Benchmarks of tailcast-proxy."""
