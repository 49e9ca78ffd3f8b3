from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from export.exporter import ExportConfig, export_onnx
from export.parity import MAX_BATCH, PATTERNS, TOLERANCES, Shape, measure_padding, measure_parity, shapes
from predictors.modules import load_checkpoint
from predictors.runtime import open_runtime
from scheduler_core.errors import InputError, TailcastError
from tests.predictors.tiny_encoders import ENCODERS


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize(("batch", "seq"), [(1, 1), (1, 9), (5, 1), (64, 33)])
def test_patterns_fill_rows_as_they_say(pattern: str, batch: int, seq: int) -> None:
    lengths = Shape(batch, seq, pattern).lengths(np.random.default_rng(0))
    assert lengths.shape == (batch,)
    assert lengths.min() >= 1
    assert lengths.max() <= seq
    if (batch, seq) == (64, 33):
        facts = {
            "full": (lengths == 33).all(),
            "one long": sorted(lengths)[-2:] == [1, 33],
            "one short": sorted(lengths)[:2] == [1, 33],
            "all short": lengths.max() < 33,
            "steps": (np.diff(lengths) >= 0).all() and lengths[0] == 1 and lengths[-1] == 33,
            "alternating": (lengths[::2] == 33).all() and (lengths[1::2] == 1).all(),
            "random": len(set(lengths)) > 10,
        }
        assert facts[pattern]


def test_shapes_reach_the_edges_within_the_bound() -> None:
    found = list(shapes(512, max_tokens=64 * 512, num_random=200, rng=np.random.default_rng(0)))
    sizes = {(shape.batch, shape.seq) for shape in found}
    assert sizes >= {(1, 1), (1, 512), (64, 1), (64, 512), (2, 1)}
    assert {shape.pattern for shape in found} == set(PATTERNS)
    assert len({batch for batch, _ in sizes}) > 30
    assert len({seq for _, seq in sizes}) > 60
    assert max(batch for batch, _ in sizes) == MAX_BATCH
    assert max(seq for _, seq in sizes) == 512
    small = list(shapes(512, max_tokens=64, num_random=50, rng=np.random.default_rng(0)))
    assert all(shape.batch * shape.seq <= 64 or shape == Shape(1, 512, shape.pattern) for shape in small[7:])
    again = list(shapes(512, max_tokens=64, num_random=50, rng=np.random.default_rng(0)))
    assert small == again


@pytest.fixture(scope="module")
def artifacts(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("parity")
    for kind in ENCODERS:
        config = ExportConfig(
            checkpoint=str(checkpoints[kind]),
            out=str(root / kind),
            legacy_exporter=True,
            parity_tokens=64,
            parity_shapes=0,
        )
        export_onnx(config)
    return {kind: root / kind for kind in ENCODERS}


@pytest.mark.parametrize("kind", ENCODERS)
def test_every_shape_gives_torchs_numbers_and_padding_changes_none(
    artifacts: dict[str, Path], checkpoints: dict[str, Path], kind: str
) -> None:
    model = load_checkpoint(checkpoints[kind]).model
    runtime = open_runtime(artifacts[kind])
    rng = np.random.default_rng(7)
    parity = measure_parity(model, runtime, tolerance=2e-5, rng=rng, max_tokens=64 * 48, num_random=12)
    assert "64x48" in {shape.split()[0] for shape in parity.max_abs_diff}
    assert len(parity.max_abs_diff) > 20
    assert (
        measure_parity(model, runtime, rng=rng, max_tokens=64, num_random=0).tolerance == TOLERANCES["fp32"]
    )
    padding = measure_padding(model, runtime, rng=rng)
    assert set(padding) == {tensor.name for tensor in runtime.artifact.manifest.outputs}
    assert max(padding.values()) <= 2e-5


def test_numbers_that_depend_on_batch_mates_are_caught(
    artifacts: dict[str, Path], checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_checkpoint(checkpoints["bert"]).model
    runtime = open_runtime(artifacts["bert"])
    run = runtime._session.run

    def leaking(names: list[str], feed: dict[str, np.ndarray]) -> list[np.ndarray]:
        found = run(names, feed)
        return [values + 0.001 * feed["input_ids"].shape[1] for values in found]

    class Session:
        run = staticmethod(leaking)

    monkeypatch.setattr(runtime, "_session", Session())
    assert min(measure_padding(model, runtime, rng=np.random.default_rng(0)).values()) > 1e-3
    with pytest.raises(TailcastError, match="differs by"):
        measure_parity(model, runtime, tolerance=1e-4, rng=np.random.default_rng(0))


def test_columns_fewer_than_tokens_are_refused(artifacts: dict[str, Path]) -> None:
    runtime = open_runtime(artifacts["bert"])
    prompts = [np.ones(5, dtype=np.int64), np.ones(2, dtype=np.int64)]
    with pytest.raises(InputError, match="seq: got 4; allowed: at least the 5 tokens"):
        runtime.run(prompts, seq=4)
    np.testing.assert_allclose(runtime.run(prompts, seq=40).mu, runtime.run(prompts).mu, atol=1e-5)
