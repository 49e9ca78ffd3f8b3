"""The reproduction suite: verdicts, the page, the parts that are not the simulator's, and heads on frozen features."""

import math
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from benchmarks.reproduce import multitier_systems, rad
from benchmarks.reproduce.__main__ import STUDIES, _is_kept
from benchmarks.reproduce.frozen_heads import HEADS, Rows, few_prompts, one_output
from benchmarks.reproduce.page import COVERAGE, MAX_ROWS, coverage, load, pages, save
from benchmarks.reproduce.predict import BASELINES, FEW_PROMPTS, ONE_OUTPUT, head_columns, prediction_table
from benchmarks.reproduce.study import Claim, Effort, Findings, Row
from benchmarks.reproduce.tie import ABLATIONS
from benchmarks.reproduce.tie_map import SCORES, Population, Value, best, scaled, variation
from benchmarks.reproduce.tie_requests import ABOUT as TRAINED
from benchmarks.reproduce.tie_requests import COLUMNS, LENGTHS, POINTS, RANKS, requests, told
from benchmarks.reproduce.tie_systems import LMSYS_8B, PAPER_SYSTEMS, SAME_OUTPUTS, SYSTEMS, run
from predictors.heads import Predicted
from scheduler_core.errors import InputError
from scheduler_core.prediction.predictions import LengthPrediction, Prediction
from scheduler_core.simulator.step_time.base import StepWork
from scheduler_core.statistics import interval
from training.network.data import SampleLengths

ABOUT = {
    "command": "python -m benchmarks.reproduce x", "version": "0", "date": "2026-01-01", "cpu_s": 1.0,
    "quick": False, "scale": 1.0, "num_seeds": 3,
}  # fmt: skip


@pytest.mark.parametrize(
    ("paper", "ours", "neutral", "verdict"),
    [
        (8.23, 7.0, 1.0, "same"), (8.23, 0.7, 1.0, "opposite"), (8.23, 1.01, 1.0, "no effect"),
        (1.0, 1.01, 1.0, "same: no effect"), (1.0, 2.0, 1.0, "paper: no effect"),
        (-53.0, -20.0, 0.0, "same"), (26.0, -10.0, 0.0, "opposite"), (None, 1.2, 1.0, "-"),
        (1.2, None, 1.0, "-"),
    ],
)  # fmt: skip
def test_verdicts(paper: float | None, ours: float | None, neutral: float | None, verdict: str) -> None:
    assert Row(where="t", what="w", paper=paper, ours=ours, neutral=neutral).verdict == verdict


def test_findings_read_back_and_the_page_counts_them(tmp_path: Path) -> None:
    findings = Findings(
        [
            Row(
                where="table 1",
                what="a",
                paper=2.0,
                ours=3.0,
                neutral=1.0,
                more={"as-released accounting": 2.1},
            ),
            Row(where="table 1", what="b", paper=2.0, ours=0.5, neutral=1.0, note="because"),
        ],
        [
            Claim(where="section 1", text="it holds", holds=True, evidence="1 < 2"),
            Claim(where="section 2", text="it does not always", holds=True, evidence="1 < 2", case="case 1"),
            Claim(
                where="section 2",
                text="it does not always",
                holds=False,
                evidence="2 < 1",
                case="case 2",
                cause="Why.",
            ),
            Claim(where="section 2", text="our variant does", holds=True, evidence="2 > 1", ours=True),
        ],
        ["A note."],
    )
    save(tmp_path / "x.json", findings, ABOUT)
    read, about = load(tmp_path / "x.json")
    assert read == findings
    texts = pages([(STUDIES[0], read, about)])
    assert "| [Multi-tier Llumnix](multi-tier-llumnix.md) | 1 of 2 | 1 of 1 | 1 of 2 |" in texts["index.md"]
    text = texts["multi-tier-llumnix.md"]
    assert "| it does not always | section 2 | 2 < 1 | fails in case 2 | Why. |" in text
    assert "| it holds | section 1 |" in text
    assert "| our variant does | 2 > 1 | holds |  |" in text
    assert "| a | table 1 | 2 | 3 | 2.1 | - | 1 of 1 |" in text
    assert "| b | table 1 | 2 | 0.5 | - | - | 0 of 1 |" in text
    assert "1 of 2 in the paper's direction. [All 2 values]" in text


