"""The results of five papers beside ours: `python -m benchmarks.reproduce --help`.

A module per paper. Papers' values are data with their source (table or figure); ours are computed when it runs.
"""
