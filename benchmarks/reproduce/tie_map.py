"""Which score serves best, by the variation of the outputs of a prompt and by the predictor's error.

    python -m benchmarks.reproduce.tie_map [--data DATA] [--requests 300] [--seeds 5] [--out out/tie_map.csv]
                                           [--figure tie-map.svg] [--markdown README.md]

TIE's paper has one coefficient of variation within a prompt (CV, 1.09) and one predictor. Here both vary. With DATA, the folder
of public sets, the prompts are those of CASTILLO with the log-t fits of their outputs; without, a synthetic population.
One factor for all sigma gives the mean CV of the lengths up to max_tokens, and the outputs are drawn from these
distributions: the true parameters are known. The last columns are real outputs with such a CV, of the OASST sampling reports
and of GPT-4 (Tree of Thoughts): one output of a prompt is served, and the fit of its other outputs is the truth.

Predictors: the true mu and sigma, or mu and ln sigma with an error that leaves an R2 of 0.82 and 0.76 (the paper's), or of 0.4
(both). All scores get the same prediction: the median (SSJF), the mean (SEPT), TIE, and the Gittins index,
which may also displace running requests. Load and engine are those of the paper's table 2 at 100 requests per second;
offline, all requests arrive at once.

Values are ratios to TIE on the same requests, with 95 % intervals over the seeds.
"""

from __future__ import annotations

import csv
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow.parquet as pq

from benchmarks.reproduce.simulate import Outcome, percentile
from benchmarks.reproduce.study import Effort
from benchmarks.reproduce.tie_lengths import Lengths, all_lengths
from benchmarks.reproduce.tie_requests import (
    MU_MEAN,
    MU_SD,
    NU,
    SIGMA_MEAN,
    SIGMA_SD,
    Array,
    Order,
    Requests,
    made_requests,
    with_error,
)
from benchmarks.reproduce.tie_systems import LMSYS_8B, run
from benchmarks.shared.command import Parser
from benchmarks.shared.pages import put_section, write_svg
from scheduler_core.errors import InputError
from scheduler_core.lengths.student_t import student_t_quantile
from scheduler_core.report.page import markdown_table
from scheduler_core.report.plotting import COLORS, new_figure
from scheduler_core.shell.files import atomic_file
from scheduler_core.statistics import Interval, interval
from training.fitting.estimate import estimate, family_of
from training.fitting.kernels.groups import CONSTANT, SIGMA_FLOOR

#: Policies by score; all order by a predicted log-t.
SCORES = {"median": Order("ssjf"), "mean": Order("sept"), "TIE": Order("tie"), "Gittins": Order("gittins")}
#: Mean CV of the lengths of a prompt.
VARIATIONS = (0.1, 0.2, 0.4, 0.7, 1.1, 1.5)
#: R2 of the predicted mu and ln sigma.
ERRORS = {"true parameters": (1.0, 1.0), "R2 0.82": (0.82, 0.76), "R2 0.4": (0.4, 0.4)}
#: The paper's predictor.
PAPER_ERROR = "R2 0.82"
#: Ranges of the CV of real outputs, by set.
REAL = {"ToT": (0.0, 2.0), "OASST": (0.25, 0.6), "OASST ": (0.8, 9.0)}
#: max_tokens of the drawn requests.
MAX_TOKENS = 8192
MEASURES = {
    "token": "latency per token, mean",
    "mean": "latency, mean",
    "P99": "latency, P99",
    "offline": "time for 3 of 10 outputs, offline",
}
#: Measures of the table.
TABLE = ("token", "mean", "offline")
#: Quantiles of Student's t for the moments of a truncated log-t.
_NODES = np.array([student_t_quantile((k + 0.5) / 400, NU) for k in range(400)])