@pytest.mark.mend
def test_a_sentence_counts_once_and_a_check_of_ours_is_not_the_papers(tmp_path: Path) -> None:
    """18 of 22 claims of one paper were one sentence, which the section that they named does not have."""
    findings = Findings()
    for number in range(18):
        findings.claim(
            "section 5.1", "the sentence", number < 17, "1 < 2", case=f"cell {number}", cause="Why."
        )
    findings.check("section 5.1", "the sentence", True, "1 < 2")
    save(tmp_path / "x.json", findings, ABOUT)
    texts = pages([(STUDIES[0], *load(tmp_path / "x.json"))])
    assert "| [Multi-tier Llumnix](multi-tier-llumnix.md) | 0 of 1 | 1 of 1 | - |" in texts["index.md"]
    table = [line for line in texts["multi-tier-llumnix.md"].splitlines() if "the sentence" in line]
    assert table == [
        "| the sentence | section 5.1 | 1 < 2 | fails in cell 17 | Why. |",
        "| the sentence | 1 < 2 | holds |  |",
    ]


def test_the_page_says_the_scale_of_every_study(tmp_path: Path) -> None:
    """Studies of different scales on one page: each says its own, the head counts them; what is kept is not missing."""
    parts, path = [], tmp_path / "x.json"
    assert not _is_kept(path, Effort())
    quarter, quick = {"scale": 0.25, "num_seeds": 1}, {"quick": True, "num_seeds": 1}
    for number, about in enumerate(({}, quarter, quick, quarter)):
        row = Row(where="w", what="v", paper=1.0, ours=1.0)
        save(path, Findings([row], size=f"{number} requests"), ABOUT | about)
        efforts = (Effort(scale=0.5), Effort(scale=0.25), Effort(quick=True))
        assert [_is_kept(path, effort) for effort in efforts] == [not about, not about.get("quick"), True]
        parts.append((STUDIES[number], *load(path)))
    text = "".join(pages(parts).values())
    assert "Of 4 studies: 1 at scale 1, 2 at scale 0.25, 1 quick versions, which are not conclusive" in text
    assert f"Scale 1: 0 requests, 3 seeds. The paper: {STUDIES[0].paper_size}." in text
    assert "Scale 0.25: 1 requests, 1 seed." in text
    assert "at best the direction of an effect: 2 requests, 1 seed." in text


def test_the_pages_in_docs_are_those_of_the_findings() -> None:
    root = Path(__file__).parents[2]
    paths = [(study, root / f"benchmarks/results/reproduction/{study.name}.json") for study in STUDIES]
    expected = pages([(study, *load(path)) for study, path in paths if path.exists()])
    folder = root / "docs/reproduction"
    assert {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir()} == expected
    tables = re.findall(
        r"(?:^\|.*\n)+", "\n".join(text for name, text in expected.items() if name != "coverage.md"), re.M
    )
    assert max(table.count("\n") - 2 for table in tables) <= MAX_ROWS


def test_each_sentence_that_fails_has_its_cause() -> None:
    folder = Path(__file__).parents[2] / "benchmarks/results/reproduction"
    causes: dict[tuple[str, str], list[str]] = {}
    for study in STUDIES:
        findings, _ = load(folder / f"{study.name}.json")
        for claim in findings.claims:
            if not claim.holds:
                causes.setdefault((study.paper, claim.text), []).append(claim.cause)
    assert causes
    assert [name for name, texts in causes.items() if not any(texts)] == []


def test_coverage_names_every_table_and_figure_once_and_only_studies_that_there_are() -> None:
    named = [(one.paper, one.where) for one in COVERAGE]
    assert len(set(named)) == len(named)
    assert {name for one in COVERAGE for name in one.studies} == {study.name for study in STUDIES}
    assert {one.paper for one in COVERAGE} == {study.paper for study in STUDIES}
    assert all(one.studies or len(one.note) > 5 for one in COVERAGE)
    tables = {"Multi-tier Llumnix": 4, "Semantic scheduling": 2, "UniBoost": 10, "TIE": 8}
    figures = {"Multi-tier Llumnix": 9, "Semantic scheduling": 5, "UniBoost": 9, "TIE": 10}
    for paper in tables:
        wanted = {f"table {n + 1}" for n in range(tables[paper])}
        wanted |= {f"figure {n + 1}" for n in range(figures[paper])}
        assert wanted <= {where for name, where in named if name == paper}
    assert "| tables 7, 8 | OpenPangu" in coverage([])


def test_the_released_cost_charges_the_attention_of_32_of_the_batch() -> None:
    model = multitier_systems.STEP_TIME
    released = multitier_systems.ReleasedCost(model)
    contexts = (100,) * 500
    assert released.step_s(StepWork((), contexts)) < model.step_s(StepWork((), contexts))
    assert released.step_s(StepWork((), contexts)) > model.step_s(StepWork((), contexts[:32]))
    assert released.step_s(StepWork((), contexts[:20])) == model.step_s(StepWork((), contexts[:20]))
    end_s = released.run(contexts, 1.0).end_s(1)
    assert end_s == pytest.approx(1.0 + released.step_s(StepWork((), contexts)))


