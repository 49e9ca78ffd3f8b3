"""Grouping of output lengths in both forms, the fits file with its figure and report, and the command `fit-dist`."""

import json
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from scheduler_core.errors import InputError
from scheduler_core.shell.table_files import read_parquet
from tests.training.data import assert_refused, finished_of, lengths_of, write_lists, write_sample_file
from training.commands.fit_dist import main
from training.evaluating.rows import EvaluationRows
from training.fitting import fit_job
from training.fitting.fits import FitOptions, fit_groups, fits_table, read_fits_or_fit
from training.fitting.report import summarize_file, write_figure
from training.fitting.sample_files import open_samples
from training.fitting.samples import group_table

YES, NO = True, False
LAST_NOT = [YES, YES, YES, NO]
MAX_TOKENS = 300


def groups_of(path, **options):
    return group_table(read_parquet(path, "samples"), path, **options)


def fit(path, out, *options):
    """Runs the command without a bar; returns the fits."""
    assert main([str(path), "--out", str(out), "--progress", "false", *options]) == 0
    return pq.read_table(out)


def test_samples_become_groups_in_order_with_what_was_truncated(tmp_path):
    table = pa.table(
        {
            "prompt_id": ["b", "a", "b", "a", "b", "a", "a"],
            "temperature": [0.5] * 7,
            "prompt": ["B", "A"] * 3 + ["A"],
            "output_tokens": [4, 9, 6, 8, 10, 0, 7],
            "finish_reason": ["stop", "length", "stop", "stop", "length", "error", "stop"],
            "max_tokens": pa.array([10, 9, 10, 9, 10, 9, 9], pa.int32()),
        }
    )
    chunks = pa.concat_tables([table.slice(0, 2), table.slice(2)])
    groups = group_table(chunks, tmp_path / "x.parquet", keys=("prompt_id", "temperature"))
    assert groups.name(0) == "prompt_id='b', temperature=0.5"
    assert groups.column("prompt") == ["B", "A"]
    assert lengths_of(groups) == [[4, 6, 10], [9, 8, 7]]
    assert finished_of(groups) == [[True, True, False], [False, True, True]]
    assert groups.max_tokens == [10, 9]
    assert groups.num_errors == 1


@pytest.mark.parametrize(("num_failed", "code"), [(0, 0), (4, 0), (5, 3)])
def test_the_last_line_says_how_many_samples_failed(tmp_path, caplog, num_failed, code):
    columns = {"prompt_id": "p", "model": "m", "output_tokens": 7, "finish_reason": "stop"}
    rows = [columns | {"output_tokens": 7 + number} for number in range(4)]
    rows += [columns | {"output_tokens": 0, "finish_reason": "error"}] * num_failed
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "s.parquet")
    args = [str(tmp_path / "s.parquet"), "--out", str(tmp_path / "f.parquet"), "--progress", "false"]
    with caplog.at_level("INFO"):
        assert main([*args, "--alternatives", "false"]) == code
    line = f"left out {num_failed} of {4 + num_failed} samples: {num_failed} x failed"
    assert (caplog.messages[-1] == line) == (num_failed > 0)
    assert (tmp_path / "f.parquet").exists()


@pytest.mark.parametrize(
    ("rows", "columns", "max_tokens", "lengths", "finished", "limits"),
    [
        ([[5, 100, 101]], {}, None, [[5, 100, 101]], [[YES] * 3], [None]),
        ([[5, 100, 101]], {}, 100, [[5, 100, 100]], [[YES, NO, NO]], [100]),
        ([[5, 9, 11, 9]], {"finished": [LAST_NOT]}, None, [[5, 9, 11, 9]], [LAST_NOT], [200]),
        ([[5, 9, 11, 9]], {"finished": [LAST_NOT]}, 9, [[5, 9, 9, 9]], [[YES, YES, NO, NO]], [9]),
        ([[5, 6], [7]], {"prompt_id": ["a", "a"]}, None, [[5, 6, 7]], [[YES] * 3], [None]),
        ([[7], [], [5, 6, 7]], {}, None, [[7], [], [5, 6, 7]], [[YES], [], [YES] * 3], [None] * 3),
    ],
)
def test_flags_or_limits_censor_lists(rows, columns, max_tokens, lengths, finished, limits, tmp_path):
    columns = columns | ({"max_tokens": [200]} if "finished" in columns else {})
    groups = groups_of(write_lists(tmp_path / "x.parquet", rows, **columns), max_tokens=max_tokens)
    assert lengths_of(groups) == lengths
    assert finished_of(groups) == finished
    assert groups.max_tokens == limits


