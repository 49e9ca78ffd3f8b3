"""The prediction service over gRPC and HTTP: queue, batches, ONNX session."""
