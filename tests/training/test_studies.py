"""The command `study-lengths`: what its three studies say of small files, against numbers computed another way."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from scheduler_core.errors import InputError
from tests.training.data import write_lists
from training.cli_studies import (
    FamiliesConfig,
    NuConfig,
    SampleSizeConfig,
    StudyConfig,
    main,
    study_lengths,
)
from training.fitting.estimate import Sample, estimate
from training.fitting.families import family_of
from training.studies.draws import as_ended, cut_at, log_t_draws, subsets
from training.studies.families import study_families
from training.studies.groups import StudyGroups, read_groups
from training.studies.heavy_tail import measures
from training.studies.likelihood_ratio import free_nu_points
from training.studies.nu import study_nu
from training.studies.sample_size import study_sample_size

CAP = 2_000


def write_file(path: Path, *, num_groups: int = 30, num_samples: int = 12, seed: int = 0) -> Path:
    """Groups from log-t distributions cut at CAP, and three that cannot be tested: constant, all cut, too few."""
    rng = np.random.default_rng(seed)
    lengths, finished = [], []
    for group in range(num_groups):
        drawn = np.exp(4.0 + 0.1 * group + 0.4 * rng.standard_t(3.5, num_samples))
        lengths.append([int(length) for length in np.clip(np.rint(drawn), 1, CAP)])
        finished.append([bool(length <= CAP) for length in drawn])
    lengths += [[7] * num_samples, [CAP] * num_samples, [5, 9]]
    finished += [[True] * num_samples, [False] * num_samples, [True, True]]
    return write_lists(
        path, lengths, finished=finished, max_tokens=np.full(len(lengths), CAP, dtype=np.int32).tolist()
    )


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_file(tmp_path_factory.mktemp("studies") / "samples.parquet")


def read(path: Path, **options) -> StudyGroups:
    return read_groups(
        path, **{"keys": ("prompt_id", "model"), "max_tokens": None, "censoring": "right"} | options
    )


def groups_of(*lengths: list[int], cut: set[int] = frozenset()) -> StudyGroups:
    """Groups of answers; lengths in `cut` were cut there."""
    flat = np.concatenate([np.array(answers) for answers in lengths])
    offsets = np.concatenate([[0], np.cumsum([len(answers) for answers in lengths])])
    sample = Sample.of(flat, ~np.isin(flat, list(cut)), offsets)
    names = [f"g{group}" for group in range(len(lengths))]
    return StudyGroups(Path("x"), names, sample, np.full(len(lengths), np.inf), len(lengths))


COMMANDS = {
    "families": ["--bootstrap", "19", "--bootstrap-groups", "5"],
    "nu": ["--grid", "1,3.5,inf"],
    "sample-size": ["--counts", "3,6,12", "--repeats", "4"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_writes_the_same_three_files_twice(path, tmp_path, name, capsys):
    for out in ("a", "b"):
        args = [name, str(path), "--out", str(tmp_path / out), "--progress", "false", *COMMANDS[name]]
        assert main(args) == 0, capsys.readouterr().err
    first, second = (json.loads((tmp_path / out / f"{name}.json").read_text()) for out in ("a", "b"))
    assert first.pop("config") == second.pop("config") | {"out": str(tmp_path / "a")}
    assert first == second
    assert first["study"] == name
    assert first["samples"]["name"] == "samples.parquet"
    assert len(first["samples"]["sha256"]) == 64
    page = (tmp_path / "a" / f"{name}.html").read_text()
    assert page.count("data:image/png;base64,") == 1
    assert (tmp_path / "a" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_families_counts_what_cannot_be_tested_and_agrees_with_scipy(path):
    groups = read(path)
    content = study_families(groups, replicates=0).content
    assert content["groups"]["num_groups"] == 33
    assert content["groups"]["num_tested"] == 30
    assert content["groups"]["num_bootstrapped"] == 0
    assert content["families"]["log_t"]["ks_pass_rate_boot"] is None
    whole = [
        g for g in range(30) if not groups.cut[groups.sample.offsets[g] : groups.sample.offsets[g + 1]].any()
    ]
    content = study_families(groups.take(np.array(whole)), replicates=0).content
    normal, exponential, p_values = [], [], []
    for group in whole:
        x = groups.lengths[groups.sample.offsets[group] : groups.sample.offsets[group + 1]]
        shape = np.std(np.log(x))
        normal.append(stats.lognorm.logpdf(x, shape, scale=np.exp(np.mean(np.log(x)))).sum())
        exponential.append(stats.expon.logpdf(x, scale=x.mean()).sum())
        p_values.append(stats.kstest(x, stats.expon(scale=x.mean()).cdf).pvalue)
    rows = content["families"]
    assert rows["log_normal"]["mean_log_likelihood"] == pytest.approx(np.mean(normal), rel=1e-9)
    assert rows["exponential"]["mean_log_likelihood"] == pytest.approx(np.mean(exponential), rel=1e-9)
    assert rows["exponential"]["ks_mean_p"] == pytest.approx(np.mean(p_values), abs=1e-6)
    assert rows["exponential"]["ks_pass_rate"] == np.mean(np.array(p_values) > 0.05)
    assert rows["exponential"]["log_ratio_to_log_normal"] == pytest.approx(
        np.mean(exponential) - np.mean(normal)
    )
    assert rows["exponential"]["mean_aic"] == pytest.approx(2 - 2 * np.mean(exponential))
    assert sum(row["best_aic"] for row in rows.values()) == pytest.approx(1.0)
    assert rows["log_t_free"]["mean_log_likelihood"] >= rows["log_t"]["mean_log_likelihood"]


def test_the_bootstrap_accepts_the_true_family_and_refuses_a_wrong_one():
    rng = np.random.default_rng(3)
    lengths = [np.rint(np.exp(6 + 0.5 * rng.standard_t(3.5, 100))).astype(int).tolist() for _ in range(40)]
    rows = study_families(groups_of(*lengths), replicates=39, bootstrap_groups=40).content["families"]
    assert rows["log_t"]["ks_pass_rate_boot"] > 0.8
    assert rows["exponential"]["ks_pass_rate_boot"] < 0.2


def test_likelihood_ratio_points_reject_one_in_twenty_under_the_null():
    # The limits for many answers, and by simulation with other seeds for few.
    assert free_nu_points(np.array([10**9]), math.inf, draws=500, seed=0)[0] == pytest.approx(2.706, abs=0.01)
    assert free_nu_points(np.array([10**9]), 3.5, draws=500, seed=0)[0] == pytest.approx(3.841, abs=0.01)
    point = free_nu_points(np.array([10]), math.inf, draws=4000, seed=1)[0]
    one = np.ones(1)
    sample = log_t_draws(9.0 * one, 0.3 * one, math.inf, np.inf * one, 10, 4000, np.random.default_rng(2))
    statistic = 2 * (
        estimate(sample, family_of("log-t", None)).log_likelihood
        - estimate(sample, family_of("log-normal")).log_likelihood
    )
    assert np.mean(statistic > point) == pytest.approx(0.05, abs=0.02)


def test_heavy_tail_measures_against_numpy_and_scipy():
    lengths = [[*range(1, 20), 400], [3, 5, 8], [6, 6, 6, 6]]
    found = measures(groups_of(*lengths))
    for group, answers in enumerate(lengths):
        x = np.array(answers, dtype=float)
        assert found["cv"][group] == pytest.approx(x.std() / x.mean())
        p50, p90, p99 = np.quantile(x, [0.5, 0.9, 0.99])
        assert found["p90_over_p50"][group] == pytest.approx(p90 / p50)
        assert found["p99_over_p50"][group] == pytest.approx(p99 / p50)
    assert found["skewness"][:2] == pytest.approx([stats.skew(lengths[0]), stats.skew(lengths[1])])
    assert np.isnan(found["skewness"][2])
    # The longest tenth: two answers of 20; 0.3 of the longest of 3; 0.4 of one of 4 equal ones.
    assert found["top_decile_share"] == pytest.approx([(400 + 19) / 590, 0.3 * 8 / 16, 0.1])


def test_nu_study_against_scipy_and_its_own_best(path):
    groups = read(path)
    num_cut = np.add.reduceat(groups.cut, groups.sample.offsets[:-1], dtype=int)
    groups = groups.take(np.flatnonzero(num_cut == 0))
    study = study_nu(groups, [2.0, math.inf])
    rows = {row["nu"]: row for row in study.content["grid"]}
    assert set(rows) == {2.0, "inf"}
    fits = estimate(groups.sample, family_of("log-normal"))
    p_values = []
    for group in np.flatnonzero(fits.fitted & (fits.flags == 0)):
        part = slice(groups.sample.offsets[group], groups.sample.offsets[group + 1])
        y = np.log(groups.lengths[part])
        p_values.append(stats.kstest(y, stats.norm(y.mean(), y.std()).cdf).pvalue)
    assert len(p_values) == study.content["groups"]["num_tested"]
    assert rows["inf"]["ks_mean_p"] == pytest.approx(np.mean(p_values), abs=1e-6)
    best = max(rows, key=lambda nu: rows[nu]["ks_mean_p"])
    assert study.content["best"]["ks_mean_p"] == best
    free = study.content["free_nu"]["log_likelihood_per_answer"]
    assert free >= max(row["log_likelihood_per_answer"] for row in rows.values())


def test_nu_study_finds_the_nu_that_was_drawn():
    one = np.ones(150)
    sample = log_t_draws(7 * one, 0.4 * one, 3.0, np.inf * one, 60, 1, np.random.default_rng(5))
    groups = StudyGroups(Path("x"), [f"g{i}" for i in range(150)], sample, np.inf * one, 150)
    best = study_nu(groups, [1.0, 3.0, 12.0, math.inf]).content["best"]
    assert best["log_likelihood_per_answer"] == best["ks_mean_p"] == 3.0


def test_how_often_an_own_nu_is_infinite_is_said_for_either_truth(path):
    shares = study_nu(read(path), [3.5]).content["free_nu"]["share_at_inf_if_true"]
    assert 0.1 < shares["3.5"] < shares["inf"] < 0.95


def test_parts_of_all_answers_have_no_error_and_smaller_ones_more(path):
    content = study_sample_size(read(path), [3, 6, 12], repeats=10, seed=1)
    assert content["groups"]["num_studied"] == 30
    assert content["groups"]["min_samples"] == 12
    few, more, every = content["rows"]
    assert every["mu_rmse"] == pytest.approx(0, abs=1e-9)
    assert every["sigma_relative"] == pytest.approx(0, abs=1e-7)
    assert every["mu_within"] is None
    for name in ("mu_rmse", "mu_relative", "sigma_relative", "expected_relative"):
        assert few[name] > more[name] > every[name]
    assert few["num_fits"] == 300


def test_simulated_errors_are_what_the_information_predicts(path):
    content = study_sample_size(read(path), [10, 100], repeats=40, simulate=True, cut_share=0.3, seed=2)
    assert content["simulated"]
    assert content["groups"]["min_samples"] is None
    row = content["rows"][1]
    assert row["num_answers"] == 100
    # About 1,200 fits: 95 % within three standard errors of that, and a little skewness.
    assert row["mu_within"] == pytest.approx(0.95, abs=0.025)
    assert row["log_sigma_within"] == pytest.approx(0.95, abs=0.025)
    assert row["mu_rmse"] == pytest.approx(row["mu_predicted"], rel=0.15)
    cut = row["cut"]
    assert cut["share"] == pytest.approx(0.3, abs=0.03)
    assert abs(cut["right"]["log_sigma_bias"]) < 0.08
    assert cut["none"]["log_sigma_bias"] < -0.25
    assert cut["none"]["expected_bias"] < cut["right"]["expected_bias"]


def test_subsets_are_parts_of_their_group_without_repeats():
    groups = groups_of([10, 20, 30, 40], [5, 6, 7], cut={40})
    parts = subsets(groups.sample, 3, 50, np.random.default_rng(0))
    assert len(parts) == 100
    keys = parts.keys.reshape(2, 50, 3)
    assert (np.diff(keys, axis=2) > 0).all()
    assert set(keys[0].ravel().tolist()) == {20, 40, 60, 81}
    assert (keys[1] == [10, 12, 14]).all()
    seen = np.array([(keys[0] == key).any(axis=1).mean() for key in (20, 40, 60, 81)])
    assert seen == pytest.approx([0.75] * 4, abs=0.25)


def test_cutting_marks_only_longer_answers_and_can_be_ignored():
    sample = groups_of([10, 20, 30], [5, 6, 7], cut={30}).sample
    cut = cut_at(sample, np.array([20.0, np.inf]))
    assert cut.keys.tolist() == [20, 40, 41, 10, 12, 14]
    assert as_ended(cut).keys.tolist() == [20, 40, 40, 10, 12, 14]


def test_a_drawn_part_of_the_groups_does_not_depend_on_their_order(tmp_path):
    lengths = [[10 + g, 20 + g, 40 + g] for g in range(20)]
    ids = [f"p{g}" for g in range(20)]
    there = read(write_lists(tmp_path / "a.parquet", lengths, prompt_id=ids), max_groups=5, seed=3)
    back = read(write_lists(tmp_path / "b.parquet", lengths[::-1], prompt_id=ids[::-1]), max_groups=5, seed=3)
    assert len(there) == 5
    assert there.num_in_file == 20
    assert set(there.names) == set(back.names)
    assert set(there.names) != set(read(tmp_path / "a.parquet", max_groups=5, seed=4).names)


def test_censoring_none_takes_cut_answers_for_ended(path):
    assert read(path).cut.any()
    plain = read(path, censoring="none")
    assert not plain.cut.any()
    assert np.isinf(plain.caps).all()
    assert (read(path).caps == CAP).all()


@pytest.mark.parametrize(
    ("config", "options", "field"),
    [
        (StudyConfig, {"max_tokens": 0}, "max_tokens"),
        (StudyConfig, {"max_groups": 0}, "max_groups"),
        (StudyConfig, {"group_by": "model,model"}, "group_by"),
        (StudyConfig, {"seed": -1}, "seed"),
        (FamiliesConfig, {"bootstrap": 5}, "bootstrap"),
        (FamiliesConfig, {"bootstrap_groups": 0}, "bootstrap_groups"),
        (FamiliesConfig, {"nu": 0.0}, "nu"),
        (NuConfig, {"grid": "1,x"}, "grid"),
        (NuConfig, {"grid": "1,1"}, "grid"),
        (NuConfig, {"grid": "0,1"}, "grid"),
        (NuConfig, {"grid": "nan"}, "grid"),
        (SampleSizeConfig, {"counts": "3,4.5"}, "counts"),
        (SampleSizeConfig, {"simulate": True, "min_samples": 5}, "min_samples"),
    ],
)
def test_bad_options_are_refused_by_name(config, options, field):
    with pytest.raises(InputError, match=f"^{field}: got"):
        config(samples="x", out="y", **options)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"counts": "2,5"}, "counts"),
        ({"counts": "50"}, "counts"),
        ({"repeats": 0}, "repeats"),
        ({"cut_share": 0.95}, "cut_share"),
        ({"min_samples": 13}, "min_samples"),
    ],
)
def test_bad_sample_sizes_are_refused_by_name(path, tmp_path, options, field):
    config = SampleSizeConfig(samples=str(path), out=str(tmp_path), progress=False, **options)
    with pytest.raises(InputError, match=f"^{field}"):
        study_lengths("sample-size", config)


def test_a_file_without_a_group_to_test_is_refused(tmp_path, capsys):
    path = write_lists(tmp_path / "x.parquet", [[5, 5, 5], [9, 9, 9, 9]])
    for name in COMMANDS:
        assert main([name, str(path), "--out", str(tmp_path / "out"), "--progress", "false"]) == 2
        assert "x.parquet" in capsys.readouterr().err
    assert not list((tmp_path / "out").glob("*.json"))


def test_groups_of_nearly_equal_answers_alone_have_no_likelihood_to_compare(tmp_path, capsys):
    path = write_lists(tmp_path / "x.parquet", [[5] * 9 + [6], [8] * 8 + [7, 9]])
    for name in ("families", "nu"):
        args = [name, str(path), "--out", str(tmp_path), "--progress", "false", *COMMANDS[name]]
        assert main(args) == 0, capsys.readouterr().err
        content = json.loads((tmp_path / f"{name}.json").read_text())
        assert content["groups"]["num_tested"] == 2
        assert content["groups"]["num_regular"] == 0
    assert content["best"]["log_likelihood_per_answer"] is None


def test_the_command_names_its_studies(capsys):
    assert main([]) == 2
    assert "sample-size" in capsys.readouterr().err
    assert main(["--help"]) == 0
    assert main(["figures"]) == 2
    assert "families, nu, sample-size" in capsys.readouterr().err
    assert main(["nu"]) == 2
