"""The torch side of a predictor: encoder, heads, calibration, checkpoint folder.

This is the only part of `predictors` that needs torch; serving runs the exported graph.
"""
