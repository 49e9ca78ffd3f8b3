"""Scheduling hints for each engine (body members or headers added to a request), and the rules for clients.

docs/proxy-hints.md lists the hints of each engine. Engines do not age priorities.

The priority of a request is one number: the level that its client declares (see `declared_level`), then the policy's key.

    number = +-(level * 2^b + round(resolution * key)),   -2^(b-1) <= round(resolution * key) < 2^(b-1)

b is 40 for engines with priorities of 64 bits, and 28 for Dynamo's 32 bits. Levels beyond the remaining bits (2^22, and 7
for Dynamo) count as the outermost ones.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from multidict import CIMultiDictProxy

from predictors.proxy.config import ProxyConfig
from predictors.proxy.parsing import CHAT, MESSAGES, RESPONSES, TEXT, ParsedRequest
from scheduler_core.errors import InputError
from scheduler_core.prediction.api_request import integer
from scheduler_core.prediction.correction import MAX_NAME_CHARS
from scheduler_core.prediction.prompt_text import member
from scheduler_core.prediction.urgency import LEVELS
from scheduler_core.request import DEFAULT_TIER, RequestState

#: Hints that let a client set its own priority, for all engines, because a gateway can forward to other
#: engines: paths of body members, and prefixes of header names in lower case.
CLIENT_MEMBERS: tuple[tuple[str, ...], ...] = (
    ("priority",),
    ("parameters", "priority"),
    ("nvext", "agent_hints"),
)
CLIENT_HEADERS = (
    "x-vllm-priority",
    *("x-smg-priority", "x-smg-tenant-id"),  # SGLang's gateway
    *("x-dynamo-request-priority", "x-dynamo-request-strict-priority"),
    *("x-llm-d-", "x-gateway-inference-", "x-slo-"),  # llm-d's router, including older names
)


#: Header with the declared urgency, 0 (most urgent) to 4.
TIER_HEADER = "x-tailcast-tier"


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


class ClientRules:
    """Rules for what clients may declare; `restricts` is true if their own hints are replaced."""

    def __init__(self, config: ProxyConfig) -> None:
        self._config = config
        self.restricts = config.client_priority == "replace" or config.most_urgent_tier > 0

    def tenant(self, headers: Mapping[str, str]) -> str:
        """The value of the tenant header, or a hash of the API key (keys are never logged), or ""."""
        name = headers.get(self._config.tenant_header, "").strip()
        if name:
            return name
        key = headers.get("Authorization", "") or headers.get("api-key", "")
        return "key-" + hashlib.sha256(key.encode()).hexdigest()[:12] if key else ""

    def tier(self, headers: Mapping[str, str]) -> int:
        """The declared urgency tier, or the default; InputError if clients may not declare it."""
        text = headers.get(TIER_HEADER)
        if text is None:
            return max(DEFAULT_TIER, self._config.most_urgent_tier)
        levels = range(self._config.most_urgent_tier, len(LEVELS))
        if text not in map(str, levels):
            raise InputError(TIER_HEADER, text, f"integers from {levels[0]} to {levels[-1]}")
        return int(text)

    def check_headers(self, headers: CIMultiDictProxy[str]) -> None:
        """Raises InputError for a value that is not UTF-8, which cannot be forwarded unchanged, for a
        repeated tenant or tier header, which is ambiguous, and for a long name of a tenant."""
        for name, value in headers.items():
            if not value.isascii() and any("\ud800" <= char <= "\udfff" for char in value):
                raise InputError(name, "other bytes", "UTF-8")
        for name in (self._config.tenant_header, TIER_HEADER):
            if (count := len(headers.getall(name, ()))) > 1:
                raise InputError(name, f"{count} times", "once")
        tenant = self._config.tenant_header
        if (length := len(headers.get(tenant, ""))) > MAX_NAME_CHARS:
            raise InputError(tenant, f"a name of {length} characters", f"at most {MAX_NAME_CHARS}")

    def allowed_content(self, content: Mapping[str, Any]) -> Mapping[str, Any]:
        """The body without the client's hints; `content` itself if it has none."""
        allowed = functools.reduce(_without, CLIENT_MEMBERS, content)
        return content if allowed == content else allowed


def _without(node: Mapping[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    """The object without the member at `path`; names are case-insensitive."""
    others: dict[str, Any] = {}
    for name, value in node.items():
        if name.casefold() != path[0]:
            others[name] = value
        elif len(path) > 1:
            others[name] = _without(value, path[1:]) if isinstance(value, dict) else value
    return others
