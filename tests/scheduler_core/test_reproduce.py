"""The frame of the reproduction suite: verdicts, the page, and the parts that are not the simulator's."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.reproduce import multitier_systems, predict, rad, semantic
from benchmarks.reproduce.__main__ import STUDIES, _is_kept
from benchmarks.reproduce.coverage import COVERAGE
from benchmarks.reproduce.page import coverage, load, pages, save
from benchmarks.reproduce.simulate import simulate
from benchmarks.reproduce.slai import at_rate, crossing
from benchmarks.reproduce.study import Claim, Effort, Findings, Row
from benchmarks.reproduce.tie_requests import Order, requests, told, with_worse_points
from benchmarks.reproduce.tie_systems import LMSYS_8B, PAPER_SYSTEMS, SYSTEMS, run
from benchmarks.reproduce.uniboost_appendix import preempted_s
from benchmarks.reproduce.uniboost_systems import A100, drawn, mixture
from benchmarks.reproduce.uniboost_systems import SYSTEMS as BOOST_SYSTEMS
from benchmarks.reproduce.uniboost_systems import run as run_boost
from scheduler_core.errors import InputError
from scheduler_core.kv_cost import KVCost
from scheduler_core.plan import PrefillChunk
from scheduler_core.simulator.step_time import StepWork
from scheduler_core.simulator.workloads import Workload
from training.evaluating.predictors import PredictedRows

ABOUT = {
    "command": "python -m benchmarks.reproduce x",
    "version": "0",
    "date": "2026-01-01",
    "cpu_s": 1.0,
    "quick": False,
    "scale": 1.0,
    "num_seeds": 3,
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
    texts = pages([(STUDIES[0], read, about)])
    assert "1 of 2 values with a direction" in texts["index.md"]
    assert "1 of 2 claims hold" in texts["index.md"]
    assert "| it does not | section 2 | 2 < 1 |" in texts["index.md"]
    assert "it holds" not in texts["index.md"]
    text = texts["multi-tier-llumnix.md"]
    assert "| table 1 | a | 2 | 3 | 2.1 | 1.5 | same |" in text
    assert "opposite; because" in text


def test_every_study_has_a_name_a_cost_and_a_reason() -> None:
    names = [study.name for study in STUDIES]
    assert len(set(names)) == len(names)
    for study in STUDIES:
        assert 0 < study.cost_s[0] < study.cost_s[1]
        assert len(study.why) > 40
    assert sum(study.cost_s[0] for study in STUDIES) < 360


def test_the_page_says_the_scale_of_every_study(tmp_path: Path) -> None:
    """Studies of different scales on one page: each says its own, the head counts them."""
    parts = []
    for number, about in enumerate(
        (
            {},
            {"scale": 0.25, "num_seeds": 1},
            {"quick": True, "num_seeds": 1},
            {"scale": 0.25, "num_seeds": 1},
        )
    ):
        path = tmp_path / f"{number}.json"
        save(
            path,
            Findings([Row(where="w", what="v", paper=1.0, ours=1.0)], size=f"{number} requests"),
            ABOUT | about,
        )
        parts.append((STUDIES[number], *load(path)))
    texts = pages(parts)
    text = "".join(texts.values())
    assert "Of 4 studies: 1 at scale 1, 2 at scale 0.25, 1 quick versions, which decide nothing" in text
    assert "Scale 1: 0 requests, 3 seeds." in text
    assert "Scale 0.25: 1 requests, 1 seed." in text
    assert "at best a direction: 2 requests, 1 seed." in text


def test_the_pages_in_docs_are_those_of_the_findings() -> None:
    root = Path(__file__).parents[2]
    paths = [(study, root / f"benchmarks/results/reproduction/{study.name}.json") for study in STUDIES]
    expected = pages([(study, *load(path)) for study, path in paths if path.exists()])
    folder = root / "docs/reproduction"
    assert {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir()} == expected


def test_scale_takes_requests_and_seeds_down_to_what_the_quick_version_has() -> None:
    scaled = Effort(scale=0.25)
    assert (scaled.num(10_000, 800), scaled.num(1000, 800)) == (2500, 800)
    assert (len(scaled.seeds), len(Effort(scale=0.7).seeds), len(Effort().seeds)) == (1, 2, 3)
    assert Effort(quick=True).num(10_000, 800) == 800
    assert scaled.size(10_000, 800) == "2,500 of 10,000 requests"
    for wrong in (0.0, 1.5):
        with pytest.raises(InputError, match="--scale"):
            Effort(scale=wrong)


def test_what_is_kept_at_this_scale_or_a_larger_one_is_not_missing(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    assert not _is_kept(path, Effort())
    save(path, Findings(), ABOUT | {"scale": 0.25})
    assert _is_kept(path, Effort(scale=0.25))
    assert _is_kept(path, Effort(quick=True))
    assert not _is_kept(path, Effort(scale=0.5))
    save(path, Findings(), ABOUT | {"quick": True})
    assert not _is_kept(path, Effort(scale=0.1))


def test_coverage_names_every_table_and_figure_once_and_only_studies_that_there_are() -> None:
    named = [(one.paper, one.where) for one in COVERAGE]
    assert len(set(named)) == len(named)
    assert {name for one in COVERAGE for name in one.studies} == {study.name for study in STUDIES}
    assert {one.paper for one in COVERAGE} == {study.paper for study in STUDIES}
    assert all(one.studies or len(one.note) > 5 for one in COVERAGE)
    tables = {"Multi-tier Llumnix": 4, "Semantic scheduling": 2, "UniBoost": 10, "TIE": 8}
    figures = {"Multi-tier Llumnix": 9, "Semantic scheduling": 5, "UniBoost": 9, "TIE": 10}
    for paper in tables:
        wanted = {f"table {n + 1}" for n in range(tables[paper])} | {
            f"figure {n + 1}" for n in range(figures[paper])
        }
        assert wanted <= {where for name, where in named if name == paper}
    assert "| TIE | table 7 | OpenPangu" in coverage([])


def test_the_released_cost_charges_the_attention_of_32_of_the_batch() -> None:
    model = multitier_systems.STEP_TIME
    released = multitier_systems.ReleasedCost(model)
    contexts = (100,) * 500
    assert released.step_s(StepWork((), contexts)) < model.step_s(StepWork((), contexts))
    assert released.step_s(StepWork((), contexts)) > model.step_s(StepWork((), contexts[:32]))
    assert released.step_s(StepWork((), contexts[:20])) == model.step_s(StepWork((), contexts[:20]))
    assert released.run(contexts, 1.0).end_s(1) == pytest.approx(
        1.0 + released.step_s(StepWork((), contexts))
    )


def test_both_systems_of_the_tables_have_the_same_engine() -> None:
    base, ours = multitier_systems.baseline(), multitier_systems.proposed(4)
    assert base.scheduler == ours.scheduler
    assert base.step_time == ours.step_time
    free = multitier_systems.as_released(ours, 1000)
    assert free.scheduler.num_kv_blocks * 16 >= 1000 * 512
    assert free.scheduler.max_num_seqs == 1000


def test_in_a_burst_the_whole_queue_counts() -> None:
    """The paper's freeness sees the head alone and fills one replica's queue; with the whole queue counted, dispatch is as
    good as round robin, on the very same requests."""
    trace = multitier_systems.workload(300, 4, "uniform").trace(0)
    paper = multitier_systems.proposed(4, migration=False)
    mean = {
        name: multitier_systems.latencies(simulate(system, trace))[1]
        for name, system in (
            ("paper", paper),
            ("whole queue", multitier_systems.whole_queue(paper)),
            ("round robin", multitier_systems.tiers_alone()),
        )
    }
    assert mean["paper"] > 1.3 * mean["round robin"]
    assert mean["whole queue"] == pytest.approx(mean["round robin"], rel=0.15)


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


def test_values_between_rates_are_interpolated() -> None:
    assert at_rate((1.0, 2.0), (0.1, 0.4), 1.5) == pytest.approx(0.2)


def test_without_a_trained_predictor_all_policies_of_tie_hear_the_same_one() -> None:
    found = requests(Effort(quick=True), 50, seed=1)
    whole, point, rank, truth = (
        told(SYSTEMS[name], found) for name in ("TIE", "SSJF", "LTR", "SJF, true lengths")
    )
    assert whole is not None
    assert point is not None
    assert rank is not None
    assert truth is not None
    for row in found.trace.requests:
        law = found.laws[row.request_id]
        assert whole.by_id[row.request_id] == law
        assert point.by_id[row.request_id].mu == pytest.approx(max(law.mu, 0.0))  # type: ignore[union-attr]
        assert rank.by_id[row.request_id].mu == law.mu  # type: ignore[union-attr]
        assert truth.by_id[row.request_id].mu == pytest.approx(math.log(row.output_tokens))  # type: ignore[union-attr]
    assert told(SYSTEMS["FCFS"], found) is None
    assert told(Order("ltr", told="rank"), found).by_id["r0"].rank.score == found.ranks["r0"]  # type: ignore[union-attr]


def _predictions(path: Path) -> None:
    """A file as `benchmarks.reproduce.predict` writes it, of two served models."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(5, 400, (20, 10))
    rows = [{"prompt_tokens": 30, "model": model, "dataset": "Alpaca" if i % 2 else "ShareGPT", "prompt_id": f"p{i}",
             "output_tokens": lengths[i].tolist()} for model in (LMSYS_8B.served_model, "other") for i in range(20)]  # fmt: skip
    logs = np.log(np.array([row["output_tokens"] for row in rows], float))
    given = PredictedRows(
        mu=logs.mean(axis=1), sigma=logs.std(axis=1), regression_tokens=np.full(40, 77.0), rank=-logs[:, 0]
    )
    pq.write_table(predict.table(rows, given, given, given), path)


