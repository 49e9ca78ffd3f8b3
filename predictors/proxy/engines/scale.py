"""From a policy's key, a real number, to an engine's priority, an integer of a range."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from scheduler_core.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class PriorityScale:
    """priority = +-round(resolution * key): + where the lower number goes first, - where the higher does.

    The order of keys is kept but for differences below 1 / resolution, which become ties (engines serve those by
    arrival). Keys of different times are on one scale: their origin never moves, so a request sent an hour ago still
    compares rightly with one sent now.

    Attributes:
        sooner: Which number goes first.
        low, high: The engine's range; what lies outside is refused, never cut to it, because cut numbers would all be
            equal and turn the order into arrival order unseen.
        resolution: Integers per unit of the key, above 0.

    Raises:
        InputError: `resolution` is not a finite number above 0.
    """

    sooner: Literal["lower", "higher"]
    low: int
    high: int
    resolution: float

    def __post_init__(self) -> None:
        if not 0 < self.resolution < math.inf:
            raise InputError("resolution", self.resolution, "a finite number > 0")

    def integer(self, key: float) -> int:
        """The priority of a key.

        Raises:
            InputError: It lies outside of the engine's range, or the key is no finite number.
        """
        scaled = key * self.resolution
        if not math.isfinite(scaled):
            raise InputError("policy key", key, f"finite numbers (times resolution {self.resolution:g})")
        number = round(scaled) if self.sooner == "lower" else -round(scaled)
        if not self.low <= number <= self.high:
            raise InputError("priority", number, f"integers from {self.low} to {self.high}; lower resolution")
        return number
