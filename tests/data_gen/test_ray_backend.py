"""Sampling on a local Ray cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from data_gen.backend import WorkResult
from data_gen.cli_gen_samples import main
from data_gen.ray_backend import RayBackend
from data_gen.samples import read_samples
from tests.properties import RAY_WARNINGS

pytestmark = RAY_WARNINGS
ARGUMENTS = ["templates:30", "--backend", "synthetic", "--num-samples", "8", "--progress", "false", "--out"]


def test_an_address_without_a_cluster_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ARGUMENTS, str(tmp_path / "s.parquet"), "--ray", "127.0.0.1:1"]) == 2
    assert "the address of a running Ray cluster" in capsys.readouterr().err


@pytest.fixture(scope="module")
def cluster() -> Any:
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield ray
    ray.shutdown()


@pytest.mark.slow
def test_workers_draw_what_one_process_draws(cluster: Any, tmp_path: Path) -> None:
    alone, together = tmp_path / "a.parquet", tmp_path / "b.parquet"
    assert main([*ARGUMENTS, str(alone)]) == 0
    assert main([*ARGUMENTS, str(together), "--ray", "auto", "--ray-workers", "2"]) == 0
    assert read_samples(together).equals(read_samples(alone))
    assert cluster.is_initialized(), "a cluster that is there stays"
    assert main([*ARGUMENTS, str(tmp_path / "c.parquet"), "--ray", "auto", "--ray-workers", "3"]) == 2


@pytest.mark.slow
def test_a_lost_worker_costs_no_sample(cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other worker goes on, and what the lost one was drawing is requested again."""
    alone, out = tmp_path / "a.parquet", tmp_path / "b.parquet"
    assert main([*ARGUMENTS, str(alone)]) == 0
    sample = RayBackend.sample
    lost: list[WorkResult] = []

    def losing(self: RayBackend, *arguments: Any) -> Any:
        for result in sample(self, *arguments):
            if not lost:
                cluster.kill(self._workers[0])
                lost.append(result)
            yield result

    monkeypatch.setattr(RayBackend, "sample", losing)
    pace = ["--synthetic.samples-per-s", "60"]
    assert main([*ARGUMENTS, str(out), "--ray", "auto", "--ray-workers", "2", *pace]) == 0
    assert lost
    assert read_samples(out).equals(read_samples(alone))