@pytest.mark.parametrize(
    ("lengths", "columns", "message"),
    [
        ([[5, 6, 7], [5, float("nan"), 7.0]], {}, "row 1, column output_tokens: got nan"),
        ([[5, 6, 7.5]], {}, "row 0, column output_tokens: got 7.5"),
        ([[5, 6, 7], None], {}, "row 1, column output_tokens: got None"),
        ([[5, 6, 7]], {"prompt": [" "]}, "row 0, column prompt: got ' '"),
        ([[5, 6, 7]], {"prompt_id": [None]}, "row 0, column prompt_id"),
        ([[5, 6, 7]], {"finished": [[True]]}, "row 0, column finished"),
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


def test_command_writes_fits_summary_figure_and_run(tmp_path):
    samples = write_sample_file(tmp_path / "samples.parquet", num_prompts=12, max_tokens=120)
    summary, figure = tmp_path / "s.json", tmp_path / "f.png"
    table = fit(samples, tmp_path / "fits.parquet", "--json", str(summary), "--figure", str(figure))
    assert table.schema.metadata[b"tailcast.schema"] == b"fits/2"
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
    fit(samples, tmp_path / "fits.parquet", "--alternatives", "false")
    fitted = read_fits_or_fit(samples, FitOptions())
    read = read_fits_or_fit(tmp_path / "fits.parquet", FitOptions(nu=9.0))
    for part in (lambda fits: fits.mu.tolist(), lambda fits: fits.sigma.tolist(), lambda fits: fits.flags):
        assert part(read) == part(fitted)
    assert read.nu == 3.5
    for part in (lengths_of, finished_of):
        assert part(read.groups) == part(fitted.groups)


def test_ignoring_truncation_shortens_the_fit(tmp_path):
    samples = write_sample_file(tmp_path / "samples.parquet", num_prompts=24, max_tokens=100)
    right = read_fits_or_fit(samples, FitOptions())
    none = read_fits_or_fit(samples, FitOptions(censoring="none"))
    several = np.array([finished.count(False) > 2 for finished in finished_of(right.groups)])
    compared = several & ~right.has_flag("all_censored")
    assert compared.sum() > 3
    assert (none.mu[compared] < right.mu[compared]).all()
    assert none.flags.count(("all_censored",)) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{dir}/none.parquet"], "samples: got"),
        (["{dir}/broken.parquet"], "a whole Parquet file"),
        (["{dir}/empty.parquet"], "not empty"),
        (["{dir}/good.parquet", "--group_by", "prompt_id,nope"], "also nope; --group_by names other columns"),
        (["{dir}/log.csv"], "log.csv, columns: got"),
        (["{dir}/log.parquet"], "also prompt_id, model, output_tokens; --group_by names other columns"),
        (
            ["{dir}/log.parquet", "--group_by", "prompt"],
            "also output_tokens; import-lengths log log.parquet --columns output_tok",
        ),
        (
            ["{dir}/plain.parquet", "--group_by", "prompt"],
            "import-lengths log plain.parquet --columns finish_reason=COLUMN",
        ),
        (["{dir}/good.parquet", "--nu", "0"], "nu"),
        (["{dir}/good.parquet", "--processes", "0"], "processes"),
        (["{dir}/good.parquet", "--bootstrap", "5"], "bootstrap"),
        (["{dir}/good.parquet", "--figure", "{dir}/good.parquet/f.png"], "figure"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(arguments, message, tmp_path, capsys):
    good = write_sample_file(tmp_path / "good.parquet", num_prompts=3)
    (tmp_path / "broken.parquet").write_bytes(good.read_bytes()[:-300])
    (tmp_path / "empty.parquet").touch()
    (tmp_path / "log.csv").write_text("prompt,tokens\na,5\n")
    pq.write_table(pa.table({"prompt": ["a"], "tokens": [5]}), tmp_path / "log.parquet")
    pq.write_table(pa.table({"prompt": ["a"], "output_tokens": [5]}), tmp_path / "plain.parquet")
    args = [argument.format(dir=tmp_path) for argument in arguments]
    assert_refused(main, [*args, "--out", tmp_path / "fits.parquet"], message, tmp_path, capsys)


def test_groups_with_few_or_no_samples_have_flagged_rows_and_change_no_other_fit(tmp_path, caplog):
    lengths = [[], [7], [5, 6], [5, 6, 9], [3, 8, 30, 31], []]
    path = write_lists(tmp_path / "x.parquet", lengths)
    rest = write_lists(tmp_path / "rest.parquet", lengths[3:5], prompt_id=["p3", "p4"])
    options = ["--bootstrap", "19"]
    figure = tmp_path / "f.png"
    table = fit(path, tmp_path / "fits.parquet", *options, "--figure", str(figure))
    rows = table.to_pylist()
    assert [row["num_samples"] for row in rows] == [0, 1, 2, 3, 4, 0]
    assert [row["output_tokens"] for row in rows] == lengths
    assert [row["flags"] for row in rows] == [["too_few_samples"]] * 3 + [[], [], ["too_few_samples"]]
    assert [row["converged"] for row in rows] == [False] * 3 + [True, True, False]
    empty = [rows[at][name] for at in (0, 5) for name in ("mu", "sigma", "log_likelihood", "ks_p_boot")]
    assert empty == [None] * 8
    others = fit(rest, tmp_path / "others.parquet", *options).drop_columns(["prompt"])
    assert table.slice(3, 2).select(others.column_names).to_pylist() == others.to_pylist()
    assert figure.stat().st_size > 0
    # They are left out when the fits are read.
    caplog.set_level("INFO")
    for source in (tmp_path / "fits.parquet", path):
        assert lengths_of(read_fits_or_fit(source, FitOptions()).groups) == lengths[1:5]
        assert "2 groups without samples left out" in caplog.text
        caplog.clear()


@pytest.mark.parametrize(
    ("options", "columns"),
    [
        (["--nu", "free"], {"mu", "sigma", "nu", "se_nu", "log_t_ks_p"}),
        (["--family", "log-normal"], {"mu", "sigma", "nu", "log_t_free_log_likelihood"}),
        (["--family", "gamma"], {"shape", "scale", "se_shape", "se_scale"}),
        (["--family", "exponential"], {"scale", "se_scale", "weibull_ad_stat"}),
        (["--integers", "true"], {"mu", "se_sigma"}),
        (["--solver", "lbfgsb", "--bootstrap", "19"], {"mu", "ks_p_boot"}),
    ],
)
def test_every_family_and_option_gives_a_whole_file_and_summary(options, columns, tmp_path):
    path = write_lists(
        tmp_path / "x.parquet",
        [[50] * 5, [9] * 5, [3, 5, 9, 12, 20, 31], [100, 90, 130, 100, 100, 100], [4, 4, 1000, 3]],
        finished=[[False] * 5, [True] * 5, [True] * 6, [True] * 5 + [False], [True] * 4],
        prompt=["a", "b", "c", "d", None],
    )
    out, summary = tmp_path / "fits.parquet", tmp_path / "s.json"
    table = fit(path, out, "--json", str(summary), "--processes", "1", *options)
    assert columns <= set(table.column_names)
    assert table.column("flags").to_pylist()[0] == ["all_censored"]
    content = json.loads(summary.read_text())
    assert content["num_groups"] == 5
    assert [row["num_tested"] for row in content["ks"].values()] == [3] * 6
    # A prompt may be missing, but not where predictors read it.
    with pytest.raises(InputError, match="column prompt: got None"):
        EvaluationRows.of(read_fits_or_fit(path, FitOptions()))


def samples_table(numbers, **more):
    row = {"prompt_id": "p", "model": "m", "run_id": "r", "finish_reason": "stop"}
    rows = [row | {"sample_index": number, "output_tokens": 5 + number} | more for number in numbers]
    return pa.Table.from_pylist(rows)


# A row that is there twice counted twice: se_mu 0.101 in place of 0.143.
@pytest.mark.mend
def test_a_sample_that_is_there_twice_is_refused(tmp_path):
    path = tmp_path / "x.parquet"
    pq.write_table(pa.concat_tables([samples_table(range(40)), samples_table([3])]), path)
    with pytest.raises(InputError, match=r"row 40: .*sample_index=3.*row 3 has the same prompt_id"):
        fit_job.fit_file(path, tmp_path / "f.parquet", FitOptions())
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.parquet"]
    # Another run, or a sampling setting that is grouped by, makes another sample of it.
    pq.write_table(pa.concat_tables([samples_table(range(4)), samples_table([3], run_id="s")]), path)
    assert groups_of(path).counts.tolist() == [5]
    tables = [samples_table(range(4), temperature=0.5), samples_table(range(4), temperature=1.0)]
    pq.write_table(pa.concat_tables(tables), path)
    assert groups_of(path, keys=("prompt_id", "temperature")).counts.tolist() == [4, 4]


# A file that is there twice counted twice.
@pytest.mark.mend
def test_a_file_that_is_there_twice_is_refused(tmp_path, capsys):
    folder = tmp_path / "samples"
    folder.mkdir()
    pq.write_table(samples_table(range(4)).drop_columns(["sample_index"]), folder / "a.parquet")
    (folder / "b.parquet").symlink_to(folder / "a.parquet")
    assert main([str(folder), "--out", str(tmp_path / "f.parquet")]) == 2
    assert "samples samples: got 'b.parquet'; allowed: files that differ" in capsys.readouterr().err
    assert [entry.name for entry in tmp_path.iterdir()] == ["samples"]


# A newer schema was read as if it were known.
@pytest.mark.mend
def test_files_of_a_newer_schema_are_refused(tmp_path):
    path = tmp_path / "x.parquet"
    pq.write_table(samples_table(range(4)).replace_schema_metadata({"tailcast.schema": "samples/3"}), path)
    for read in (partial(open_samples, work=tmp_path), groups_of):
        with pytest.raises(InputError, match=r"x.parquet: schema: got 'samples/3'; allowed: .*/2 or older"):
            read(path)


def fitted_file(tmp_path, *, num_groups=12, prompt=None, **options):
    """A fits file of log-t groups, some censored, and of constant, wholly censored and too small ones."""
    mu = 3.5 + 0.15 * np.arange(num_groups)[:, None]
    drawn = np.exp(mu + 0.35 * np.random.default_rng(1).standard_t(3.5, (num_groups, 15)))
    lengths = np.clip(np.rint(drawn), 1, MAX_TOKENS).astype(int).tolist()
    lengths += [[7] * 5, [MAX_TOKENS] * 5, [5, 9]]
    finished = [*(drawn <= MAX_TOKENS).tolist(), [True] * 5, [False] * 5, [True, True]]
    columns = {"finished": finished, "max_tokens": [MAX_TOKENS] * len(lengths)}
    if prompt is not None:
        columns["prompt"] = [prompt] * len(lengths)
    samples = write_lists(tmp_path / "samples.parquet", lengths, **columns)
    choice = FitOptions(**options)
    path = tmp_path / "fits.parquet"
    groups = group_table(read_parquet(samples, "samples"), samples)
    pq.write_table(fits_table(fit_groups(groups, choice)), path)
    return path, summarize_file(path, choice.family, choice.nu)


@pytest.mark.parametrize(
    "options",
    [
        {"alternatives": True, "bootstrap": 19},
        # Few groups, few panels to draw.
        {"nu": None, "alternatives": True, "num_groups": 3},
        {"family": "gamma", "num_groups": 3},
        {"family": "exponential", "censoring": "none", "num_groups": 3},
        {"num_groups": 0},
    ],
)
def test_the_summary_counts_flags_and_the_figure_draws_any_family(tmp_path, options):
    path, summary = fitted_file(tmp_path, prompt="pay $x$", **options)
    write_figure(path, tmp_path / "fits.png", summary["family"])
    assert (tmp_path / "fits.png").read_bytes().startswith(b"\x89PNG")
    is_cut = options.get("censoring") != "none"
    counts = {"constant": 1 + (not is_cut), "all_censored": int(is_cut), "too_few_samples": 1}
    assert {name: summary["flags"].get(name, 0) for name in counts} == counts


def test_a_file_of_hopeless_groups_still_has_a_figure(tmp_path):
    path, _ = fitted_file(tmp_path, num_groups=0)
    write_figure(path, tmp_path / "fits.png", "log_t")
    assert (tmp_path / "fits.png").read_bytes().startswith(b"\x89PNG")
