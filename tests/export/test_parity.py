"""Shapes and padding patterns of the comparison with torch, and what it catches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from export.parity import measure_padding, measure_parity
from predictors.modules.checkpoint import load_checkpoint
from predictors.runtime import open_runtime
from scheduler_core.errors import TailcastError
from tests.predictors.tiny_encoders import ENCODERS


@pytest.mark.parametrize("kind", ENCODERS)
def test_every_shape_gives_torchs_numbers_and_padding_changes_none(
    artifacts: dict[str, Path], checkpoints: dict[str, Path], kind: str
) -> None:
    parity = measure_parity(
        load_checkpoint(checkpoints[kind]).model,
        open_runtime(artifacts[f"{kind}-legacy"]),
        tolerance=2e-5,
        rng=np.random.default_rng(7),
        max_tokens=64 * 48,
        num_random=12,
    )
    assert "64x48" in {shape.split()[0] for shape in parity["max_abs_diff"]}
    assert len(parity["max_abs_diff"]) > 20
    assert parity["padding"] <= 2e-5


def test_numbers_that_depend_on_batch_mates_or_are_none_are_caught(
    artifacts: dict[str, Path], checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_checkpoint(checkpoints["bert"]).model
    runtime = open_runtime(artifacts["bert"])
    run = runtime._session.run

    class Session:
        @staticmethod
        def run(names: list[str], feed: dict[str, np.ndarray]) -> list[np.ndarray]:
            return [values + 0.001 * feed["input_ids"].shape[1] for values in run(names, feed)]

    rng = np.random.default_rng(0)
    limits = {"tolerance": 1e-4, "rng": rng, "max_tokens": 64, "num_random": 0}
    broken = load_checkpoint(checkpoints["bert"]).model
    with torch.no_grad():
        broken.heads["length"].mu.rest[-1].bias.fill_(float("nan"))
    with pytest.raises(TailcastError, match="mu differs by nan"):
        measure_parity(broken, runtime, **limits)
    monkeypatch.setattr(runtime, "_session", Session())
    assert min(measure_padding(model, runtime, rng=rng).values()) > 1e-3
    with pytest.raises(TailcastError, match="differs by"):
        measure_parity(model, runtime, **limits)
