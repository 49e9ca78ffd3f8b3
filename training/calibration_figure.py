"""Predicted against fitted parameters, and nominal against observed coverage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scheduler_core.files import atomic_file
from training.fitting.fits import NOT_FITTED, FittedGroups

COLOURS = {"model": "#1c2733", "constant": "#9aa5b1", "marginal": "#2a7f9e", "prompt_length": "#d97b29"}


def draw_calibration(
    fits: FittedGroups,
    mu: NDArray[np.float64],
    sigma: NDArray[np.float64],
    report: dict[str, Any],
    path: str | Path,
) -> None:
    """Draws three panels: mu, sigma, calibration.

    Args:
        fits: G groups.
        mu, sigma: Predicted parameters [G], log tokens.
        report: What `full_report` said of them.
        path: PNG to write.
    """
    import matplotlib.pyplot as plt

    compared = ~fits.has_flag(*NOT_FITTED)
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(12, 4), layout="constrained")
    for axis, name, true, predicted in (
        (left, "mu", fits.mu[compared], mu[compared]),
        (middle, "sigma", fits.sigma[compared], sigma[compared]),
    ):
        axis.scatter(true, predicted, s=8, alpha=0.4, color=COLOURS["marginal"], linewidths=0)
        ends = [
            float(np.min([*true, *predicted], initial=np.inf)),
            float(np.max([*true, *predicted], initial=0)),
        ]
        if compared.any():
            axis.plot(ends, ends, color=COLOURS["constant"], linewidth=1)
        if name == "sigma":
            for scale in (axis.set_xscale, axis.set_yscale):
                scale("log")
            for ticks in (axis.xaxis, axis.yaxis):
                ticks.set_minor_formatter("")
                ticks.set_major_formatter("{x:g}")
        axis.set_xlabel(f"{name} fitted to the answers")
        axis.set_ylabel(f"{name} predicted from the prompt")
    for name, metrics in [("model", report["model"]), *report["baselines"].items()]:
        rows = [row for row in metrics["calibration"] if row["estimate"] is not None]
        right.plot(
            [row["level"] for row in rows],
            [row["estimate"] for row in rows],
            color=COLOURS[name],
            linewidth=2 if name == "model" else 1,
            label=name.replace("_", " "),
        )
    right.plot([0, 1], [0, 1], color=COLOURS["constant"], linewidth=1, linestyle=":")
    right.set_xlabel("nominal probability")
    right.set_ylabel("share of answers below the quantile")
    right.legend(fontsize=8)
    with atomic_file(path) as temporary:
        figure.savefig(temporary, dpi=120, format="png")
    plt.close(figure)
