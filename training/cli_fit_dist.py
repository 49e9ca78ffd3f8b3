"""The command `fit-dist`: a length distribution for each prompt, from its sampled answers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from scheduler_core.command import run_command
from scheduler_core.errors import InputError, MissingExtraError

if TYPE_CHECKING:
    from training.fitting.jobs.workers import Runner
    from training.fitting.options import FitOptions

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class FitDistConfig:
    """Fit a length distribution to the sampled answers of each prompt, by maximum likelihood."""

    INPUTS = ("samples",)
    OUTPUTS = ("out", "{out}.run.json", "{out}.parts", "json", "figure", "report")

    samples: str
    """Answer lengths: a Parquet, .jsonl or .csv file, a folder saved by datasets, or a folder of Parquet files; one row for each answer (samples/2), or lists in output_tokens with one row for each group."""
    out: str
    """Parquet file to write, one row for each group (schema fits/2)."""
    family: Literal["log-t", "log-normal", "gamma", "weibull", "exponential"] = "log-t"
    """Family of the distributions."""
    nu: float | Literal["free"] = 3.5
    """Degrees of freedom of the log-t distribution, or free: fitted too, for each group."""
    censoring: Literal["right", "none"] = "right"
    """What an answer cut at its cap means: right = at least that long; none = just that long (the TIE paper's way, biased low)."""
    max_tokens: int | None = None
    """Cap on all answers: longer ones count as cut there. Needed for lists without a column `finished`, where answers of that length or more count as cut."""
    group_by: str = "prompt_id,model"
    """Columns that name a group, separated by commas."""
    solver: Literal["batched", "lbfgsb"] = "batched"
    """batched = all groups at once with Newton's method; lbfgsb = one by one with scipy's L-BFGS-B (the paper's)."""
    integers: bool = False
    """Take a length x for the interval [x - 1/2, x + 1/2], whose probability is its likelihood."""
    weights: str | None = None
    """Column that says how many answers each one counts as: a number above 0, or a list of them in the form of lists."""
    alternatives: bool = True
    """Fit the other families too, to compare them."""
    bootstrap: int = 0
    """Replicates of the parametric bootstrap for each group, for p-values and confidence intervals; 0 = none."""
    confidence: float = 0.9
    """Confidence of the bootstrap's intervals."""
    seed: int = 0
    """Seed of the bootstrap."""
    processes: int | None = None
    """Number of processes; unset = one, and one for each core where a fit is slow: with --bootstrap, --nu free or --solver lbfgsb. The result does not depend on it."""
    ray: str | None = None
    """Fit on a Ray cluster: its address (HOST:PORT, ray://HOST:PORT or auto), or local to start one on this machine with --processes processors. Every node needs this version of tailcast."""
    block_groups: int = 16_384
    """Most groups fitted at a time by one process; fewer need less memory."""
    resume: bool = True
    """Go on where an interrupted run of the same command stopped; false = start over."""
    json: str | None = None
    """JSON file to write: counts, flags, and how well each family does."""
    figure: str | None = None
    """PNG file to write: histograms of some prompts with the fitted curves."""
    report: str | None = None
    """HTML file to write: a report on the fits."""
    progress: bool = True
    """Show a progress bar on a terminal, a line now and then elsewhere."""

    def __post_init__(self) -> None:
        if self.nu != "free" and not 0 < self.nu < float("inf"):
            raise InputError("nu", self.nu, "a finite number above 0, or free")
        if self.max_tokens is not None and not 1 <= self.max_tokens < 2**31:
            raise InputError("max_tokens", self.max_tokens, "integers from 1 to 2**31 - 1, or unset")
        if self.block_groups < 1:
            raise InputError("block_groups", self.block_groups, "a whole number of at least 1")
        if self.processes is not None and self.processes < 1:
            raise InputError("processes", self.processes, "a whole number of at least 1, or unset")
        if self.weights == "":
            raise InputError("weights", "", "the name of a column, or unset")
        for name in ("out", "json", "figure", "report"):
            if getattr(self, name) == "":
                raise InputError(name, "", "a path")
        names = [name.strip() for name in self.group_by.split(",")]
        if not all(names) or len(set(names)) < len(names):
            raise InputError("group_by", self.group_by, "column names separated by commas, each once")

    @property
    def keys(self) -> tuple[str, ...]:
        """Columns that name a group."""
        return tuple(name.strip() for name in self.group_by.split(","))


def fit_dist(config: FitDistConfig) -> dict[str, Any]:
    """Runs the command: writes the fits, `OUT.run.json`, and what else is asked for; returns the summary."""
    try:
        import numba  # noqa: F401
        import pyarrow  # noqa: F401
        import scipy  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(error.name or "scipy", "train") from error
    from scheduler_core.files import writable_target, write_json
    from training.fitting.jobs.pipeline import fit_block, fit_file
    from training.fitting.reading.blocks import BlockLimits, Grouping
    from training.fitting.summary import families_table, summarize_file
    from training.versions import versions_of

    out = writable_target(config.out, "out")
    others = {
        name: writable_target(path, name)
        for name, path in (("json", config.json), ("figure", config.figure), ("report", config.report))
        if path is not None
    }
    options = _options(config)
    versions = versions_of(("numpy", "scipy", "pyarrow", "numba"))
    counts, samples = fit_file(
        config.samples,
        out,
        partial(fit_block, options=options),
        grouping=Grouping(keys=options.keys, max_tokens=options.max_tokens, weights=options.weights),
        settings={"options": asdict(options), "versions": versions},
        limits=BlockLimits(groups=config.block_groups),
        runner=_runner(config),
        resume=config.resume,
        progress=config.progress,
    )
    summary = summarize_file(out, options.family, options.nu) | {"num_errors_left_out": counts.num_errors}
    run = {"config": asdict(config), "samples": samples, "versions": versions}
    write_json(out.with_name(out.name + ".run.json"), run)
    if "json" in others:
        write_json(others["json"], summary | run)
    if "figure" in others:
        from training.fitting.figure import draw_fits

        draw_fits(out, others["figure"])
    if "report" in others:
        from training.fitting.report import write_report

        write_report(out, others["report"], summary)
    _log(summary, families_table(summary))
    return summary


def _options(config: FitDistConfig) -> FitOptions:
    from training.fitting.options import FitOptions

    return FitOptions(
        family=config.family,
        nu=None if config.nu == "free" else config.nu,
        censoring=config.censoring,
        integers=config.integers,
        solver=config.solver,
        keys=config.keys,
        max_tokens=config.max_tokens,
        weights=config.weights,
        alternatives=config.alternatives,
        bootstrap=config.bootstrap,
        confidence=config.confidence,
        seed=config.seed,
    )


def _runner(config: FitDistConfig) -> Runner:
    from training.fitting.jobs.workers import check_processes, run_processes

    slow = config.bootstrap > 0 or config.nu == "free" or config.solver == "lbfgsb"
    processes = check_processes(config.processes, slow=slow)
    if config.ray is None:
        return partial(run_processes, processes=processes)
    from training.fitting.jobs.ray_workers import run_ray

    return partial(run_ray, address=config.ray, processes=processes)


def _log(summary: dict[str, Any], table: str) -> None:
    log.info(
        "%d groups, %d samples, %.1f %% of them cut, %d failed ones left out; flags %s; %d not converged",
        summary["num_groups"],
        summary["num_samples"],
        100 * summary["num_censored"] / summary["num_samples"],
        summary["num_errors_left_out"],
        summary["flags"],
        summary["num_not_converged"],
    )
    for line in table.splitlines():
        log.info("%s", line)


def main(args: Sequence[str] | None = None) -> int:
    """Entry point of `fit-dist`."""

    def command(config: FitDistConfig) -> None:
        fit_dist(config)

    return run_command("fit-dist", FitDistConfig, command, positionals=("samples",), extra="train", args=args)


if __name__ == "__main__":
    raise SystemExit(main())
