"""Simulator: latencies of a request trace under a policy and a model of the engine's step times."""
