"""Predictions of a request's output: records, asynchronous predictors, texts of requests, corrections, drift."""
