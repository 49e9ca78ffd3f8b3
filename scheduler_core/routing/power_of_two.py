"""Power of two choices (Mitzenmacher 2001, IEEE Trans. Parallel Distrib. Syst. 12; Vvedenskaya et al. 1996)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from scheduler_core.errors import InputError
from scheduler_core.routing.base import Router, RoutingRequest
from scheduler_core.routing.snapshot import ReplicaSnapshot


@dataclass(kw_only=True, slots=True)
class PowerOfTwo(Router):
    """The shorter queue of d replicas drawn at random.

    Nearly as good as looking at all of them, and no herd: routers with the same old picture do not all choose the same.

    | symbol | meaning | unit |
    | --- | --- | --- |
    | d | num_choices: different replicas drawn; all of them if there are fewer | - |
    | rng | source of randomness | - |

    Raises:
        InputError: num_choices is not above 0.
    """

    name: ClassVar[str] = "power_of_two"
    needs_generator: ClassVar[bool] = True

    rng: np.random.Generator
    num_choices: int = 2

    def __post_init__(self) -> None:
        if self.num_choices < 1:
            raise InputError("num_choices", self.num_choices, "integers > 0")

    def choose(self, item: RoutingRequest, replicas: Sequence[ReplicaSnapshot], now: float) -> str:
        if self.num_choices >= len(replicas):
            candidates = list(replicas)
        else:
            drawn = self.rng.choice(len(replicas), size=self.num_choices, replace=False)
            candidates = [replicas[index] for index in drawn.tolist()]
        return min(candidates, key=lambda replica: replica.num_requests).replica_id
