"""Messages of the interface as JSON, and back: field names as in the .proto, numbers as numbers."""

from __future__ import annotations

import asyncio
import functools
import json
from typing import Any, TypeVar

import numpy as np
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from predictors.proto import predictor_v1_pb2 as pb
from predictors.service.errors import UnparsableError

M = TypeVar("M", bound=Message)

MAX_JSON_VALUES = 100_000
"""Most brackets, commas and colons of a JSON body: as many take some 20 ms to read, in which nobody else is answered."""
MAX_INTEGER_CHARS = 20
PIECE_BYTES = 2**17
# As few bytes cannot be too many values.
UNCOUNTED_BYTES = MAX_JSON_VALUES
SYMBOLS = np.zeros(256, dtype=np.bool_)
SYMBOLS[list(b"[{,:")] = True

NUMBER_TYPES: dict[int, set[type]] = {
    FieldDescriptor.CPPTYPE_INT32: {int},
    FieldDescriptor.CPPTYPE_INT64: {int},
    FieldDescriptor.CPPTYPE_DOUBLE: {int, float},
}

# Messages that are nothing but a list are lists in JSON.
LISTS = {
    pb.TokenIds.DESCRIPTOR.full_name: pb.TokenIds.DESCRIPTOR.fields[0].name,
    pb.ChatMessages.DESCRIPTOR.full_name: pb.ChatMessages.DESCRIPTOR.fields[0].name,
}


async def json_object(body: bytes) -> dict[str, Any]:
    """The JSON object that `body` is, in UTF-8; while it is read, others get their turns on the event loop.

    Raises:
        UnparsableError: It is none, or has more than `MAX_JSON_VALUES` values.
    """
    if await _num_symbols(body) > MAX_JSON_VALUES:
        reason = f"more than {MAX_JSON_VALUES} values; larger requests go over gRPC or as binary tensors"
        raise UnparsableError("JSON object", reason)
    try:
        text = body.decode("utf-8-sig")
        content = json.loads(text, parse_int=_json_integer, object_pairs_hook=_json_members)
    except (ValueError, RecursionError) as error:
        raise UnparsableError("JSON object", error) from error
    if not isinstance(content, dict):
        raise UnparsableError("JSON object", type(content).__name__)
    await asyncio.sleep(0)
    return content


async def _num_symbols(body: bytes) -> int:
    """How many brackets, commas and colons outside strings, not all counted once they are too many.

    Parsing takes a time that they bound, and cannot be interrupted; counting can.
    """
    if len(body) <= UNCOUNTED_BYTES:
        return 0
    count, at, is_inside = 0, 0, False
    while at < len(body) and count <= MAX_JSON_VALUES:
        piece = body[at : at + PIECE_BYTES]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:  # ends in the middle of an escape
            piece = body[at : at + PIECE_BYTES + 1]
        at += len(piece)
        codes = np.frombuffer(piece.replace(b"\\\\", b"").replace(b'\\"', b""), dtype=np.uint8)
        if len(codes):
            inside = np.logical_xor.accumulate(codes == ord('"')) ^ is_inside
            count += int(np.count_nonzero(SYMBOLS[codes] & ~inside))
            is_inside = bool(inside[-1])
        await asyncio.sleep(0)
    return count


def _json_members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("a name that comes twice in one object")
    return members


def _json_integer(text: str) -> int:
    if len(text) > MAX_INTEGER_CHARS:  # the time that conversion takes grows with the square of the digits
        raise ValueError(f"an integer of {len(text)} characters")
    return int(text)


def from_json(kind: type[M], content: dict[str, Any]) -> M:
    """The message that a JSON object is. Names may be those of protobuf's JSON (maxTokens), numbers may be quoted.

    Raises:
        UnparsableError: A field is unknown or of another type.
    """
    try:
        message: M = kind(**_arguments(kind.DESCRIPTOR, content))
        return message
    except (TypeError, ValueError, OverflowError) as error:
        raise UnparsableError(kind.DESCRIPTOR.name, error) from error


def as_json(message: Message) -> dict[str, Any]:
    """All fields of a message; those that can be absent only where they are present."""
    found: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        if field.has_presence and not message.HasField(field.name):
            continue
        value = getattr(message, field.name)
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            found[field.name] = [as_json(one) for one in value] if field.is_repeated else as_json(value)
        else:
            found[field.name] = list(value) if field.is_repeated else value
    return found


def schemas(*kinds: type[Message]) -> dict[str, Any]:
    """JSON schemas (OpenAPI 3.1) of messages and of all messages in them, by name."""
    found: dict[str, Any] = {}
    for kind in kinds:
        _add_schema(kind.DESCRIPTOR, found)
    return found


