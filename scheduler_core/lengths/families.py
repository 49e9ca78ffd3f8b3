"""The length distributions by the names that commands and files use."""

from __future__ import annotations

from scheduler_core.lengths.base import LengthDistribution
from scheduler_core.lengths.exponential import Exponential
from scheduler_core.lengths.gamma import Gamma
from scheduler_core.lengths.log_normal import LogNormal
from scheduler_core.lengths.log_t import LogT
from scheduler_core.lengths.weibull import Weibull

FAMILIES: dict[str, type[LengthDistribution]] = {
    "log-t": LogT,
    "log-normal": LogNormal,
    "gamma": Gamma,
    "weibull": Weibull,
    "exponential": Exponential,
}
