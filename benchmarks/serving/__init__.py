"""Parts of benchmarks/service.py: load generator, servers, upper limit, tables."""
