"""Generates the checked-in gRPC code next to each .proto file: `python -m predictors.proto.generate`.

The Open Inference Protocol gets a separate descriptor pool, because tritonclient registers its messages too.
"""

from __future__ import annotations

import sys
from pathlib import Path

PROTOS = ("predictors/proto/predictor_v1.proto", "predictors/proto/open_inference.proto")
ROOT = Path(__file__).resolve().parents[2]


def generate(out: Path) -> int:
    """Writes messages (`_pb2.py`, `.pyi`) and stubs (`_pb2_grpc.py`) to `out`; returns protoc's exit code."""
    from grpc_tools import protoc

    outputs = (f"--{kind}_out={out}" for kind in ("python", "pyi", "grpc_python"))
    code: int = protoc.main(["protoc", f"-I{ROOT}", *outputs, *PROTOS])
    if code == 0:
        messages = out / "predictors/proto/open_inference_pb2.py"
        text = messages.read_text(encoding="utf-8").replace("pool.Default()", "pool.DescriptorPool()")
        messages.write_text(text, encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(generate(ROOT))
