"""Files of fits: the same bytes whoever makes them, wherever they were interrupted."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from scheduler_core.errors import InputError, MissingExtraError, TailcastError
from tests.training.stand_in_fit import die_once, mean_lengths
from training.fitting import sample_files
from training.fitting.fit_job import Workers, fit_file
from training.fitting.fits import FitOptions
from training.fitting.sample_files import ROW, open_samples

ROOT = Path(__file__).parents[2]


def samples(num_groups, *, seed=0, longest=9):
    """A table with one row for each sample: ragged groups, their rows scattered over the whole table."""
    rng = np.random.default_rng(seed)
    group = rng.permutation(np.repeat(np.arange(num_groups), rng.integers(1, longest, num_groups)))
    lengths = rng.integers(1, 400, len(group))
    return pa.table(
        {
            "prompt_id": pa.array([f"p{number}" for number in group // 2]),
            "model": pa.array(np.where(group % 2, "large", "small")),
            "prompt": pa.array([f"prompt {number}" for number in group // 2]),
            "output_tokens": lengths,
            "finish_reason": pa.array(np.where(lengths > 300, "length", "stop")),
            "max_tokens": pa.array(np.full(len(group), 300)),
        }
    )


def lists(num_groups, *, longest=9, seed=0):
    """A table with one row for each group."""
    rng = np.random.default_rng(seed)
    return pa.table(
        {
            "prompt_id": [f"p{number}" for number in range(num_groups)],
            "model": ["m"] * num_groups,
            "output_tokens": [
                rng.integers(1, 400, size).tolist() for size in rng.integers(0, longest, num_groups)
            ],
        }
    )


def write(table, path):
    pq.write_table(table, path, row_group_size=50)
    return path


def fit(path, out, fit=mean_lengths, *, block_groups=16, options=FitOptions(), **more):  # noqa: B008
    counts, _ = fit_file(path, out, options, block_groups=block_groups, fit=fit, **more)
    return counts


@pytest.fixture(params=["samples", "lists"])
def path(request, tmp_path):
    """A file of either form, more than ten blocks."""
    table = samples(400) if request.param == "samples" else lists(200)
    return write(table, tmp_path / "samples.parquet")


def test_the_file_holds_every_group_once_in_order_of_first_appearance(path, tmp_path):
    counts = fit(path, tmp_path / "out.parquet")
    table = pq.read_table(tmp_path / "out.parquet")
    names = list(zip(*(table.column(name).to_pylist() for name in ("prompt_id", "model")), strict=True))
    rows = pq.read_table(path)
    keys = zip(*(rows.column(name).to_pylist() for name in ("prompt_id", "model")), strict=True)
    assert names == list(dict.fromkeys(keys))
    assert counts.num_groups == table.num_rows
    assert counts.num_samples == sum(table.column("num_samples").to_pylist())
    lengths = rows.column("output_tokens").to_pylist()
    total = sum(value if isinstance(value, int) else sum(value) for value in lengths)
    assert sum(table.column("total").to_pylist()) == total
    assert table.schema.metadata[b"kind"] == b"totals"
    assert sorted(tmp_path.iterdir()) == [tmp_path / "out.parquet", path]


def test_scattered_rows_that_do_not_fit_into_memory_are_grouped_on_disk(tmp_path, monkeypatch):
    path = write(samples(60_000, longest=12), tmp_path / "samples.parquet")
    fit(path, tmp_path / "one.parquet", block_groups=10_000)
    monkeypatch.setattr(sample_files, "MEMORY_LIMIT", "48MB")
    monkeypatch.setattr(sample_files, "THREADS", 1)
    monkeypatch.setattr(sample_files, "_BATCH_ROWS", 2048)
    fit(path, tmp_path / "two.parquet", block_groups=10_000)
    assert (tmp_path / "one.parquet").read_bytes() == (tmp_path / "two.parquet").read_bytes()


@pytest.mark.parametrize(("max_groups", "max_samples"), [(7, 1 << 20), (1000, 20), (1000, 1)])
def test_blocks_are_whole_groups_within_the_limits(path, tmp_path, monkeypatch, max_groups, max_samples):
    monkeypatch.setattr(sample_files, "BLOCK_SAMPLES", max_samples)
    blocks = list(open_samples(path).blocks(max_groups, tmp_path / "work"))
    assert len(blocks) > 10
    groups = [block.column(sample_files.GROUP).unique().to_pylist() for block in blocks]
    assert all(len(names) <= max_groups for names in groups)
    every = [name for names in groups for name in names]
    assert every == sorted(set(every))
    for names, block in zip(groups, blocks, strict=True):
        lengths = block.column("output_tokens").to_pylist()
        num_samples = sum(len(value) if isinstance(value, list) else 1 for value in lengths)
        assert len(names) == 1 or num_samples <= max_samples
    rows = pa.chunked_array([chunk for block in blocks for chunk in block.column(ROW).chunks])
    assert sorted(rows.to_pylist()) == list(range(pq.read_metadata(path).num_rows))


def test_keys_that_come_again_are_named_with_both_rows(tmp_path):
    table = lists(200)
    path = write(pa.concat_tables([table, table.slice(17, 1)]), tmp_path / "x.parquet")
    with pytest.raises(
        InputError,
        match=r"x.parquet, row 200: got .*prompt_id='p17', model='m'.* each group in one row \(x.parquet, row 17 has",
    ):
        fit(path, tmp_path / "out.parquet")


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("output_tokens", 0, "row 123, column output_tokens: got 0.0"),
        ("prompt_id", None, "row 123, column prompt_id: got None"),
    ],
)
def test_bad_values_are_named_by_their_row_in_the_file(column, value, message, tmp_path):
    table = samples(100)
    values = table.column(column).to_pylist()
    values[123] = value
    table = table.set_column(table.column_names.index(column), column, pa.array(values))
    path = write(table, tmp_path / "x.parquet")
    with pytest.raises(InputError, match=message):
        fit(path, tmp_path / "out.parquet")
    assert list(tmp_path.iterdir()) == [path]


def test_processes_write_the_same_bytes(path, tmp_path):
    fit(path, tmp_path / "one.parquet")
    fit(path, tmp_path / "two.parquet", workers=Workers(processes=2))
    assert (tmp_path / "one.parquet").read_bytes() == (tmp_path / "two.parquet").read_bytes()


@pytest.fixture
def no_token(monkeypatch):
    """A cluster of tests writes no token into the home folder."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")


