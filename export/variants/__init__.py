"""Faster variants of an artifact: their graphs, quality and latency, and the report."""
