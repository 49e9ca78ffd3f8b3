"""Passes over exported ONNX graphs: cheaper operations with equal results, and lower precision.

A pass rewrites an `onnx_ir.Model` in place, without torch. It verifies its assumptions by running the graph (`probe`), so it
depends neither on names nor on the exporter.
"""
