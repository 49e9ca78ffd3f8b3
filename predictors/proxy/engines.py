"""Scheduling hints for each engine: body members or headers added to a request.

docs/proxy-hints.md lists the hints of each engine. Engines do not age priorities.

The priority of a request is one number: the level that its client declares (see `declared_level`), then the policy's key.

    number = +-(level * 2^b + round(resolution * key)),   -2^(b-1) <= round(resolution * key) < 2^(b-1)

b is 40 for engines with priorities of 64 bits, and 28 for Dynamo's 32 bits. Levels beyond the remaining bits (2^22, and 7
for Dynamo) count as the outermost ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from predictors.proxy.config import ProxyConfig
from predictors.proxy.parsing import CHAT, MESSAGES, RESPONSES, TEXT, ParsedRequest
from scheduler_core.errors import InputError
from scheduler_core.prediction.api_request import integer
from scheduler_core.prediction.prompt_text import member
from scheduler_core.request import RequestState


@dataclass(frozen=True, slots=True, kw_only=True)
class Hint:
    """Top-level body members and headers to add to a request."""

    members: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)


class PriorityEngine:
    """An engine whose requests have the body member `priority`.

    Engines have a method `hint`, a method `client_priority`, and `endpoints`, those whose requests accept the hint; None:
    all of them. Here they are chat, completions and Responses of the OpenAI API, and the arguments.

    Keys that differ by less than 1 / resolution can become ties, which engines serve in order of arrival. The
    origin of keys never moves, so keys of different times are comparable. Numbers outside the range of the
    engine are rejected, because clipping would silently turn the order into that of arrival.
    """

    #: b, the number of bits of the policy's key, and the largest level.
    key_bits, max_level = 40, 2**22
    #: Header with the priority, which overrides the body.
    header: str | None = None

    def __init__(self, *endpoints: str, lower_first: bool = False, resolution: float) -> None:
        self.endpoints = frozenset({CHAT, TEXT, RESPONSES, *endpoints})
        self._resolution = resolution
        self._sign = 1 if lower_first else -1

    def hint(self, parsed: ParsedRequest, level: int, key: float, state: RequestState) -> Hint:
        """The hint for a request from its level and the policy's key, smaller first; raises as `priority`."""
        return Hint(members={"priority": self.priority(level, key)})

    def priority(self, level: int, key: float) -> int:
        """The priority of a level and a key; InputError if the key is not finite or exceeds its bits."""
        scaled = key * self._resolution
        if not math.isfinite(scaled):
            raise InputError("policy key", key, f"finite numbers (times resolution {self._resolution:g})")
        number, limit = round(scaled), 2 ** (self.key_bits - 1)
        if not -limit <= number < limit:
            allowed = f"integers from {-limit} to {limit - 1}; lower resolution"
            raise InputError("resolution * policy key", number, allowed)
        bounded = min(max(level, -self.max_level), self.max_level - 1)
        priority: int = self._sign * (bounded * 2**self.key_bits + number)
        return priority

    def client_priority(self, parsed: ParsedRequest, headers: Mapping[str, str]) -> int:
        """The priority that the client declares, smaller first; 0 without one."""
        declared = None if self.header is None else integer(headers.get(self.header))
        declared = self._declared(parsed) if declared is None else declared
        return 0 if declared is None else self._sign * declared

    def _declared(self, parsed: ParsedRequest) -> int | None:
        return parsed.body.priority


class Vllm(PriorityEngine):
    """vLLM: the body member, and a header (since 0.32), which also reaches endpoints without that member, as Anthropic's."""

    header = "X-Vllm-Priority"

    def hint(self, parsed: ParsedRequest, level: int, key: float, state: RequestState) -> Hint:
        number = self.priority(level, key)
        members = {} if parsed.endpoint == MESSAGES else {"priority": number}
        return Hint(members=members, headers={self.header: str(number)})


class Dynamo(PriorityEngine):
    """NVIDIA Dynamo: adds `osl` and `priority` to the client's `nvext.agent_hints`."""

    key_bits, max_level = 28, 2**3
    header = "x-dynamo-request-priority"

    def hint(self, parsed: ParsedRequest, level: int, key: float, state: RequestState) -> Hint:
        extension = parsed.content.get("nvext")
        client_hints = extension.get("agent_hints") if isinstance(extension, dict) else None
        if not isinstance(extension, dict | None) or not isinstance(client_hints, dict | None):
            return Hint()  # malformed; the engine reports it
        number = self.priority(level, key)
        hints: dict[str, Any] = {}
        length = state.prediction
        if length is not None:
            mean, _ = length.expected_and_cvar(state.request.max_tokens)
            if mean < 2**32 - 1:
                hints["osl"] = max(1, round(mean / parsed.num_outputs))
        hints |= client_hints or {}
        members = {"nvext": {**(extension or {}), "agent_hints": hints | {"priority": number}}}
        return Hint(members=members, headers={self.header: str(number)})

    def _declared(self, parsed: ParsedRequest) -> int | None:
        hints = member(parsed.content.get("nvext"), "agent_hints")
        return integer(member(hints, "priority"))


class LlmD:
    """llm-d: headers for its router, which uses objectives, fairness and SLOs instead of a priority."""

    endpoints = None

    def __init__(self, config: ProxyConfig) -> None:
        self._levels = {
            "x-llm-d-slo-ttft-ms": [str(value) for value in config.slo_ttft_ms],
            "x-llm-d-slo-tpot-ms": [str(value) for value in config.slo_tpot_ms],
            "x-llm-d-inference-objective": config.objectives,
        }

    def hint(self, parsed: ParsedRequest, level: int, key: float, state: RequestState) -> Hint:
        urgency = state.effective_level()
        headers = {name: values[urgency] for name, values in self._levels.items() if values}
        if state.request.tenant:
            headers["x-llm-d-inference-fairness-id"] = state.request.tenant
        return Hint(headers=headers)

    def client_priority(self, parsed: ParsedRequest, headers: Mapping[str, str]) -> int:
        """0: clients declare objectives in llm-d's own headers, which take precedence over the hints."""
        return 0


def make_engine(config: ProxyConfig) -> PriorityEngine | LlmD | None:
    """The engine of `config.engine`; None for `none`."""
    resolution = config.resolution or (100.0 if config.engine == "dynamo" else 1000.0)
    match config.engine:
        case "vllm":
            endpoints = (MESSAGES, "/v1/chat/completions/batch", "/inference/v1/generate")
            return Vllm(*endpoints, lower_first=True, resolution=resolution)
        case "sglang":
            return PriorityEngine("/generate", resolution=resolution)
        case "dynamo":
            return Dynamo(MESSAGES, resolution=resolution)
        case "llm-d":
            return LlmD(config)
        case _:
            return None
