"""Python API of plans: the cheapest GPUs, replicas and settings that meet targets, from a log of requests."""

from __future__ import annotations

import logging
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scheduler_core.shell.command import report_left_out
from scheduler_core.shell.options import from_mapping
from scheduler_core.simulator.planning.config import PlanConfig
from scheduler_core.simulator.planning.plan import lines_of, make_plan
from scheduler_core.simulator.planning.simulations import Simulations, read_log
from scheduler_core.simulator.planning.targets import Target
from scheduler_core.simulator.sweep import CellStore
from scheduler_core.simulator.trace import Trace, write_trace
from tailcast.request_log import read_requests

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanResult:
    """Recommendation for a log of requests.

    Attributes:
        content: All of the result, as `tailcast plan --json` writes it; see `make_plan`.
        targets: The targets of latency, goodput and cost.
        warnings: What may mislead, as sentences.
        num_rows: Number of rows of the log.
        left_out: Numbers of rows that were not planned for, by reason.
    """

    content: dict[str, Any]
    targets: tuple[Target, ...]
    warnings: tuple[str, ...]
    num_rows: int
    left_out: Counter[str]

    @property
    def answer(self) -> dict[str, Any]:
        """What to buy and to set: hardware, gpu, settings, num_replicas, num_gpus, price_per_hour, cost_per_million_tokens,
        metrics, margin and others."""
        answer: dict[str, Any] = self.content["answer"]
        return answer

    @property
    def num_replicas(self) -> int:
        """Recommended number of replicas."""
        return int(self.answer["num_replicas"])

    @property
    def price_per_hour(self) -> float:
        """Price of all replicas per hour."""
        return float(self.answer["price_per_hour"])

    @property
    def unreliable(self) -> tuple[str, ...]:
        """Why the recommendation cannot be relied on, as sentences; empty: it can."""
        return tuple(self.content["unreliable"])

    def write_page(self, path: str | Path) -> None:
        """Writes a page with plots (HTML); needs matplotlib."""
        from scheduler_core.simulator.planning.page import write_plan_page

        write_plan_page(self.content, self.targets, path)

    def __str__(self) -> str:
        return "\n".join(lines_of(self.content))


def plan(
    log: Trace | str | Path,
    target: str | Sequence[str],
    gpus: str | Mapping[str, float],
    **options: Any,
) -> PlanResult:
    """Finds the cheapest GPUs, number of replicas and settings that meet targets; see `tailcast plan --help`.

        result = tailcast.plan("log.jsonl", "ttft_s.p99<2", {"h100-80gb": 2.5}, model="llama-3.1-8b")
        print(result)
        result.num_replicas, result.answer["settings"], result.unreliable

    What may mislead is logged as warnings, and is in `result.warnings`.

    Args:
        log: A trace of `read_trace`, or the path of a log that the command reads.
        target: Targets, such as "ttft_s.p99<2,tpot_s.p90<0.05", or a list of them.
        gpus: Prices per hour by kind of GPU, such as {"h100-80gb": 2.5}.
        options: Other fields of `PlanConfig`, such as model, what_if, rate. `workers` is 1 here: more processes need a
            main module that can be imported (`if __name__ == "__main__"`).

    Raises:
        InputError: The log or an option is invalid, or no choice meets the targets (with the closest one).
    """
    values = {"workers": 1, **options, "gpus": gpus if isinstance(gpus, str) else dict(gpus)}
    values["target"] = target if isinstance(target, str) else list(target)
    config = from_mapping(PlanConfig, values)
    with tempfile.TemporaryDirectory() as folder:
        result = plan_log(log, config, Path(folder), Path(folder))
    for warning in result.warnings:
        logger.warning(warning)
    report_left_out(result.left_out, result.num_rows)
    return result


def plan_log(
    log: Trace | str | Path,
    config: PlanConfig,
    scratch: Path,
    folder: Path,
    progress: Callable[[int], object] = lambda num: None,
    stage: Callable[[str], object] = lambda name: None,
) -> PlanResult:
    """The plan for a log. `folder` gets the results of simulations, `scratch` temporary files; `progress` and `stage`: see
    `Simulations` and `make_plan`. Raises as `plan`."""
    requests = read_requests(log, config, scratch)
    store = CellStore(folder / "cells")
    path = folder / f"log-{requests.trace.fingerprint()[:12]}.parquet"
    write_trace(requests.trace, path)
    read_log.cache_clear()  # the same log may have other predictions now
    with Simulations(store, config.num_workers, progress) as simulations:
        content = make_plan(config, read_log(str(path)), str(path), simulations, stage)
    content["log"]["source"] = Path(log.source if isinstance(log, Trace) else log).name
    refused = content["log"]["num_refused"]
    left_out = requests.left_out + Counter({"too large for the KV cache": refused})
    return PlanResult(
        content=content,
        targets=config.targets,
        warnings=(*content["warnings"].values(), *requests.warnings),
        num_rows=len(requests.trace) + requests.left_out.total(),
        left_out=left_out,
    )
