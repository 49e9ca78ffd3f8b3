"""Whether a predictor still fits the answers it sees: sliding coverage, sequential test, running recalibration."""
