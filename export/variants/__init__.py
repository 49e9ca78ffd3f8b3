"""Faster variants of an artifact: graphs, quality, latency and report."""
