"""Histograms of some prompts' answer lengths with the fitted densities."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from scheduler_core.files import atomic_file
from scheduler_core.lengths import LogT
from training.fitting.alternatives import fit_alternatives
from training.fitting.fits import Censoring, FittedGroups, seen_as_finished
from training.fitting.summary import NOT_TESTED

PANELS = 6
COLOURS = {
    "log_t": "#1c2733",
    "log_normal": "#2a7f9e",
    "gamma": "#d97b29",
    "weibull": "#7a9e2a",
    "exponential": "#9aa5b1",
}


def draw_fits(fits: FittedGroups, censoring: Censoring, path: str | Path) -> None:
    """Draws up to six prompts, from the shortest to the longest typical answer, with all families' densities.

    Answers that were cut stand in another colour at the length they were cut at. Draws an empty page if no group can
    be shown, which is when each is constant or cut throughout.
    """
    import matplotlib.pyplot as plt

    shown = _choose(fits)
    figure, axes = plt.subplots(2, 3, figsize=(12, 6.4), layout="constrained", squeeze=False)
    for axis in axes.flat[len(shown) :]:
        axis.set_visible(False)
    for axis, number in zip(axes.flat, shown, strict=False):
        _panel(axis, fits, number, censoring)
    if shown:
        axes.flat[0].legend(fontsize=7)
    with atomic_file(path) as temporary:
        figure.savefig(temporary, dpi=120, format="png")
    plt.close(figure)


def _choose(fits: FittedGroups) -> list[int]:
    several = np.array([len(np.unique(lengths)) > 1 for lengths in fits.groups.lengths], dtype=bool)
    usable = np.flatnonzero(several & ~fits.has_flag(*NOT_TESTED))
    by_mu = usable[np.argsort(fits.mu[usable], kind="stable")]
    if len(by_mu) <= PANELS:
        return [int(number) for number in by_mu]
    ranks = np.linspace(0.05, 0.95, PANELS) * (len(by_mu) - 1)
    return [int(by_mu[int(rank)]) for rank in ranks]


def _panel(axis: object, fits: FittedGroups, number: int, censoring: Censoring) -> None:
    groups = fits.groups
    lengths = groups.lengths[number].astype(np.float64)
    finished = groups.finished[number]
    top = float(lengths.max())
    bins = np.linspace(0, top * 1.02, 16)
    axis.hist(  # type: ignore[attr-defined]
        [lengths[finished], lengths[~finished]],
        bins=bins,
        weights=[
            np.full(count, 1 / (len(lengths) * bins[1])) for count in (finished.sum(), (~finished).sum())
        ],
        stacked=True,
        color=["#2a7f9e55", "#d97b2955"],
        label=["finished", "cut"],
    )
    at = np.linspace(max(top / 400, 0.5), top * 1.3, 500)
    log_t = LogT(fits.mu[number], fits.sigma[number], fits.nu)
    densities = {"log_t": log_t.pdf(at)} | {
        name: _slope(at, fit.cdf(at))
        for name, fit in fit_alternatives(lengths, seen_as_finished(finished, censoring)).items()
    }
    for name, density in densities.items():
        width = 2.0 if name == "log_t" else 1.0
        axis.plot(at, density, color=COLOURS[name], linewidth=width, label=name.replace("_", "-"))  # type: ignore[attr-defined]
    tallest = max(patch.get_height() + patch.get_y() for patch in axis.patches)  # type: ignore[attr-defined]
    axis.set_ylim(0, 1.8 * tallest)  # type: ignore[attr-defined]
    axis.set_title(_title(fits, number), fontsize=8)  # type: ignore[attr-defined]
    axis.set_xlabel("answer tokens", fontsize=8)  # type: ignore[attr-defined]
    axis.tick_params(labelsize=7)  # type: ignore[attr-defined]


def _slope(at: NDArray[np.float64], cdf: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(np.gradient(cdf, at), dtype=np.float64)


def _title(fits: FittedGroups, number: int) -> str:
    prompts = fits.groups.column("prompt")
    text = " ".join((prompts[number] if prompts else fits.groups.name(number)).split())
    # A dollar sign would start a formula.
    short = (text if len(text) <= 46 else text[:45] + "…").replace("$", r"\$")
    return f"{short}\nmu {fits.mu[number]:.2f}, sigma {fits.sigma[number]:.2f}, KS p {fits.ks_p[number]:.2f}"
