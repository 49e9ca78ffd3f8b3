"""What clients may say about their own place in the order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from predictors.proxy.engines import CLIENT_HINTS
from scheduler_core.errors import InputError
from scheduler_core.urgency import LEVELS

#: What engines take.
MIN_PRIORITY, MAX_PRIORITY = -(2**63), 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientRules:
    """What clients may say.

    Attributes:
        tier_header: Header with the declared level of urgency, 0 (most urgent) to 4.
        default_tier: Level of who declares none.
        most_urgent_tier: The most urgent level that clients may declare.
        client_priority: A client's own hints, such as `priority` in the body: "keep" sends them to the engine instead of
            the policy's, "replace" removes them.
        lowest_priority, highest_priority: Bounds of a priority; outside of them a request is refused. None: no bound.

    Raises:
        InputError: A rule is outside its range.
    """

    tier_header: str = "x-tailcast-tier"
    default_tier: int = 2
    most_urgent_tier: int = 0
    client_priority: Literal["keep", "replace"] = "keep"
    lowest_priority: int | None = None
    highest_priority: int | None = None

    def __post_init__(self) -> None:
        for name in ("default_tier", "most_urgent_tier"):
            if not 0 <= getattr(self, name) < len(LEVELS):
                raise InputError(name, getattr(self, name), f"0 to {len(LEVELS) - 1}")
        low, high = self.lowest_priority, self.highest_priority
        if low is not None and high is not None and low > high:
            raise InputError("lowest_priority", low, f"at most highest_priority ({high})")

    def restricts(self, most_urgent_tier: int | None = None) -> bool:
        """Whether clients' hints are bounded or replaced, so that none may pass unread.

        Args:
            most_urgent_tier: What its tenant may declare; None: what all clients may.
        """
        tier = self.most_urgent_tier if most_urgent_tier is None else most_urgent_tier
        return self.client_priority == "replace" or self._has_bounds or tier > 0

    def allowed_content(self, content: Mapping[str, Any]) -> Mapping[str, Any]:
        """A body's members without the hints that a client may not send; `content` itself where there are none.

        Integer priorities stay where they are kept. Other hints, which no bound is for, are removed.

        Raises:
            InputError: A priority is outside the bounds.
        """
        allowed = content
        for path in CLIENT_HINTS.members:
            allowed = _without(allowed, path)
        for path in CLIENT_HINTS.priorities:
            priority = _member(content, path)
            if priority is None or (self.client_priority == "replace" and not self._has_bounds):
                continue
            self._check_priority(".".join(path), priority)
            if self.client_priority == "keep":
                allowed = _with(allowed, path, priority)
        return content if allowed == content else allowed

    def tier(self, headers: Mapping[str, str], most_urgent_tier: int | None = None) -> int:
        """The declared level; of who declares none, the default, or what its tenant may where that is less urgent.

        Args:
            headers: Of the request.
            most_urgent_tier: What its tenant may declare; None: what all clients may.

        Raises:
            InputError: It is none, or one that clients may not declare.
        """
        text = headers.get(self.tier_header)
        if text is None:
            return self.default_tier if most_urgent_tier is None else max(self.default_tier, most_urgent_tier)
        least = self.most_urgent_tier if most_urgent_tier is None else most_urgent_tier
        allowed = f"whole numbers from {least} to {len(LEVELS) - 1}"
        if not (text.isascii() and text.isdigit() and len(text) < 4):
            raise InputError(self.tier_header, text, allowed)
        if not least <= int(text) < len(LEVELS):
            raise InputError(self.tier_header, int(text), allowed)
        return int(text)

    @property
    def _has_bounds(self) -> bool:
        return self.lowest_priority is not None or self.highest_priority is not None

    def _check_priority(self, field: str, priority: object) -> None:
        low, high = self.lowest_priority, self.highest_priority
        if type(priority) is int and (MIN_PRIORITY if low is None else low) <= priority <= (
            MAX_PRIORITY if high is None else high
        ):
            return
        words = [] if low is None else [f"at least {low}"]
        words += [] if high is None else [f"at most {high}"]
        raise InputError(field, priority, f"integers of {' and '.join(words) or '64 bits'}")


def _member(node: object, path: tuple[str, ...]) -> object:
    for name in path:
        node = node.get(name) if isinstance(node, dict) else None
    return node


def _with(node: Mapping[str, Any], path: tuple[str, ...], value: object) -> dict[str, Any]:
    name, *rest = path
    return {**node, name: _with(node.get(name, {}), tuple(rest), value) if rest else value}


def _without(node: Mapping[str, Any], path: tuple[str, ...]) -> Mapping[str, Any]:
    """The object without a member, whatever the case of its name; itself where it has none."""
    kept: dict[str, Any] = {}
    for name, value in node.items():
        if name.casefold() != path[0]:
            kept[name] = value
        elif len(path) > 1:
            kept[name] = _without(value, path[1:]) if isinstance(value, dict) else value
    return node if len(kept) == len(node) and all(kept[name] is node[name] for name in kept) else kept
