"""Benchmarks of orders, routers and the scheduler's operations."""
