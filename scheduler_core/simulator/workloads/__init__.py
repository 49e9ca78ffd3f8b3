"""Workloads: requests drawn from a description by a seed."""
