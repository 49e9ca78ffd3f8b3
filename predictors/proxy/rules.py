"""What clients may say about their own place in the order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from scheduler_core.errors import InputError
from scheduler_core.urgency import LEVELS


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientRules:
    """What clients may say.

    Attributes:
        tier_header: Header with the declared level of urgency, 0 (most urgent) to 4.
        default_tier: Level of who declares none.
        most_urgent_tier: The most urgent level that clients may declare.
        client_priority: A `priority` in the body: "keep" sends it to the engine instead of the policy's, "replace" sends
            the policy's.
        lowest_priority, highest_priority: Bounds of it; outside of them a request is refused. None: no bound.

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

    @property
    def keeps(self) -> bool:
        """Whether a client's own priority reaches the engine."""
        return self.client_priority == "keep"

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

    def check_priority(self, priority: int | None) -> None:
        """Nothing, if a client may say that.

        Raises:
            InputError: It may not.
        """
        low, high = self.lowest_priority, self.highest_priority
        if priority is None or ((low is None or priority >= low) and (high is None or priority <= high)):
            return
        words = [] if low is None else [f"at least {low}"]
        words += [] if high is None else [f"at most {high}"]
        raise InputError("priority", priority, "integers of " + " and ".join(words))
