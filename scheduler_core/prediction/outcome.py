"""Outcome of a request: its prediction, what was generated, its limits and times; in JSON, one object per line.

`tailcast-proxy --feedback FOLDER` writes outcomes; `read-feedback`, `evaluate-stream`, `import-lengths feedback` and `adapt`
read them, and online calibration learns from them. In the JSON form, the prediction's fields stand beside the others, those of
a second predictor's under "shadow"; "format" is `FORMAT`. Only output_tokens is required; unknown keys are ignored.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import IO, Any

from scheduler_core.errors import InputError
from scheduler_core.prediction.api_request import MAX_TOKENS
from scheduler_core.prediction.api_response import COMPLETE, TRUNCATED
from scheduler_core.prediction.predictions import LengthPrediction
from scheduler_core.prediction.prompt_text import Message
from scheduler_core.ranges import FINITE
from scheduler_core.shell.json_text import parse_json

FORMAT = "tailcast-feedback/1"
SEGMENTS = "feedback-*.jsonl"
#: Maximum bytes of a line; longer ones are not parsed.
MAX_LINE_BYTES = 64 << 20
#: Degrees of freedom of predictions that do not have them (the default of TIE).
DEFAULT_NU = 3.5
_MAX_S = 1e11
_COUNTED_BY = ("usage", "tokenizer", "deltas")
_CENSORED = TRUNCATED | {"abort", "cancelled"}
_INTEGERS = {"output_tokens": 0, "max_tokens": 1, "prompt_tokens": 0, "num_events": 0, "tier": 0}
_NUMBERS = {"time": _MAX_S, "waited_s": _MAX_S, "ttft_s": _MAX_S, "total_s": _MAX_S, "temperature": FINITE, "top_p": FINITE}  # fmt: skip
_TEXTS = (
    "finish_reason",
    "request_id",
    "tenant",
    "endpoint",
    "served_model",
    "replica",
    "prompt",
    "prompt_sha256",
)
_FLAGS = ("finished", "forced_length")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What happened to one request with one output. None: not known.

    Attributes:
        output_tokens: Tokens of the output, as far as it was generated.
        counted_by: "usage" (by the engine), "tokenizer", or "deltas" (estimated from the events of a stream).
        num_events: Events with output of a streamed response.
        max_tokens: The request's limit; servers may count a token more, see `limit`.
        finished: Whether the output ended by itself; false if it is censored (a limit, a client that disconnected).
        finish_reason: In the words of the API; "abort" if the client disconnected, empty if unknown.
        forced_length: The client determined the length (`ignore_eos`, `min_tokens`).
        prediction: As predicted, before online calibration.
        shadow: That of a second predictor, for comparison.
        time: Arrival, Unix time in seconds.
        waited_s, ttft_s, total_s: Seconds from arrival to the engine, the first token and the end.
        replica: URL of the engine, if there are several.
        tier: Declared urgency, 0 = most urgent.
        prompt_sha256: Key of the prompt, also if its text is not stored.
    """

    output_tokens: int
    counted_by: str | None = None
    num_events: int | None = None
    max_tokens: int | None = None
    finished: bool | None = None
    finish_reason: str = ""
    forced_length: bool = False
    served_model: str | None = None
    prediction: LengthPrediction | None = None
    shadow: LengthPrediction | None = None
    prompt_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    request_id: str | None = None
    tenant: str | None = None
    tier: int | None = None
    endpoint: str | None = None
    replica: str | None = None
    time: float | None = None
    waited_s: float | None = None
    ttft_s: float | None = None
    total_s: float | None = None
    prompt_sha256: str | None = None
    prompt: str | None = None
    messages: tuple[Message, ...] = ()

    @property
    def is_finished(self) -> bool:
        """Whether the output is complete; by its limit if `finished` is None."""
        if self.finished is None:
            return self.max_tokens is None or self.output_tokens < self.max_tokens
        return self.finished

    @property
    def limit(self) -> int | None:
        """max_tokens, but at least output_tokens."""
        return None if self.max_tokens is None else max(self.max_tokens, self.output_tokens)

    @property
    def has_length(self) -> bool:
        """Whether the model determined the length, or a censored part of it."""
        failed = self.finish_reason in ("error", "content_filter")
        return self.output_tokens > 0 and not failed and not self.forced_length

    def to_json(self) -> dict[str, Any]:
        """The JSON object; keys of texts and of predictions that are not known are left out."""
        optional = {"prompt", "messages", "prediction", "shadow"}
        content = {
            field.name: getattr(self, field.name) for field in fields(self) if field.name not in optional
        }
        content = {"format": FORMAT, **content, **_prediction_json(self.prediction)}
        if self.prompt is not None:
            content["prompt"] = self.prompt
        if self.messages:
            content["messages"] = [{"role": role, "content": text} for role, text in self.messages]
        if self.shadow is not None:
            content["shadow"] = _prediction_json(self.shadow)
        return content


