"""Calibration: shift and scale for each served model, conformal quantiles, the command."""

import json
import math
from dataclasses import asdict, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from data_gen.splits import overlap, smallest_hashes
from predictors.modules.checkpoint import load_checkpoint
from predictors.modules.config import Calibration, Conditioning
from predictors.modules.heads import Heads, RankHead
from scheduler_core.lengths import LogQuantiles
from scheduler_core.lengths.quantiles import LEVELS
from tests.training.checkpoints import MODELS, SMALL_TOWER, prompts, random_checkpoint, write_drawn_answers
from tests.training.data import assert_refused
from training.commands.calibrate import main
from training.commands.evaluate import main as evaluate
from training.correcting import estimation

ESTIMATORS = [name for name in estimation.METHODS if name != "identity"]


def residuals(count=20_000, *, shift=(0.0, 0.0), scale=(1.0, 1.0), limit=np.inf, seed=0, quantiles=()):
    """Answers of two served models whose residuals are shift + scale T, censored at `limit`; T has these quantiles, or is
    Student's t."""
    rng = np.random.default_rng(seed)
    model = rng.integers(1, 3, count)
    t = LogQuantiles(quantiles).logppf(rng.random(count)) if quantiles else rng.standard_t(3.5, count)
    z = np.array(shift)[model - 1] + np.array(scale)[model - 1] * t
    row = np.arange(count)
    limits, nu = np.full(count, float(limit)), np.full(count, 3.5)
    rows = np.tile(np.array(quantiles, dtype=float), (count, 1))
    return estimation.Residuals(np.minimum(z, limit), z <= limit, limits, model, row // 2, row, nu, rows)


def folds(data, count=5):
    """The residuals of every fifth prompt together."""
    return [data.take(data.prompt % count == number) for number in range(count)]


@pytest.mark.parametrize("method", ESTIMATORS)
@pytest.mark.parametrize("limit", [np.inf, 4.0])
@pytest.mark.parametrize(("shift", "scale"), [((0.5, -0.4), (1.5, 0.7)), ((0, 0), (1, 1))])
def test_shift_and_scale_are_found_for_each_served_model(method, limit, shift, scale):
    found = estimation.fit_calibration(residuals(shift=shift, scale=scale, limit=limit), 2, method, 0.0)
    assert found.mu_shift[1:] == pytest.approx(shift, abs=0.08)
    assert found.sigma_scale[1:] == pytest.approx(scale, abs=0.12)
    after = residuals(shift=shift, scale=scale, limit=limit, seed=1).calibrated(found).coverage()
    assert after["largest_shift"] < 0.02


@pytest.mark.parametrize("limit", [np.inf, 2.0])
def test_predicted_quantiles_are_calibrated_with_their_shape(limit):
    t = stats.t.ppf(LEVELS, 3.5)
    skewed = {"quantiles": tuple(np.where(t < 0, 1.7 * t, 0.5 * t).tolist())}
    exact = residuals(shift=(0, 0), limit=limit, **skewed)
    assert exact.coverage()["largest_shift"] < 0.02
    assert replace(exact, quantiles=np.zeros((len(exact), 0))).coverage()["largest_shift"] > 0.04
    off = {"shift": (0.4, -0.3), "scale": (1.3, 0.8), "limit": limit} | skewed
    found = estimation.select_calibration(folds(residuals(4000, **off)), 2, list(estimation.METHODS))
    assert found.method != "identity"
    other = residuals(seed=1, **off)
    before, after = other.coverage(), other.calibrated(found.calibration).coverage()
    assert after["mean_largest_shift"] < 0.025 < 0.1 < before["mean_largest_shift"]


def test_no_change_is_kept_where_nothing_is_wrong():
    exact = residuals(4000)
    levels = (np.arange(1000) + 0.5) / 1000
    for number in (1, 2):
        own = np.flatnonzero(exact.model == number)[:1000]
        exact.z[own] = stats.t.ppf(levels, 3.5)
        exact.model[np.setdiff1d(np.flatnonzero(exact.model == number), own)] = 3
    exact = exact.take(exact.model < 3)
    selected = estimation.select_calibration(folds(exact), 2, list(estimation.METHODS))
    assert selected.method == "identity"
    assert selected.calibration == Calibration.identity(2)
    wide = folds(residuals(4000, scale=(2.0, 1.0)))
    other = estimation.select_calibration(wide, 2, list(estimation.METHODS))
    assert other.method != "identity"
    chosen = other.trials[f"{other.method}, {other.pooling:g}"]
    assert other.trials["identity, 1"]["largest_shift"] > chosen["largest_shift"]


def test_what_few_prompts_say_of_one_model_is_pooled():
    def largest_shift(pooling):
        shifts = []
        for seed in range(20):
            few = residuals(300, shift=(0.6, 0.6), scale=(1.3, 1.3), seed=seed)
            others = residuals(4000, shift=(0.6, 0.6), scale=(1.3, 1.3), seed=100 + seed)
            found = estimation.fit_calibration(few, 2, "quantiles", pooling)
            shifts.append(others.calibrated(found).coverage()["mean_largest_shift"])
        return np.mean(shifts)

    assert largest_shift(1.0) < 0.9 * largest_shift(0.0)
    many = residuals(20_000, shift=(1.0, -1.0))
    assert estimation.select_calibration(folds(many), 2, list(estimation.METHODS)).pooling == 0
    own, pooled = (estimation.fit_calibration(many, 2, "likelihood", weight) for weight in (0.0, 1.0))
    assert pooled.mu_shift[0] == pooled.mu_shift[1] == pooled.mu_shift[2] == own.mu_shift[0]
    # Of too few samples nothing is estimated.
    few = many.take((many.model == 1) | (np.cumsum(many.model == 2) <= 50))
    found = estimation.fit_calibration(few, 3, "likelihood", 0.0)
    assert found.mu_shift[2] == found.mu_shift[3] == found.mu_shift[0] != found.mu_shift[1]


@settings(max_examples=25, deadline=None)
@given(
    count=st.integers(1, 150),
    level=st.sampled_from([0.5, 0.8, 0.9]),
    kind=st.sampled_from(["normal", "cauchy", "ties", "mixture"]),
    censored_fraction=st.sampled_from([0.0, 0.2]),
    seed=st.integers(0, 10**6),
)
def test_conformal_coverage_is_guaranteed_on_exchangeable_data(count, level, kind, censored_fraction, seed):
    rng = np.random.default_rng(seed)
    repeats = 3000
    draw = {
        "normal": lambda size: rng.normal(size=size),
        "cauchy": lambda size: rng.standard_cauchy(size),
        "ties": lambda size: rng.integers(0, 4, size).astype(float),
        "mixture": lambda size: rng.normal(size=size) + 5 * (rng.random(size) < 0.1),
    }[kind]
    z = draw((repeats, count + 1))
    # A cap of each row's own, as exchangeable as the rest.
    limits = np.where(rng.random(z.shape) < censored_fraction, draw(z.shape), np.inf)
    finished = z <= limits
    pairs = zip(np.minimum(z, limits)[:, :count], finished[:, :count], strict=True)
    offsets = np.array([estimation.conformal_offset(*pair, level) for pair in pairs])
    covered = float((z[:, count] <= offsets).mean())
    error = 4 * math.sqrt(level * (1 - level) / repeats)
    assert covered >= level - error
    if kind in ("normal", "cauchy") and not censored_fraction:
        assert covered <= level + 1 / (count + 1) + error


def test_conformal_quantiles_fall_back_where_rows_are_few():
    data = residuals(4000, shift=(0.0, 1.0))
    few = data.take((data.model == 1) | (np.cumsum(data.model == 2) <= 60))
    pooled, many, few = estimation.fit_conformal(few, MODELS, np.random.default_rng(0))["offsets"].values()
    assert all(entry["own"] for entry in many.values())
    # 60 rows are enough for P50 and P90, not for a finite P99
    assert [entry["own"] for entry in few.values()] == [True, True, False]
    assert few["p99"]["offset"] == pooled["p99"]["offset"]
    assert few["p50"]["offset"] == pytest.approx(1.0, abs=0.5)


def test_one_sample_of_a_row_and_one_row_of_a_prompt_count():
    repeated = residuals(1000).take(np.repeat(np.arange(1000), 5))
    pooled, *models = estimation.fit_conformal(repeated, MODELS, np.random.default_rng(0))["offsets"].values()
    assert [entry["num_rows"] for entry in pooled.values()] == [500] * 3
    assert sum(entries["p50"]["num_rows"] for entries in models) == 1000
    # Too few or too many truncated samples give an infinite offset.
    assert estimation.conformal_offset(np.zeros(10), np.zeros(10, dtype=bool), 0.5) == math.inf
    assert estimation.conformal_offset(np.arange(4.0), np.ones(4, dtype=bool), 0.9) == math.inf


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint, and answers longer and wider than it says, for calibrating and for checking."""
    root = tmp_path_factory.mktemp("calibrate")
    checkpoint = random_checkpoint(root, info={"data": {"name": "x"}, "note": "kept"})
    for name, seed in (("answers", 0), ("new", 1)):
        wrong = {"shift": (0.6, -0.5), "scale": (1.6, 0.8), "max_tokens": 2000, "num_prompts": 150}
        write_drawn_answers(root / f"{name}.parquet", checkpoint, seed=seed, **wrong)
    return root


def coverage(predictor, data, out):
    args = [str(predictor), "--data", str(data), "--json", str(out), "--progress", "false"]
    assert evaluate([*args, "--ceiling", "false"]) == 0
    return json.loads(out.read_text())


def test_the_command_writes_a_calibrated_checkpoint(folder, tmp_path):
    args = [str(folder / "checkpoint"), "--data", str(folder / "answers.parquet"), "--progress", "false"]
    out = tmp_path / "calibrated"
    assert main([*args, "--out", str(out), "--report", str(tmp_path / "report.html")]) == 0
    page = (tmp_path / "report.html").read_text()
    assert all(f"<td>{name}</td>" in page for name in MODELS)
    info = json.loads((out / "training.json").read_text())
    assert info["note"] == "kept"
    assert info["calibration"]["method"] in ESTIMATORS
    assert not load_checkpoint(out).model.calibration.is_identity
    before = coverage(folder / "checkpoint", folder / "new.parquet", tmp_path / "a.json")
    after = coverage(out, folder / "new.parquet", tmp_path / "b.json")
    for name in MODELS:
        for level in ("p50", "p90"):
            row = after["by_model"][name]["coverage"][level]
            assert row["estimate"] == pytest.approx(row["level"], abs=0.06)
        old = before["by_model"][name]["coverage"]["p50"]["estimate"]
        assert abs(old - 0.5) > 0.1
        assert after["conformal"]["coverage"][name]["p90"] >= 0.8  # 0.9 less three standard errors
    # calibrating again starts from the uncalibrated predictions
    assert main([str(out), *args[1:], "--out", str(tmp_path / "again")]) == 0
    again = load_checkpoint(tmp_path / "again").model.calibration
    assert asdict(again) == {name: tuple(info["calibration"][name]) for name in ("sigma_scale", "mu_shift")}


def test_a_method_can_be_chosen_and_a_predictor_without_conditions_has_one_entry(folder, tmp_path):
    plain = random_checkpoint(tmp_path / "plain", conditioning=None)
    args = [str(plain), "--data", str(folder / "answers.parquet"), "--progress", "false"]
    assert main([*args, "--out", str(tmp_path / "out"), "--method", "quantiles"]) == 0
    assert load_checkpoint(tmp_path / "out").model.calibration.num_models == 0
    info = json.loads((tmp_path / "out" / "training.json").read_text())
    assert (info["calibration"]["method"], info["calibration"]["pooling"]) == ("quantiles", 1.0)


def test_rows_of_unknown_served_models_say_nothing_of_a_mean_over_the_known_ones(tmp_path):
    conditioning = Conditioning(MODELS, width=4, unknown_is_mean=True)
    checkpoint = random_checkpoint(tmp_path, conditioning=conditioning)
    data = write_drawn_answers(tmp_path / "a.parquet", checkpoint, num_prompts=60, num_answers=4)
    table = pq.read_table(data)
    names = pc.if_else(pc.equal(table["model"], MODELS[0]), table["model"], pa.scalar("another"))
    pq.write_table(table.set_column(table.column_names.index("model"), "model", names), data)
    args = [str(checkpoint), "--data", str(data), "--out", str(tmp_path / "out"), "--progress", "false"]
    assert main([*args, "--method", "likelihood"]) in (0, 3)
    summary = json.loads((tmp_path / "out/training.json").read_text())["calibration"]
    assert summary["data"]["num_rows"] == 60
    assert list(summary["coverage_of_conformal_rows"]["before"]["by_model"]) == ["1"]


def test_a_calibration_that_makes_coverage_worse_says_so_and_exits_with_3(folder, tmp_path, caplog):
    checkpoint = folder / "checkpoint"
    right = write_drawn_answers(tmp_path / "right.parquet", checkpoint, num_prompts=40, num_answers=4)
    args = [str(checkpoint), "--data", str(right), "--out", str(tmp_path / "out"), "--progress", "false"]
    assert main([*args, "--method", "coverage"]) == 3
    assert "COVERAGE IS WORSE THAN BEFORE" in caplog.text
    summary = json.loads((tmp_path / "out/training.json").read_text())["calibration"]
    sides = summary["coverage_of_conformal_rows"]
    assert sides["after"]["mean_largest_shift"] > sides["before"]["mean_largest_shift"]


def test_training_prompts_are_noticed(tmp_path, caplog):
    texts = prompts(60)
    data = {"smallest_hashes": smallest_hashes(texts), "split": {"seed": 0, "fractions": [0.6, 0.2, 0.2]}}
    checkpoint = random_checkpoint(tmp_path, info={"data": data})
    answers = write_drawn_answers(tmp_path / "answers.parquet", checkpoint, num_prompts=60)
    args = [str(checkpoint), "--data", str(answers), "--progress", "false"]
    assert main([*args, "--out", str(tmp_path / "out")]) in (0, 3)
    assert "about 100 % of the prompts are in the training data" in caplog.text
    assert "--split test" in caplog.text
    caplog.clear()
    assert evaluate([*args, "--split", "train", "--ceiling", "false"]) == 0
    assert "in the training data" not in caplog.text
    many, new = ([f"{name} {number}" for number in range(5000)] for name in ("prompt", "new"))
    assert overlap([*many[:500], *new[:500]], smallest_hashes(many)) == pytest.approx(0.5, abs=0.2)
    assert overlap(["new"], smallest_hashes(many)) == overlap(many, []) == 0.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["{root}/nothing"], "an existing checkpoint folder"),
        (["{root}/checkpoint", "--conformal_fraction", "1"], "conformal_fraction: got 1"),
        (["{root}/checkpoint", "--split", "test"], "the predictor does not record a split"),
        (["{rank}"], "a checkpoint with a length head"),
        (["{root}/checkpoint", "--out", "{root}"], "a path that does not contain that of predictor"),
    ],
)
def test_bad_input_is_one_line(options, message, folder, tmp_path, capsys):
    rank = random_checkpoint(tmp_path, heads=Heads(rank=RankHead(tower=SMALL_TOWER)))
    words = [word.format(root=folder, rank=rank) for word in options]
    words += ["--data", str(folder / "answers.parquet")] if "--data" not in words else []
    words += ["--out", str(tmp_path / "out")] if "--out" not in words else []
    assert_refused(main, [*words, "--progress", "false"], message, tmp_path, capsys)
