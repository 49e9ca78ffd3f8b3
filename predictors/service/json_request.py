"""Requests of the HTTP port, from JSON: the fields of PredictRequest, or the body of any generation API.

| member | meaning |
|---|---|
| prompt, messages, input, inputs, text, contents | the prompt, as in `scheduler_core.prediction.api_request`; token_ids: a list of ids of the artifact's tokenizer |
| model, served_model | name of the served model |
| max_tokens, max_completion_tokens, max_output_tokens, ... | limit of the output; 0 or below: no limit |
| other fields of PredictRequest | as in protobuf's JSON mapping: numbers may be texts |
| tools, response_format, reasoning_effort, stop, ... | options of the request, see `scheduler_core.prediction.request_options` |
| other members (stream, user, ...) | ignored |

Members that differ from one of these names by one letter, case, _ or -, and a few names of other libraries (model_name,
max_length, ...), are refused, because they are probably meant as these.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

from predictors.proto import predictor_v1_pb2 as pb
from predictors.service.errors import renamed
from predictors.service.messages import MAX_ELEMENTS, MAX_MESSAGES
from scheduler_core.errors import InputError
from scheduler_core.prediction.api_request import ApiRequest, integer, read_request

#: Name in JSON -> field of PredictRequest.
FIELDS: Mapping[str, FieldDescriptor] = {
    name: field for field in pb.PredictRequest.DESCRIPTOR.fields for name in (field.name, field.json_name)
}
#: The same of Observation, except for its request.
OBSERVATION_FIELDS: Mapping[str, FieldDescriptor] = {
    field.name: field for field in pb.Observation.DESCRIPTOR.fields if field.message_type is None
}
MAX_OBSERVATIONS = 1000
MAX_JSON_VALUES = 100_000
"""Maximum number of brackets, commas and colons of a JSON body; parsing that many blocks for about 20 ms."""
INPUTS = ("prompt", "messages", "token_ids", "tokenIds", "input", "inputs", "text", "contents")
MODELS = ("model", "served_model", "servedModel")
#: Limits of the output; the first one >= 1 applies.
LIMITS = (
    *("max_completion_tokens", "max_tokens", "maxTokens", "max_output_tokens"),
    *("max_new_tokens", "n_predict", "num_predict"),
)
_READ = frozenset({*FIELDS, *INPUTS, *MODELS, *LIMITS})


def _without_letter(name: str) -> set[str]:
    """The name in lower case without _ and -, and that without each of its letters. Two names that differ by one letter, added,
    missing, other or exchanged with the next one, have one of them in common."""
    name = name.lower().replace("_", "").replace("-", "")
    return {name, *(name[:index] + name[index + 1 :] for index in range(len(name)))}


#: Names of members that are read, without up to one letter -> name.
_SIMILAR = {variant: name for name in sorted(_READ) for variant in _without_letter(name)}
_LONGEST = max(map(len, _READ)) + 1
#: Names of such members in other libraries -> name; no generation API has them.
_OTHER_NAMES = {
    **dict.fromkeys(("model_name", "model_id"), "model"),
    **dict.fromkeys(("max_length", "max_gen_tokens"), "max_tokens"),
    "temp": "temperature",
}
#: Not misspelled: OpenRouter's list of models.
_NOT_READ = frozenset({"models"})


def request_message(content: object) -> pb.PredictRequest:
    """The request from a JSON object. InputError for misspelled members, wrong types, several inputs, long lists."""
    if not isinstance(content, dict):
        raise InputError("request", f"a value of type {type(content).__name__}", "a JSON object")
    members = {name: value for name, value in content.items() if value is not None}
    fields: dict[str, Any] = {}
    for name, value in members.items():
        field = FIELDS.get(name)
        if name not in _READ | _NOT_READ and len(name) <= _LONGEST:
            similar = sorted(_SIMILAR[variant] for variant in _without_letter(name) & _SIMILAR.keys())
            if name in _OTHER_NAMES or similar:
                allowed = f"{_OTHER_NAMES.get(name) or similar[0]}, or the name of another member of a generation API"
                raise InputError("member", name, allowed)
        if field is None or {field.name, name} & {*INPUTS, *MODELS, *LIMITS}:
            continue
        if field.name in fields:
            raise InputError(f"{field.name}, {field.json_name}", "both", "one of them")
        fields[field.name] = _value(field, name, value)
    api = read_request(members)
    if "temperature" not in fields and api.temperature is not None:  # in the options of Ollama and others
        fields["temperature"] = api.temperature
    limits = {name: _integer(name, members[name], 64) for name in LIMITS if name in members}
    if "max_tokens" in members and "maxTokens" in members:
        raise InputError("max_tokens, maxTokens", "both", "one of them")
    fields["max_tokens"] = next((limit for limit in limits.values() if limit >= 1), api.max_tokens)
    return pb.PredictRequest(**fields, **_input(members, api), served_model=_model(members))


def observe_message(content: object) -> pb.ObserveRequest:
    """The observations from a JSON object: one observation, or a list of `observations`. Their members are those of
    Observation; all others are those of its request. InputError as `request_message`."""
    if isinstance(content, dict) and "observations" in content:
        rows = content["observations"]
        if not isinstance(rows, list) or len(content) > 1:
            raise InputError("observations", [*content], "an object with nothing but a list of observations")
        if len(rows) > MAX_OBSERVATIONS:
            raise InputError("observations", f"{len(rows)} of them", f"1 to {MAX_OBSERVATIONS}")
    else:
        rows = [content]
    message = pb.ObserveRequest()
    for index, row in enumerate(rows):
        if not isinstance(row, dict):
            raise InputError(f"observations[{index}]", row, "a JSON object")
        try:
            message.observations.append(_observation(row))
        except InputError as error:
            raise renamed(error, f"observations[{index}].{error.field}") from error
    return message


def _observation(row: Mapping[str, Any]) -> pb.Observation:
    members = {name: value for name, value in row.items() if value is not None}
    own = {name: members.pop(name) for name in (*OBSERVATION_FIELDS, "request") if name in members}
    fields = {
        name: _value(OBSERVATION_FIELDS[name], name, value)
        for name, value in own.items()
        if name != "request"
    }
    if "request" in own and members:
        raise InputError("request", [*members], "a request in the member request, or beside it, not both")
    request = own.get("request", members or None)
    if request is not None:
        fields["request"] = request_message(request)
    return pb.Observation(**fields)


def _input(members: Mapping[str, Any], api: ApiRequest) -> dict[str, Any]:
    """The field of the oneof `input`, from the only member with a prompt."""
    inputs = {name: members[name] for name in INPUTS if name in members}
    # The Responses API has a format in `text`, and the name of a stored prompt in `prompt`.
    inputs = {
        name: value
        for name, value in inputs.items()
        if name not in ("text", "prompt") or not isinstance(value, dict)
    }
    if "prompt" in members and not inputs:
        raise InputError("prompt", members["prompt"], "a text")
    if len(inputs) > 1:
        raise InputError(", ".join(inputs), f"{len(inputs)} inputs", "one of them")
    for name, value in inputs.items():
        if name in ("token_ids", "tokenIds"):
            return {"token_ids": _token_ids(name, value)}
        if name == "messages" and not isinstance(value, list):
            raise InputError(name, value, "a list of messages")
        if not isinstance(value, str | list):
            raise InputError(name, value, "a text")
        if api.messages or name == "messages":
            return {"messages": _chat(name, value, api)}
        if api.num_prompt_ids or (isinstance(value, list) and len(api.texts) != 1):
            allowed = (
                "one text; token_ids has ids of the artifact's tokenizer, /v1/predict-batch several prompts"
            )
            raise InputError(name, value, allowed)
        return {"messages": _chat(name, value, api)} if api.options else {"prompt": _text(name, api.texts[0])}
    return {}


def _chat(name: str, value: list[Any] | str, api: ApiRequest) -> pb.ChatMessages:
    if len(value) > MAX_MESSAGES and isinstance(value, list):
        raise InputError(name, f"{len(value)} messages", f"at most {MAX_MESSAGES}")
    chat = pb.ChatMessages()
    for role, text in api.conversation:
        chat.messages.add(role=_text(name, role), content=_text(name, text))
    return chat


def _token_ids(name: str, value: object) -> pb.TokenIds:
    ids = value.get("ids") if isinstance(value, dict) else value
    return pb.TokenIds(ids=[_integer(name, each, 32) for each in _list(name, ids)])


def _model(members: Mapping[str, Any]) -> str:
    names = {name: _text(name, members[name]) for name in MODELS if name in members}
    models = {model for model in names.values() if model}  # empty: unknown
    if len(models) > 1:
        raise InputError(", ".join(names), list(names.values()), "one name, or the same")
    return next(iter(models), "")


def _value(field: FieldDescriptor, name: str, value: object) -> Any:
    """The value of a field of PredictRequest that is no message."""
    if field.is_repeated:
        return [_number(name, each) for each in _list(name, value)]
    if field.type == field.TYPE_STRING:
        return _text(name, value)
    if field.type == field.TYPE_DOUBLE:
        return _number(name, value)
    if field.type == field.TYPE_BOOL:
        if not isinstance(value, bool):
            raise InputError(name, value, "true or false")
        return value
    return _integer(name, value, 32 if field.type == field.TYPE_INT32 else 64)


def _list(name: str, value: object) -> list[Any]:
    if not isinstance(value, list) or len(value) > MAX_ELEMENTS:
        count = f"{len(value)} values" if isinstance(value, list) else value
        raise InputError(name, count, f"a list of at most {MAX_ELEMENTS} numbers")
    return value


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise InputError(name, value, "a text")
    return value


def _integer(name: str, value: object, bits: int) -> int:
    number = integer(value)
    if number is None or not -(2 ** (bits - 1)) <= number < 2 ** (bits - 1):
        raise InputError(name, value, f"an integer of {bits} bits")
    return number


def _number(name: str, value: object) -> float:
    try:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number or (isinstance(value, str) and value.isascii() and "_" not in value):
            number = float(value)  # type: ignore[arg-type]
            if math.isfinite(number):
                return number
    except (ValueError, OverflowError):
        pass
    raise InputError(name, value, "a finite number")
