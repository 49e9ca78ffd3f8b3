"""Benchmarks of agents: sessions of many turns that share a growing context."""
