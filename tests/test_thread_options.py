"""Numbers of threads that the model libraries could not start are refused where they are given."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from data_gen.transformers_backend import TransformersOptions
from export.variants.config import VariantsConfig
from predictors.cli import ServeConfig
from scheduler_core.errors import InputError
from training.calibrating.config import CalibrateConfig
from training.evaluating.config import EvaluateConfig


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (TransformersOptions, "threads"),
        (partial(VariantsConfig, artifact="a", data="d", out="o"), "threads"),
        (partial(CalibrateConfig, predictor="p", data="d", out="o"), "threads"),
        (partial(EvaluateConfig, predictor="p", data="d", json="j"), "threads"),
        (partial(ServeConfig, artifact="a"), "threads_per_worker"),
        (partial(ServeConfig, artifact="a"), "num_workers"),
    ],
)
@pytest.mark.parametrize("value", [0, 1025, 2**31])
def test_number_of_threads_is_bounded(config: Callable[..., Any], field: str, value: int) -> None:
    with pytest.raises(InputError, match=rf"^{field}: got {value}; allowed: integers from 1 to 1024"):
        config(**{field: value})
