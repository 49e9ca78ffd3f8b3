"""Which operator sets an ONNX file is written in, read from the file's header without the onnx package.

An ONNX file is a protobuf message `ModelProto`; field 8 repeats `OperatorSetIdProto` (field 1 domain, field 2 version).
The graph, field 7, is skipped by its length, so that gigabytes of weights cost nothing.
Source: onnx/onnx.proto; protobuf encoding guide (varint, length-delimited).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from scheduler_core.errors import InputError

# Operator set -> oldest and newest version that is accepted. An empty domain is ai.onnx.
OPSETS: Mapping[str, tuple[int, int]] = {"ai.onnx": (13, 23), "ai.onnx.ml": (1, 5), "com.microsoft": (1, 1)}

_OPSET_FIELD = 8
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MOST_OPSET_BYTES = 1024


def read_opset(path: Path) -> dict[str, int]:
    """Operator set -> version of an ONNX file.

    Raises:
        InputError: The file is not ONNX.
    """
    found: dict[str, int] = {}
    size = os.path.getsize(path)
    try:
        with open(path, "rb") as stream:
            while stream.tell() < size:
                number, wire = divmod(_varint(stream), 8)
                if number == _OPSET_FIELD and wire == _BYTES:
                    domain, version = _opset(stream)
                    found[domain or "ai.onnx"] = version
                else:
                    _skip(stream, wire, size)
    except (ValueError, UnicodeDecodeError) as error:
        raise InputError(f"artifact file {path.name}", str(path), f"a valid ONNX model ({error})") from error
    if not found:
        raise InputError(f"artifact file {path.name}", str(path), "a valid ONNX model (it names no opset)")
    return found


def check_opset(opset: Mapping[str, int], where: str) -> None:
    """Raises InputError, naming `where`, for an operator set or version that is not in `OPSETS`."""
    for domain, version in opset.items():
        if domain not in OPSETS:
            raise InputError(f"{where}, opset", domain, f"only {', '.join(OPSETS)}")
        low, high = OPSETS[domain]
        if not low <= version <= high:
            raise InputError(f"{where}, opset {domain}", version, f"a version from {low} to {high}")


def _opset(stream: BinaryIO) -> tuple[str, int]:
    length = _varint(stream)
    if length > _MOST_OPSET_BYTES:
        raise ValueError("an opset is too long")
    end = stream.tell() + length
    domain, version = "", 0
    while stream.tell() < end:
        number, wire = divmod(_varint(stream), 8)
        if number == 1 and wire == _BYTES:
            domain = _read(stream, _varint(stream)).decode()
        elif number == 2 and wire == _VARINT:
            version = _varint(stream)
        else:
            _skip(stream, wire, end)
    return domain, version


def _skip(stream: BinaryIO, wire: int, end: int) -> None:
    if wire == _VARINT:
        _varint(stream)
        return
    if wire not in (_FIXED64, _BYTES, _FIXED32):
        raise ValueError(f"wire type {wire}")
    length = _varint(stream) if wire == _BYTES else {_FIXED64: 8, _FIXED32: 4}[wire]
    if stream.tell() + length > end:
        raise ValueError("it ends too early")
    stream.seek(length, os.SEEK_CUR)


def _varint(stream: BinaryIO) -> int:
    value = 0
    for shift in range(0, 70, 7):
        byte = _read(stream, 1)[0]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value
    raise ValueError("a number is too long")


def _read(stream: BinaryIO, length: int) -> bytes:
    found = stream.read(length)
    if len(found) < length:
        raise ValueError("it ends too early")
    return found
