"""Synthetic workloads: requests drawn from a description with a seed."""
