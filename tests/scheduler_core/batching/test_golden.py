"""Decision logs replay to the same plans, entry by entry: golden ones, one per batch former, and new ones; a change is noticed.

After an intended change of decisions or of the log's format: python -m tests.scheduler_core.batching.test_golden
"""

import copy
from pathlib import Path

import numpy as np
import pytest

from scheduler_core.batching import BATCH_FORMERS
from scheduler_core.engine.decision_log import DecisionLog
from scheduler_core.errors import InputError
from scheduler_core.prediction.predictions import LengthPrediction, Prediction, UrgencyPrediction
from scheduler_core.replay import ReplayError, read_log, replay
from scheduler_core.request import Segment
from scheduler_core.scheduler import Scheduler, SchedulerConfig
from tests.scheduler_core.helpers import (
    NEVER_PREEMPT,
    SMALL_PARAMETERS,
    Drive,
    random_trace,
    request,
    scheduler,
    simulate,
)

FOLDER = Path(__file__).parent / "golden"
#: The order policy of each recording: the paper's own where there is one.
POLICY = {"stage_aware": "semantic", "slai": "spf", "chunked_prefill": "tie", "vllm": "srpt"}
NUM_REQUESTS = 10
SMALL = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64, num_kv_blocks=60, kv_block_tokens=16)


def record(former: str) -> DecisionLog:
    """Ten requests on an engine so small that some are preempted where that can happen."""
    rng = np.random.default_rng(7)
    log = DecisionLog()
    core = scheduler(
        POLICY.get(former, "fcfs"), log=log, max_num_seqs=3, max_num_batched_tokens=32, num_kv_blocks=14,
        kv_block_tokens=2, preemption="swap", num_swap_blocks=8, batching=former,
        batching_parameters=SMALL_PARAMETERS.get(former, {}),
    )  # fmt: skip
    given = []
    for index in range(NUM_REQUESTS):
        arrival_s, prompt = float(rng.integers(0, 12)) / 2, int(rng.integers(2, 12))
        item = request(
            f"r{index}", arrival_s, prompt=prompt, cap=12,
            tier=int(rng.integers(0, 5)), tbt_slo_s=(0.1, 2.0, None)[index % 3],
            content=(Segment("shared", min(prompt, 7)),) if index % 2 else (),
        )  # fmt: skip
        given.append((item, int(rng.integers(1, 12))))
    run = Drive(core, given)
    predicted: set[str] = set()
    while run.step() is not None or run.coming:
        for index, name in enumerate(run.lengths):
            if name in core and name not in predicted:
                predicted.add(name)
                core.update(name, _prediction(index, run.lengths[name]), run.now)
    return log


def _prediction(index: int, length: int) -> Prediction | None:
    if index % 5 == 4:
        return None
    urgency = UrgencyPrediction(tuple(1.0 if level == index % 5 else 0.0 for level in range(5)))
    # Rounded, so that the golden files do not depend on the last bit of a logarithm.
    return Prediction(length=LengthPrediction(round(float(np.log(length)), 3), 0.5, 3.5), urgency=urgency)


@pytest.mark.parametrize("former", BATCH_FORMERS)
def test_a_recorded_run_replays_exactly(former: str) -> None:
    entries = read_log(FOLDER / f"{former}.jsonl")
    again: Scheduler = replay(entries)
    assert again.counters.num_finished == NUM_REQUESTS
    assert SchedulerConfig(**entries[0]["config"]) == again.config
    assert again.config.batching == former
    assert (again.counters.num_preemptions > 0) == (former not in NEVER_PREEMPT)


def simulated(policy: str) -> DecisionLog:
    log = DecisionLog()
    simulate(random_trace(60, rate_rps=30), policy, log=log, predictor_delay_s=0.05, scheduler=SMALL)
    return log


def test_a_simulation_replays_exactly_also_from_its_file(tmp_path: Path) -> None:
    log = simulated("tie")
    log.write(tmp_path / "log.jsonl")
    entries = read_log(tmp_path / "log.jsonl")
    assert entries == log.entries
    again = replay(entries)
    assert again.counters.num_finished == 60
    assert again.counters.num_preemptions > 0


def test_another_decision_is_noticed() -> None:
    entries = copy.deepcopy(simulated("tie").entries)
    number = next(i for i, entry in enumerate(entries) if entry["op"] == "schedule" and entry["plan"])
    entries[number]["plan"]["num_context_tokens"] += 1
    with pytest.raises(ReplayError, match=f"entry {number + 1}"):
        replay(entries)


@pytest.mark.parametrize("content", ["not json\n", "[1]\n", '{"no": "op"}\n'])
def test_a_damaged_log_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text(content)
    with pytest.raises(InputError, match="line 1"):
        read_log(tmp_path / "log.jsonl")


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name in BATCH_FORMERS:
        record(name).write(FOLDER / f"{name}.jsonl")
