"""`tailcast.simulate`: options as a user writes them, and its result as table and plot."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tailcast
from scheduler_core.errors import InputError
from scheduler_core.scheduler import SchedulerConfig
from scheduler_core.simulator.trace import Trace
from tests.scheduler_core.helpers import random_trace


def test_simulate_takes_options_as_a_user_writes_them() -> None:
    trace = random_trace(60, rate_rps=20)
    for options in (
        {"scheduler": SchedulerConfig(max_num_seqs=8)},
        {"scheduler": {"max_num_seqs": 8}},
        {"max_num_seqs": np.int64(8)},
        {"max_num_seqs": 8, "scheduler": {"batching": "chunked_prefill"}, "num_replicas": 1},
    ):
        result = tailcast.simulate(trace, "fcfs", **options)
        assert result.config["scheduler"]["max_num_seqs"] == 8
    tie = tailcast.simulate(trace, "tie", policy_parameters={"gamma": 0.8}, predictor="oracle")
    assert tie.config["policy_parameters"] == {"gamma": 0.8}
    slow = tailcast.simulate(trace, "fcfs", base_s=0.5, repeat=2, cluster={"num_replicas": 2})
    assert (slow.config["step_time"]["base_s"], slow.config["cluster"]["num_replicas"]) == (0.5, 2)
    assert slow.metrics["num_finished"] == 120


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"max_num_seq": 8}, "option: got 'max_num_seq'; .*Did you mean max_num_seqs?"),
        ({"scheduler": {"max_num_sequences": 8}}, "option scheduler.max_num_sequences: .*Did you mean max_num_seqs"),
        ({"cluster": {"routr": "jsq"}}, "option cluster.routr: .*Did you mean router"),
        ({"scheduler": 8}, "scheduler: got 8; allowed: a mapping of options, or a SchedulerConfig"),
        ({"scheduler": {"max_num_seqs": "8"}}, "scheduler.max_num_seqs: got '8'; allowed: int"),
        ({"scheduler": {"max_num_seqs": 8}, "max_num_seqs": 9}, "max_num_seqs: got 9; .*also in scheduler"),
        ({"max_num_seqs": 0}, "max_num_seqs: got 0; allowed: integers >= 1"),
        ({"policy_parameters": 3}, "policy_parameters: got 3; allowed: names with values"),
        ({"seed": 1.5}, "seed: got 1.5; allowed: int"),
        ({"polcy_parameters": {}}, "Did you mean policy_parameters"),
    ],
)  # fmt: skip
def test_wrong_options_of_simulate_are_named(options: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        tailcast.simulate(random_trace(5), "fcfs", **options)


def test_a_result_has_a_table_and_a_plot(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    rows = [replace(row, tier=index % 2) for index, row in enumerate(random_trace(40, rate_rps=500).requests)]
    result = tailcast.simulate(Trace(tuple(rows)), "fcfs")
    lines = result.table().splitlines()
    assert lines[0].split()[:3] == ["mean", "P50", "P90"]
    ttft = next(line.split() for line in lines if line.startswith("ttft_s"))
    assert float(ttft[1]) == pytest.approx(result.metrics["ttft_s"]["mean"], rel=1e-3)
    figure = result.plot()
    assert [axis.get_xlabel() for axis in figure.axes] == ["TTFT, s", "TBT, s", "TTLT, s"]
    labels = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert labels == ["tier 0", "tier 1"]
    figure.savefig(tmp_path / "plot.png")
    assert "<table>" in result._repr_html_()
    assert "steady_state" in result.warnings
    assert result.warnings["steady_state"] in caplog.messages
    assert result.warnings["steady_state"] in str(result)
    result.records.clear()
    with pytest.raises(InputError, match="records: got 0"):
        result.plot()
