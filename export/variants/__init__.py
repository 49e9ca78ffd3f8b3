"""Variants of an artifact: faster or smaller graphs, each judged by what it is for before it is accepted."""
