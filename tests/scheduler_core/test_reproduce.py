"""The frame of the reproduction suite: verdicts, the page, and the parts that are not the simulator's."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.reproduce import multitier, rad, semantic, tie
from benchmarks.reproduce.__main__ import STUDIES
from benchmarks.reproduce.hardware import A100_80, LLAMA_2_7B, step_time
from benchmarks.reproduce.page import load, page, save
from benchmarks.reproduce.slai import crossing
from benchmarks.reproduce.study import Claim, Effort, Findings, Row
from scheduler_core.kv_cost import KVCost
from scheduler_core.plan import PrefillChunk
from scheduler_core.simulator.step_time import StepWork
from scheduler_core.simulator.workloads import Workload

ABOUT = {
    "command": "python -m benchmarks.reproduce x",
    "version": "0",
    "date": "2026-01-01",
    "cpu_s": 1.0,
    "quick": False,
}


@pytest.mark.parametrize(
    ("paper", "ours", "neutral", "verdict"),
    [
        (8.23, 7.0, 1.0, "same"),
        (8.23, 0.7, 1.0, "opposite"),
        (8.23, 1.01, 1.0, "no effect"),
        (1.0, 1.01, 1.0, "same: no effect"),
        (1.0, 2.0, 1.0, "paper: no effect"),
        (-53.0, -20.0, 0.0, "same"),
        (26.0, -10.0, 0.0, "opposite"),
        (26.0, 2.0, 0.0, "no effect"),
        (1.5, 1.2, None, "-"),
        (None, 1.2, 1.0, "-"),
        (1.2, None, 1.0, "-"),
    ],
)
def test_a_verdict_is_about_the_direction(
    paper: float | None, ours: float | None, neutral: float | None, verdict: str
) -> None:
    assert Row(where="t", what="w", paper=paper, ours=ours, neutral=neutral).verdict == verdict


def test_findings_read_back_and_the_page_counts_them(tmp_path: Path) -> None:
    findings = Findings(
        [
            Row(where="table 1", what="a", paper=2.0, ours=3.0, neutral=1.0, more={"as released": 2.1}),
            Row(where="table 1", what="b", paper=2.0, ours=0.5, neutral=1.0, note="because"),
        ],
        [Claim("section 1", "it holds", True, "1 < 2"), Claim("section 2", "it does not", False, "2 < 1")],
        ["A note."],
    )
    save(tmp_path / "x.json", findings, ABOUT)
    read, about = load(tmp_path / "x.json")
    assert read == findings
    text = page([(STUDIES[0], read, about)])
    assert "1 of 2 values with a direction" in text
    assert "1 of 2 claims hold" in text
    assert "| table 1 | a | 2 | 3 | 2.1 | 1.5 | same |" in text
    assert "opposite; because" in text


def test_every_study_has_a_name_a_cost_and_a_reason() -> None:
    names = [study.name for study in STUDIES]
    assert len(set(names)) == len(names)
    for study in STUDIES:
        assert 0 < study.cost_s[0] < study.cost_s[1]
        assert len(study.why) > 40
    assert sum(study.cost_s[0] for study in STUDIES) < 240


def test_step_times_from_data_sheets() -> None:
    """Llama-2-7B on an A100: 13.5 GB over 0.8 of 2.039 TB/s is 8.3 ms; a token 2 x 6.74e9 operations."""
    model = step_time(LLAMA_2_7B, A100_80)
    assert model.base_s == pytest.approx(0.00826, rel=0.01)
    assert model.per_prefill_token_s == pytest.approx(13.48e9 / (0.6 * 312e12))
    assert model.per_context_token_s == pytest.approx(524_288 / (0.8 * 2.039e12))


def test_the_released_cost_charges_32_of_the_batch() -> None:
    model = step_time(LLAMA_2_7B, A100_80)
    released = multitier.ReleasedCost(model)
    contexts = (100,) * 500
    assert released.step_s(StepWork((), contexts)) == model.step_s(StepWork((), contexts[:32]))
    assert released.step_s(StepWork((), contexts[:20])) == model.step_s(StepWork((), contexts[:20]))
    assert released.run(contexts, 1.0).end_s(3) == model.run(contexts[:32], 1.0).end_s(3)


def test_both_systems_of_the_tables_have_the_same_engine() -> None:
    base, ours = multitier.baseline(), multitier.proposed(4)
    assert base.scheduler == ours.scheduler
    assert base.step_time == ours.step_time
    free = multitier.as_released(ours, 1000)
    assert free.scheduler.num_kv_blocks * 16 >= 1000 * 512
    assert free.scheduler.max_num_seqs == 1000


def test_a_batch_of_the_semantic_paper_costs_its_largest_member() -> None:
    cost = KVCost()
    model = semantic.system("semantic").step_time
    chunks = (PrefillChunk("a", 0, 100, True), PrefillChunk("b", 0, 400, True))
    assert model.step_s(StepWork(chunks)) == pytest.approx(cost.prefill_s(400))
    assert model.step_s(StepWork((), (10, 50))) == pytest.approx(cost.gamma_1 * 50 + cost.gamma_2)
    by_steps = sum(model.step_s(StepWork((), (10 + step, 50 + step))) for step in range(7))
    assert model.run((10, 50), 0.0).end_s(7) == pytest.approx(by_steps)


def test_predictions_of_a_busy_predictor_come_in_its_batches() -> None:
    trace = semantic.spikes(1.0, 5, seed=1)
    late = semantic.delays(trace, 0.1, 4, full=True)
    ends = sorted({round(row.arrival_s + late[row.request_id], 9) for row in trace.requests})
    assert len(ends) == -(-len(trace) // 4)
    assert all(b - a >= 0.1 - 1e-9 for a, b in pairwise(ends))
    at_once = semantic.delays(trace, 1e-6, 64, full=False)
    assert max(at_once.values()) < 1e-4


def test_wrong_levels_are_as_many_as_the_rate_says_and_keep_the_truth() -> None:
    trace = semantic.spikes(0.1, 100, seed=2)
    wrong = semantic.wrong_levels(trace, 0.4, seed=2)
    share = sum(row.tier != int(row.category) for row in wrong.requests) / len(trace)
    assert share == pytest.approx(0.4, abs=0.06)
    assert semantic.wrong_levels(trace, 0.0, seed=2) == trace


def test_the_bound_of_rad_is_the_time_at_optimal_tiling() -> None:
    """256 prompt tokens are 8 chunks of 32; outputs 8 to 128, so 67 decodes on average, 32 at a time."""
    trace = Workload(num_requests=4000, lengths=rad.LENGTHS).trace(0)
    step = rad.STEP_TIME.tile_s + 32 * rad.STEP_TIME.token_s
    assert rad.expected_time_s(trace, rad.STEP_TIME) == pytest.approx(step * (8 + 67 / 32), rel=0.01)


def test_capacity_is_where_the_curve_crosses() -> None:
    assert crossing((1.0, 2.0, 3.0), (0.1, 0.4, 1.6), 0.8) == pytest.approx(2.5)
    assert crossing((1.0, 2.0), (0.1, 0.2), 0.5) is None
    assert crossing((1.0, 2.0), (0.6, 0.9), 0.5) is None


def test_all_policies_of_tie_hear_the_same_predictor() -> None:
    found = tie.requests(Effort(quick=True), 50, seed=1)
    whole, median, rank = (tie.told(tie.SYSTEMS[name], found) for name in ("TIE", "SSJF", "LTR"))
    assert whole is not None
    assert median is not None
    assert rank is not None
    for name, law in found.seen.items():
        assert whole.answers[name] == law
        assert median.answers[name].mu == law.mu  # type: ignore[union-attr]
        assert rank.answers[name].rank.score == law.mu  # type: ignore[union-attr]
    assert tie.told(tie.SYSTEMS["FCFS"], found) is None


@pytest.mark.slow
@pytest.mark.parametrize("study", STUDIES, ids=lambda study: study.name)
def test_every_study_runs_quickly(study: object) -> None:
    findings = study.run(Effort(quick=True))  # type: ignore[attr-defined]
    assert findings.rows
    assert all(row.ours is not None or row.note for row in findings.rows if row.neutral is not None)
    assert replace(findings.rows[0]) == findings.rows[0]
