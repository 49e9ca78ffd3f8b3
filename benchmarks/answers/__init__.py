"""Helpers shared by the studies of output lengths: input files and result tables."""