def is_finished(finish_reason: str) -> bool | None:
    """Whether an output with this finish reason is complete, false if it is censored; None if neither is known."""
    reason = finish_reason.lower()
    return True if reason in COMPLETE else False if reason in _CENSORED else None


def outcome_of(content: Mapping[str, Any]) -> Outcome:
    """The outcome of a JSON object; InputError names the first key with an invalid value."""
    if content.get("format", FORMAT) != FORMAT:
        raise InputError("format", content["format"], FORMAT)
    values: dict[str, Any] = {}
    for name, low in _INTEGERS.items():
        values[name] = _number(content, name, low, MAX_TOKENS)
    if values["output_tokens"] is None:
        raise InputError("output_tokens", None, f"integers from 0 to {MAX_TOKENS}")
    for name, high in _NUMBERS.items():
        values[name] = _number(content, name, 0.0, high)
    for name in _TEXTS:
        values[name] = _typed(content, name, str, "a string")
    for name in _FLAGS:
        values[name] = _typed(content, name, bool, "true or false")
    values |= {"finish_reason": values["finish_reason"] or "", "forced_length": bool(values["forced_length"])}
    if (counted_by := content.get("counted_by")) not in (None, *_COUNTED_BY):
        raise InputError("counted_by", counted_by, " | ".join(_COUNTED_BY))
    shadow = _typed(content, "shadow", dict, "an object with mu and sigma")
    return Outcome(
        **values,
        counted_by=counted_by,
        prediction=_prediction(content, ""),
        shadow=None if shadow is None else _prediction(shadow, "shadow."),
        messages=_messages(content.get("messages")),
    )


def parse_outcome(line: str | bytes) -> Outcome:
    """The outcome of a line of JSON; InputError for "line" if it is none, else for the key."""
    if len(line) > MAX_LINE_BYTES:
        raise InputError("line", line[:40], f"at most {MAX_LINE_BYTES} bytes")
    try:
        content = parse_json(line)
    except ValueError as error:
        raise InputError("line", line[:80], "a JSON object in UTF-8") from error
    if not isinstance(content, dict):
        raise InputError("line", line[:80], "a JSON object in UTF-8")
    return outcome_of(content)


def read_log(path: str | Path, left_out: Counter[str]) -> Iterator[tuple[int, Outcome]]:
    """The outcomes of a log, with the number of their line over all files: a folder of segments (`SEGMENTS`, in the order of
    their names), or one file.

    Lines that are not outcomes (torn by a crash, damaged) and copies of earlier ones are counted in `left_out`, by reason.
    InputError if there is no segment or no outcome.
    """
    digests, number = set[bytes](), 0
    for number, line in enumerate(_lines(segments_of(Path(path))), start=1):
        try:
            outcome = parse_outcome(line)
            key = outcome.request_id.encode("utf-8", "replace") if outcome.request_id else line
            digest = hashlib.blake2b(key, digest_size=8).digest()
            if digest in digests:
                raise InputError("record", line[:40], "a record that is not a copy of an earlier one")
        except InputError as error:
            # Without the number of a message, to limit the number of reasons.
            left_out[f"{error.field.partition('[')[0]} (allowed: {error.allowed})"] += 1
            continue
        digests.add(digest)
        yield number, outcome
    if number and not digests:
        counts = ", ".join(f"{count} x {reason}" for reason, count in left_out.most_common())
        allowed = f"at least one record (skipped {left_out.total()} of {number} lines: {counts})"
        raise InputError("feedback log", str(path), allowed)


