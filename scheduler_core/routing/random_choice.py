"""Random: every replica with the same probability."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from scheduler_core.routing.base import Router, RoutingRequest
from scheduler_core.routing.snapshot import ReplicaSnapshot


@dataclass(kw_only=True, slots=True)
class RandomChoice(Router):
    """Every replica with the same probability; the state of none is looked at.

    | symbol | meaning | unit |
    | --- | --- | --- |
    | rng | source of randomness; one draw per request | - |
    """

    name: ClassVar[str] = "random"
    needs_generator: ClassVar[bool] = True

    rng: np.random.Generator

    def choose(self, item: RoutingRequest, replicas: Sequence[ReplicaSnapshot], now: float) -> str:
        return replicas[int(self.rng.integers(len(replicas)))].replica_id
