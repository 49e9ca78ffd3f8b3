"""The gRPC interface: `predictor_v1.proto` and the code generated from it."""
