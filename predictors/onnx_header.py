"""Header of an ONNX file, read without loading it: operator sets, and files that hold its weights.

An ONNX file is a protobuf message `ModelProto`. Only the messages that can hold a tensor are entered; everything else,
weights included, is skipped by its length, so that gigabytes cost nothing. The onnx package is not needed.
Source: onnx/onnx.proto; protobuf encoding guide (varint, length-delimited).
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from scheduler_core.errors import InputError

# Operator set -> oldest and newest version that is accepted. An empty domain is ai.onnx.
OPSETS: Mapping[str, tuple[int, int]] = {"ai.onnx": (13, 23), "ai.onnx.ml": (1, 5), "com.microsoft": (1, 1)}

# Message -> its fields that are entered, and what they are.
_NESTED: Mapping[str, Mapping[int, str]] = {
    "model": {7: "graph", 8: "opset", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "function": {7: "node", 11: "attribute"},
    "graph": {1: "node", 5: "tensor", 15: "sparse tensor"},
    "node": {5: "attribute"},
    "attribute": {
        5: "tensor",
        6: "graph",
        10: "tensor",
        11: "graph",
        22: "sparse tensor",
        23: "sparse tensor",
    },
    "sparse tensor": {1: "tensor", 2: "tensor"},
    "tensor": {13: "external data"},
}
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


@dataclass(frozen=True, slots=True)
class OnnxHeader:
    """Requirements of an ONNX file.

    Attributes:
        opset: Operator set -> version.
        external_files: Files with weights, relative to the file's folder, as the file names them.
    """

    opset: dict[str, int] = field(default_factory=dict)
    external_files: set[str] = field(default_factory=set)


def read_header(path: Path) -> OnnxHeader:
    """Operator sets and external files of an ONNX file.

    Raises:
        InputError: The file is not ONNX, or ends too early.
    """
    header = OnnxHeader()
    try:
        with open(path, "rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            _walk(data, header)
    except ValueError as error:
        raise InputError(f"artifact file {path.name}", str(path), f"a valid ONNX model ({error})") from error
    if not header.opset:
        raise InputError(f"artifact file {path.name}", str(path), "a valid ONNX model (it names no opset)")
    return header


def check_opset(opset: Mapping[str, int], where: str) -> None:
    """Raises InputError, naming `where`, for an operator set or version that is not in `OPSETS`."""
    for domain, version in opset.items():
        if domain not in OPSETS:
            raise InputError(f"{where}, opset", domain, f"only {', '.join(OPSETS)}")
        low, high = OPSETS[domain]
        if not low <= version <= high:
            raise InputError(f"{where}, opset {domain}", version, f"a version from {low} to {high}")


def _walk(data: mmap.mmap, header: OnnxHeader) -> None:
    messages = [("model", 0, len(data))]
    while messages:
        kind, start, end = messages.pop()
        if kind in _NESTED:
            for number, low, high in _fields(data, start, end):
                if number in _NESTED[kind]:
                    messages.append((_NESTED[kind][number], low, high))
        else:
            # OperatorSetIdProto: domain, version; StringStringEntryProto: key, value.
            first, second = _pair(data, start, end)
            if kind == "opset":
                header.opset[first.decode() or "ai.onnx"] = _varint(second, 0)[0] if second else 0
            elif first == b"location":
                header.external_files.add(second.decode())


def _pair(data: mmap.mmap, start: int, end: int) -> tuple[bytes, bytes]:
    values = {number: data[low:high] for number, low, high in _fields(data, start, end)}
    return values.get(1, b""), values.get(2, b"")


def _fields(data: mmap.mmap, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Number, start and end of the value of each field of a message."""
    while start < end:
        key, start = _varint(data, start)
        number, wire = divmod(key, 8)
        low = start
        if wire == _VARINT:
            _, high = _varint(data, low)
        elif wire == _BYTES:
            length, low = _varint(data, low)
            high = low + length
        elif wire in (_FIXED64, _FIXED32):
            high = low + (8 if wire == _FIXED64 else 4)
        else:
            raise ValueError(f"wire type {wire}")
        if high > end:
            raise ValueError("it ends too early")
        yield number, low, high
        start = high


def _varint(data: bytes | mmap.mmap, at: int) -> tuple[int, int]:
    """The number that begins at `at`, and where it ends."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise ValueError("it ends too early")
        value |= (data[at] & 0x7F) << shift
        at += 1
        if data[at - 1] < 0x80:
            return value, at
    raise ValueError("a number is too long")
