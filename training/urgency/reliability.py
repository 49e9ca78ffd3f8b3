"""Whether predicted probabilities mean what they say: reliability diagram and expected calibration error.

Source: Guo et al. 2017, "On calibration of modern neural networks" (ECE with equal bins).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scheduler_core.errors import InputError
from scheduler_core.files import atomic_file
from training.urgency.metrics import LAST_CRITICAL


@dataclass(frozen=True, slots=True)
class Bin:
    """Predictions whose probability is between `low` and `high` (included at 1).

    Attributes:
        low: Lower edge.
        high: Upper edge.
        count: Predictions in the bin.
        mean_probability: What they say; None without any.
        frequency: What happened; None without any.
    """

    low: float
    high: float
    count: int
    mean_probability: float | None
    frequency: float | None


@dataclass(frozen=True, slots=True)
class Reliability:
    """Bins and the expected calibration error: mean |frequency - probability|, weighted by count."""

    bins: tuple[Bin, ...]
    ece: float

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


def reliability(
    probabilities: NDArray[np.float64], happened: NDArray[np.bool_], num_bins: int = 10
) -> Reliability:
    """Bins N predicted probabilities of events [N] that happened or not [N] into equal widths.

    Raises:
        InputError: No predictions, or a probability outside [0, 1].
    """
    if len(probabilities) == 0 or len(probabilities) != len(happened):
        raise InputError("predictions", len(probabilities), "one or more, as many as outcomes")
    if not np.all((probabilities >= 0) & (probabilities <= 1 + 1e-6)):
        raise InputError("probabilities", float(np.max(probabilities)), "numbers from 0 to 1")
    edges = np.linspace(0.0, 1.0, num_bins + 1)
    numbers = np.minimum((probabilities * num_bins).astype(np.int64), num_bins - 1)
    bins, error = [], 0.0
    for number in range(num_bins):
        inside = numbers == number
        count = int(inside.sum())
        said = float(probabilities[inside].mean()) if count else None
        seen = float(happened[inside].mean()) if count else None
        if said is not None and seen is not None:
            error += count * abs(seen - said) / len(probabilities)
        bins.append(Bin(float(edges[number]), float(edges[number + 1]), count, said, seen))
    return Reliability(tuple(bins), error)


def top_level(probabilities: NDArray[np.float64], true: NDArray[np.int64]) -> Reliability:
    """Of the highest probability [N, K]: how often that level is the true one [N]."""
    return reliability(probabilities.max(axis=1), probabilities.argmax(axis=1) == true)


def critical_level(probabilities: NDArray[np.float64], true: NDArray[np.int64]) -> Reliability:
    """Of P(level <= 1) out of [N, K]: how often the true level [N] is 0 or 1."""
    return reliability(probabilities[:, : LAST_CRITICAL + 1].sum(axis=1), true <= LAST_CRITICAL)


def write_reliability_figure(path: str | Path, diagrams: dict[str, Reliability]) -> None:
    """Writes a PNG with one panel for each diagram: frequency against probability, counts as bars."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6 * len(diagrams), 4.4), layout="constrained")
    for number, (title, found) in enumerate(diagrams.items(), start=1):
        axes = figure.add_subplot(1, len(diagrams), number)
        filled = [entry for entry in found.bins if entry.count]
        most = max(entry.count for entry in filled)
        centres = [(entry.low + entry.high) / 2 for entry in filled]
        shares = [0.3 * entry.count / most for entry in filled]
        axes.bar(centres, shares, width=0.9 / len(found.bins), color="0.88", label="share of texts (scaled)")
        axes.plot([0, 1], [0, 1], color="0.5", linewidth=1, linestyle="--", label="ideal")
        said = np.array([entry.mean_probability for entry in filled], dtype=np.float64)
        seen = np.array([entry.frequency for entry in filled], dtype=np.float64)
        axes.plot(said, seen, color="tab:blue", marker="o", label="predictor")
        axes.set(xlim=(0, 1), ylim=(0, 1.02), xlabel="predicted probability", ylabel="observed frequency")
        axes.set_title(f"{title}, ECE {found.ece:.3f}", fontsize=10)
        if number == 1:
            figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    with atomic_file(path) as temporary:
        figure.savefig(temporary, format="png", dpi=130)
