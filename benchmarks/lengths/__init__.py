"""Benchmark of output-length predictors on streams of requests; run with `python -m benchmarks.lengths DATA`."""
