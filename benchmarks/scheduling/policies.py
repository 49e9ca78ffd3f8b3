"""Our policies compared with the policies that they extend, on the same arrivals, in the same run.

    python -m benchmarks.scheduling.policies --lengths FILE [--requests 4500] [--slots 32] [--load 1.2] [--studies tail,slo]

FILE is a Parquet file with a column `output_tokens` of several sampled lengths per prompt, such as
CASTILLO's. The true length of a request is one of its samples. Its predicted log-t is fitted to the others
(location: median, scale: 0.8 standard deviations of ln length, nu = 3.5) and then perturbed by the
predictor's error: mu + noise N(0, e^2), shrunk towards the mean and widened as by a calibrated predictor.
Times are in decode steps: each step takes one unit regardless of its batch, as in a queue
with `slots` servers. FCFS and shortest first (SEPT) are in every table.

- tail: mean and P99 completion time under overload, the mean normalized latency, and the fraction of SEPT's gain over FCFS
  in the mean completion time.
- slo: fraction of requests that meet their target.
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from scheduler_core.engine.plan import StepResult
from scheduler_core.policies import make_policy
from scheduler_core.prediction.predictions import LengthPrediction, Prediction
from scheduler_core.request import Request
from scheduler_core.scheduler import Scheduler, SchedulerConfig

FloatArray = NDArray[np.float64]
NU, CAP = 3.5, 15_000


@dataclass(frozen=True, slots=True)
class Job:
    """A request with its true length and its prediction."""

    request: Request
    output_tokens: int
    prediction: LengthPrediction


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of one policy: latency of each job in steps (in order of arrival), and counters."""

    latency: FloatArray
    preemptions: int
    steps: int
    scheduler: Scheduler


def read_jobs(
    path: str, num: int, slots: int, load: float, noise: float, rng: np.random.Generator
) -> list[Job]:
    """Jobs with Poisson arrivals at `load` times the capacity of the slots."""
    import pyarrow.parquet as pq

    samples = np.array(pq.read_table(path, columns=["output_tokens"])["output_tokens"].to_pylist(), float)
    samples = samples[rng.choice(len(samples), num, replace=num > len(samples))]
    chosen = rng.integers(0, samples.shape[1], num)
    true = samples[np.arange(num), chosen].astype(int)
    others = np.ones_like(samples, bool)
    others[np.arange(num), chosen] = False
    logs = np.log(samples[others].reshape(num, -1))
    mu, sigma = np.median(logs, axis=1), np.maximum(0.8 * logs.std(axis=1), 0.05)
    believed = mu.var() / (mu.var() + noise**2)
    observed = mu.mean() + believed * (mu + rng.normal(0.0, noise, num) - mu.mean())
    wide = np.hypot(sigma, 0.8 * np.sqrt((1.0 - believed) * mu.var()))
    arrivals = np.cumsum(rng.exponential(true.mean() / slots / load, num))
    return [
        Job(
            Request(
                request_id=f"r{index}", arrival_s=float(arrivals[index]), prompt_tokens=1, max_tokens=CAP
            ),
            int(true[index]),
            LengthPrediction(float(observed[index]), float(wide[index]), NU),
        )
        for index in range(num)
    ]


def run(
    jobs: Sequence[Job],
    policy: str,
    parameters: Mapping[str, float] | None = None,
    *,
    prefill_token: float = 0.0,
    **limits: int,
) -> Outcome:
    """Serves all jobs; a step takes one unit of time plus `prefill_token` for each prompt token.

    Arrivals reach the scheduler at the next step.
    """
    chosen = {"num_kv_blocks": 1_000_000, "max_num_batched_tokens": 8192, **limits}
    core = Scheduler(SchedulerConfig(**chosen), make_policy(policy, parameters))  # type: ignore[arg-type]
    by_id = {job.request.request_id: job for job in jobs}
    spent: dict[str, float] = {}
    now, coming, steps = 0.0, 0, 0
    while len(spent) < len(jobs):
        while coming < len(jobs) and jobs[coming].request.arrival_s <= now:
            core.add(jobs[coming].request, now)
            core.update(jobs[coming].request.request_id, Prediction(length=jobs[coming].prediction), now)
            coming += 1
        plan = core.schedule(now)
        if plan is None:
            now = float(np.ceil(jobs[coming].request.arrival_s))
            continue
        sampling = [*plan.decodes, *(chunk.request_id for chunk in plan.prefills if chunk.is_last)]
        left = {name: by_id[name].output_tokens - core.state(name).num_output_tokens for name in sampling}
        most = 1 if plan.prefills else core.steady_steps(min(left.values()))
        if coming < len(jobs):
            most = min(most, max(1, int(np.ceil(jobs[coming].request.arrival_s - now))))
        now, steps = now + most + prefill_token * plan.num_prefill_tokens, steps + most
        stopped = tuple(name for name in sampling if left[name] == most and by_id[name].output_tokens < CAP)
        for done in core.complete(StepResult(plan.step, stopped, most), now):
            spent[done.request_id] = now - by_id[done.request_id].request.arrival_s
    latency = np.array([spent[job.request.request_id] for job in jobs])
    return Outcome(latency, core.counters.num_preemptions, steps, core)