@dataclass(frozen=True, slots=True)
class Population:
    """Prompts from which requests are drawn.

    Attributes:
        name: Column of the map.
        variation: Mean CV of the lengths of a prompt.
        prompt_tokens, mu, sigma, limits: Of each prompt [N]; true parameters, max_tokens.
        outputs: A real output of each prompt that its parameters do not know [N, K]; None: drawn from the parameters.
    """

    name: str
    variation: float
    prompt_tokens: Array
    mu: Array
    sigma: Array
    limits: Array
    outputs: Array | None = None

    def requests(self, num: int, error: tuple[float, float], seed: int) -> Requests:
        """Requests with predictions of the given R2; the outputs depend on the seed only."""
        rng = np.random.default_rng([seed, 5])
        rows = rng.integers(0, len(self.mu), num)
        mu, sigma, limits = self.mu[rows], self.sigma[rows], self.limits[rows]
        if self.outputs is None:
            output = np.exp(np.minimum(mu + sigma * rng.standard_t(NU, num), np.log(limits)))
        else:
            output = self.outputs[rows]
        seen_mu = with_error(mu, error[0], rng)
        seen_sigma = np.exp(with_error(np.log(sigma), error[1], rng))
        lengths = np.stack([seen_mu, seen_sigma, np.full(num, NU)], axis=1)
        return made_requests(self.prompt_tokens[rows], output, {"length": lengths}, {}, self.name, limits)


class Value(NamedTuple):
    """A cell of the map: ratio of a score's measure to TIE's."""

    measure: str
    population: str
    variation: float
    error: str
    score: str
    ratio: Interval


def variation(mu: Array, sigma: Array, limits: Array) -> Array:
    """CV of log-t lengths up to `limits` tokens [N]."""
    lengths = np.exp(np.minimum(mu[:, None] + sigma[:, None] * _NODES, np.log(limits)[:, None]))
    return np.asarray(lengths.std(axis=1) / lengths.mean(axis=1))


def scaled(mu: Array, sigma: Array, limits: Array, target: float) -> Array:
    """sigma times the factor for which the mean CV is the target; bisection, `InputError` if none reaches it."""
    low, high = 1e-3, 50.0
    for _ in range(40):
        factor = math.sqrt(low * high)
        reached = float(variation(mu, factor * sigma, limits).mean())
        low, high = (factor, high) if reached < target else (low, factor)
    if abs(reached / target - 1.0) > 0.01:
        raise InputError("variation", target, f"at most {reached:.2f} with max_tokens of {MAX_TOKENS}")
    return factor * sigma


def populations(data: Path | None, *, quick: bool) -> Iterator[Population]:
    """The columns of the map: drawn outputs by CV, then real ones."""
    effort = Effort(quick=quick, data=data)
    castillo, *others = all_lengths(effort)
    if data is None:
        rng = np.random.default_rng(7)
        mu, sigma = rng.normal(MU_MEAN, MU_SD, 2000), np.exp(rng.normal(SIGMA_MEAN, SIGMA_SD, 2000))
        prompt = np.exp(rng.normal(4.0, 1.0, 2000))
    else:
        mu, sigma, fitted = _fits(castillo)
        mu, sigma = mu[fitted][:2000], sigma[fitted][:2000]
        column = pq.read_table(data / "castillo_train.parquet", columns=["prompt_tokens"]).column(0)
        prompt = np.random.default_rng(7).choice(column.to_numpy().astype(float), len(mu))
    limits = np.full(len(mu), float(MAX_TOKENS))
    for target in VARIATIONS:
        wide = scaled(mu, sigma, limits, target)
        yield Population(f"{target}", target, prompt, mu, wide, limits)
    for lengths in others:
        for name, bounds in REAL.items():
            if lengths.name == name.strip():
                yield _real(lengths, bounds)


def _fits(lengths: Lengths) -> tuple[Array, Array, Array]:
    """mu, sigma [G], and whether they are a regular fit."""
    fits = estimate(lengths.sample, family_of("log-t", NU))
    fitted = fits.fitted & ((fits.flags & (CONSTANT | SIGMA_FLOOR)) == 0) & (fits.solution.m > 1.0)
    return fits.solution.m, np.exp(fits.solution.s), np.asarray(fitted)


