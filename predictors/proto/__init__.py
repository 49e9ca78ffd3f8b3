"""The gRPC interface: `predictor_v1.proto` and its generated code."""