def segments_of(path: Path) -> list[Path]:
    """The files of a log in order, see `read_log`; InputError if there is none."""
    segments = sorted(path.glob(SEGMENTS)) if path.is_dir() else [path]
    if not segments or not segments[0].is_file():
        raise InputError("feedback log", str(path), f"a file, or a folder with {SEGMENTS}")
    return segments


def bounded_lines(stream: IO[bytes]) -> Iterator[bytes]:
    """Lines of a stream; the rest of a line of more than `MAX_LINE_BYTES` is dropped, so that it is too long by one."""
    while line := stream.readline(MAX_LINE_BYTES + 1):
        yield line
        while len(line) > MAX_LINE_BYTES and not line.endswith(b"\n"):
            line = stream.readline(MAX_LINE_BYTES + 1)


def _lines(segments: list[Path]) -> Iterator[bytes]:
    for segment in segments:
        with open(segment, "rb") as stream:
            yield from filter(None, map(bytes.strip, bounded_lines(stream)))


def _prediction_json(prediction: LengthPrediction | None) -> dict[str, Any]:
    """Fields of a prediction; empty quantiles are left out, so that those of a log-t keep their form."""
    content = {} if prediction is None else asdict(prediction)
    return {name: value for name, value in content.items() if name != "quantiles" or value}


def _prediction(content: Mapping[str, Any], prefix: str) -> LengthPrediction | None:
    values: dict[str, Any] = {
        name: _number(content, name, -FINITE, FINITE, prefix) for name in ("mu", "sigma", "nu")
    }
    if values["mu"] is None and values["sigma"] is None and not prefix:
        return None
    for name in ("mu", "sigma"):
        if values[name] is None:
            raise InputError(prefix + name, None, "numbers; mu and sigma must both be set, or none of them")
    for name in ("artifact_id", "artifact_version"):
        values[name] = _typed(content, name, str, "a string") or ""
    quantiles = _typed(content, "quantiles", list, "a list of numbers") or []
    if not all(type(value) in (int, float) for value in quantiles):
        raise InputError(f"{prefix}quantiles", quantiles, "a list of numbers")
    values["nu"] = DEFAULT_NU if values["nu"] is None else values["nu"]
    try:
        return LengthPrediction(**values, quantiles=tuple(quantiles))
    except InputError as error:
        name = prefix + error.field.removeprefix("predicted ")
        raise InputError(name, error.value, error.allowed) from error


def _messages(messages: Any) -> tuple[Message, ...]:
    conversation = []
    for number, each in enumerate(messages or [] if isinstance(messages, list | None) else [messages]):
        message = each if isinstance(each, dict) else {}
        role, text = message.get("role"), message.get("content")
        if not isinstance(role, str) or not isinstance(text, str):
            raise InputError(f"messages[{number}]", each, "an object with the strings role and content")
        conversation.append(Message(role, text))
    return tuple(conversation)


def _number(content: Mapping[str, Any], name: str, low: float, high: float, prefix: str = "") -> Any:
    value = content.get(name)
    if value is None:
        return None
    is_integer = isinstance(low, int)
    if not (type(value) is int or (type(value) is float and not is_integer)) or not low <= value <= high:
        bounds = (
            f" from {low} to {high if is_integer else format(high, 'g')}"
            if high != FINITE
            else f" >= {low:g}"
            if low == 0
            else ""
        )
        raise InputError(prefix + name, value, ("integers" if is_integer else "numbers") + bounds)
    return value


def _typed(content: Mapping[str, Any], name: str, kind: type, allowed: str) -> Any:
    value = content.get(name)
    if value is not None and not isinstance(value, kind):
        raise InputError(name, value, allowed)
    return value
