"""Calibration: shift and scale for each served model, conformal quantiles, the command."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from predictors.modules import Calibration, Heads, RankHead, load_checkpoint
from scheduler_core.errors import InputError
from tests.training.checkpoints import MODELS, SMALL_TOWER, random_checkpoint, write_drawn_answers
from training.calibrating.cli import main
from training.calibrating.conformal import conformal_offset, fit_conformal
from training.calibrating.residuals import CensoredCdf, Residuals
from training.calibrating.shift_and_scale import (
    METHODS,
    POOLINGS,
    fit_calibration,
    select_calibration,
)
from training.evaluating.cli import main as evaluate
from training.evaluating.conformal import ConformalQuantiles


def residuals(count=20_000, *, shift=(0.0, 0.0), scale=(1.0, 1.0), limit=np.inf, seed=0):
    """Answers of two served models whose residuals are shift + scale T, censored at `limit`."""
    rng = np.random.default_rng(seed)
    model = rng.integers(1, 3, count)
    z = np.array(shift)[model - 1] + np.array(scale)[model - 1] * rng.standard_t(3.5, count)
    row = np.arange(count)
    return Residuals(
        np.minimum(z, limit),
        z <= limit,
        np.full(count, float(limit)),
        model,
        row // 2,
        row,
        np.full(count, 3.5),
    )


def folds(data, count=5):
    """The residuals of every fifth prompt together."""
    return [data.take(data.prompt % count == number) for number in range(count)]


@pytest.mark.parametrize("method", list(METHODS))
@pytest.mark.parametrize("limit", [np.inf, 4.0])
def test_shift_and_scale_are_found_for_each_served_model(method, limit):
    data = residuals(shift=(0.5, -0.4), scale=(1.5, 0.7), limit=limit)
    found = fit_calibration(data, 2, method)
    assert found.mu_shift[1:] == pytest.approx((0.5, -0.4), abs=0.08)
    assert found.sigma_scale[1:] == pytest.approx((1.5, 0.7), abs=0.12)
    after = residuals(shift=(0.5, -0.4), scale=(1.5, 0.7), limit=limit, seed=1).calibrated(found).coverage()
    assert after["largest_shift"] < 0.02


def test_few_answers_get_the_numbers_of_all_together():
    data = residuals(2000, shift=(0.5, 0.5))
    few = data.take((data.model == 1) | (np.cumsum(data.model == 2) <= 50))
    found = fit_calibration(few, 3, "likelihood")
    assert found.mu_shift[2] == found.mu_shift[3] == found.mu_shift[0] != found.mu_shift[1]


def test_no_change_is_kept_where_nothing_is_wrong():
    exact = residuals(4000)
    levels = (np.arange(1000) + 0.5) / 1000
    for number in (1, 2):
        own = np.flatnonzero(exact.model == number)[:1000]
        exact.z[own] = stats.t.ppf(levels, 3.5)
        exact.model[np.setdiff1d(np.flatnonzero(exact.model == number), own)] = 3
    exact = exact.take(exact.model < 3)
    selected = select_calibration(folds(exact), 2)
    assert selected.method == "identity"
    assert selected.calibration == Calibration.identity(2)
    other = select_calibration(folds(residuals(4000, scale=(2.0, 1.0))), 2)
    assert other.method != "identity"
    chosen = other.trials[f"{other.method}, {other.pooling:g}"]
    assert other.trials["identity, 1"]["largest_shift"] > chosen["largest_shift"]


def test_what_few_prompts_say_of_one_model_is_pooled():
    def largest_shift(pooling):
        shifts = []
        for seed in range(20):
            few = residuals(300, shift=(0.6, 0.6), scale=(1.3, 1.3), seed=seed)
            others = residuals(4000, shift=(0.6, 0.6), scale=(1.3, 1.3), seed=100 + seed)
            found = fit_calibration(few, 2, "quantiles", pooling)
            shifts.append(others.calibrated(found).coverage()["mean_largest_shift"])
        return np.mean(shifts)

    assert largest_shift(1.0) < 0.9 * largest_shift(0.0)
    many = residuals(20_000, shift=(1.0, -1.0))
    assert select_calibration(folds(many), 2).pooling == 0
    own, half, pooled = (fit_calibration(many, 2, "likelihood", share) for share in (0.0, 0.5, 1.0))
    assert pooled.mu_shift[0] == pooled.mu_shift[1] == pooled.mu_shift[2] == own.mu_shift[0]
    assert half.mu_shift[1] == pytest.approx((own.mu_shift[1] + own.mu_shift[0]) / 2)
    assert half.sigma_scale[1] == pytest.approx(np.sqrt(own.sigma_scale[1] * own.sigma_scale[0]))
    assert POOLINGS[0] == 0
    assert POOLINGS[-1] == 1


def test_another_shape_of_the_residuals_is_covered_too():
    rng = np.random.default_rng(3)

    def normal(seed):
        data = residuals(40_000, seed=seed)
        return Residuals(
            rng.normal(0.3, 1.0, 40_000),
            *(getattr(data, n) for n in ("finished", "z_limit", "model", "prompt", "row", "nu")),
        )

    fitting, held_out = normal(0), normal(1)
    shifts = {
        method: held_out.calibrated(fit_calibration(fitting, 2, method)).coverage()["largest_shift"]
        for method in METHODS
    }
    assert shifts["coverage"] <= min(shifts.values()) + 0.005
    assert max(shifts.values()) < 0.02


@given(
    st.lists(st.tuples(st.integers(0, 6), st.booleans()), min_size=1, max_size=30),
    st.integers(0, 6),
)
def test_the_censored_distribution_function(values, at):
    z = np.array([value for value, _ in values], dtype=float)
    finished = np.array([ended for _, ended in values])
    found = CensoredCdf.of(z, finished)
    survival = 1.0
    for time in sorted({float(value) for value in z[finished]}):
        if time <= at:
            survival *= 1 - ((z == time) & finished).sum() / (z >= time).sum()
    assert found(float(at)) == pytest.approx(1 - survival)
    if finished.all():
        assert found(float(at)) == pytest.approx((z <= at).mean())
        assert found.quantile(0.5) == np.sort(z)[math.ceil(len(z) / 2) - 1]


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
    observed = np.minimum(z, limits)
    offsets = np.array(
        [conformal_offset(observed[run, :count], finished[run, :count], level) for run in range(repeats)]
    )
    covered = float((z[:, count] <= offsets).mean())
    error = 4 * math.sqrt(level * (1 - level) / repeats)
    assert covered >= level - error
    if kind in ("normal", "cauchy") and not censored_fraction:
        assert covered <= level + 1 / (count + 1) + error


def test_conformal_quantiles_fall_back_where_rows_are_few():
    data = residuals(4000, shift=(0.0, 1.0))
    few = data.take((data.model == 1) | (np.cumsum(data.model == 2) <= 60))
    found = fit_conformal(few, MODELS, np.random.default_rng(0))
    assert found.own[1].all()
    # 60 rows are enough for P50 and P90, not for a finite P99
    assert found.own[2].tolist() == [True, True, False]
    assert found.offsets[2, 2] == found.offsets[0, 2]
    assert found.offsets[2, 0] == pytest.approx(1.0, abs=0.5)
    again = ConformalQuantiles.from_json(json.loads(json.dumps(found.to_json())))
    assert again.offsets.tolist() == found.offsets.tolist()
    assert again.own.tolist() == found.own.tolist()
    bound = found.quantiles(np.log([100.0]), np.array([0.5]), np.array([1]))
    assert bound[0, 0] == pytest.approx(100 * np.exp(0.5 * found.offsets[1, 0]))


def test_one_answer_of_a_row_and_one_row_of_a_prompt_count():
    data = residuals(1000)
    repeated = Residuals(
        *(
            np.repeat(getattr(data, n), 5)
            for n in ("z", "finished", "z_limit", "model", "prompt", "row", "nu")
        )
    )
    found = fit_conformal(repeated, MODELS, np.random.default_rng(0))
    assert found.num_rows[0].tolist() == [500] * 3
    assert found.num_rows[1:, 0].sum() == 1000


def test_too_many_cut_answers_give_an_infinite_offset():
    assert conformal_offset(np.zeros(10), np.zeros(10, dtype=bool), 0.5) == math.inf
    assert conformal_offset(np.arange(4.0), np.ones(4, dtype=bool), 0.9) == math.inf
    with pytest.raises(InputError, match="schema"):
        ConformalQuantiles.from_json({})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint, and answers longer and wider than it says, for calibrating and for checking."""
    root = tmp_path_factory.mktemp("calibrate")
    checkpoint = random_checkpoint(root, info={"data": {"name": "x"}, "note": "kept"})
    for name, seed in (("answers", 0), ("new", 1)):
        write_drawn_answers(
            root / f"{name}.parquet",
            checkpoint,
            num_prompts=150,
            shift=(0.6, -0.5),
            scale=(1.6, 0.8),
            max_tokens=2000,
            seed=seed,
        )
    return root


