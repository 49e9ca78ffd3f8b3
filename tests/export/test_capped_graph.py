from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from export.capped_graph import export_capped_graph
from export.exporter import ExportConfig, export_onnx
from export.parity import measure_capped
from predictors.artifact import CappedLengths, open_artifact
from predictors.runtime import open_runtime
from scheduler_core.errors import InputError, TailcastError
from scheduler_core.lengths import LogT

LEVELS = (0.05, 0.5, 0.9, 0.99)


def session_of(folder: Path, nu: float | None, cvar_level: float = 0.9) -> ort.InferenceSession:
    capped = CappedLengths(cvar_level=cvar_level, quantile_levels=LEVELS, has_nu=nu is None)
    export_capped_graph(capped, nu, folder / "length.onnx")
    return ort.InferenceSession(str(folder / "length.onnx"), providers=["CPUExecutionProvider"])


def compare(
    session: ort.InferenceSession, nu: NDArray[np.float32], given: bool, cvar_level: float, **feed: Any
) -> None:
    """Asserts 1e-5 against scheduler_core, with the single-precision parameters that the graph got."""
    found = session.run(None, feed | ({"nu": nu} if given else {}))
    mu, sigma, cap = (feed[name].astype(np.float64) for name in ("mu", "sigma", "max_tokens"))
    lengths = LogT(mu, sigma, nu.astype(np.float64))
    expected, cvar = lengths.expected_and_cvar(cvar_level, cap)
    logs = np.stack([lengths.logppf(level) for level in LEVELS], axis=1)
    np.testing.assert_allclose(found[0], expected, rtol=1e-5)
    np.testing.assert_allclose(found[1], cvar, rtol=1e-5)
    np.testing.assert_allclose(found[2], np.exp(np.minimum(logs, np.log(cap)[:, None])), rtol=1e-5)


@pytest.mark.parametrize("cvar_level", [0.3, 0.9, 0.999])
@pytest.mark.parametrize("nu", [0.7, 3.5, 300.0, None])
def test_numbers_are_those_of_scheduler_core(tmp_path: Path, nu: float | None, cvar_level: float) -> None:
    rng = np.random.default_rng(0)
    size = 250
    nus = np.exp(rng.uniform(0, np.log(100), size)) if nu is None else np.full(size, nu)
    compare(
        session_of(tmp_path, nu, cvar_level),
        nus.astype(np.float32) if nu is None else nus,
        nu is None,
        cvar_level,
        mu=rng.uniform(0, 10, size).astype(np.float32),
        sigma=np.exp(rng.uniform(np.log(1e-3), np.log(3), size)).astype(np.float32),
        max_tokens=np.exp(rng.uniform(0, np.log(131072), size)).astype(np.int64),
    )


@pytest.mark.parametrize("nu", [3.5, None])
def test_corners(tmp_path: Path, nu: float | None) -> None:
    grid = np.array(np.meshgrid([0, 5, 10], [1e-6, 1e-3, 1, 3], [1, 148, 131072], [1, 3.5, 100])).reshape(
        4, -1
    )
    nus = grid[3].astype(np.float32) if nu is None else np.full(grid.shape[1], nu)
    compare(
        session_of(tmp_path, nu),
        nus,
        nu is None,
        0.9,
        mu=grid[0].astype(np.float32),
        sigma=grid[1].astype(np.float32),
        max_tokens=grid[2].astype(np.int64),
    )


def test_no_room_for_tokens_is_no_number(tmp_path: Path) -> None:
    feed = {
        "mu": np.array([5, 5, 5], np.float32),
        "sigma": np.array([1, 1, 1], np.float32),
        "max_tokens": np.array([0, 100, -3]),
    }
    for values in session_of(tmp_path, 3.5).run(None, feed):
        np.testing.assert_array_equal(np.isnan(values).reshape(3, -1).all(axis=1), [True, False, True])


@pytest.mark.parametrize("kind", ["plain", "bert"])
def test_artifact_brings_the_second_graph(checkpoints: dict[str, Path], tmp_path: Path, kind: str) -> None:
    options: dict[str, Any] = {
        "checkpoint": str(checkpoints[kind]),
        "out": str(tmp_path / "a"),
        "legacy_exporter": True,
    }
    export_onnx(ExportConfig(**options, cvar_level=0.8, quantile_levels=(0.25, 0.75)))
    runtime = open_runtime(tmp_path / "a")
    capped = runtime.artifact.manifest.capped
    assert capped == CappedLengths(cvar_level=0.8, quantile_levels=(0.25, 0.75), has_nu=kind == "bert")
    session = ort.InferenceSession(
        str(runtime.artifact.capped_model_path), providers=["CPUExecutionProvider"]
    )
    for found, specs in ((session.get_inputs(), capped.inputs), (session.get_outputs(), capped.outputs)):
        assert [(entry.name, entry.shape) for entry in found] == [
            (spec.name, list(spec.shape)) for spec in specs
        ]
    predicted = runtime.predict(["name 3 rivers", "a long story"], ["tiny-llm"] * 2)
    feed = {
        name: np.asarray(getattr(predicted, name), np.float32)
        for name in ("mu", "sigma", *(["nu"] if capped.has_nu else []))
    }
    expected, cvar, quantiles = session.run(None, feed | {"max_tokens": np.array([300, 300])})
    lengths = LogT(predicted.mu, predicted.sigma, predicted.nu)
    np.testing.assert_allclose(expected, lengths.expected(300), rtol=1e-4)
    np.testing.assert_allclose(cvar, lengths.cvar(0.8, 300), rtol=1e-4)
    np.testing.assert_allclose(quantiles[:, 1], np.minimum(lengths.ppf(0.75), 300), rtol=1e-4)
    without = export_onnx(ExportConfig(**options, capped=False, overwrite=True))
    assert without.capped is None
    assert "length.onnx" not in without.files


def test_graph_with_other_numbers_is_caught(tmp_path: Path, checkpoints: dict[str, Path]) -> None:
    options = {"checkpoint": str(checkpoints["plain"]), "out": str(tmp_path / "a"), "legacy_exporter": True}
    export_onnx(ExportConfig(**options))
    artifact = open_artifact(tmp_path / "a")
    assert artifact.manifest.capped is not None
    export_capped_graph(artifact.manifest.capped, 4.0, artifact.capped_model_path)
    with pytest.raises(
        TailcastError, match="capped length's graph and scheduler_core: expected_tokens differs"
    ):
        measure_capped(artifact, rng=np.random.default_rng(0))


@pytest.mark.parametrize(
    ("field", "value"),
    [("cvar_level", 1.0), ("cvar_level", 0.0), ("quantile_levels", ()), ("quantile_levels", (0.9, 0.5))],
)
def test_bad_level_is_named(field: str, value: object) -> None:
    with pytest.raises(InputError, match=field):
        ExportConfig(checkpoint="a", out="b", **{field: value})  # type: ignore[arg-type]
