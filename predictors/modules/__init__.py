"""The torch side of a predictor: encoder, heads, calibration, checkpoint folder; serving runs the exported graph."""
