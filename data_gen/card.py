"""Data card: a summary of a samples file, as JSON and as a Markdown page with a table of lengths and a figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import scipy.stats
from numpy.typing import NDArray

from data_gen.samples import read_samples
from scheduler_core.errors import InputError
from scheduler_core.report import plotting
from scheduler_core.shell.files import atomic_file, sha256_file, shared_folder, write_json
from scheduler_core.shell.table_files import open_parquet

FILES = ("card.json", "card.md", "survival.png")
#: Minimum number of outputs of a prompt to compute its dispersion.
MIN_SAMPLES = 3
#: TIE paper, section 3.1: 1,000 LMSYS prompts, 100 outputs each, Llama-3-8B-Instruct.
PAPER = {"cv": 1.09, "p90_p50": 4.62, "p99_p50": 10.77, "top_decile_fraction": 0.357, "skewness": 3.10}
_SETTINGS = ("engine", "engine_version", "model", "temperature", "top_p", "max_tokens")
_GROUP = ("prompt_id", "model", "run_id", "temperature", "top_p")
_COLUMNS = tuple(
    dict.fromkeys((*_GROUP, *_SETTINGS, "category", "dataset", "output_tokens", "finish_reason"))
)
_QUANTILES = (10, 50, 90, 99)

FloatArray = NDArray[np.float64]


def write_card(samples_path: str | Path, folder: str | Path) -> dict[str, Any]:
    """Writes card.json, card.md and survival.png for a samples file to a folder and returns the card.

    InputError if the file cannot be read, lacks a column or has no output; TailcastError if one of the files to write exists
    and is not from an earlier card."""
    rows = read_samples(samples_path, _COLUMNS)
    has_output = pc.not_equal(rows.column("finish_reason"), "error")
    outputs = rows.filter(has_output).sort_by("output_tokens")
    if not outputs.num_rows:
        raise InputError(Path(samples_path).name, f"{rows.num_rows} failed rows", "at least one output")
    target = shared_folder(folder, "card", FILES, field="card")
    with open_parquet(samples_path, "samples") as file:
        unit = (file.schema_arrow.metadata or {}).get(b"tailcast.tokens", b"the model's own").decode()
    card = {
        "card": "data-card/3",
        "name": Path(samples_path).name,
        "sha256": sha256_file(samples_path),
        "tokens": unit,
        "num_prompts": pc.count_distinct(rows.column("prompt_id")).as_py(),
        "finish_reasons": {
            entry["values"]: entry["counts"] for entry in _counts(rows.column("finish_reason"))
        },
        "lengths": {
            "all": _lengths(
                outputs.append_column("name", pa.repeat("all outputs", outputs.num_rows)), ("name",)
            ),
            "settings": _lengths(outputs, _SETTINGS),
            "categories": _lengths(outputs, ("category",)),
            "datasets": _lengths(outputs, ("dataset",)),
        },
        "dispersion": dispersion_of(outputs),
    }
    plotting.write_png(_survival_figure(outputs), target / "survival.png")
    write_json(target / "card.json", card)
    with atomic_file(target / "card.md") as temporary:
        temporary.write_text(_page(card), encoding="utf-8")
    return card


def _counts(column: pa.ChunkedArray) -> list[dict[str, Any]]:
    return [entry.as_py() for entry in pc.value_counts(column)]


def _grouped(outputs: pa.Table, names: Sequence[str]) -> tuple[list[dict[str, Any]], pa.Table]:
    """Groups the outputs by the named columns; returns the keys, and a table with lists of lengths (ascending) and finish reasons."""
    lists = [("output_tokens", "list"), ("finish_reason", "list")]
    groups = outputs.group_by(list(names), use_threads=False).aggregate(lists)
    return groups.select(list(names)).to_pylist(), groups


def _lengths(outputs: pa.Table, names: Sequence[str]) -> list[dict[str, Any]]:
    """Number of outputs, truncated fraction and length statistics by group, the largest group first."""
    keys, groups = _grouped(outputs, names)
    table = []
    for number, key in enumerate(keys):
        lengths = groups.column("output_tokens_list")[number].values.to_numpy()
        truncated = pc.equal(groups.column("finish_reason_list")[number].values, "length")
        entry = {**key, "num_outputs": len(lengths), "truncated_fraction": pc.mean(truncated).as_py()}
        quantiles = np.percentile(lengths, _QUANTILES).tolist()
        entry |= {"mean": float(lengths.mean()), "max": int(lengths[-1])}
        table.append(entry | {f"p{name}": value for name, value in zip(_QUANTILES, quantiles, strict=True)})
    return sorted(table, key=lambda entry: -entry["num_outputs"])


def dispersion_of(outputs: pa.Table) -> dict[str, Any]:
    """Dispersion of lengths within groups (prompt, model, run, temperature, top_p) of at least `MIN_SAMPLES` outputs.

    Truncated outputs count with their observed length, which underestimates the dispersion of groups with many of them.
    `outputs` are rows without failures, by increasing length. "measures" has mean and quantiles over the groups.
    """
    _, groups = _grouped(outputs, _GROUP)
    rows = zip(groups.column("output_tokens_list"), groups.column("finish_reason_list"), strict=True)
    large = [row for row in rows if len(row[0]) >= MIN_SAMPLES]
    content: dict[str, Any] = {"num_groups": len(large), "num_skipped": groups.num_rows - len(large)}
    if not large:
        return content
    measures = np.array([_measures(np.asarray(lengths.values, np.float64)) for lengths, _ in large]).T
    return content | {
        "min_samples": min(len(lengths) for lengths, _ in large),
        "max_samples": max(len(lengths) for lengths, _ in large),
        "cv_above_1": float((measures[0] > 1).mean()),
        "truncated_groups": float(np.mean(["length" in reasons.as_py() for _, reasons in large])),
        "measures": {name: _summary(values) for name, values in zip(PAPER, measures, strict=True)},
    }


def _measures(lengths: FloatArray) -> tuple[float, ...]:
    """Dispersion measures of the ascending lengths of one group, in the order of `PAPER`.

    cv (sample standard deviation / mean), P90 / P50 and P99 / P50 (interpolated quantiles), fraction of all tokens in the
    longest tenth of the outputs, skewness (third central moment / second one ** 1.5; NaN for equal lengths).
    """
    p50, p90, p99 = np.percentile(lengths, (50, 90, 99))
    # The last output of the longest tenth counts fractionally.
    tenth = np.clip(0.1 * len(lengths) - np.arange(len(lengths)), 0, 1)
    deviations = lengths - lengths.mean()
    second = (deviations**2).mean()
    return (
        lengths.std(ddof=1) / lengths.mean(),
        p90 / p50,
        p99 / p50,
        tenth @ lengths[::-1] / lengths.sum(),
        (deviations**3).mean() / second**1.5 if second > 1e-9 else np.nan,
    )


def _summary(values: FloatArray) -> dict[str, float]:
    """Mean and quantiles of the finite values; empty if there are none."""
    finite = values[np.isfinite(values)]
    if not len(finite):
        return {}
    quantiles = zip(_QUANTILES, np.percentile(finite, _QUANTILES).tolist(), strict=True)
    return {"mean": float(finite.mean()), **{f"p{name}": value for name, value in quantiles}}


def _page(card: Mapping[str, Any]) -> str:
    import jinja2

    environment = jinja2.Environment(keep_trailing_newline=True, undefined=jinja2.StrictUndefined)
    environment.filters["join_lines"] = lambda text: " ".join(str(text).split())
    template = resources.files("data_gen").joinpath("card.md.j2").read_text(encoding="utf-8")
    synthetic = any(entry["engine"] == "synthetic" for entry in card["lengths"]["settings"])
    return environment.from_string(template).render(
        card, synthetic=synthetic, paper=PAPER, min_samples=MIN_SAMPLES
    )


def _survival_figure(outputs: pa.Table) -> Any:
    figure, (axis,) = plotting.new_figure(8, 4.6)
    lengths = np.asarray(outputs.column("output_tokens"), np.int64)
    truncated = np.asarray(pc.equal(outputs.column("finish_reason"), "length"))
    # Kaplan-Meier estimate: truncated outputs are right-censored.
    survival = scipy.stats.ecdf(scipy.stats.CensoredData.right_censored(lengths, truncated)).sf
    points, alive = survival.quantiles, survival.probabilities
    axis.step(points[alive > 0], alive[alive > 0], where="post", color=plotting.color(0))
    axis.set_xscale("log")
    axis.set_yscale("log")
    low = max(float(lengths.min()), 1.0)
    plotting.mark_decades(axis.xaxis, (low, max(float(lengths.max()), 2 * low)))
    plotting.mark_decades(axis.yaxis, (alive[alive > 0].min(initial=1.0) / 2, 1.0))
    axis.set_xlabel("output length x in tokens")
    axis.set_ylabel("fraction of outputs longer than x")
    axis.set_title("Kaplan-Meier estimate; a power law is a straight line", fontsize=10)
    return figure
