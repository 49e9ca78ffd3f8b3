"""Hints to engines: the order as each engine understands it (members of the body, or headers, that are added to a request),
and the rules for what clients may declare.

docs/proxy.md has the hints of each engine and the options it has to be started with. Dynamo's 32 bits last 24 days for
`fcfs` (seconds since 2026 in thousandths): a lower resolution lasts longer. None of the engines ages priorities: that is in
the key.
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

#: Hints with which a client could set its own order, of all engines: behind a gateway of one kind there are engines of
#: another. Members of the body by path, and beginnings of header names, in lower case.
CLIENT_MEMBERS: tuple[tuple[str, ...], ...] = (
    ("priority",),
    ("parameters", "priority"),
    ("nvext", "agent_hints"),
)
CLIENT_HEADERS = (
    *("x-smg-priority", "x-smg-tenant-id"),  # SGLang's gateway
    *("x-dynamo-request-priority", "x-dynamo-request-strict-priority"),
    *("x-llm-d-", "x-gateway-inference-", "x-slo-"),  # llm-d's router, and its earlier names
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hint:
    """Members of the body's outermost object and headers to add to a request."""

    members: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)


class PriorityEngine:
    """An engine with member `priority`: +-round(resolution * key).

    Like every engine it has `endpoints`, the paths whose bodies may carry the hint's members (None: the hint has headers
    only, for all paths), here those given and the OpenAI API's, and `hint`.

    The order of keys is kept but for differences below 1 / resolution, which become ties (engines serve those by
    arrival). Keys of different times are on one scale: their origin never moves. A number outside the engine's range is
    refused, not clipped: clipped numbers would be equal and silently turn the order into that of arrival.
    """

    def __init__(self, *endpoints: str, bits: int = 64, lower_first: bool = False, resolution: float) -> None:
        self.endpoints = frozenset({CHAT, TEXT, "/v1/responses", *endpoints})
        self._low, self._high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
        self._factor = resolution if lower_first else -resolution

    def hint(self, content: Mapping[str, Any], key: float, state: RequestState) -> Hint:
        """The hint of a request with a parsed body and the policy's key, smaller first; raises as `priority`."""
        return Hint(members={"priority": self.priority(key)})

    def priority(self, key: float) -> int:
        """The priority of a key; InputError if it lies outside the engine's range, or the key is not finite."""
        scaled = key * self._factor
        if not math.isfinite(scaled):
            raise InputError("policy key", key, f"finite numbers (times resolution {abs(self._factor):g})")
        number = round(scaled)
        if not self._low <= number <= self._high:
            allowed = f"integers from {self._low} to {self._high}; lower resolution"
            raise InputError("priority", number, allowed)
        return number


class Dynamo(PriorityEngine):
    """NVIDIA Dynamo: `osl` and `priority` in `nvext.agent_hints`; other members of the client's there stay."""

    def hint(self, content: Mapping[str, Any], key: float, state: RequestState) -> Hint:
        extension = content.get("nvext")
        own = extension.get("agent_hints") if isinstance(extension, dict) else None
        if not isinstance(extension, dict | None) or not isinstance(own, dict | None):
            return Hint()  # malformed: the engine's to report
        hints: dict[str, Any] = {"priority": self.priority(key)}
        length = state.prediction
        if length is not None:
            mean, _ = length.expected_and_cvar(state.request.max_tokens)
            if mean < 2**32 - 1:
                hints["osl"] = max(1, round(mean))
        return Hint(members={"nvext": {**(extension or {}), "agent_hints": hints | (own or {})}})


class LlmD:
    """llm-d: headers for its router, which orders by objective, fairness and SLOs and takes no priority number."""

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
    """What clients may declare; `restricts` where their own hints are replaced, so that none may pass unread."""

    def __init__(self, config: ProxyConfig) -> None:
        self._config = config
        self.restricts = config.client_priority == "replace" or config.most_urgent_tier > 0

    def tenant(self, headers: Mapping[str, str]) -> str:
        """The header's value, else twelve digits of a hash of the API key (keys are in no log), else empty."""
        name = headers.get(self._config.tenant_header, "").strip()
        if name:
            return name
        key = headers.get("Authorization", "") or headers.get("api-key", "")
        return "key-" + hashlib.sha256(key.encode()).hexdigest()[:12] if key else ""

    def tier(self, headers: Mapping[str, str]) -> int:
        """The declared level of urgency, or the default; InputError for one that clients may not declare."""
        config = self._config
        text = headers.get(config.tier_header)
        if text is None:
            return config.default_tier
        levels = range(config.most_urgent_tier, len(LEVELS))
        if text not in map(str, levels):
            raise InputError(config.tier_header, text, f"integers from {levels[0]} to {levels[-1]}")
        return int(text)

    def check_headers(self, headers: CIMultiDictProxy[str]) -> None:
        """Raises InputError for a value that is not UTF-8, and for a repeated header of the tenant or the tier: they could not
        be passed on as they came, or be read in two ways."""
        for name, value in headers.items():
            if not value.isascii() and any("\ud800" <= char <= "\udfff" for char in value):
                raise InputError(name, "other bytes", "UTF-8")
        for name in (self._config.tenant_header, self._config.tier_header):
            if (count := len(headers.getall(name, ()))) > 1:
                raise InputError(name, f"{count} times", "once")

    def allowed_content(self, content: Mapping[str, Any]) -> Mapping[str, Any]:
        """A body's members without the client's hints; `content` itself where there are none."""
        allowed = functools.reduce(_without, CLIENT_MEMBERS, content)
        return content if allowed == content else allowed


def _without(node: Mapping[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    """The object without a member, whatever the case of its name."""
    others: dict[str, Any] = {}
    for name, value in node.items():
        if name.casefold() != path[0]:
            others[name] = value
        elif len(path) > 1:
            others[name] = _without(value, path[1:]) if isinstance(value, dict) else value
    return others