def _real(lengths: Lengths, bounds: tuple[float, float]) -> Population:
    """Prompts whose other outputs have a CV within the bounds, with the fit of these, and one output to serve."""
    tokens = lengths.tokens.astype(float)
    served = np.random.default_rng(7).integers(0, tokens.shape[1], len(tokens))
    is_other = np.arange(tokens.shape[1]) != served[:, None]
    others = Lengths(
        lengths.tokens[is_other].reshape(len(tokens), -1), lengths.limits, lengths.source, lengths.name
    )
    mu, sigma, fitted = _fits(others)
    truncated = np.minimum(others.tokens, lengths.limits[:, None])
    deviation = truncated.std(axis=1) / truncated.mean(axis=1)
    chosen = fitted & (deviation >= bounds[0]) & (deviation < bounds[1])
    limits = np.where(np.isfinite(lengths.limits), lengths.limits, MAX_TOKENS)[chosen]
    output = tokens[np.arange(len(tokens)), served][chosen]
    mean = float(deviation[chosen].mean())
    name = f"{lengths.name} {mean:.2g}"
    return Population(name, mean, np.full(chosen.sum(), 50.0), mu[chosen], sigma[chosen], limits, output)


def measures(online: Outcome, offline: Outcome) -> dict[str, float]:
    """The measures of one score."""
    latencies = [record.finish_s - record.arrival_s for record in online.records]
    token = [record.normalized_latency_s for record in online.records]
    ends = sorted(record.finish_s for record in offline.records)
    return {
        "token": float(np.mean(token)),
        "mean": float(np.mean(latencies)),
        "P99": percentile(latencies, 99),
        "offline": ends[round(0.3 * len(ends)) - 1],
    }


def measured(population: Population, error: str, num: int, seeds: int) -> Iterator[Value]:
    """The ratios to TIE of one cell."""
    runs: dict[str, list[dict[str, float]]] = {score: [] for score in SCORES}
    for seed in range(seeds):
        data = population.requests(num, ERRORS[error], seed)
        for score, order in SCORES.items():
            online, offline = (run(order, data, LMSYS_8B, rate, num / 6000, seed) for rate in (100.0, None))
            if online.num_refused:
                allowed = "so many that the longest fits into their fraction of the engine's memory"
                raise InputError("--requests", num, allowed)
            runs[score].append(measures(online, offline))
    for measure in MEASURES:
        for score, values in runs.items():
            ratios = [one[measure] / tie[measure] for one, tie in zip(values, runs["TIE"], strict=True)]
            yield Value(measure, population.name, population.variation, error, score, interval(ratios))


def best(values: Sequence[Value]) -> tuple[str, float, bool]:
    """Of some scores of one cell: the best one, TIE's value as a ratio to it (or, if TIE is best, to that of the next one),
    and whether the interval excludes 1."""
    first, second = sorted(values, key=lambda value: value.ratio.mean)[:2]
    if first.score == "TIE":
        return "TIE", 1.0 / second.ratio.mean, second.ratio.low > 1.0
    return first.score, 1.0 / first.ratio.mean, first.ratio.high < 1.0


def cells(values: Sequence[Value]) -> dict[tuple[str, str, str], list[Value]]:
    """The values by measure, error and population."""
    by_cell: dict[tuple[str, str, str], list[Value]] = {}
    for value in values:
        by_cell.setdefault((value.measure, value.error, value.population), []).append(value)
    return by_cell


def table(values: Sequence[Value]) -> str:
    """Ratios to TIE by CV with the paper's predictor; bold if the interval excludes 1."""
    by_cell = cells(values)
    others = [score for score in SCORES if score != "TIE"]
    rows = []
    for population in dict.fromkeys(value.population for value in values):
        row = [population]
        for measure in TABLE:
            for value in by_cell[measure, PAPER_ERROR, population]:
                if value.score in others:
                    is_clear = value.ratio.high < 1.0 or value.ratio.low > 1.0
                    row.append(f"**{value.ratio.mean:.2f}**" if is_clear else f"{value.ratio.mean:.2f}")
        rows.append(row)
    columns = [f"{MEASURES[measure]}: {others[0]}" for measure in TABLE]
    header = [name for column in columns for name in (column, *others[1:])]
    return markdown_table(("CV within a prompt", *header), rows)


