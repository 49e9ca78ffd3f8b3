"""Simulator: a trace, a policy and a model of the engine's speed in, latencies out."""
