"""Scheduling hints for each engine (body members or headers added to a request), and the rules for clients.

docs/proxy.md lists the hints of each engine and its required options. With `fcfs` (ms since 2026), Dynamo's
32 bits overflow after 24 days; a lower resolution lasts longer. Engines do not age priorities.
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
from predictors.proxy.parsing import CHAT, TEXT
from scheduler_core.errors import InputError
from scheduler_core.request import RequestState
from scheduler_core.urgency import LEVELS

#: Hints that let a client set its own priority, for all engines, because a gateway can forward to other
#: engines: paths of body members, and prefixes of header names in lower case.
CLIENT_MEMBERS: tuple[tuple[str, ...], ...] = (
    ("priority",),
    ("parameters", "priority"),
    ("nvext", "agent_hints"),
)
CLIENT_HEADERS = (
    *("x-smg-priority", "x-smg-tenant-id"),  # SGLang's gateway
    *("x-dynamo-request-priority", "x-dynamo-request-strict-priority"),
    *("x-llm-d-", "x-gateway-inference-", "x-slo-"),  # llm-d's router, including older names
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hint:
    """Top-level body members and headers to add to a request."""

    members: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)


class PriorityEngine:
    """An engine with the body member `priority`: +-round(resolution * key).

    Engines have a method `hint` and `endpoints`, the paths whose bodies accept the members of the hint; None:
    the hint has only headers, for all paths. Here they are the endpoints of the OpenAI API and the arguments.

    Keys that differ by less than 1 / resolution can become ties, which engines serve in order of arrival. The
    origin of keys never moves, so keys of different times are comparable. Numbers outside the range of the
    engine are rejected, because clipping would silently turn the order into that of arrival.
    """

    def __init__(self, *endpoints: str, bits: int = 64, lower_first: bool = False, resolution: float) -> None:
        self.endpoints = frozenset({CHAT, TEXT, "/v1/responses", *endpoints})
        self._low, self._high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
        self._factor = resolution if lower_first else -resolution

    def hint(self, content: Mapping[str, Any], key: float, state: RequestState) -> Hint:
        """The hint from the parsed body and the policy's key (smaller first); raises as `priority`."""
        return Hint(members={"priority": self.priority(key)})

    def priority(self, key: float) -> int:
        """The priority of a key; InputError if it is outside the engine's range or the key is not finite."""
        scaled = key * self._factor
        if not math.isfinite(scaled):
            raise InputError("policy key", key, f"finite numbers (times resolution {abs(self._factor):g})")
        number = round(scaled)
        if not self._low <= number <= self._high:
            allowed = f"integers from {self._low} to {self._high}; lower resolution"
            raise InputError("priority", number, allowed)
        return number


class Dynamo(PriorityEngine):
    """NVIDIA Dynamo: adds `osl` and `priority` to the client's `nvext.agent_hints`."""

    def hint(self, content: Mapping[str, Any], key: float, state: RequestState) -> Hint:
        extension = content.get("nvext")
        client_hints = extension.get("agent_hints") if isinstance(extension, dict) else None
        if not isinstance(extension, dict | None) or not isinstance(client_hints, dict | None):
            return Hint()  # malformed; the engine reports it
        hints: dict[str, Any] = {"priority": self.priority(key)}
        length = state.prediction
        if length is not None:
            mean, _ = length.expected_and_cvar(state.request.max_tokens)
            if mean < 2**32 - 1:
                hints["osl"] = max(1, round(mean))
        return Hint(members={"nvext": {**(extension or {}), "agent_hints": hints | (client_hints or {})}})


class LlmD:
    """llm-d: headers for its router, which uses objectives, fairness and SLOs instead of a priority."""

    endpoints = None

    def __init__(self, config: ProxyConfig) -> None:
        self._levels = {
            "x-llm-d-slo-ttft-ms": [str(value) for value in config.slo_ttft_ms],
            "x-llm-d-slo-tpot-ms": [str(value) for value in config.slo_tpot_ms],
            "x-llm-d-inference-objective": config.objectives,
        }

    def hint(self, content: Mapping[str, Any], key: float, state: RequestState) -> Hint:
        level = state.effective_level()
        headers = {name: values[level] for name, values in self._levels.items() if values}
        if state.request.tenant:
            headers["x-llm-d-inference-fairness-id"] = state.request.tenant
        return Hint(headers=headers)


def make_engine(config: ProxyConfig) -> PriorityEngine | LlmD | None:
    """The engine of `config.engine`; None for `none`."""
    resolution = config.resolution
    match config.engine:
        case "vllm":
            endpoints = ("/v1/chat/completions/batch", "/inference/v1/generate")
            return PriorityEngine(*endpoints, lower_first=True, resolution=resolution)
        case "sglang":
            return PriorityEngine("/generate", resolution=resolution)
        case "dynamo":
            return Dynamo(bits=32, resolution=resolution)
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
        config = self._config
        text = headers.get(config.tier_header)
        if text is None:
            return config.default_tier
        levels = range(config.most_urgent_tier, len(LEVELS))
        if text not in map(str, levels):
            raise InputError(config.tier_header, text, f"integers from {levels[0]} to {levels[-1]}")
        return int(text)

    def check_headers(self, headers: CIMultiDictProxy[str]) -> None:
        """Raises InputError for a value that is not UTF-8, which cannot be forwarded unchanged, and for a
        repeated tenant or tier header, which is ambiguous."""
        for name, value in headers.items():
            if not value.isascii() and any("\ud800" <= char <= "\udfff" for char in value):
                raise InputError(name, "other bytes", "UTF-8")
        for name in (self._config.tenant_header, self._config.tier_header):
            if (count := len(headers.getall(name, ()))) > 1:
                raise InputError(name, f"{count} times", "once")

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
