"""Gradient-boosted trees on lexical features of the prompt: the cheap predictor of the length distribution."""
