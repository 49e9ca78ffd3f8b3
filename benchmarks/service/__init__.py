"""Parts of benchmarks.service: load generator, servers, upper limit, tables."""
