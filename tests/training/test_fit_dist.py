"""Reading answer lengths in both forms, the fits file and the command `fit-dist`."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_gen.tables import read_parquet
from scheduler_core.errors import InputError
from tests.training.data import write_lists, write_sample_file
from training.cli_fit_dist import main
from training.evaluating.rows import prompts_of
from training.fitting import fit_job
from training.fitting.fits import FitOptions, read_fits_or_fit
from training.fitting.sample_files import open_samples
from training.fitting.samples import group_table


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
        ([[5, 6], [5], []], {}, "x.parquet, column output_tokens: got '2 samples in the largest group'"),
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
        ([[5, 6, 7]], {"finished": [[True, None, True]]}, "row 0, column finished: got None"),
        ([[5, 6, 7]], {"finished": [[1, 0, 1]]}, "column finished: got 'list<.*lists of booleans"),
        ([[5, 6, 7]], {"max_tokens": [0]}, "row 0, column max_tokens: got 0"),
        ([[5, 6, 7]], {"max_tokens": [8.0]}, "column max_tokens: got 'double'"),
        ([["a", "b", "c"]], {}, "column output_tokens: got 'list<.*string>'"),
    ],
)
def test_bad_values_are_named_by_row_and_column(lengths, columns, message, tmp_path):
    path = write_lists(tmp_path / "x.parquet", lengths, **columns)
    with pytest.raises(InputError, match=message):
        groups_of(path)


def test_ragged_groups_keep_their_sizes(tmp_path):
    """Groups of fewer than three answers are kept too, an empty one included: their fits are flagged."""
    lengths = [[7], [], [5, 6, 7], list(range(1, 900)), [8, 9]]
    groups = groups_of(write_lists(tmp_path / "x.parquet", lengths))
    assert [values.tolist() for values in groups.lengths] == lengths
    assert groups.counts.tolist() == [1, 0, 3, 899, 2]
    some = groups.take([3, 1, 0])
    assert [values.tolist() for values in some.lengths] == [lengths[3], [], [7]]
    assert some.column("prompt_id") == ["p3", "p1", "p0"]
    assert [len(values) for values in some.finished[1:]] == [0, 1]


def test_weights_stay_with_their_answers(tmp_path):
    lists = write_lists(tmp_path / "x.parquet", [[5, 6, 7], [8, 9]], w=[[1.0, 2.0, 3.0], [4.0, 5.0]])
    groups = groups_of(lists, weights="w")
    assert groups.flat_weights.tolist() == [1, 2, 3, 4, 5]
    assert groups.take([1]).flat_weights.tolist() == [4, 5]
    assert groups_of(lists).flat_weights is None
    rows = pa.table(
        {
            "prompt_id": ["a", "b", "a", "a", "b"],
            "output_tokens": [1, 2, 3, 4, 5],
            "finished": [True, False, True, False, True],
            "w": [10, 20, 30, 40, 50],
        }
    )
    groups = group_table(rows, tmp_path / "x.parquet", keys=("prompt_id",), weights="w")
    assert groups.flat_weights.tolist() == [10, 30, 40, 20, 50]
    assert groups.flat_finished.tolist() == [True, True, False, False, True]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([[1.0, 2.0, 0.0]], "row 0, column w: got 0.0; allowed: finite numbers above 0"),
        ([[1.0, 2.0, float("inf")]], "row 0, column w: got inf"),
        ([[1.0, 2.0, None]], "row 0, column w: got nan"),
        ([[1.0, 2.0]], "row 0, column w: got .* as many values as output_tokens"),
        ([1.0], "column w: got 'double'; allowed: lists of numbers"),
        ([["a", "b", "c"]], "column w: got 'list<.*string>'; allowed: numbers"),
    ],
)
def test_bad_weights_are_named(weights, message, tmp_path):
    with pytest.raises(InputError, match=message):
        groups_of(write_lists(tmp_path / "x.parquet", [[5, 6, 7]], w=weights), weights="w")
    with pytest.raises(InputError, match="also nope"):
        groups_of(tmp_path / "x.parquet", weights="nope")


def test_several_keys_of_any_type_make_groups_in_order_of_appearance(tmp_path):
    rows = pa.table(
        {
            "temperature": [0.7, 0.0, 0.7, 0.7, 0.0],
            "model": ["b", "a", "a", "b", "a"],
            "output_tokens": [1, 2, 3, 4, 5],
            "finish_reason": ["stop"] * 5,
        }
    )
    chunks = pa.concat_tables([rows.slice(0, 2), rows.slice(2)])
    groups = group_table(chunks, tmp_path / "x", keys=("temperature", "model"), min_samples=0)
    assert [groups.name(number) for number in range(3)] == [
        "temperature=0.7, model='b'",
        "temperature=0.0, model='a'",
        "temperature=0.7, model='a'",
    ]
    assert [values.tolist() for values in groups.lengths] == [[1, 4], [2, 5], [3]]


def test_command_writes_fits_summary_figure_and_run(tmp_path):
    samples = write_sample_file(tmp_path / "samples.parquet", num_prompts=12, max_tokens=120)
    fits, summary, figure = tmp_path / "fits.parquet", tmp_path / "s.json", tmp_path / "f.png"
    assert main([str(samples), "--out", str(fits), "--json", str(summary), "--figure", str(figure)]) == 0

    table = pq.read_table(fits)
    assert table.schema.metadata[b"tailcast.schema"] == b"fits/2"
    assert table.num_rows == 12
    assert table.column("num_samples").to_pylist() == [8] * 12
    assert table.column("prompt").to_pylist()[0] == "write a short rivers of 0"
    for row in table.to_pylist():
        assert row["num_censored"] == sum(not finished for finished in row["finished"])
        assert 0 <= row["ks_p"] <= 1
        assert row["max_tokens"] == 120
    content = json.loads(summary.read_text())
    assert {"log_t", "log_normal", "gamma", "weibull", "exponential"} <= set(content["ks"])
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{dir}/none.parquet"], "samples: got"),
        (["{dir}/broken.parquet"], "a whole Parquet file"),
        (["{dir}/empty.parquet"], "not empty"),
        (["{dir}/good.parquet", "--group_by", "prompt_id,nope"], "also nope"),
        (["{dir}/good.parquet", "--nu", "0"], "nu"),
        (["{dir}/good.parquet", "--nu", "many"], "nu"),
        (["{dir}/good.parquet", "--max_tokens", "0"], "max_tokens"),
        (["{dir}/good.parquet", "--processes", "0"], "processes"),
        (["{dir}/good.parquet", "--block-groups", "0"], "block_groups"),
        (["{dir}/good.parquet", "--weights", "nope"], "also nope"),
        (["{dir}/good.parquet", "--solver", "lbfgsb", "--nu", "free"], "solver"),
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


def test_groups_with_few_or_no_answers_have_flagged_rows(tmp_path):
    """The fits of the others are what they are without them."""
    lengths = [[], [7], [5, 6], [5, 6, 9], [3, 8, 30, 31], []]
    path = write_lists(tmp_path / "x.parquet", lengths, w=[[1.0 + size for size in row] for row in lengths])
    rest = write_lists(
        tmp_path / "rest.parquet", lengths[3:5], w=[[1.0 + size for size in row] for row in lengths[3:5]]
    )
    extra = ["--weights", "w", "--bootstrap", "19", "--progress", "false"]
    figure, report = tmp_path / "f.png", tmp_path / "f.html"
    assert (
        main(
            [
                str(path),
                "--out",
                str(tmp_path / "fits.parquet"),
                *extra,
                "--figure",
                str(figure),
                "--report",
                str(report),
            ]
        )
        == 0
    )
    assert main([str(rest), "--out", str(tmp_path / "others.parquet"), *extra]) == 0

    rows = pq.read_table(tmp_path / "fits.parquet").to_pylist()
    assert [row["num_samples"] for row in rows] == [0, 1, 2, 3, 4, 0]
    assert [row["output_tokens"] for row in rows] == lengths
    assert [row["flags"] for row in rows] == [["too_few_samples"]] * 3 + [[], [], ["too_few_samples"]]
    assert [row["converged"] for row in rows] == [False] * 3 + [True, True, False]
    assert all(
        rows[at][name] is None for at in (0, 5) for name in ("mu", "sigma", "log_likelihood", "ks_p_boot")
    )
    others = pq.read_table(tmp_path / "others.parquet")
    same = [
        name for name in others.column_names if "boot" not in name and not name.endswith(("_low", "_high"))
    ]
    fitted = (
        pq.read_table(tmp_path / "fits.parquet")
        .slice(3, 2)
        .select(same)
        .drop_columns(["prompt_id", "prompt"])
    )
    assert fitted.to_pylist() == others.select(same).drop_columns(["prompt_id", "prompt"]).to_pylist()
    assert figure.stat().st_size > 0
    assert "<html" in report.read_text(encoding="utf-8")


def test_options_reach_the_fit_and_a_resumed_run(tmp_path, capsys):
    samples = str(write_sample_file(tmp_path / "samples.parquet", num_prompts=8))
    out = tmp_path / "fits.parquet"
    assert main([samples, "--out", str(out), "--family", "gamma", "--alternatives", "false"]) == 0
    assert {"shape", "scale"} <= set(pq.read_schema(out).names)
    assert main([samples, "--out", str(out), "--group-by", "model"]) == 0
    assert pq.read_table(out).column("num_samples").to_pylist() == [64]

    # Parts of a run with other options are refused, unless they may go.
    parts = tmp_path / "fits.parquet.parts"
    parts.mkdir()
    (parts / "manifest.json").write_text("{}")
    capsys.readouterr()
    assert main([samples, "--out", str(out)]) == 2
    assert "--resume false starts over" in capsys.readouterr().err
    assert main([samples, "--out", str(out), "--resume", "false"]) == 0
    assert not parts.exists()
    assert pq.read_metadata(out).num_rows == 8


@pytest.mark.parametrize(
    ("options", "columns"),
    [
        (["--nu", "free"], {"mu", "sigma", "nu", "se_nu", "log_t_ks_p"}),
        (["--family", "log-normal"], {"mu", "sigma", "nu", "log_t_free_log_likelihood"}),
        (["--family", "gamma"], {"shape", "scale", "se_shape", "se_scale"}),
        (["--family", "exponential"], {"scale", "se_scale", "weibull_ad_stat"}),
        (["--solver", "lbfgsb"], {"mu", "se_sigma"}),
        (["--integers", "true"], {"mu", "se_sigma"}),
    ],
)
def test_every_family_and_option_gives_a_whole_file_and_summary(options, columns, tmp_path):
    path = write_lists(
        tmp_path / "x.parquet",
        [[50] * 5, [9] * 5, [3, 5, 9, 12, 20, 31], [100, 90, 130, 100, 100, 100], [4, 4, 1000, 3]],
        finished=[[False] * 5, [True] * 5, [True] * 6, [True] * 5 + [False], [True] * 4],
    )
    out, summary = tmp_path / "fits.parquet", tmp_path / "s.json"
    assert main([str(path), "--out", str(out), "--json", str(summary), "--processes", "1", *options]) == 0
    table = pq.read_table(out)
    assert columns <= set(table.column_names)
    assert table.column("flags").to_pylist()[0] == ["all_censored"]
    content = json.loads(summary.read_text())
    assert content["num_groups"] == 5
    assert len(content["ks"]) == 6
    assert all(row["num_tested"] == 3 for row in content["ks"].values())


def test_groups_without_answers_are_left_out_when_fits_are_read(tmp_path, caplog):
    path = write_lists(tmp_path / "x.parquet", [[], [5, 6, 9], [3, 8, 30]])
    out = tmp_path / "fits.parquet"
    assert main([str(path), "--out", str(out)]) == 0
    caplog.set_level("INFO")
    for source in (out, path):
        read = read_fits_or_fit(source, FitOptions())
        assert [lengths.tolist() for lengths in read.groups.lengths] == [[5, 6, 9], [3, 8, 30]]
        assert np.isfinite(read.mu).all()
        assert "1 groups without any sample left out" in caplog.text


def test_prompts_may_be_missing_but_not_for_training(tmp_path):
    path = write_lists(tmp_path / "x.parquet", [[5, 6, 9], [3, 8, 30]], prompt=["a", None])
    out = tmp_path / "fits.parquet"
    assert main([str(path), "--out", str(out)]) == 0
    assert pq.read_table(out).column("prompt").to_pylist() == ["a", None]
    with pytest.raises(InputError, match="column prompt: got None"):
        prompts_of(read_fits_or_fit(out, FitOptions()))


ANSWERS = {"prompt_id": "p", "model": "m", "run_id": "r", "finish_reason": "stop"}


def answers(numbers, **more):
    rows = [ANSWERS | {"sample_index": number, "output_tokens": 5 + number} | more for number in numbers]
    return pa.Table.from_pylist(rows)


def test_a_sample_that_is_there_twice_is_refused(tmp_path):
    path = tmp_path / "x.parquet"
    pq.write_table(pa.concat_tables([answers(range(40)), answers([3])]), path)
    with pytest.raises(
        InputError, match=r"x.parquet, row 40: .*sample_index=3.*row 3 has the same prompt_id"
    ):
        fit_job.fit_file(path, tmp_path / "f.parquet", FitOptions())
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.parquet"]
    # Another run, or a sampling setting that is grouped by, makes another answer of it.
    pq.write_table(pa.concat_tables([answers(range(4)), answers([3], run_id="s")]), path)
    assert groups_of(path).counts.tolist() == [5]
    tables = [answers(range(4), temperature=0.5), answers(range(4), temperature=1.0)]
    pq.write_table(pa.concat_tables(tables), path)
    assert groups_of(path, keys=("prompt_id", "temperature")).counts.tolist() == [4, 4]


def test_a_file_that_is_there_twice_is_refused(tmp_path, capsys):
    folder = tmp_path / "samples"
    folder.mkdir()
    pq.write_table(answers(range(4)).drop_columns(["sample_index"]), folder / "a.parquet")
    (folder / "b.parquet").symlink_to(folder / "a.parquet")
    assert main([str(folder), "--out", str(tmp_path / "f.parquet")]) == 2
    assert "samples samples: got 'b.parquet'; allowed: files that differ" in capsys.readouterr().err
    assert [entry.name for entry in tmp_path.iterdir()] == ["samples"]


@pytest.mark.parametrize("label", ["samples/3", "fits/3", "samples/x"])
def test_files_of_a_newer_schema_are_refused(label, tmp_path):
    path = tmp_path / "x.parquet"
    pq.write_table(answers(range(4)).replace_schema_metadata({"tailcast.schema": label}), path)
    for read in (open_samples, groups_of):
        with pytest.raises(InputError, match=rf"x.parquet: schema: got '{label}'; allowed: .*/2 or older"):
            read(path)


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), 130), (OSError(28, "No space left"), 2)])
def test_parts_stay_only_where_a_run_can_go_on(error, code, tmp_path, capsys, monkeypatch):
    path, out = tmp_path / "x.parquet", tmp_path / "f.parquet"
    pq.write_table(pa.concat_tables([answers(range(4)), answers(range(4), prompt_id="q")]), path)
    command = [str(path), "--out", str(out), "--block-groups", "1", "--progress", "false"]
    real = fit_job._Parts.write

    def failing_at(last):
        def write(parts, number, content):
            if number == last:
                raise error
            real(parts, number, content)

        return write

    for last, rests in ((0, []), (1, ["f.parquet.parts"])):
        monkeypatch.setattr(fit_job._Parts, "write", failing_at(last))
        assert main(command) == code
        assert len(capsys.readouterr().err.strip().splitlines()) == 1
        assert sorted(entry.name for entry in tmp_path.iterdir()) == [*rests, "x.parquet"]
    monkeypatch.undo()
    shard = out.with_name("f.parquet.parts") / "shard-00000000.parquet"
    content = shard.read_bytes()
    shard.write_bytes(content[:-9])
    assert main(command) == 2
    assert "is damaged; --resume false starts over" in capsys.readouterr().err
    shard.write_bytes(content)
    assert main(command) == 0
    assert pq.read_metadata(out).num_rows == 2