def test_the_bound_of_rad_is_the_time_at_optimal_tiling() -> None:
    """256 prompt tokens are 8 chunks of 32; outputs 8 to 128, so 67 decodes on average, 32 at a time."""
    step_time = rad.STEP_TIMES["Eq. 7"]
    rates, _ = rad.bounds(0, 4000, step_time)
    expected_s = (step_time.linear_tile_s + 32 * step_time.per_token_s) * (8 + 67 / 32)
    assert 1.0 / rates["T_R"] == pytest.approx(expected_s, rel=0.01)
    assert rates["any scheduler"] == pytest.approx(rates["T_R"])
    rates, _ = rad.bounds(0, 4000, rad.STEP_TIMES["Eq. 7 and a fixed time"])
    assert rates["any scheduler"] > 1.2 * rates["T_R"]


def test_tie_runs_at_the_papers_load_and_the_truth_is_hard_to_beat() -> None:
    found = requests(Effort(quick=True), 200, seed=0)
    latency = {
        name: np.mean([one.ttft_s for one in run(SYSTEMS[name], found, LMSYS_8B, 100.0, 1 / 30, 0).records])
        for name in ("FCFS", "SSJF", "SJF, true lengths")
    }
    assert latency["SJF, true lengths"] < latency["SSJF"] < latency["FCFS"]
    assert set(PAPER_SYSTEMS) == {"FCFS", "SSJF", "LTR", "TIE"}


def test_tie_runs_on_trained_predictions_and_their_note_names_who_predicts_how_well(tmp_path: Path) -> None:
    rows = {
        "served_model": ["m", "m", "m", "other"],
        "dataset": ["Alpaca"] * 4,
        "prompt_tokens": [10, 20, 30, 40],
        "output_tokens": [[100, 100], [200, 200], [300, 300], [400, 400]],
        **{name: [[4.6, 0.4, 3.5], [5.3, 0.4, 3.5], [5.7, 0.4, 3.5], [6.0, 0.4, 3.5]] for name in LENGTHS},
        "within": [[4.6, 0.2, 3.5]] * 4,
        "log-normal": [[4.6, 0.4, 1000.0]] * 4,
        "regression_tokens": [300.0, 200.0, 100.0, 400.0],
        "rank": [-1.0, 1.0, 0.0, 9.0],
        "equal budget tokens": [100.0, 300.0, 200.0, 400.0],
        "equal budget rank": [2.0, 3.0, 1.0, 9.0],
    }
    table = pa.table(rows).replace_schema_metadata({TRAINED: b"Heads on a frozen encoder"})
    pq.write_table(table, tmp_path / "predictions.parquet")
    found = requests(Effort(quick=True, predictions=tmp_path / "predictions.parquet"), 50, 0, "m", "Alpaca")
    assert {row.output_tokens for row in found.trace.requests} == {100, 200, 300}
    assert all(length.mu < 6.0 for length in found.lengths["length"].values())
    for order, expected in (
        (SYSTEMS["TIE, sigma within a prompt"], LengthPrediction(4.6, 0.2, 3.5)),
        (ABLATIONS["log-normal"], LengthPrediction(4.6, 0.4, 1000.0)),
        (PAPER_SYSTEMS["TIE"], found.lengths["equal budget"]["r0"]),
        (
            PAPER_SYSTEMS["SSJF"],
            LengthPrediction(math.log(found.numbers["equal budget tokens"]["r0"]), 1e-6, 3.5),
        ),
        (SAME_OUTPUTS["LTR"], LengthPrediction(found.numbers["rank"]["r0"], 1e-6, 3.5)),
    ):
        predictions = told(order, found)
        assert predictions is not None
        assert predictions.by_id["r0"] == Prediction(length=expected)
    assert "budget: TIE 1.000, SSJF 0.333, LTR -0.333;" in found.source
    assert found.source.endswith("TIE 1.000, SSJF -1.000, LTR 0.333. Heads on a frozen encoder")


@pytest.mark.slow
@pytest.mark.parametrize("study", STUDIES, ids=lambda study: study.name)
def test_every_study_runs_quickly(study: object) -> None:
    findings = study.run(Effort(quick=True))  # type: ignore[attr-defined]
    assert findings.rows
    assert all(row.ours is not None or row.note for row in findings.rows if row.neutral is not None)


def rows_of(num: int, seed: int) -> Rows:
    """Prompts with one feature, the mean of ln length, and ten log-normal lengths each."""
    rng = np.random.default_rng(seed)
    mean = rng.normal(5.0, 1.0, num)
    tokens = np.exp(mean[:, None] + 0.3 * rng.standard_normal((num, 10))).astype(np.float32)
    ones = torch.ones(num, 10, dtype=torch.bool)
    return Rows(
        features=torch.tensor(mean[:, None] - 5.0, dtype=torch.float32), prompt=torch.arange(num),
        model=torch.ones(num, dtype=torch.int64), temperature=torch.full((num,), 0.7),
        samples=SampleLengths(torch.from_numpy(tokens), ones, ones, torch.full((num,), torch.inf)),
        weight=torch.ones(num),
        table=pd.DataFrame(
            {
                "prompt_id": [f"p{row}" for row in range(num)], "model": "m", "dataset": "d",
                "prompt_tokens": 10, "output_tokens": tokens.astype(int).tolist(),
            }
        ),
    )  # fmt: skip


