"""What a file of fits says as a whole: counts, flags, and how well each family does, read in one pass."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from training.fitting.families import FamilyName, FloatArray, compared_families, family_of
from training.fitting.fits import NOT_FITTED

PASS_ABOVE = 0.05
# Nothing can be tested where all answers are equal, all were cut, or too few are there.
NOT_TESTED = ("constant", *NOT_FITTED)
_MEASURES = ("log_likelihood", "ks_stat", "ks_p", "ad_stat")


@dataclass(slots=True)
class _Totals:
    num_groups: int = 0
    num_samples: int = 0
    num_censored: int = 0
    num_not_converged: int = 0
    flags: Counter[str] = field(default_factory=Counter)
    parameters: dict[str, list[FloatArray]] = field(default_factory=dict)
    measures: dict[str, list[FloatArray]] = field(default_factory=dict)


def summarize_file(path: str | Path, family: FamilyName = "log-t", nu: float | None = 3.5) -> dict[str, Any]:
    """Counts, flags, quantiles of the parameters and tests of the families, ready for JSON (None for no number).

    Args:
        path: A file `fits/2`; a few numbers of each row are held, never the answers.
        family, nu: What the file's main columns are fits of.

    Returns:
        num_groups, num_samples, num_censored, num_not_converged, flags (flag -> groups), family, parameters
        (name -> quantiles) and ks: label -> num_tested, pass_rate (plain KS p > 0.05), mean_p, mean_ad, mean_aic,
        best_aic (share of groups where it has the lowest), log_likelihood_ratio (mean of ln L - ln L of the first
        family), pass_rate_boot (None without bootstrap). Groups with a flag of NOT_TESTED are left out there.
    """
    main = family_of(family, nu)
    totals = _read(path, main.label)
    families = {main.label: main} | compared_families(nu)
    found = {
        label: {name: np.concatenate(totals.measures[f"{label}_{name}"]) for name in _MEASURES}
        for label in families
        if f"{label}_log_likelihood" in totals.measures
    }
    aic = {
        label: 2.0 * families[label].num_parameters - 2.0 * columns["log_likelihood"]
        for label, columns in found.items()
    }
    best = np.min(np.stack(list(aic.values())), axis=0)
    boot = totals.measures.get("ks_p_boot")
    return {
        "num_groups": totals.num_groups,
        "num_samples": totals.num_samples,
        "num_censored": totals.num_censored,
        "num_not_converged": totals.num_not_converged,
        "flags": dict(sorted(totals.flags.items())),
        "family": main.label,
        "parameters": {name: _quantiles(np.concatenate(parts)) for name, parts in totals.parameters.items()},
        "ks": {
            label: {
                "num_tested": len(columns["ks_p"]),
                "pass_rate": _mean(columns["ks_p"] > PASS_ABOVE),
                "pass_rate_boot": _mean(np.concatenate(boot) > PASS_ABOVE)
                if boot and label == main.label
                else None,
                "mean_p": _mean(columns["ks_p"]),
                "mean_ad": _mean(columns["ad_stat"]),
                "mean_aic": _mean(aic[label]),
                "best_aic": _mean(aic[label] <= best + 1e-9),
                "log_likelihood_ratio": _mean(
                    columns["log_likelihood"] - found[main.label]["log_likelihood"]
                ),
            }
            for label, columns in found.items()
        },
    }


def _read(path: str | Path, label: str) -> _Totals:
    totals = _Totals()
    file = pq.ParquetFile(path)
    ending = tuple(f"_{name}" for name in _MEASURES)
    wanted = [
        name
        for name in file.schema_arrow.names
        if name in (*_MEASURES, "mu", "sigma", "nu", "shape", "scale", "num_samples", "num_censored", "flags")
        or name in ("converged", "ks_p_boot")
        or name.endswith(ending)
    ]
    for batch in file.iter_batches(batch_size=65_536, columns=wanted):
        _add(totals, batch, label)
    return totals


def _add(totals: _Totals, batch: pa.RecordBatch, label: str) -> None:
    totals.num_groups += batch.num_rows
    totals.num_samples += pc.sum(batch.column("num_samples")).as_py() or 0
    totals.num_censored += pc.sum(batch.column("num_censored")).as_py() or 0
    totals.num_not_converged += batch.num_rows - batch.column("converged").true_count
    flags = batch.column("flags")
    values = pc.list_flatten(flags)
    for entry in pc.value_counts(values).to_pylist():
        totals.flags[entry["values"]] += entry["counts"]
    owners = pc.list_parent_indices(flags).to_numpy()
    fitted = np.ones(batch.num_rows, dtype=bool)
    tested = np.ones(batch.num_rows, dtype=bool)
    names = values.to_numpy(zero_copy_only=False)
    fitted[owners[np.isin(names, NOT_FITTED)]] = False
    tested[owners[np.isin(names, NOT_TESTED)]] = False
    for name in batch.schema.names:
        if name in ("mu", "sigma", "nu", "shape", "scale"):
            column = batch.column(name).to_numpy(zero_copy_only=False)
            totals.parameters.setdefault(name, []).append(column[fitted])
        elif name not in ("num_samples", "num_censored", "converged", "flags"):
            key = f"{label}_{name}" if name in _MEASURES else name
            column = batch.column(name).to_numpy(zero_copy_only=False).astype(np.float64)
            totals.measures.setdefault(key, []).append(column[tested])


def families_table(summary: dict[str, Any]) -> str:
    """The families of a summary as lines of text."""
    lines = [
        f"{'family':<12} {'KS p > 0.05':>12} {'mean p':>8} {'mean AD':>8} {'best AIC':>9} {'ln L ratio':>10} {'tested':>8}"
    ]
    for name, row in summary["ks"].items():
        cells = (
            f"{_shown(row['pass_rate'], 100.0, '.1f', ' %'):>12}",
            f"{_shown(row['mean_p'], 1.0, '.3f'):>8}",
            f"{_shown(row['mean_ad'], 1.0, '.3f'):>8}",
            f"{_shown(row['best_aic'], 100.0, '.1f', ' %'):>9}",
            f"{_shown(row['log_likelihood_ratio'], 1.0, '.3f'):>10}",
            f"{row['num_tested']:>8}",
        )
        lines.append(f"{name:<12} " + " ".join(cells))
        if row["pass_rate_boot"] is not None:
            lines.append(f"{'':<12} {_shown(row['pass_rate_boot'], 100.0, '.1f', ' %'):>12} by bootstrap")
    return "\n".join(lines)


def _shown(value: float | None, scale: float, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{scale * value:{form}}{unit}"


def _mean(values: Any) -> float | None:
    return float(np.mean(values)) if len(values) else None


def _quantiles(values: FloatArray) -> dict[str, float | None] | None:
    """Quantiles of the finite values, and the share of infinite ones, as nu may be."""
    if len(values) == 0:
        return None
    finite = values[np.isfinite(values)]
    levels = {"p05": 0.05, "p50": 0.5, "p95": 0.95, "max": 1.0}
    found = {
        name: float(np.quantile(finite, level)) if len(finite) else None for name, level in levels.items()
    }
    return found | {"infinite": float(1.0 - len(finite) / len(values))}
