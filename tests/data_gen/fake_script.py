"""How the fake server behaves: what goes wrong with which request, and how long answers are."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

MODEL = "fake-model"


@dataclass(frozen=True)
class Fault:
    """What a request gets instead of, or on top of, an answer.

    Attributes:
        status: HTTP status; 200 goes on with the answer.
        headers: Further headers.
        payload: Body instead of the answer.
        hang: Never answers.
        cut: "early": the connection breaks before the head; "middle": in the middle of the body. Of a stream also
            "quiet": no more events come; "ended": it ends properly, but too soon.
        delay_s: Waits before the answer.
        change: Changes the answer's JSON before it is sent.
    """

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    payload: bytes | None = None
    hang: bool = False
    cut: str = ""
    delay_s: float = 0.0
    change: Callable[[dict[str, Any]], None] | None = None


GOOD = Fault()


def error(status: int, message: str = "told to fail", **headers: str) -> Fault:
    """An HTTP error with a message as engines send it."""
    payload = json.dumps({"error": {"message": message, "type": "Error", "code": status}}).encode()
    return Fault(status, {name.replace("_", "-"): value for name, value in headers.items()}, payload)


@dataclass
class Script:
    """How a server behaves; change it while the server runs.

    Attributes:
        behave: Fault for a request, given its number (from 0) and its body.
        model: Name it serves.
        owner: `owned_by` of its model; decides what engine it is taken for.
        version: SampledOutput of /version.
        delay_s: Seconds until a good answer.
        gate: Answers wait until so many requests have been in flight at once.
        honours_n: Whether `n` above 1 is obeyed.
        usage: Whether it counts tokens.
        lists_tokens: Whether token ids and logprobs are sent when asked for.
        lists_end: Whether they hold the end marker.
        prompt_tokens: Count of a prompt.
        busy_tokenizer: So many requests to /tokenize are answered with 503 before one is served.
        key: API key it wants, if any.
    """

    behave: Callable[[int, dict[str, Any]], Fault] = lambda number, body: GOOD
    model: str = MODEL
    owner: str = "vllm"
    version: str = "9.9"
    delay_s: float = 0.0
    gate: int = 0
    honours_n: bool = True
    usage: bool = True
    lists_tokens: bool = True
    lists_end: bool = True
    prompt_tokens: Callable[[str], int] = lambda text: len(text.split())
    busy_tokenizer: int = 0
    key: str = ""


def first(count: int, fault: Fault) -> Callable[[int, dict[str, Any]], Fault]:
    """The first `count` requests fail, the rest are answered."""
    return lambda number, body: fault if number < count else GOOD


def prompt_of(body: dict[str, Any]) -> str:
    """Last user message or the bare prompt."""
    return str(body["messages"][-1]["content"] if "messages" in body else body["prompt"])


def length_of(prompt: str, seed: int | None, choice: int = 0) -> int:
    """Uncut length of an answer, end marker included: 1 to 64 words."""
    return 1 + hashlib.sha256(f"{prompt}|{seed}|{choice}".encode()).digest()[0] % 64
