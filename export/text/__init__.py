"""An artifact with its tokenizer inside the graph, by the operators of onnxruntime-extensions."""
