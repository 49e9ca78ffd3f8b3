"""Helpers for figures: creation, colors, axes, and output as SVG text or PNG files."""

import io
import re
from pathlib import Path
from typing import Any

from scheduler_core.errors import MissingExtraError
from scheduler_core.shell.files import atomic_file

#: The color-blind safe palette of Okabe and Ito.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
DASHES = ("-", "--", ":")
INK, GRAY = "#1c2733", "#9aa5b1"
#: Number of distinct combinations of color and dash; a figure with more curves has no legend.
MAX_NAMED_CURVES = len(COLORS) * len(DASHES)
_DPI = 130
#: Maximum number of ticks of a logarithmic axis, so that their labels do not overlap.
_MAX_TICKS = 6


def new_figure(
    width: float, height: float, *, rows: int = 1, columns: int = 1, **subplots: Any
) -> tuple[Any, list[Any]]:
    """A figure without pyplot's global state, and its axes in reading order; width and height in inches."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError as error:
        raise MissingExtraError("matplotlib", "sim") from error
    figure = Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(wspace=0.06))
    axes = list(figure.subplots(rows, columns, squeeze=False, **subplots).flat)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25, linewidth=0.6)
        axis.set_axisbelow(True)
    return figure, axes


def svg(figure: Any, legend_of: Any = None) -> str:
    """A figure as reproducible SVG text. It gets a legend outside the panels if the axis `legend_of` has from
    2 to `MAX_NAMED_CURVES` curves."""
    import matplotlib

    handles, labels = ([], []) if legend_of is None else legend_of.get_legend_handles_labels()
    if 1 < len(labels) <= MAX_NAMED_CURVES:
        figure.legend(handles, labels, frameon=False, fontsize=8, loc="outside right upper")

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "tailcast"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = re.sub("<metadata>.*?</metadata>", "", buffer.getvalue(), flags=re.DOTALL)
    return text[text.index("<svg") :]


def write_png(figure: Any, path: str | Path) -> None:
    """Writes a figure as a PNG file, atomically."""
    with atomic_file(path) as temporary:
        figure.savefig(temporary, dpi=_DPI, format="png", metadata={"Software": None})


def color(index: int) -> str:
    """Color of the curve with this index."""
    return COLORS[index % len(COLORS)]


def dash(index: int) -> str:
    """Line style of the curve with this index; it changes when the colors repeat."""
    return DASHES[index // len(COLORS) % len(DASHES)]


def mark_decades(axis: Any, limits: tuple[float, float]) -> None:
    """Sets ticks with plain numbers at 1, 2 and 5 of each decade of a logarithmic axis (`axes.xaxis` or
    `axes.yaxis`); only at 1 if the limits span more than a factor of 150."""
    from matplotlib.ticker import LogLocator

    low, high = limits
    ticks = LogLocator(subs=(1, 2, 5) if high / low <= 150 else (1,)).tick_values(low, high)
    inside = [tick for tick in ticks if low <= tick <= high]
    axis.set_ticks(inside[:: -(-len(inside) // _MAX_TICKS) or 1])
    axis.set_ticks([], minor=True)
    axis.set_major_formatter(lambda value, _: f"{value:g}")
