"""Recorded decisions replay to the same plans, and a change is noticed."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

from scheduler_core.decision_log import DecisionLog
from scheduler_core.errors import InputError
from scheduler_core.replay import ReplayError, read_log, replay
from scheduler_core.scheduler import SchedulerConfig
from tests.scheduler_core.helpers import random_trace, simulate

SMALL = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64, num_kv_blocks=60, kv_block_tokens=16)


def recorded(policy: str) -> DecisionLog:
    log = DecisionLog()
    simulate(random_trace(60, rate_rps=30), policy, log=log, predictor_delay_s=0.05, scheduler=SMALL)
    return log


def test_a_simulation_replays_exactly_also_from_its_file(tmp_path: Path) -> None:
    log = recorded("tie")
    log.write(tmp_path / "log.jsonl")
    entries = read_log(tmp_path / "log.jsonl")
    assert entries == log.entries
    again = replay(entries)
    assert again.counters.num_finished == 60
    assert again.counters.num_preemptions > 0


def test_another_decision_is_noticed() -> None:
    entries = copy.deepcopy(recorded("tie").entries)
    number = next(i for i, entry in enumerate(entries) if entry["op"] == "schedule" and entry["plan"])
    entries[number]["plan"]["num_context_tokens"] += 1
    with pytest.raises(ReplayError, match=f"entry {number + 1}"):
        replay(entries)


@pytest.mark.parametrize("content", ["not json\n", "[1]\n", '{"no": "op"}\n'])
def test_a_damaged_log_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text(content)
    with pytest.raises(InputError, match="line 1"):
        read_log(tmp_path / "log.jsonl")
