"""Fitting as a job that survives: blocks to shards to one file, here, in processes or on a Ray cluster."""