def plot(file: Path, values: Sequence[Value]) -> None:
    """The map: a row of panels for each measure, without and with preemption; the color is the best score, the number TIE's
    ratio to it, and pale cells are not clear."""
    from matplotlib.patches import Patch, Rectangle

    by_cell = cells(values)
    columns = list(dict.fromkeys(value.population for value in values))
    rows = list(dict.fromkeys(value.error for value in values))
    colors = dict(zip(SCORES, COLORS, strict=False))
    size = {"rows": len(MEASURES), "columns": 2, "sharex": True, "sharey": True}
    figure, axes = new_figure(1.3 * len(columns) + 2.4, 8.0, **size)
    panels = [(measure, scores) for measure in MEASURES for scores in (list(SCORES)[:3], list(SCORES))]
    for axis, (measure, scores) in zip(axes, panels, strict=True):
        for x, population in enumerate(columns):
            for y, error in enumerate(rows):
                cell = [value for value in by_cell[measure, error, population] if value.score in scores]
                name, ratio, is_clear = best(cell)
                style = {"facecolor": colors[name], "alpha": 0.75 if is_clear else 0.2, "edgecolor": "white"}
                axis.add_patch(Rectangle((x - 0.5, y - 0.5), 1.0, 1.0, **style))  # type: ignore[arg-type]
                axis.text(
                    x,
                    y,
                    f"{ratio:.2f}" if ratio < 10 else f"{ratio:.0f}",
                    ha="center",
                    va="center",
                    fontsize=8,
                )
        what = "" if "Gittins" in scores else ", without preemption"
        axis.set(xlim=(-0.5, len(columns) - 0.5), ylim=(len(rows) - 0.5, -0.5))
        axis.set_title(f"{MEASURES[measure]}{what}", fontsize=10)
        axis.set_xticks(range(len(columns)), [name.replace(" ", "\n") for name in columns], fontsize=8)
        axis.set_yticks(range(len(rows)), rows, fontsize=8)
        axis.grid(visible=False)
    for axis in axes[-2:]:
        axis.set_xlabel("coefficient of variation of the outputs of a prompt", fontsize=9)
    figure.legend(
        handles=[Patch(facecolor=color, alpha=0.75, label=score) for score, color in colors.items()],
        loc="outside upper center", ncols=len(colors), frameon=False, fontsize=9,
    )  # fmt: skip
    write_svg(file, figure)


def write_values(file: Path, values: Sequence[Value]) -> None:
    """All values as CSV."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(file) as temporary, open(temporary, "w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(
            ["measure", "population", "CV", "predictor", "score", "ratio to TIE", "low", "high", "seeds"]
        )
        for value in values:
            numbers = [f"{number:.4f}" for number in (value.ratio.mean, value.ratio.low, value.ratio.high)]
            writer.writerow([*value[:2], f"{value.variation:.2f}", *value[3:5], *numbers, value.ratio.num])


def main() -> int:
    """Entry point; returns the exit code."""
    parser = Parser(__doc__)
    parser.add_argument("--data", type=Path, help="folder of the public sets")
    parser.add_argument("--requests", type=int, default=300, help="requests of a simulation")
    parser.add_argument("--seeds", type=int, default=5, help="simulations of each cell")
    parser.add_argument("--quick", action="store_true", help="two columns and two seeds, to see that it runs")
    parser.add_argument("--out", type=Path, default=Path("out/tie_map.csv"), help="all values, CSV")
    parser.add_argument("--figure", type=Path, help="the map, SVG")
    parser.add_argument("--markdown", type=Path, help="page whose section `scores` gets the table")
    options = parser.parse_args()
    values: list[Value] = []
    try:
        columns = list(populations(options.data, quick=options.quick))
        for population in columns[1:4:2] if options.quick else columns:
            for error in ERRORS:
                values += measured(population, error, options.requests, 2 if options.quick else options.seeds)
        write_values(options.out, values)
        text = table(values)
        print(text)
        if options.figure is not None:
            plot(options.figure, values)
        if options.markdown is not None:
            put_section(options.markdown, "scores", text)
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