def test_tie_hears_each_trained_predictor_and_draws_real_answers(tmp_path: Path) -> None:
    path = tmp_path / "p.parquet"
    _predictions(path)
    effort = Effort(quick=True, predictions=path)
    found = requests(effort, 60, 0, LMSYS_8B.served_model, "Alpaca")
    assert found.source.startswith("10 prompts of p.parquet")
    assert set(found.points.values()) == {77.0}
    rows = pq.read_table(path).to_pylist()
    by_mu = {row["mu"]: row for row in rows if row["dataset"] == "Alpaca" and row["served_model"] != "other"}
    for one in found.trace.requests:
        row = by_mu[found.laws[one.request_id].mu]
        assert one.output_tokens in row["output_tokens"]
        assert found.ranks[one.request_id] == row["rank"]
    with pytest.raises(InputError, match="no answers of nobody"):
        requests(effort, 10, 0, "nobody")


def test_the_same_prompts_are_taken_of_every_served_model_with_all_their_answers(tmp_path: Path) -> None:
    rows = [
        {"prompt_id": prompt, "model": model, "dataset": "d", "prompt": f"text {prompt}", "prompt_tokens": 3,
         "output_tokens": number, "temperature": 0.7}
        for model, prompts in (("a", "pqrs"), ("b", "qrst"), ("c", "pt"))
        for prompt in prompts for number in range(4)
    ]  # fmt: skip
    path = tmp_path / "samples.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    found = predict.groups(path, ["a", "b"], 2, seed=0)
    chosen = [row["prompt_id"] for row in found]
    assert [row["model"] for row in found] == ["a", "a", "b", "b"]
    assert chosen[:2] == chosen[2:]
    assert set(chosen) < set("qrs")
    assert found[0]["output_tokens"] == [1, 1, 2, 3]
    assert found[0]["prompt"] == f"text {chosen[0]}"
    with pytest.raises(InputError, match="--model"):
        predict.groups(path, ["a", "nobody"], 2, seed=0)


