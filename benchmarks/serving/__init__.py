"""What benchmarks/service.py is made of: load, servers to compare, the raw limit, the table."""
