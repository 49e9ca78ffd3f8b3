"""The prediction service: queue -> batches -> ONNX session, behind gRPC."""
