"""Figures of the simulator's report: every curve can be told from the others, every axis says its scale."""

from __future__ import annotations

import re

import numpy as np
import pytest

from scheduler_core.report.plotting import MAX_NAMED_CURVES
from scheduler_core.simulator.figures import distribution_functions


def _drawn(num_curves: int, low: float = 0.1, high: float = 1.0) -> str:
    shares = np.linspace(0, 1, 50)
    values = np.geomspace(low, high, 50)
    return distribution_functions(
        {"TBT": {f"group {number}": (values * (1 + number), shares) for number in range(num_curves)}}
    )


def test_up_to_a_limit_every_curve_has_a_look_and_a_name_of_its_own() -> None:
    drawn = _drawn(MAX_NAMED_CURVES)
    looks = set(re.findall(r"<path d=[^>]*clip-path=[^>]*style=\"(fill: none; stroke[^\"]*)\"", drawn))
    looks = {look for look in looks if "1.4" in look}
    assert len(looks) == MAX_NAMED_CURVES
    for number in range(MAX_NAMED_CURVES):
        assert f">group {number}<" in drawn
    assert ">group 0<" not in _drawn(MAX_NAMED_CURVES + 1)
    assert ">group 0<" not in _drawn(1)


@pytest.mark.parametrize(
    ("low", "high"), [(0.021, 0.024), (0.02, 0.045), (0.1, 3.0), (1e-3, 100.0), (0.9, 1.1)]
)
def test_an_axis_has_marks_whatever_its_range(low: float, high: float) -> None:
    drawn = _drawn(1, low, high)
    axis = drawn[drawn.index('id="matplotlib.axis_1"') : drawn.index('id="matplotlib.axis_2"')]
    marks = [float(text) for text in re.findall(r">([0-9.e+-]+)</text>", axis)]
    assert 3 <= len(marks) <= 9
    assert marks == sorted(marks)
    assert all(0.9 * low <= mark <= 1.2 * high for mark in marks)
