"""The command `fit-dist`: a log-t length distribution for each prompt, from its sampled answers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from scheduler_core.command import run_command
from scheduler_core.errors import InputError, MissingExtraError

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class FitDistConfig:
    """Fit a log-t length distribution to the sampled answers of each prompt, by maximum likelihood."""

    samples: str
    """Parquet file with answer lengths: one row for each answer (samples/1), or lists in output_tokens with one row for each prompt and model."""
    out: str
    """Parquet file to write, one row for each group (schema fits/1)."""
    nu: float = 3.5
    """Degrees of freedom of the log-t distribution."""
    censoring: Literal["right", "none"] = "right"
    """What an answer cut at its cap means: right = at least that long; none = just that long (the TIE paper's way, biased low)."""
    group_by: str = "prompt_id,model"
    """Columns that name a group, separated by commas."""
    max_tokens: int | None = None
    """Cap on all answers: longer ones count as cut there. Needed for lists without a column `finished`, where answers of that length or more count as cut."""
    figure: str | None = None
    """PNG file to write: histograms of some prompts with the fitted curves."""
    json: str | None = None
    """JSON file to write: counts, flags, KS pass rates of log-t, log-normal, gamma, Weibull and exponential."""
    alternatives: bool = True
    """Fit the other families too, to compare KS pass rates."""
    progress: bool = True
    """Show a progress bar on a terminal, a line now and then elsewhere."""

    def __post_init__(self) -> None:
        if not 0 < self.nu < float("inf"):
            raise InputError("nu", self.nu, "a finite number above 0")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise InputError("max_tokens", self.max_tokens, "a whole number of at least 1, or unset")
        names = self.group_by.split(",")
        if not all(name.strip() for name in names) or len(set(names)) < len(names):
            raise InputError("group_by", self.group_by, "column names separated by commas, each once")


def fit_dist(config: FitDistConfig) -> dict[str, Any]:
    """Runs the command: writes the fits, `OUT.run.json`, and on request summary and figure; returns the summary."""
    try:
        import pyarrow  # noqa: F401
        import scipy  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(error.name or "scipy", "train") from error
    from scheduler_core.files import sha256_file, writable_target, write_json
    from training.fitting.fits import FitOptions, fit_groups, write_fits
    from training.fitting.summary import compare_families, ks_table, summarize
    from training.fitting.table import group_table, read_parquet
    from training.progress import tracked
    from training.versions import versions_of

    out = writable_target(config.out, "out")
    others = {
        name: writable_target(path, name)
        for name, path in (("json", config.json), ("figure", config.figure))
        if path is not None
    }
    options = FitOptions(
        nu=config.nu,
        censoring=config.censoring,
        keys=tuple(name.strip() for name in config.group_by.split(",")),
        max_tokens=config.max_tokens,
    )
    table = read_parquet(config.samples, "samples")
    groups = group_table(table, Path(config.samples), keys=options.keys, max_tokens=options.max_tokens)
    fits = fit_groups(groups, options, track=lambda numbers: tracked(numbers, "log-t", config.progress))
    p_values = {}
    if config.alternatives:
        p_values = compare_families(
            fits, config.censoring, track=lambda numbers: tracked(numbers, "others", config.progress)
        )
    summary = summarize(fits, p_values)
    write_fits(out, fits)
    if "figure" in others:
        from training.fitting.figure import draw_fits

        draw_fits(fits, config.censoring, others["figure"])
    run = {
        "config": asdict(config),
        "samples": {"name": Path(config.samples).name, "sha256": sha256_file(config.samples)},
        "versions": versions_of(("numpy", "scipy", "pyarrow")),
    }
    write_json(out.with_name(out.name + ".run.json"), run)
    if "json" in others:
        write_json(others["json"], summary | run)
    _report(summary, ks_table(summary) if config.alternatives else "")
    return summary


def _report(summary: dict[str, Any], table: str) -> None:
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
