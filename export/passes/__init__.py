"""Graph surgery on exported ONNX graphs: the same numbers from cheaper operations, and smaller numbers.

Every pass takes and gives an `onnx.ModelProto`; none needs torch. What a pass believes about the graph it proves by running
the graph (`probe`), so that it does not depend on the names or on the exporter that made the graph.
"""