RAY_WARNINGS = pytest.mark.filterwarnings(
    "ignore:Tip. In future versions of Ray:FutureWarning",
    "ignore:subprocess .* is still running:ResourceWarning",
    "ignore:unclosed:ResourceWarning",
)


@RAY_WARNINGS
@pytest.mark.usefixtures("no_token")
def test_a_local_ray_cluster_writes_the_same_bytes(tmp_path):
    ray = pytest.importorskip("ray")
    path = write(samples(400), tmp_path / "samples.parquet")
    fit(path, tmp_path / "one.parquet")
    fit(path, tmp_path / "two.parquet", workers=Workers(ray="local"))
    assert (tmp_path / "one.parquet").read_bytes() == (tmp_path / "two.parquet").read_bytes()
    assert not ray.is_initialized()


@pytest.mark.slow
@RAY_WARNINGS
@pytest.mark.usefixtures("no_token")
def test_an_existing_ray_cluster_is_used_and_left_as_it_is(tmp_path):
    ray = pytest.importorskip("ray")
    path, out = write(lists(100), tmp_path / "samples.parquet"), tmp_path / "out.parquet"
    fit(path, tmp_path / "one.parquet")
    workers = Workers(ray="auto")
    name = "prompt_id='p60', model='m'"
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        with pytest.raises(InputError, match="nu: got 0"):
            fit(path, out, partial(mean_lengths, stop_at=name, how=InputError), workers=workers)
        assert not (tmp_path / "out.parquet.parts").exists()
        # A worker that dies once is no matter; a block that kills all of them is named in one line.
        once = partial(die_once, marker=tmp_path / "died", stop_at=name)
        fit(path, out, once, workers=workers)
        assert (tmp_path / "died").exists()
        assert out.read_bytes() == (tmp_path / "one.parquet").read_bytes()
        with pytest.raises(TailcastError, match="lost on the Ray cluster"):
            fit(path, out, partial(mean_lengths, stop_at=name), workers=workers)
        assert ray.is_initialized()
        out.unlink()

        # Another process comes by address; it resumes what this one left.
        address = ray.get_runtime_context().gcs_address
        run_script(RAY_SCRIPT, tmp_path / "run.py", str(path), str(out), address)
        assert out.read_bytes() == (tmp_path / "one.parquet").read_bytes()
    finally:
        ray.shutdown()


