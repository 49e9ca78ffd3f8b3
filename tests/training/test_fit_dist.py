"""Reading answer lengths in both forms, the fits file and the command `fit-dist`."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from scheduler_core.errors import InputError
from tests.training.data import write_lists, write_sample_file
from training.cli_fit_dist import main
from training.fitting.fits import FitOptions, read_fits_or_fit
from training.fitting.table import group_table, read_parquet


def groups_of(path, **options):
    return group_table(read_parquet(path, "samples"), path, **options)


def test_samples_become_groups_in_order_with_what_was_cut(tmp_path):
    table = pa.table(
        {
            "prompt_id": ["b", "a", "b", "a", "b", "a", "a"],
            "model": ["m"] * 7,
            "prompt": ["B", "A"] * 3 + ["A"],
            "output_tokens": [4, 9, 6, 8, 10, 0, 7],
            "finish_reason": ["stop", "length", "stop", "stop", "length", "error", "stop"],
            "max_tokens": pa.array([10, 9, 10, 9, 10, 9, 9], pa.int32()),
        }
    )
    groups = group_table(table, tmp_path / "x.parquet")
    assert groups.column("prompt_id") == ["b", "a"]
    assert groups.column("prompt") == ["B", "A"]
    assert [lengths.tolist() for lengths in groups.lengths] == [[4, 6, 10], [9, 8, 7]]
    assert [finished.tolist() for finished in groups.finished] == [[True, True, False], [False, True, True]]
    assert groups.max_tokens == [10, 9]
    assert groups.num_errors == 1


def test_lists_are_cut_at_the_cap_they_are_said_to_have(tmp_path):
    path = write_lists(tmp_path / "x.parquet", [[5, 100, 101], [7, 8, 9]], dataset=["A", "B"])
    groups = groups_of(path, max_tokens=100)
    assert groups.lengths[0].tolist() == [5, 100, 100]
    assert groups.finished[0].tolist() == [True, False, False]
    assert groups.max_tokens == [100, 100]
    assert groups.column("dataset") == ["A", "B"]
    assert groups_of(path).finished[0].all()


def test_lists_can_say_themselves_what_was_cut(tmp_path):
    path = write_lists(
        tmp_path / "x.parquet", [[5, 100, 101, 100]], finished=[[True, True, True, False]], max_tokens=[200]
    )
    assert groups_of(path).finished[0].tolist() == [True, True, True, False]
    assert groups_of(path).max_tokens == [200]
    capped = groups_of(path, max_tokens=100)
    assert capped.lengths[0].tolist() == [5, 100, 100, 100]
    assert capped.finished[0].tolist() == [True, True, False, False]


def test_rows_of_the_same_keys_are_one_group(tmp_path):
    path = write_lists(tmp_path / "x.parquet", [[5, 6], [7]], prompt_id=["a", "a"])
    assert groups_of(path).lengths[0].tolist() == [5, 6, 7]


@pytest.mark.parametrize(
    ("lengths", "columns", "message"),
    [
        ([[5, 6, 7], [5, 6]], {}, "prompt_id='p1', model='m', column output_tokens: got '2 samples'"),
        ([[5, 6, 7], [5, float("nan"), 7.0]], {}, "row 1, column output_tokens: got nan"),
        ([[5, 6, 7], [5, 0, 7]], {}, "row 1, column output_tokens: got 0.0"),
        ([[5, 6, -7]], {}, "row 0, column output_tokens: got -7.0"),
        ([[5, 6, 7.5]], {}, "row 0, column output_tokens: got 7.5"),
        ([[5, 6, None]], {}, "row 0, column output_tokens: got nan"),
        ([[5, 6, 7], None], {}, "row 1, column output_tokens: got None"),
        ([[5, 6, 7]], {"prompt": [" "]}, "row 0, column prompt: got ' '"),
        ([[5, 6, 7]], {"prompt_id": [None]}, "row 0, column prompt_id"),
        ([[5, 6, 7]], {"finished": [[True]]}, "row 0, column finished"),
        ([[5, 6, 7]], {"finished": [1]}, "column finished: got 'int64'"),
        ([["a", "b", "c"]], {}, "column output_tokens: got 'string'"),
    ],
)
def test_bad_values_are_named_by_row_and_column(lengths, columns, message, tmp_path):
    path = write_lists(tmp_path / "x.parquet", lengths, **columns)
    with pytest.raises(InputError, match=message):
        groups_of(path)


def test_missing_columns_are_named_beside_those_that_exist(tmp_path):
    pq.write_table(pa.table({"prompt": ["a"], "tokens": [3]}), tmp_path / "x.parquet")
    with pytest.raises(
        InputError, match=r"got \['prompt', 'tokens'\]; allowed: also prompt_id, model, output_tokens"
    ):
        groups_of(tmp_path / "x.parquet")


def test_an_unknown_finish_reason_is_named(tmp_path):
    table = pa.table(
        {"prompt_id": ["a"], "model": ["m"], "output_tokens": [3], "finish_reason": ["eos"]},
    )
    with pytest.raises(
        InputError, match="row 0, column finish_reason: got 'eos'; allowed: stop, length, error"
    ):
        group_table(table, tmp_path / "x.parquet")


def test_command_writes_fits_summary_figure_and_run(tmp_path):
    samples = write_sample_file(tmp_path / "samples.parquet", num_prompts=12, max_tokens=120)
    fits, summary, figure = tmp_path / "fits.parquet", tmp_path / "s.json", tmp_path / "f.png"
    assert main([str(samples), "--out", str(fits), "--json", str(summary), "--figure", str(figure)]) == 0

    table = pq.read_table(fits)
    assert table.schema.metadata[b"tailcast.schema"] == b"fits/1"
    assert table.num_rows == 12
    assert table.column("num_samples").to_pylist() == [8] * 12
    assert table.column("prompt").to_pylist()[0] == "write a short rivers of 0"
    for row in table.to_pylist():
        assert row["num_censored"] == sum(not finished for finished in row["finished"])
        assert 0 <= row["ks_p"] <= 1
        assert row["max_tokens"] == 120
    content = json.loads(summary.read_text())
    assert set(content["ks"]) == {"log_t", "log_normal", "gamma", "weibull", "exponential"}
    assert content["ks"]["log_t"]["num_tested"] == 12
    assert content["num_censored"] == sum(table.column("num_censored").to_pylist()) > 0
    assert figure.read_bytes().startswith(b"\x89PNG")
    run = json.loads((tmp_path / "fits.parquet.run.json").read_text())
    assert run["config"]["nu"] == 3.5
    assert run["versions"]["scipy"]


def test_fits_are_read_back_as_they_were_written(tmp_path):
    samples = write_sample_file(tmp_path / "samples.parquet", num_prompts=6, max_tokens=60)
    assert main([str(samples), "--out", str(tmp_path / "fits.parquet"), "--alternatives", "false"]) == 0
    fitted = read_fits_or_fit(samples, FitOptions())
    read = read_fits_or_fit(tmp_path / "fits.parquet", FitOptions(nu=9.0))
    np.testing.assert_array_equal(read.mu, fitted.mu)
    np.testing.assert_array_equal(read.sigma, fitted.sigma)
    assert read.flags == fitted.flags
    assert read.nu == 3.5
    assert [lengths.tolist() for lengths in read.groups.lengths] == [
        x.tolist() for x in fitted.groups.lengths
    ]
    assert [ended.tolist() for ended in read.groups.finished] == [x.tolist() for x in fitted.groups.finished]


def test_ignoring_the_cut_shortens_the_fit(tmp_path):
    samples = write_sample_file(tmp_path / "samples.parquet", num_prompts=24, max_tokens=100)
    right = read_fits_or_fit(samples, FitOptions())
    none = read_fits_or_fit(samples, FitOptions(censoring="none"))
    several_cut = np.array([(~finished).sum() > 2 for finished in right.groups.finished])
    compared = several_cut & ~right.has_flag("all_censored")
    assert compared.sum() > 3
    assert (none.mu[compared] < right.mu[compared]).all()
    assert none.flags.count(("all_censored",)) == 0


def test_constant_and_fully_cut_groups_are_fitted_but_not_tested(tmp_path):
    path = write_lists(
        tmp_path / "x.parquet",
        [[50] * 5, [9] * 5, [3, 5, 9, 12, 20]],
        finished=[[False] * 5, [True] * 5, [True] * 5],
    )
    summary = tmp_path / "s.json"
    figure = tmp_path / "f.png"
    args = [
        str(path),
        "--out",
        str(tmp_path / "fits.parquet"),
        "--json",
        str(summary),
        "--figure",
        str(figure),
    ]
    assert main(args) == 0
    content = json.loads(summary.read_text())
    assert content["ks"]["gamma"]["num_tested"] == 1
    assert content["flags"] == {"all_censored": 1, "constant": 1, "sigma_floor": 1}
    assert pq.read_table(tmp_path / "fits.parquet").column("ks_p").to_pylist()[0] is None
    assert figure.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{dir}/none.parquet"], "samples: got"),
        (["{dir}/broken.parquet"], "a whole Parquet file"),
        (["{dir}/empty.parquet"], "not empty"),
        (["{dir}/good.parquet", "--group_by", "prompt_id,nope"], "also nope"),
        (["{dir}/good.parquet", "--nu", "0"], "nu"),
        (["{dir}/good.parquet", "--max_tokens", "0"], "max_tokens"),
        (["{dir}/good.parquet", "--figure", "{dir}/good.parquet/f.png"], "figure"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(arguments, message, tmp_path, capsys):
    good = write_sample_file(tmp_path / "good.parquet", num_prompts=3)
    (tmp_path / "broken.parquet").write_bytes(good.read_bytes()[:-300])
    (tmp_path / "empty.parquet").touch()
    before = sorted(tmp_path.iterdir())
    args = [argument.format(dir=tmp_path) for argument in arguments]
    assert main([*args, "--out", str(tmp_path / "fits.parquet")]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert message in lines[0]
    assert sorted(tmp_path.iterdir()) == before
