"""Statistics of a file of fits as a whole: counts, flags, and how well each family fits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from scheduler_core.errors import InputError
from training.fitting.estimate import FamilyName, FloatArray, compared_families, family_of
from training.fitting.fits import NOT_FITTED, NOT_TESTED

PASS_ABOVE = 0.05
PARAMETERS = ("mu", "sigma", "nu", "shape", "scale")
#: Label of a family -> its name for people.
FAMILY_NAMES = {
    "log_t": "log-t",
    "log_t_free": "log-t, free nu",
    "log_normal": "log-normal",
    "gamma": "gamma",
    "weibull": "Weibull",
    "exponential": "exponential",
}
_MEASURES = ("log_likelihood", "ks_stat", "ks_p", "ad_stat")


@dataclass(frozen=True, slots=True)
class FitNumbers:
    """The numbers of all rows of a fits file, without the samples.

    Attributes:
        path: The file.
        columns: Numeric columns by name, NaN for null, [G] each.
        flags: Flag -> number of groups.
        fitted: Whether each row is a fit, [G].
        tested: Whether each row is a fit that can be tested, [G].
    """

    path: Path
    columns: dict[str, FloatArray]
    flags: dict[str, int]
    fitted: NDArray[np.bool_]
    tested: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.fitted)

    @property
    def parameters(self) -> list[str]:
        """Names of the family's parameters."""
        return [name for name in PARAMETERS if name in self.columns]

    @property
    def p_name(self) -> str:
        """Name of the column of p-values: by bootstrap if there is one."""
        return "ks_p_boot" if "ks_p_boot" in self.columns else "ks_p"


def read_numbers(path: str | Path) -> FitNumbers:
    """The numbers of a fits file.

    Raises:
        InputError: The file is no fits file.
    """
    path = Path(path)
    with pq.ParquetFile(path) as file:
        schema = file.schema_arrow
        if "scale" not in schema.names and not {"mu", "sigma", "nu"} <= set(schema.names):
            raise InputError(
                f"{path.name}, columns", schema.names, "those of a fits file: mu, sigma, nu or scale"
            )
        # Columns of the samples, such as prompt_tokens, come before the parameters.
        first = min(schema.names.index(name) for name in PARAMETERS if name in schema.names)
        names = [
            item.name
            for item in list(schema)[first:]
            if pa.types.is_floating(item.type) or pa.types.is_integer(item.type) or item.name == "converged"
        ]
        table = file.read(columns=[*names, "flags"])
    flags = table.column("flags").combine_chunks()
    values, owners = pc.list_flatten(flags), pc.list_parent_indices(flags).to_numpy()

    def without(excluded: Sequence[str]) -> NDArray[np.bool_]:
        rows = np.ones(table.num_rows, dtype=bool)
        rows[owners[pc.is_in(values, pa.array(excluded)).to_numpy(zero_copy_only=False)]] = False
        return rows

    return FitNumbers(
        path,
        {
            name: np.asarray(table.column(name).cast(pa.float64()).to_numpy(), dtype=np.float64)
            for name in names
        },
        dict(sorted(Counter(values.to_pylist()).items())),
        without(NOT_FITTED),
        without(NOT_TESTED),
    )


def summarize_file(path: str | Path, family: FamilyName = "log-t", nu: float | None = 3.5) -> dict[str, Any]:
    """Counts, flags, quantiles of the parameters and tests of the families, ready for JSON (None for no number).

    Args:
        path: A file `fits/2`.
        family, nu: What the file's main columns are fits of.

    Returns:
        num_groups, num_samples, num_censored, num_not_converged, flags (flag -> groups), family, parameters
        (name -> quantiles) and ks: label -> num_tested, pass_rate (plain KS p > 0.05), mean_p, mean_ad, mean_aic,
        best_aic (fraction of groups where it has the lowest), log_likelihood_ratio (mean of ln L - ln L of the first
        family), pass_rate_boot (None without bootstrap). Groups with a flag of NOT_TESTED are left out there.
    """
    numbers = read_numbers(path)
    columns = numbers.columns
    main = family_of(family, nu)
    families = {main.label: main} | compared_families(nu)
    measures = {
        label: {name: columns[prefix + name][numbers.tested] for name in _MEASURES}
        for label in families
        for prefix in ["" if label == main.label else f"{label}_"]
        if f"{prefix}log_likelihood" in columns
    }
    aic = {
        label: 2.0 * families[label].num_parameters - 2.0 * values["log_likelihood"]
        for label, values in measures.items()
    }
    best = np.min(np.stack(list(aic.values())), axis=0)
    boot = columns["ks_p_boot"][numbers.tested] > PASS_ABOVE if "ks_p_boot" in columns else None
    return {
        "num_groups": len(numbers),
        "num_samples": int(columns["num_samples"].sum()),
        "num_censored": int(columns["num_censored"].sum()),
        "num_not_converged": int((columns["converged"] == 0).sum()),
        "flags": numbers.flags,
        "family": main.label,
        "parameters": {name: _quantiles(columns[name][numbers.fitted]) for name in numbers.parameters},
        "ks": {
            label: {
                "num_tested": len(values["ks_p"]),
                "pass_rate": _mean(values["ks_p"] > PASS_ABOVE),
                "pass_rate_boot": _mean(boot) if boot is not None and label == main.label else None,
                "mean_p": _mean(values["ks_p"]),
                "mean_ad": _mean(values["ad_stat"]),
                "mean_aic": _mean(aic[label]),
                "best_aic": _mean(aic[label] <= best + 1e-9),
                "log_likelihood_ratio": _mean(
                    values["log_likelihood"] - measures[main.label]["log_likelihood"]
                ),
            }
            for label, values in measures.items()
        },
    }


def families_table(summary: dict[str, Any]) -> str:
    """The families of a summary as lines of text."""
    lines = [
        f"{'family':<12} {'KS p > 0.05':>12} {'mean p':>8} {'mean AD':>8} {'best AIC':>9} {'ln L ratio':>10} {'tested':>8}"
    ]
    for name, row in summary["ks"].items():
        lines.append(
            f"{name:<12} {percent(row['pass_rate']):>12} {fixed(row['mean_p']):>8} {fixed(row['mean_ad']):>8} "
            f"{percent(row['best_aic']):>9} {fixed(row['log_likelihood_ratio']):>10} {row['num_tested']:>8}"
        )
        if row["pass_rate_boot"] is not None:
            lines.append(f"{'':<12} {percent(row['pass_rate_boot']):>12} by bootstrap")
    return "\n".join(lines)


def percent(value: float | None) -> str:
    """A fraction in percent, a dash for None."""
    return "-" if value is None else f"{100 * value:.1f} %"


def fixed(value: float | None, digits: int = 3) -> str:
    """A number with so many digits after the point, a dash for None."""
    # + 0.0 turns a rounded -0 into 0.
    return "-" if value is None else f"{round(value, digits) + 0.0:.{digits}f}"


def _mean(values: Any) -> float | None:
    return float(np.mean(values)) if len(values) else None


def _quantiles(values: FloatArray) -> dict[str, float | None] | None:
    """Quantiles of the finite values, and the fraction of infinite ones, which nu may have."""
    if len(values) == 0:
        return None
    finite = values[np.isfinite(values)]
    levels = {"p05": 0.05, "p50": 0.5, "p95": 0.95, "max": 1.0}
    quantiles = {
        name: float(np.quantile(finite, level)) if len(finite) else None for name, level in levels.items()
    }
    return quantiles | {"infinite": float(1.0 - len(finite) / len(values))}
