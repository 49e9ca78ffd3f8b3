"""Regenerates the checked-in gRPC code: `python -m predictors.proto.generate`.

Written beside each .proto file: messages (`_pb2.py`), their types (`_pb2.pyi`) and stubs (`_pb2_grpc.py`).
A test compares the checked-in files with a fresh generation.

The Open Inference Protocol is everybody's: tritonclient registers messages of the same names. Ours have a descriptor pool
of their own, so that both can be imported in one process.
"""

from __future__ import annotations

import sys
from pathlib import Path

from scheduler_core.errors import MissingExtraError, TailcastError

PROTOS = ("predictors/proto/predictor_v1.proto", "predictors/proto/open_inference.proto")
SHARED_NAMES = "predictors/proto/open_inference.proto"
ROOT = Path(__file__).resolve().parents[2]


def generate(out: Path) -> list[Path]:
    """Generates the code for `PROTOS` under the folder `out` and returns the files' paths.

    Raises:
        MissingExtraError: grpcio-tools is not installed.
        TailcastError: protoc refuses a file.
    """
    try:
        from grpc_tools import protoc
    except ImportError as error:
        raise MissingExtraError("grpcio-tools", "dev") from error
    code = protoc.main(
        [
            "protoc",
            f"-I{ROOT}",
            f"--python_out={out}",
            f"--pyi_out={out}",
            f"--grpc_python_out={out}",
            *PROTOS,
        ]
    )
    if code != 0:
        raise TailcastError(f"protoc failed on {', '.join(PROTOS)} with exit code {code}")
    messages = out / SHARED_NAMES.replace(".proto", "_pb2.py")
    content = messages.read_text(encoding="utf-8")
    messages.write_text(
        content.replace("_descriptor_pool.Default()", "_descriptor_pool.DescriptorPool()"), encoding="utf-8"
    )
    return [
        out / (proto.removesuffix(".proto") + suffix)
        for proto in PROTOS
        for suffix in ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")
    ]


if __name__ == "__main__":
    for path in generate(ROOT):
        sys.stdout.write(f"{path.relative_to(ROOT)}\n")
