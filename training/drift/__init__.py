"""Drift of a predictor: sliding coverage, sequential test, running recalibration."""
