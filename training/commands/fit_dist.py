"""The command `fit-dist`: a length distribution for each prompt, from its sampled outputs."""

from __future__ import annotations

import logging
import os
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from scheduler_core.errors import InputError
from scheduler_core.ranges import INTEGERS, check_ranges
from scheduler_core.shell.command import command, report_left_out
from training.fitting.grouping import GroupingOptions

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class FitDistConfig(GroupingOptions):
    """Fit a length distribution to the sampled outputs of each prompt, by maximum likelihood."""

    INPUTS = ("samples",)
    OUTPUTS = ("out", "{out}.run.json", "json", "figure")

    samples: str
    """Output lengths: a Parquet, CSV or JSON lines file, or a folder of Parquet files, with one row for each sample (samples/2), or one row for each group and lists in output_tokens; import-lengths reads logs."""
    out: str
    """Parquet file to write, one row for each group (schema fits/2)."""
    overwrite: bool = False
    """Replace files at the outputs."""
    family: Literal["log-t", "log-normal", "gamma", "weibull", "exponential"] = "log-t"
    """Family of the distributions."""
    nu: float | Literal["free"] = 3.5
    """Degrees of freedom of the log-t distribution, or free to fit them for each group."""
    censoring: Literal["right", "none"] = "right"
    """Treatment of a sample truncated at max_tokens: right = right-censored; none = as if finished (as in the TIE paper; biased low)."""
    solver: Literal["batched", "lbfgsb"] = "batched"
    """batched = all groups at once with Newton's method; lbfgsb = one by one with scipy's L-BFGS-B (as in the TIE paper)."""
    integers: bool = False
    """Use the probability of the interval [x - 1/2, x + 1/2] as likelihood of a length x, instead of the density at x."""
    alternatives: bool = True
    """Also fit the other families, for comparison."""
    bootstrap: int = 0
    """Replicates of the parametric bootstrap for each group, for p-values; 0 = none."""
    seed: int = 0
    """Seed of the bootstrap."""
    processes: int | None = None
    """Number of processes; unset = one, or one per core for slow fits (--bootstrap, --nu free or --solver lbfgsb). The result does not depend on it."""
    block_groups: int = 16_384
    """Maximum number of groups that one process fits at a time; a smaller number needs less memory."""
    json: str | None = None
    """JSON file to write: counts, flags, and goodness of fit of each family."""
    figure: str | None = None
    """PNG file to write: histograms of some prompts with the fitted curves."""
    progress: bool = True
    """Show a progress bar on a terminal, or a line every ten seconds elsewhere."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nu != "free" and not 0 < self.nu < float("inf"):
            raise InputError("nu", self.nu, "a finite number above 0, or free")
        check_ranges(self, block_groups=(1, INTEGERS), processes=(1, INTEGERS))
        for name in ("out", "json", "figure"):
            if getattr(self, name) == "":
                raise InputError(name, "", "a path")


def run(config: FitDistConfig) -> int:
    """Runs the command; returns its exit code, see `report_left_out`."""
    summary = fit_dist(config)
    num_errors = summary["num_errors_left_out"]
    return report_left_out({"failed": num_errors}, summary["num_samples"] + num_errors, "samples")


def fit_dist(config: FitDistConfig) -> dict[str, Any]:
    """Runs the command: writes the fits, `OUT.run.json` and the optional outputs; returns the summary."""
    from scheduler_core.shell.files import writable_target, write_json
    from scheduler_core.shell.versions import versions_of
    from training.fitting.fit_job import fit_file
    from training.fitting.fits import FitOptions
    from training.fitting.report import families_rows, summarize_file, write_figure

    out = writable_target(config.out, "out")
    others = {
        name: writable_target(path, name)
        for name in ("json", "figure")
        if (path := getattr(config, name)) is not None
    }
    options = FitOptions(
        **{option.name: getattr(config, option.name) for option in fields(FitOptions)}
        | {"nu": None if config.nu == "free" else config.nu}
    )
    # Sending samples to another process costs more than a fast fit, which takes microseconds.
    is_slow = config.bootstrap > 0 or config.nu == "free" or config.solver == "lbfgsb"
    processes = config.processes or (len(os.sched_getaffinity(0)) if is_slow else 1)
    run_options = {name: getattr(config, name) for name in ("block_groups", "progress")}
    samples = fit_file(config.samples, out, options, processes=processes, **run_options)
    summary = summarize_file(out, options.family, options.nu)
    versions = versions_of(("numpy", "scipy", "pyarrow", "numba", "duckdb"))
    run = {"config": asdict(config), "samples": samples, "versions": versions}
    write_json(out.with_name(out.name + ".run.json"), run)
    if "json" in others:
        write_json(others["json"], summary | run)
    if "figure" in others:
        write_figure(out, others["figure"], summary["family"])
    message = (
        "%(num_groups)d groups, %(num_samples)d samples (%(num_censored)d censored); %(num_errors_left_out)d failed "
        "samples left out; %(num_not_converged)d groups not converged; flags %(flags)s"
    )
    log.info(message, summary)
    for row in families_rows(summary):
        log.info("%-26s" + " %12s" * (len(row) - 1), *row)
    return summary


main = command("fit-dist", FitDistConfig, run, positionals=("samples",), extra="train")


if __name__ == "__main__":
    raise SystemExit(main())
