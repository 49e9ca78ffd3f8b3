"""What a plan chooses from: devices with their prices, and settings of engine and router."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from scheduler_core.errors import InputError
from scheduler_core.policies import policy_class
from scheduler_core.ranges import parse_number
from scheduler_core.simulator.config import ClusterConfig, SimulationConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Devices and settings of the replicas.

    Attributes:
        gpu: Kind of device.
        devices: Number of devices of a replica (tensor parallel).
        order: Policy of the queue.
        prefill_fraction: Fraction of the replicas that only process prompts; 0: none.
    """

    gpu: str
    devices: int
    max_num_seqs: int
    max_num_batched_tokens: int
    prefix_caching: bool
    order: str
    router: str
    prefill_fraction: float = 0.0

    @property
    def hardware(self) -> str:
        """Name of the devices of a replica."""
        return self.gpu if self.devices == 1 else f"{self.devices} x {self.gpu}"

    def settings(self) -> dict[str, Any]:
        """What to set in engine, proxy and router."""
        settings: dict[str, Any] = {
            "tensor_parallel": self.devices,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "prefix_caching": self.prefix_caching,
            "order": self.order,
            "router": self.router,
        }
        if self.prefill_fraction:
            settings["prefill_fraction"] = self.prefill_fraction
        return settings

    def config(
        self, base: SimulationConfig, num_replicas: int, cluster: Mapping[str, Any] = MappingProxyType({})
    ) -> SimulationConfig:
        """The simulation of so many replicas, with other options of `ClusterConfig`; `InputError` if the model does not fit, or
        there are too few replicas."""
        parameters = base.step_time_parameters
        if not isinstance(parameters, str):
            parameters = {**parameters, "gpu": self.gpu, "tensor_parallel": self.devices}
        limits = ("max_num_seqs", "max_num_batched_tokens", "prefix_caching")
        scheduler = replace(base.scheduler, **{name: getattr(self, name) for name in limits})
        cluster = dict(cluster)
        if num_replicas > 1:
            num_prefill = 0
            if self.prefill_fraction:
                num_prefill = min(max(round(self.prefill_fraction * num_replicas), 1), num_replicas - 1)
            router = "disaggregated" if num_prefill else self.router
            cluster |= {
                "num_replicas": num_replicas,
                "router": router,
                "num_prefill_replicas": num_prefill,
            }
        predictor = base.predictor
        if "length" not in policy_class(self.order).inputs:
            predictor = None
        return replace(
            base,
            policy=self.order,
            predictor=predictor,
            scheduler=scheduler,
            cluster=ClusterConfig(**cluster),
            step_time_parameters=parameters,
        )


def parse_prices(gpus: Mapping[str, float] | str) -> dict[str, float]:
    """Prices per hour and device by kind, from a mapping or a text such as `h100-80gb=2.5,l40s-48gb=0.9`; `InputError` if one
    is no number > 0."""
    allowed = "NAME=PRICE_PER_HOUR,... such as h100-80gb=2.5,l40s-48gb=0.9"
    prices: dict[str, float] = {}
    if isinstance(gpus, str):
        for part in gpus.split(","):
            name, equals, price = (word.strip() for word in part.partition("="))
            if name in prices:
                raise InputError("gpus", gpus, f"one price for {name}")
            try:
                prices[name] = parse_number(price)
            except ValueError as error:
                raise InputError("gpus", gpus, allowed) from error
            if not name or not equals:
                raise InputError("gpus", gpus, allowed)
    else:
        prices = dict(gpus)
    for name, value in prices.items():
        if not 0 < value < math.inf:
            raise InputError(f"gpus.{name}", value, "a price per hour > 0")
    if not prices:
        raise InputError("gpus", gpus, allowed)
    return prices


def variants(choice: Choice, settings: Mapping[str, Sequence[Any]]) -> list[Choice]:
    """The choice with each other value of each setting, one at a time."""
    return [
        replace(choice, **{name: value})
        for name, values in settings.items()
        for value in values
        if value != getattr(choice, name)
    ]