def test_each_head_is_trained_by_its_own_loss() -> None:
    report = rows_of(200, 2)
    rows, tune = rows_of(6000, 0), rows_of(200, 1)
    columns, likelihood = head_columns(BASELINES | HEADS, rows, tune, report, ["m"])
    columns |= head_columns(ONE_OUTPUT, one_output(rows), tune, report, ["m"])[0]
    columns |= head_columns(FEW_PROMPTS, few_prompts(rows, 10, seed=0), tune, report, ["m"], 20)[0]
    mean = np.log(np.array(report.table.output_tokens.tolist())).mean(axis=1)
    mu = [np.array(columns[name])[:, 0] for name in ("log-normal", "equal budget")]
    for scores in (*mu, *(columns[name] for name in (*POINTS, *RANKS))):
        assert pd.Series(scores).corr(pd.Series(mean), method="kendall") > 0.8
    nu = {name: np.array(columns[name])[:, 2] for name in likelihood}
    assert (set(nu["log-t, nu 3.5"]), set(nu["log-normal"])) == ({3.5}, {1000.0})
    assert np.median(nu["log-t, free nu"]) > 5.0  # of log-normal lengths
    assert likelihood["log-normal"] > likelihood["log-t, nu 3.5"]
    num = len(report.table)
    shipped = Predicted(mu=np.full(num, 5.0), sigma=np.full(num, 0.4), sigma_within=np.full(num, 0.3), nu=3.5)
    table = prediction_table(report.table.assign(**columns), shipped)
    assert table.column_names == list(COLUMNS)
    assert table["within"][0].as_py() == pytest.approx([5.0, 0.3, 3.5])
    assert table["log-normal"][0].as_py() == columns["log-normal"][0]


def test_the_papers_budget_is_the_same_number_of_outputs() -> None:
    """One output of each prompt, or all ten of every tenth prompt."""
    rows = rows_of(400, 3)
    one, few = one_output(rows), few_prompts(rows, 10, seed=0)
    assert int(one.samples.present.sum()) == int(few.samples.present.sum()) == 400
    assert len(set(few.prompt.tolist())) == len(few.table) == 40
    assert torch.equal(few.samples.tokens, rows.samples.tokens[few.prompt])


def test_the_map_draws_outputs_of_the_wanted_variation() -> None:
    rng = np.random.default_rng(0)
    mu, sigma, limits = rng.normal(5.0, 0.8, 300), np.exp(rng.normal(-2.0, 0.5, 300)), np.full(300, 8192.0)
    wide = scaled(mu, sigma, limits, 1.1)
    assert variation(mu, wide, limits).mean() == pytest.approx(1.1, rel=0.01)
    with pytest.raises(InputError, match="variation"):
        scaled(mu, sigma, np.full(300, 200.0), 1.5)
    population = Population("1.1", 1.1, np.full(300, 50.0), mu, wide, limits)
    true, wrong = (population.requests(2000, error, seed=1) for error in ((1.0, 1.0), (0.4, 0.4)))
    assert true.trace == wrong.trace
    for data, explained in ((true, 1.0), (wrong, 0.4)):
        seen = np.array([length.mu for length in data.lengths["length"].values()])
        known = np.array([length.mu for length in true.lengths["length"].values()])
        assert np.corrcoef(seen, known)[0, 1] ** 2 == pytest.approx(explained, abs=0.05)


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        ({"median": 0.5, "mean": 0.9, "TIE": 1.0, "Gittins": 0.8}, ("median", 2.0)),
        ({"median": 2.0, "mean": 1.25, "TIE": 1.0, "Gittins": 1.5}, ("TIE", 0.8)),
    ],
)
def test_the_map_says_which_score_is_best_and_whether_that_is_clear(
    ratios: dict[str, float], expected: tuple[str, float]
) -> None:
    for spread, is_clear in ((0.01, True), (1.0, False)):
        values = [
            Value(
                "mean",
                "0.4",
                0.4,
                "R2 0.4",
                score,
                interval([ratios[score] + spread * side for side in (-1.0, 0.0, 1.0)]),
            )
            for score in SCORES
        ]
        name, ratio, clear = best(values)
        assert (name, clear) == (expected[0], is_clear)
        assert ratio == pytest.approx(expected[1])
