"""`simulate tiers`: the search for the number of tiers and the headroom."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from scheduler_core.errors import InputError
from scheduler_core.simulator.commands.simulate import main
from scheduler_core.simulator.commands.tiers import TiersConfig, compare_tiers, effectiveness
from scheduler_core.simulator.config import ClusterConfig
from scheduler_core.simulator.workloads.workload import Tiers, Workload

CLUSTER = ClusterConfig(num_replicas=2, router="llumnix", migration=True)


def config(**more: Any) -> TiersConfig:
    options: dict[str, Any] = {
        "workload": Workload(num_requests=4, tiers=Tiers()),
        "cluster": CLUSTER,
        "json": "x.json",
    } | more
    return TiersConfig(**options)


def cell(num_tiers: int, headroom: float, seed: int, cost: float, **more: Any) -> dict[str, Any]:
    """The result of a simulation with this cost per latency."""
    metrics: dict[str, Any] = {
        "cost_per_latency": cost,
        "goodput_rps": None,
        "mean_replicas": 2.0,
        "groups": {"tier": {}},
    }
    metrics |= {"ttlt_s": {"mean": 1.0, "p99": cost / 2}, "ttft_s": {"mean": 0.5}}
    settings = {"num_tiers": num_tiers, "cluster.headroom_fraction": headroom, "seed": seed}
    return {"settings": settings, "metrics": metrics | more}


def test_the_best_and_what_is_not_distinguishable_from_it() -> None:
    """Costs over three seeds: 4 tiers 10, 11, 12; 3 tiers always 0.1 more; 5 tiers 0.1 less or more, so that the interval of
    the difference contains 0. The baseline costs twice as much as 4 tiers."""
    search = config(tiers=[3, 4, 5], headroom_fractions=[0.2], num_seeds=3)
    offsets = {3: (0.1, 0.1, 0.1), 4: (0.0, 0.0, 0.0), 5: (-0.1, 0.2, 0.2)}
    results = [
        cell(num, 0.2, seed, 10.0 + seed + offsets[num][seed]) for num in search.tiers for seed in range(3)
    ]
    baseline = [cell(1, 0.2, seed, 2 * (10.0 + seed)) for seed in range(3)]
    comparison = compare_tiers(search, baseline, results)
    best = comparison["points"][comparison["best"]]
    assert (best["num_tiers"], best["gain"]) == (4, pytest.approx(2.0))
    assert [point["may_be_best"] for point in comparison["points"]] == [False, True, True]


def test_cost_effectiveness_is_goodput_per_replica_where_requests_have_targets() -> None:
    assert effectiveness(cell(1, 0.0, 0, 8.0)["metrics"]) == 1 / 8.0
    assert effectiveness(cell(1, 0.0, 0, 8.0, goodput_rps=5.0)["metrics"]) == 2.5


def test_every_combination_runs_behind_llumnix_and_the_baseline_behind_infaas() -> None:
    search = config(
        tiers=[1, 4], headroom_fractions=[0.0, 0.2], num_seeds=2, cluster=ClusterConfig(num_replicas=2)
    )
    cells = search.combinations()
    assert len(cells) == 8
    assert {(one.config.cluster.router, one.config.policy_name) for one in cells} == {("llumnix", "llumlet")}
    assert [one.config.workload.tiers.num_tiers for one in cells if one.config.workload] == [1] * 4 + [4] * 4  # type: ignore[union-attr]
    (first, second) = search.baselines()
    assert (first.config.seed, second.config.seed) == (0, 1)
    assert (first.config.cluster.router, first.config.policy_name) == ("infaas", "fcfs")
    with pytest.raises(InputError, match=r"workload\.tiers"):
        config(workload=Workload(num_requests=4))
    with pytest.raises(InputError, match="num_replicas"):
        config(cluster=ClusterConfig())


def test_the_command_prints_a_table_and_resumes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    workload = {"num_requests": 40, "arrivals": {"process": "at_once"}, "tiers": {"mix": "enterprise"}}
    lengths = {"prompt": {"low": 20, "high": 60}, "output": {"low": 5, "high": 30}}
    words = [
        "tiers",
        "--workload",
        json.dumps(workload | {"lengths": lengths}),
        "--cluster.num_replicas",
        "2",
    ]
    words += [
        "--scheduler.max_num_seqs",
        "4",
        "--tiers",
        "[1,3]",
        "--headroom_fractions",
        "[0.1]",
        "--num_seeds",
        "2",
    ]
    words += ["--cells", f"{tmp_path}/cells", "--json", f"{tmp_path}/tiers.json", "--overwrite", "true"]
    with caplog.at_level(logging.INFO):
        assert main(words) == 0
    assert "K" in caplog.text
    assert "1 / cost per latency" in caplog.text
    assert "INFaaS" in caplog.text
    content = json.loads((tmp_path / "tiers.json").read_text())
    assert [point["num_tiers"] for point in content["points"]] == [1, 3]
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "cells").iterdir()}
    assert len(times) == 6
    assert main(words) == 0
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cells").iterdir()} == times
    assert json.loads((tmp_path / "tiers.json").read_text()) == content
