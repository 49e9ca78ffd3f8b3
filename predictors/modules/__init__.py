"""Predictors in torch: encoder, heads, calibration, checkpoints. Serving runs the exported graph instead."""
