"""Sampling of many outputs for each prompt: prompt sources, sampling backends, sample schema, and resumable runs."""