def coverage(predictor, data, out):
    args = [str(predictor), "--data", str(data), "--json", str(out), "--progress", "false"]
    assert evaluate([*args, "--ceiling", "false"]) == 0
    return json.loads(out.read_text())


def test_the_command_writes_a_calibrated_checkpoint(folder, tmp_path):
    args = [str(folder / "checkpoint"), "--data", str(folder / "answers.parquet"), "--progress", "false"]
    out = tmp_path / "calibrated"
    assert main([*args, "--out", str(out)]) == 0
    info = json.loads((out / "training.json").read_text())
    assert info["note"] == "kept"
    assert info["calibration"]["method"] in METHODS
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
    assert again.to_json() == {name: info["calibration"][name] for name in ("sigma_scale", "mu_shift")}


def test_a_method_can_be_chosen_and_a_predictor_without_conditions_has_one_entry(folder, tmp_path):
    plain = random_checkpoint(tmp_path / "plain", conditioning=None)
    args = [str(plain), "--data", str(folder / "answers.parquet"), "--progress", "false"]
    assert main([*args, "--out", str(tmp_path / "out"), "--method", "quantiles"]) == 0
    assert load_checkpoint(tmp_path / "out").model.calibration.num_models == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["{root}/nothing"], "an existing checkpoint folder"),
        (["{root}/checkpoint", "--data", "{root}/none.parquet"], "data: got"),
        (["{root}/checkpoint", "--method", "magic"], "method"),
        (["{root}/checkpoint", "--folds", "1"], "folds: got 1"),
        (["{root}/checkpoint", "--pooling", "1.5"], "pooling: got 1.5"),
        (["{root}/checkpoint", "--conformal_fraction", "1"], "conformal_fraction: got 1"),
        (["{root}/checkpoint", "--split", "test"], "the predictor does not say how it split"),
        (["{rank}"], "a checkpoint with a length head"),
        (["{root}/checkpoint", "--out", "{root}"], "a path that does not contain that of predictor"),
    ],
)
def test_bad_input_is_one_line(options, message, folder, tmp_path, capsys):
    rank = random_checkpoint(tmp_path, heads=Heads(rank=RankHead(tower=SMALL_TOWER)))
    words = [word.format(root=folder, rank=rank) for word in options]
    words += ["--data", str(folder / "answers.parquet")] if "--data" not in words else []
    words += ["--out", str(tmp_path / "out")] if "--out" not in words else []
    assert main([*words, "--progress", "false"]) == 2
    assert message in capsys.readouterr().err.strip().splitlines()[-1]
    assert not (tmp_path / "out").exists()


def test_a_folder_with_a_config_json_is_not_replaced(folder, tmp_path, capsys):
    (tmp_path / "config.json").write_text("mine")
    words = [str(folder / "checkpoint"), "--data", str(folder / "answers.parquet"), "--overwrite", "true"]
    assert main([*words, "--out", str(tmp_path)]) == 2
    assert "an earlier checkpoint to replace" in capsys.readouterr().err.strip().splitlines()[-1]
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("config.json", "mine")]


def test_quantiles_of_students_t_are_the_identity():
    levels = (np.arange(4000) + 0.5) / 4000
    z = stats.t.ppf(levels, 3.5)
    ones = np.ones(4000, dtype=bool)
    numbers = np.arange(4000)
    data = Residuals(z, ones, np.full(4000, np.inf), numbers * 0, numbers, numbers, np.full(4000, 3.5))
    for method in METHODS:
        found = fit_calibration(data, 0, method)
        assert found.mu_shift[0] == pytest.approx(0.0, abs=0.01)
        assert found.sigma_scale[0] == pytest.approx(1.0, abs=0.01)
