"""Fitting of one length distribution for each prompt to sampled output lengths."""