def heading(*columns: str) -> None:
    """Prints the header of a table."""
    print("\n| " + " | ".join(columns) + " |")
    print("| --- |" + " ---: |" * (len(columns) - 1))


def row(name: str, *values: float | str) -> None:
    """Prints a row of a table."""
    print(
        f"| {name} | " + " | ".join(v if isinstance(v, str) else f"{v:,.0f}" for v in values) + " |",
        flush=True,
    )


def tail(options: argparse.Namespace) -> None:
    """Mean and tail latency of each policy under overload."""
    jobs = read_jobs(
        options.lengths, options.requests, options.slots, options.load, options.noise, rng(options)
    )
    limits = {"max_num_seqs": options.slots}
    fcfs, sept = run(jobs, "fcfs", **limits).latency, run(jobs, "sept", **limits).latency
    sides: list[tuple[str, FloatArray | Callable[[], FloatArray]]] = [("fcfs", fcfs), ("sept", sept)]
    for title, policy, parameters in (
        ("ssjf", "ssjf", {}),
        ("tie, tau as 30 s of 20 ms steps", "tie", {"tau_s": 1500.0}),
        ("hrrn", "hrrn", {"token_s": 1.0}),
        ("bounded_shortest", "bounded_shortest", {}),
    ):
        sides.append((title, lambda p=policy, q=parameters: run(jobs, p, q, **limits).latency))  # type: ignore[misc]
    print(
        f"\ntail: {len(jobs)} requests, {options.slots} slots, load {options.load}, prediction error {options.noise}; steps"
    )
    heading(
        "policy", "mean", "P50", "P99", "P99.9", "max", "mean per token", "P99 / FCFS", "gain in mean kept"
    )
    tokens = np.array([job.output_tokens for job in jobs], float)
    for title, side in sides:
        latency = side() if callable(side) else side
        p50, p99, p999 = np.percentile(latency, [50, 99, 99.9])
        per_token, ratio = f"{(latency / tokens).mean():.1f}", f"{p99 / np.percentile(fcfs, 99):.2f}"
        fraction_kept = f"{100 * kept_share(latency, fcfs, sept):.0f} %"
        row(title, latency.mean(), p50, p99, p999, latency.max(), per_token, ratio, fraction_kept)


def kept_share(latency: FloatArray, fcfs: FloatArray, sept: FloatArray) -> float:
    """Fraction of sept's improvement over fcfs in the mean that `latency` keeps; can exceed 1."""
    return float((fcfs.mean() - latency.mean()) / (fcfs.mean() - sept.mean()))


def slo(options: argparse.Namespace) -> None:
    """SLO-aware TIE compared with other policies."""
    num = min(options.requests, 1500)
    jobs = read_jobs(options.lengths, num, options.slots, options.load, options.noise, rng(options))
    targets = rng(options).choice([300.0, 1000.0, 4000.0], num)
    jobs = [
        replace(
            job, request=replace(job.request, ttlt_slo_s=float(target) + 2.0 * job.output_tokens, tier=level)
        )
        for job, target, level in zip(
            jobs, targets, np.searchsorted([500.0, 2000.0], targets).tolist(), strict=True
        )
    ]
    print(
        f"\nslo: {num} requests, {options.slots} slots, load {options.load}, targets of 300, 1,000, 4,000 + 2 x length steps"
    )
    heading("policy", "mean", "P99", "within target", "tier 0", "tier 1", "tier 2")
    for name, parameters in (
        ("fcfs", {}), ("edf", {}), ("tie", {"tau_s": 3000.0}),
        ("slo_tie", {"tau_s": 3000.0, "token_s": 1.0, "margin_s": 100.0}),
    ):  # fmt: skip
        latency = run(jobs, name, parameters, max_num_seqs=options.slots).latency
        targets = np.array([job.request.ttlt_slo_s for job in jobs], float)
        tiers = np.array([job.request.tier for job in jobs])
        met = latency <= targets
        shares = [
            f"{100 * met[chosen].mean():.1f} %" for chosen in (tiers >= 0, tiers == 0, tiers == 1, tiers == 2)
        ]
        row(name, latency.mean(), np.percentile(latency, 99), *shares)


def rng(options: argparse.Namespace) -> np.random.Generator:
    """Random generator of the study."""
    return np.random.default_rng(options.seed)


STUDIES: dict[str, Callable[[argparse.Namespace], None]] = {"tail": tail, "slo": slo}


def main(args: Sequence[str] | None = None) -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", help="Parquet file with sampled lengths")
    parser.add_argument("--requests", type=int, default=4500)
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--load", type=float, default=1.2)
    parser.add_argument("--noise", type=float, default=0.5, help="standard error of the predicted ln length")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--studies", default=",".join(STUDIES))
    options = parser.parse_args(args)
    if options.lengths is None:
        print("nothing to measure: --lengths FILE (Parquet) is required (see --help)")
        return
    print(
        f"Python {platform.python_version()}, numpy {np.__version__}, {platform.machine()}, seed {options.seed}"
    )
    for name in options.studies.split(","):
        STUDIES[name](options)


if __name__ == "__main__":
    main()