RAY_SCRIPT = """
import sys
from tests.training.test_fit_job import Workers, fit
if __name__ == "__main__":
    path, out, address = sys.argv[1:]
    fit(path, out, workers=Workers(ray=address))
"""


def run_script(script, at, *arguments):
    """Runs a script in another process; returns its exit code once all its children have ended too."""
    at.write_text(script)
    result = subprocess.run(
        [sys.executable, str(at), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert result.returncode in (0, -signal.SIGKILL), result.stderr.decode()
    return result.returncode


def test_ray_that_is_missing_or_nowhere_is_named(tmp_path, monkeypatch):
    path = write(lists(10), tmp_path / "samples.parquet")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    for form in (address, f"ray://{address}"):
        with pytest.raises(
            InputError, match=f"ray: got '{form}'; allowed: local, or the address of a running"
        ):
            fit(path, tmp_path / "out.parquet", workers=Workers(ray=form))
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"tailcast\[ray\]"):
        fit(path, tmp_path / "out.parquet", workers=Workers(ray="local"))


# Its workers import it too, and only what comes before the condition.
SCRIPT = """
import sys
from functools import partial
from tests.training.stand_in_fit import mean_lengths
if __name__ == "__main__":
    from tests.training.test_fit_job import Workers, fit
    path, out, log, stop_at, how, processes = sys.argv[1:]
    fit(path, out, partial(mean_lengths, log=log, stop_at=stop_at, how=how), workers=Workers(processes=int(processes)))
"""


def run_and_kill(path, out, log, stop_at, *, how="self", processes=1):
    """Runs in another process that ends by SIGKILL; returns once all its children have ended too."""
    code = run_script(
        SCRIPT, log.with_suffix(".py"), str(path), str(out), str(log), stop_at, how, str(processes)
    )
    assert code == -signal.SIGKILL


def test_a_killed_run_resumes_where_it_stopped(path, tmp_path):
    out, whole, log = tmp_path / "out.parquet", tmp_path / "whole.parquet", tmp_path / "log"
    fit(path, whole)
    table = pq.read_table(whole)
    names = [
        f"prompt_id={row['prompt_id']!r}, model={row['model']!r}"
        for row in table.select(["prompt_id", "model"]).to_pylist()
    ]
    stop_at = names[table.num_rows // 2]
    run_and_kill(path, out, log, stop_at)
    assert not out.exists()
    before = log.read_text().splitlines()
    assert stop_at in before
    assert len(list((tmp_path / "out.parquet.parts").glob("shard-*.parquet"))) > 3

    log.unlink()
    fit(path, out, partial(mean_lengths, log=log))
    after = log.read_text().splitlines()
    assert out.read_bytes() == whole.read_bytes()
    # Only the block in which it was killed is fitted twice.
    assert stop_at in after
    assert len(before) + len(after) < 1.3 * table.num_rows
    assert set(before) | set(after) == set(names)
    assert not (tmp_path / "out.parquet.parts").exists()


def test_killed_while_several_processes_fit(tmp_path):
    path = write(lists(200), tmp_path / "samples.parquet")
    out, log = tmp_path / "out.parquet", tmp_path / "log"
    fit(path, tmp_path / "whole.parquet")
    # The pipes close when the workers have ended too: none may outlive its parent.
    run_and_kill(path, out, log, "prompt_id='p100', model='m'", how="parent", processes=2)
    fit(path, out, workers=Workers(processes=2))
    assert out.read_bytes() == (tmp_path / "whole.parquet").read_bytes()


def interrupted(path, out):
    stop = partial(mean_lengths, stop_at="prompt_id='p50', model='m'", how=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        fit(path, out, stop)


def test_a_worker_that_dies_is_an_error_and_no_wait(tmp_path):
    path = write(lists(200), tmp_path / "samples.parquet")
    out = tmp_path / "out.parquet"
    workers = Workers(processes=2)
    with pytest.raises(TailcastError, match="a process that fitted a block died"):
        fit(path, out, partial(mean_lengths, stop_at="prompt_id='p150', model='m'"), workers=workers)
    assert not out.exists()
    assert fit(path, out, workers=workers).num_groups == 200


def test_an_error_in_a_worker_is_raised_here_and_leaves_nothing(tmp_path):
    path = write(lists(200), tmp_path / "samples.parquet")
    wrong = partial(mean_lengths, stop_at="prompt_id='p150', model='m'", how=InputError)
    with pytest.raises(InputError, match="nu: got 0"):
        fit(path, tmp_path / "out.parquet", wrong, workers=Workers(processes=2))
    assert list(tmp_path.iterdir()) == [path]


def test_parts_of_another_run_are_not_mixed_in(tmp_path):
    path, out, log = (
        write(lists(100), tmp_path / "samples.parquet"),
        tmp_path / "out.parquet",
        tmp_path / "log",
    )
    interrupted(path, out)
    with pytest.raises(InputError, match=r"resume: got 'another options.nu'; .*--resume false"):
        fit(path, out, options=FitOptions(nu=4.0))
    with pytest.raises(InputError, match="another block_groups"):
        fit(path, out, block_groups=17)
    assert fit(path, out).num_groups == 100

    interrupted(path, out)
    fit(path, out, partial(mean_lengths, log=log), resume=False)
    assert len(log.read_text().splitlines()) == 100

    interrupted(path, out)
    write(lists(100, seed=1), path)
    with pytest.raises(InputError, match=r"resume: got 'another samples.sha256"):
        fit(path, out)
    fit(path, out, resume=False)
    expected = [sum(row) for row in pq.read_table(path).column("output_tokens").to_pylist()]
    assert pq.read_table(out).column("total").to_pylist() == expected


def test_a_folder_that_is_not_ours_is_left_as_it_is(tmp_path):
    path = write(lists(100), tmp_path / "samples.parquet")
    folder = tmp_path / "out.parquet.parts"
    folder.mkdir()
    (folder / "thesis.txt").write_text("years of work")
    for resume in (True, False):
        with pytest.raises(InputError, match="a free name"):
            fit(path, tmp_path / "out.parquet", resume=resume)
    assert (folder / "thesis.txt").exists()


def test_some_group_must_have_three_samples(tmp_path):
    table = pa.table({"prompt_id": ["a", "b"], "model": ["m", "m"], "output_tokens": [[4, 5], [6]]})
    path = write(table, tmp_path / "samples.parquet")
    with pytest.raises(
        InputError, match="samples.parquet, column output_tokens: got '2 samples in the largest"
    ):
        fit(path, tmp_path / "out.parquet")
    assert list(tmp_path.iterdir()) == [path]
    longer = pa.concat_tables(
        [table, pa.table({"prompt_id": ["c"], "model": ["m"], "output_tokens": [[7] * 3]})]
    )
    counts = fit(write(longer, path), tmp_path / "out.parquet", block_groups=1)
    assert (counts.num_groups, counts.num_samples) == (3, 6)


def test_failed_samples_are_counted_in_the_file(tmp_path):
    table = samples(100)
    reasons = ["error" if row % 5 == 0 else "stop" for row in range(table.num_rows)]
    path = write(table.set_column(4, "finish_reason", pa.array(reasons)), tmp_path / "samples.parquet")
    counts = fit(path, tmp_path / "out.parquet")
    assert counts.num_errors == reasons.count("error")
    metadata = pq.read_schema(tmp_path / "out.parquet").metadata
    assert int(metadata[b"tailcast.num_errors"]) == counts.num_errors


def test_the_samples_are_never_overwritten(tmp_path):
    path = write(lists(10), tmp_path / "samples.parquet")
    content = path.read_bytes()
    with pytest.raises(InputError, match="out: .*another file than the samples"):
        fit(path, tmp_path / "sub" / ".." / "samples.parquet")
    assert path.read_bytes() == content
    with pytest.raises(InputError, match="a folder stands there"):
        fit(path, tmp_path)


@pytest.mark.parametrize("limit", [3_000, 20_000])
def test_a_full_disk_leaves_nothing_half_written(limit, tmp_path):
    """A limit on the size of files stands in for the full disk: writes fail in the same way."""
    path, out = write(samples(3000, longest=5), tmp_path / "samples.parquet"), tmp_path / "out.parquet"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(TailcastError, match="out: cannot write .*the same command resumes"):
            fit(path, out, block_groups=500)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not out.exists()
    assert not [file for file in tmp_path.rglob("*") if file.name.startswith(".")]
    assert fit(path, out, block_groups=500).num_groups == len(pq.read_table(out))


def test_progress_counts_rows(path, tmp_path, capsys):
    fit(path, tmp_path / "out.parquet", progress=True)
    assert "fitting: 100%" in capsys.readouterr().err
    fit(path, tmp_path / "out.parquet", progress=False)
    assert capsys.readouterr().err == ""
