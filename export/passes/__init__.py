"""Passes over exported ONNX graphs: cheaper operations with the same results, and lower precision.

A pass rewrites an `onnx_ir.Model` in place, without torch. It verifies its assumptions by running the graph
(`probe`), so it does not depend on node names or on the exporter.
"""