NUMBERS = {
    FieldDescriptor.CPPTYPE_INT32: {"type": "integer", "format": "int32"},
    FieldDescriptor.CPPTYPE_INT64: {"type": "integer", "format": "int64"},
    FieldDescriptor.CPPTYPE_DOUBLE: {"type": "number", "format": "double"},
    FieldDescriptor.CPPTYPE_BOOL: {"type": "boolean"},
    FieldDescriptor.CPPTYPE_STRING: {"type": "string"},
}


def _arguments(descriptor: Descriptor, content: Any) -> dict[str, Any]:
    """What the message's class takes to make the message that `content` is."""
    if not isinstance(content, dict):
        raise TypeError(f"{descriptor.name} is an object, not {type(content).__name__}")
    fields = _fields(descriptor.full_name)
    arguments: dict[str, Any] = {}
    oneofs: dict[str, str] = {}
    for name, value in content.items():
        if name not in fields:
            raise ValueError(f"{descriptor.name} has no field {name[:50]!r}")
        if value is None:
            continue
        field, oneof = fields[name]
        group = oneof or field.name
        if oneofs.setdefault(group, name) != name:
            raise ValueError(f"{oneofs[group]} and {name} exclude each other")
        arguments[field.name] = _argument(field, value)
    return arguments


@functools.cache
def _fields(message: str) -> dict[str, tuple[FieldDescriptor, str | None]]:
    """The fields of a message of the interface by both of their names, each with the oneof that it is in."""
    descriptor = pb.DESCRIPTOR.message_types_by_name[message.rpartition(".")[2]]
    found = {}
    for field in descriptor.fields:
        oneof = field.containing_oneof
        group = oneof.name if oneof is not None and len(oneof.fields) > 1 else None
        found[field.name] = found[field.json_name] = field, group
    return found


def _argument(field: FieldDescriptor, value: Any) -> Any:
    inner = field.message_type
    if inner is not None and inner.full_name in LISTS and isinstance(value, list):
        name = LISTS[inner.full_name]
        return {name: _argument(inner.fields_by_name[name], value)}
    if not field.is_repeated:
        return _one(field, value)
    if not isinstance(value, list):
        raise TypeError(f"{field.name} is a list, not {type(value).__name__}")
    if field.cpp_type in NUMBER_TYPES and set(map(type, value)) <= NUMBER_TYPES[field.cpp_type]:
        return value
    return [_one(field, one) for one in value]


def _one(field: FieldDescriptor, value: Any) -> Any:
    if field.message_type is not None:
        return _arguments(field.message_type, value)
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        if isinstance(value, str):
            return value
    elif isinstance(value, int | float | str) and not isinstance(value, bool) and value == value:
        if field.cpp_type == FieldDescriptor.CPPTYPE_DOUBLE:
            return float(value)
        number = _json_integer(value) if isinstance(value, str) else int(value)
        if isinstance(value, str) or number == value:
            bits = 32 if field.cpp_type == FieldDescriptor.CPPTYPE_INT32 else 64
            if not -(2 ** (bits - 1)) <= number < 2 ** (bits - 1):
                raise ValueError(f"{field.name} is an integer of {bits} bits, not {number}")
            return number
    allowed = "a text" if field.cpp_type == FieldDescriptor.CPPTYPE_STRING else "a number"
    if isinstance(value, float):
        allowed = "an integer"
    raise TypeError(f"{field.name} is {allowed}, not {type(value).__name__}")


def _add_schema(descriptor: Descriptor, found: dict[str, Any]) -> None:
    if descriptor.name in found:
        return
    properties: dict[str, Any] = {}
    found[descriptor.name] = {"type": "object", "properties": properties, "additionalProperties": False}
    for field in descriptor.fields:
        repeated = field.is_repeated
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            inner = field.message_type
            if inner.full_name in LISTS:
                repeated = True
                [of] = inner.fields
                schema = _schema(of, found)
            else:
                schema = _schema(field, found)
        else:
            schema = _schema(field, found)
        properties[field.name] = {"type": "array", "items": schema} if repeated else schema


def _schema(field: FieldDescriptor, found: dict[str, Any]) -> dict[str, Any]:
    if field.type == FieldDescriptor.TYPE_MESSAGE:
        _add_schema(field.message_type, found)
        return {"$ref": f"#/components/schemas/{field.message_type.name}"}
    return dict(NUMBERS[field.cpp_type])