def test_a_predictor_without_the_wanted_head_is_refused() -> None:
    whole = PredictedRows(mu=np.zeros(1), sigma=np.ones(1), regression_tokens=np.ones(1), rank=np.ones(1))
    for place, option in enumerate(("--length", "--regression", "--rank")):
        given = [whole] * 3
        given[place] = PredictedRows()
        with pytest.raises(InputError, match=option):
            predict.table([], *given)


def test_worse_points_are_other_points_for_the_same_requests() -> None:
    found = requests(Effort(quick=True), 400, seed=1)
    worse = with_worse_points(found, 1.0, seed=0)
    before, after = (np.log(list(one.points.values())) for one in (found, worse))
    assert worse.trace == found.trace
    assert np.corrcoef(before, after)[0, 1] == pytest.approx(0.71, abs=0.08)


def test_tie_runs_at_the_papers_load_and_the_truth_is_hard_to_beat() -> None:
    found = requests(Effort(quick=True), 200, seed=0)
    latency = {
        name: np.mean([one.ttft_s for one in run(SYSTEMS[name], found, LMSYS_8B, 100.0, 1 / 30, 0).records])
        for name in ("FCFS", "SSJF", "SJF, true lengths")
    }
    assert latency["SJF, true lengths"] < latency["SSJF"] < latency["FCFS"]
    assert set(PAPER_SYSTEMS) == {"FCFS", "SSJF", "LTR", "TIE"}


def test_the_time_preempted_is_none_where_nobody_is_preempted() -> None:
    effort = Effort(quick=True)
    for share, preempted in ((0.05, False), (2.0, True)):
        trace = drawn(mixture(effort, 40), A100, share, 0, small=True)
        outcome = run_boost(BOOST_SYSTEMS["Sarathi"], trace, A100, True, segments=True)
        away = preempted_s(outcome)
        assert any(row.num_preemptions for row in outcome.records) == preempted
        assert (max(away.values()) > 1.0) == preempted
        assert min(away.values()) > -1e-6


@pytest.mark.slow
@pytest.mark.parametrize("study", STUDIES, ids=lambda study: study.name)
def test_every_study_runs_quickly(study: object) -> None:
    findings = study.run(Effort(quick=True))  # type: ignore[attr-defined]
    assert findings.rows
    assert all(row.ours is not None or row.note for row in findings.rows if row.neutral is not None)
    assert replace(findings.rows[0]) == findings.rows[0]


@pytest.mark.parametrize(("chunk", "seats"), [(128, 128), (512, 256)])
def test_engines_of_uniboost_have_no_more_seats_than_tokens_per_step(chunk: int, seats: int) -> None:
    assert replace(A100, chunk=chunk).limits(small=False).max_num_seqs == seats
