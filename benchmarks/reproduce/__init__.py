"""Comparison with the results of five papers: `python -m benchmarks.reproduce --help`.

There is a module per paper. Values of the papers are data with their source (table or figure).
"""
