"""Messages of the interface as JSON, and back: field names as in the .proto, numbers as numbers."""

from __future__ import annotations

import json
from typing import Any, TypeVar

from google.protobuf import json_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from predictors.proto import predictor_v1_pb2 as pb
from predictors.service.errors import UnparsableError

M = TypeVar("M", bound=Message)

# Messages that are nothing but a list are lists in JSON.
LISTS = {
    pb.TokenIds.DESCRIPTOR.full_name: pb.TokenIds.DESCRIPTOR.fields[0].name,
    pb.ChatMessages.DESCRIPTOR.full_name: pb.ChatMessages.DESCRIPTOR.fields[0].name,
}


def json_object(body: bytes) -> dict[str, Any]:
    """The JSON object that `body` is.

    Raises:
        UnparsableError: It is none.
    """
    try:
        content = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise UnparsableError("JSON object", error) from error
    if not isinstance(content, dict):
        raise UnparsableError("JSON object", type(content).__name__)
    return content


def from_json(kind: type[M], content: dict[str, Any]) -> M:
    """The message that a JSON object is.

    Raises:
        UnparsableError: A field is unknown or of another type.
    """
    try:
        message: M = kind()
        json_format.ParseDict(_with_lists(kind.DESCRIPTOR, content), message)
        return message
    except (json_format.ParseError, ValueError, TypeError, AttributeError, RecursionError) as error:
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


def _with_lists(descriptor: Descriptor, content: Any) -> Any:
    """Wraps the lists of `LISTS` as protobuf's JSON has them."""
    if not isinstance(content, dict):
        return content
    found = dict(content)
    for field in descriptor.fields:
        value = found.get(field.name)
        if field.type != FieldDescriptor.TYPE_MESSAGE or value is None:
            continue
        inner = field.message_type
        if inner.full_name in LISTS and isinstance(value, list):
            found[field.name] = {LISTS[inner.full_name]: value}
        elif field.is_repeated and isinstance(value, list):
            found[field.name] = [_with_lists(inner, one) for one in value]
    return found


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
