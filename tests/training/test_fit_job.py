"""Files of fits: the same bytes whoever makes them, wherever they were interrupted."""

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from scheduler_core.errors import InputError, TailcastError
from tests.data_gen.fake_backend import largest_file
from tests.training.stand_in_fit import mean_lengths
from training.fitting import sample_files
from training.fitting.fit_job import fit_file
from training.fitting.fits import FitOptions

ROOT = Path(__file__).parents[2]
GROUP = "prompt_id='p17', model='m'"
TWICE = rf"x.parquet, row 100: got .*{GROUP}.* one row for each group \(x.parquet, row 17 has"


def samples(num_groups, *, seed=0, longest=9):
    """A table with one row for each sample: ragged groups, their rows scattered over the whole table."""
    rng = np.random.default_rng(seed)
    group = rng.permutation(np.repeat(np.arange(num_groups), rng.integers(1, longest, num_groups)))
    lengths = rng.integers(1, 400, len(group))
    columns = {"prompt_id": [f"p{number}" for number in group // 2], "output_tokens": lengths}
    columns |= {"model": np.where(group % 2, "large", "small"), "max_tokens": np.full(len(group), 300)}
    columns["prompt"] = [f"prompt {number}" for number in group // 2]
    reasons = np.select([lengths > 300, lengths < 9], ["length", "error"], "stop")
    return pa.table(columns | {"finish_reason": reasons})


def lists(num_groups, *, longest=9, seed=0):
    """A table with one row for each group."""
    rng = np.random.default_rng(seed)
    tokens = [rng.integers(1, 400, size).tolist() for size in rng.integers(0, longest, num_groups)]
    names = [f"p{number}" for number in range(num_groups)]
    return pa.table({"prompt_id": names, "model": ["m"] * num_groups, "output_tokens": tokens})


def write(table, path):
    pq.write_table(table, path, row_group_size=50)
    return path


def fit(path, out, fit=mean_lengths, *, block_groups=16, options=FitOptions(), **more):  # noqa: B008
    fit_file(path, out, options, block_groups=block_groups, fit=fit, **more)
    return pq.read_table(out)


@pytest.fixture(params=["samples", "lists"])
def path(request, tmp_path):
    """A file of either form, more than ten blocks."""
    table = samples(400) if request.param == "samples" else lists(200)
    return write(table, tmp_path / "samples.parquet")


@pytest.mark.parametrize("block_samples", [1 << 20, 20])
def test_the_file_holds_every_group_once_in_order_of_appearance(path, block_samples, tmp_path, monkeypatch):
    monkeypatch.setattr(sample_files, "BLOCK_SAMPLES", block_samples)
    table = fit(path, tmp_path / "out.parquet")
    names = list(zip(*(table.column(name).to_pylist() for name in ("prompt_id", "model")), strict=True))
    rows = pq.read_table(path)
    keys = zip(*(rows.column(name).to_pylist() for name in ("prompt_id", "model")), strict=True)
    assert names == list(dict.fromkeys(keys))
    failed = rows.to_pydict().get("finish_reason", []).count("error")
    num_samples = sum(map(np.size, rows.column("output_tokens").to_pylist())) - failed
    assert sum(table.column("num_samples").to_pylist()) == num_samples
    assert int(pq.read_metadata(tmp_path / "out.parquet").metadata[b"tailcast.num_errors"]) == failed
    assert table.schema.metadata[b"kind"] == b"totals"
    assert sorted(tmp_path.iterdir()) == [tmp_path / "out.parquet", path]


@pytest.mark.parametrize(
    ("form", "column", "value", "message"),
    [
        (samples, "output_tokens", 0, "row 100, column output_tokens: got 0.0"),
        (samples, "prompt_id", None, "row 100, column prompt_id: got None"),
        (lists, "prompt_id", "p17", TWICE),
    ],
)
def test_what_is_wrong_is_named_by_its_row_in_the_file(form, column, value, message, tmp_path):
    table = form(200)
    values = table.column(column).to_pylist()
    values[100] = value
    table = table.set_column(table.column_names.index(column), column, pa.array(values))
    path = write(table, tmp_path / "x.parquet")
    with pytest.raises(InputError, match=message):
        fit(path, tmp_path / "out.parquet")
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("num_groups", "limits", "workers"),
    [
        (400, {}, {"processes": 2}),
        # Scattered rows that do not fit into memory are grouped on disk.
        (60_000, {"MEMORY_LIMIT": "48MB", "THREADS": 1, "BATCH_ROWS": 2048}, {"block_groups": 10_000}),
    ],
)
def test_workers_and_little_memory_write_the_same_bytes(num_groups, limits, workers, tmp_path, monkeypatch):
    path = write(samples(num_groups, longest=12), tmp_path / "samples.parquet")
    fit(path, tmp_path / "one.parquet", block_groups=workers.get("block_groups", 16))
    for name, value in limits.items():
        monkeypatch.setattr(sample_files, name, value)
    fit(path, tmp_path / "two.parquet", **workers)
    assert (tmp_path / "one.parquet").read_bytes() == (tmp_path / "two.parquet").read_bytes()


def run_script(script, at, *arguments):
    """Runs a script in another process; returns its exit code once all its children have ended too."""
    at.write_text(script)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(at), *arguments]
    result = subprocess.run(command, env=environment, capture_output=True, timeout=120, check=False)
    assert result.returncode in (0, -signal.SIGKILL), result.stderr.decode()
    return result.returncode


# Its workers import it too, and only what comes before the condition.
SCRIPT = """
import sys
from functools import partial
from tests.training.stand_in_fit import mean_lengths
if __name__ == "__main__":
    from tests.training.test_fit_job import fit
    path, out, log, stop_at, how, processes = sys.argv[1:]
    fit(path, out, partial(mean_lengths, log=log, stop_at=stop_at, how=how), processes=int(processes))
"""


def run_and_kill(path, out, log, stop_at, *, how="self", processes=1):
    """Runs in another process that ends by SIGKILL; returns once all its children have ended too."""
    words = map(str, (path, out, log, stop_at, how, processes))
    assert run_script(SCRIPT, log.with_suffix(".py"), *words) == -signal.SIGKILL


def test_killed_while_several_processes_fit(tmp_path):
    path = write(lists(200), tmp_path / "samples.parquet")
    out = tmp_path / "out.parquet"
    # The pipes close when the workers have ended too: none may outlive its parent.
    run_and_kill(path, out, tmp_path / "log", "prompt_id='p100', model='m'", how="parent", processes=2)
    assert fit(path, out, processes=2).equals(fit(path, tmp_path / "whole.parquet"))


def test_an_interrupt_leaves_nothing(path, tmp_path):
    stop = partial(mean_lengths, stop_at="prompt_id='p50', model='m'", how=KeyboardInterrupt)
    if "finish_reason" not in pq.read_schema(path).names:
        with pytest.raises(KeyboardInterrupt):
            fit(path, tmp_path / "out.parquet", stop)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [(signal.SIGKILL, TailcastError, "a worker process died"), (InputError, InputError, "nu: got 0")],
)
def test_a_worker_that_fails_is_an_error_and_no_wait(how, error, message, tmp_path):
    path = write(lists(200), tmp_path / "samples.parquet")
    out = tmp_path / "out.parquet"
    with pytest.raises(error, match=message):
        fit(path, out, partial(mean_lengths, stop_at="prompt_id='p150', model='m'", how=how), processes=2)
    assert list(tmp_path.iterdir()) == [path]
    assert fit(path, out).num_rows == 200


def test_some_group_must_have_three_samples_which_are_never_overwritten(tmp_path):
    path = write(lists(5, longest=3), tmp_path / "samples.parquet")
    too_large, same = "got '. samples in the largest", "another file than the"
    for out, message in ((tmp_path / "out", too_large), (path, same)):
        with pytest.raises(InputError, match=message):
            fit(path, out)
        assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("limit", [3_000, 20_000])
def test_a_full_disk_leaves_nothing_half_written(limit, tmp_path):
    """A limit on the size of files stands in for the full disk: writes fail in the same way."""
    path, out = write(samples(3000, longest=5), tmp_path / "samples.parquet"), tmp_path / "out.parquet"
    message = "out: cannot"
    with largest_file(limit), pytest.raises(TailcastError, match=message):
        fit(path, out, block_groups=500)
    assert not out.exists()
    assert not [file for file in tmp_path.rglob("*") if file.name.startswith(".")]
    assert fit(path, out, block_groups=500).num_rows > 1000
