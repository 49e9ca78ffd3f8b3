"""Benchmarks of the simulator, and its validation against Vidur."""
