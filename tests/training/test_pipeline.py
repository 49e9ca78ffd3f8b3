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

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from scheduler_core.errors import InputError, MissingExtraError, TailcastError
from tests.training.stand_in_fit import die_once, mean_lengths
from tests.training.test_blocks import answers, lists, write
from training.fitting.jobs.pipeline import fit_file
from training.fitting.jobs.ray_workers import run_ray
from training.fitting.jobs.workers import check_processes, run_here, run_processes, usable_cores
from training.fitting.reading.blocks import BlockLimits

ROOT = Path(__file__).parents[2]
SCATTERED = BlockLimits(held_bytes=30_000)
RANGES = BlockLimits(groups=16)


def fit(path, out, limits=SCATTERED, fit=mean_lengths, **options):
    counts, _ = fit_file(path, out, fit, limits=limits, **options)
    return counts


@pytest.fixture(params=["scattered", "ranges"])
def case(request, tmp_path):
    """(samples, limits) of both forms, in more than ten blocks."""
    table, limits = (answers(400), SCATTERED) if request.param == "scattered" else (lists(200), RANGES)
    return write(table, tmp_path / "samples.parquet"), limits


def test_the_file_holds_every_group_once(case, tmp_path):
    path, limits = case
    counts = fit(path, tmp_path / "out.parquet", limits)
    table = pq.read_table(tmp_path / "out.parquet")
    names = set(zip(*(table.column(name).to_pylist() for name in ("prompt_id", "model")), strict=True))
    assert counts.num_groups == table.num_rows == len(names)
    assert counts.num_samples == sum(table.column("num_samples").to_pylist())
    samples = pq.read_table(path).column("output_tokens").to_pylist()
    total = sum(value if isinstance(value, int) else sum(value) for value in samples)
    assert sum(table.column("total").to_pylist()) == total
    assert table.schema.metadata[b"kind"] == b"totals"
    assert sorted(tmp_path.iterdir()) == [tmp_path / "out.parquet", path]


def test_processes_write_the_same_bytes(case, tmp_path):
    path, limits = case
    fit(path, tmp_path / "one.parquet", limits, runner=run_here)
    fit(path, tmp_path / "two.parquet", limits, runner=partial(run_processes, processes=2))
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
    path = write(answers(400), tmp_path / "samples.parquet")
    fit(path, tmp_path / "one.parquet")
    fit(path, tmp_path / "two.parquet", runner=partial(run_ray, address="local", processes=1))
    assert (tmp_path / "one.parquet").read_bytes() == (tmp_path / "two.parquet").read_bytes()
    assert not ray.is_initialized()


@pytest.mark.slow
@RAY_WARNINGS
@pytest.mark.usefixtures("no_token")
def test_an_existing_ray_cluster_is_used_and_left_as_it_is(tmp_path):
    ray = pytest.importorskip("ray")
    path, out = write(lists(100), tmp_path / "samples.parquet"), tmp_path / "out.parquet"
    fit(path, tmp_path / "one.parquet", RANGES)
    runner = partial(run_ray, address="auto", processes=1)
    name = "prompt_id='p60', model='m'"
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        with pytest.raises(InputError, match="nu: got 0"):
            fit(path, out, RANGES, partial(mean_lengths, stop_at=name, how=InputError), runner=runner)
        assert not (tmp_path / "out.parquet.parts").exists()
        # A worker that dies once is no matter; a block that kills all of them is named in one line.
        once = partial(die_once, marker=tmp_path / "died", stop_at=name)
        fit(path, out, RANGES, once, runner=runner)
        assert (tmp_path / "died").exists()
        assert out.read_bytes() == (tmp_path / "one.parquet").read_bytes()
        with pytest.raises(TailcastError, match="lost on the Ray cluster"):
            fit(path, out, RANGES, partial(mean_lengths, stop_at=name), runner=runner)
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
from functools import partial
from tests.training.test_pipeline import RANGES, fit
from training.fitting.jobs.ray_workers import run_ray
if __name__ == "__main__":
    path, out, address = sys.argv[1:]
    fit(path, out, RANGES, runner=partial(run_ray, address=address, processes=1))
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
            fit(path, tmp_path / "out.parquet", runner=partial(run_ray, address=form, processes=1))
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"tailcast\[ray\]"):
        fit(path, tmp_path / "out.parquet", runner=partial(run_ray, address="local", processes=1))


# Its workers import it too, and only what comes before the condition.
SCRIPT = """
import sys
from functools import partial
from tests.training.stand_in_fit import mean_lengths
if __name__ == "__main__":
    from tests.training.test_pipeline import BlockLimits, fit
    from training.fitting.jobs.workers import run_here, run_processes
    path, out, log, stop_at, how, processes, groups, held_bytes = sys.argv[1:]
    runner = partial(run_processes, processes=int(processes)) if int(processes) else run_here
    stop = partial(mean_lengths, log=log, stop_at=stop_at, how=how)
    fit(path, out, BlockLimits(groups=int(groups), held_bytes=int(held_bytes)), stop, runner=runner)
"""


def run_and_kill(path, out, limits, log, stop_at, *, how="self", processes=0):
    """Runs in another process that ends by SIGKILL; returns once all its children have ended too."""
    numbers = (str(processes), str(limits.groups), str(limits.held_bytes))
    code = run_script(SCRIPT, log.with_suffix(".py"), str(path), str(out), str(log), stop_at, how, *numbers)
    assert code == -signal.SIGKILL


def test_a_killed_run_goes_on_where_it_stopped(case, tmp_path):
    path, limits = case
    out, whole, log = tmp_path / "out.parquet", tmp_path / "whole.parquet", tmp_path / "log"
    fit(path, whole, limits)
    table = pq.read_table(whole)
    names = [
        f"prompt_id={row['prompt_id']!r}, model={row['model']!r}"
        for row in table.select(["prompt_id", "model"]).to_pylist()
    ]
    stop_at = names[table.num_rows // 2]
    run_and_kill(path, out, limits, log, stop_at)
    assert not out.exists()
    before = log.read_text().splitlines()
    assert stop_at in before
    assert len(list((tmp_path / "out.parquet.parts").glob("shard-*.parquet"))) > 3

    log.unlink()
    fit(path, out, limits, partial(mean_lengths, log=log))
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
    fit(path, tmp_path / "whole.parquet", RANGES)
    # The pipes close when the workers have ended too: none may outlive its parent.
    run_and_kill(path, out, RANGES, log, "prompt_id='p100', model='m'", how="parent", processes=2)
    fit(path, out, RANGES, runner=partial(run_processes, processes=2))
    assert out.read_bytes() == (tmp_path / "whole.parquet").read_bytes()


def test_an_interrupt_keeps_what_is_finished(case, tmp_path):
    path, limits = case
    out, log = tmp_path / "out.parquet", tmp_path / "log"
    fit(path, tmp_path / "whole.parquet", limits)
    name = "prompt_id='p99', model='" + ("m'" if limits is RANGES else "small'")
    with pytest.raises(KeyboardInterrupt):
        fit(path, out, limits, partial(mean_lengths, stop_at=name, how=KeyboardInterrupt))
    assert not out.exists()
    fit(path, out, limits, partial(mean_lengths, log=log))
    assert out.read_bytes() == (tmp_path / "whole.parquet").read_bytes()
    assert len(log.read_text().splitlines()) < pq.read_metadata(out).num_rows


def test_a_worker_that_dies_is_an_error_and_no_wait(tmp_path):
    path = write(lists(200), tmp_path / "samples.parquet")
    out = tmp_path / "out.parquet"
    runner = partial(run_processes, processes=2)
    die = partial(mean_lengths, stop_at="prompt_id='p150', model='m'")
    with pytest.raises(TailcastError, match="a process that fitted a block died"):
        fit(path, out, RANGES, die, runner=runner)
    assert not out.exists()
    assert fit(path, out, RANGES, runner=runner).num_groups == 200


def test_an_error_in_a_worker_is_raised_here_and_leaves_nothing(tmp_path):
    path = write(lists(200), tmp_path / "samples.parquet")
    wrong = partial(mean_lengths, stop_at="prompt_id='p150', model='m'", how=InputError)
    with pytest.raises(InputError, match="nu: got 0"):
        fit(path, tmp_path / "out.parquet", RANGES, wrong, runner=partial(run_processes, processes=2))
    assert list(tmp_path.iterdir()) == [path]


def interrupted(path, out, limits=RANGES, **options):
    stop = partial(mean_lengths, stop_at="prompt_id='p50', model='m'", how=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        fit(path, out, limits, stop, **options)


def test_parts_of_another_run_are_not_mixed_in(tmp_path):
    path, out = write(lists(100), tmp_path / "samples.parquet"), tmp_path / "out.parquet"
    settings = {"options": {"nu": 3.5, "keys": ("prompt_id",)}}
    interrupted(path, out, settings=settings)
    with pytest.raises(
        InputError, match=r"resume: got 'settings.options.nu = 4.0'; allowed: 3.5, .*--resume false"
    ):
        fit(path, out, RANGES, settings={"options": {"nu": 4.0, "keys": ("prompt_id",)}})
    with pytest.raises(InputError, match="blocks.groups = 17"):
        fit(path, out, BlockLimits(groups=17), settings=settings)
    assert fit(path, out, RANGES, settings=settings).num_groups == 100

    interrupted(path, out)
    write(lists(100, seed=1), path)
    with pytest.raises(InputError, match=r"resume: got \"?'?samples.sha256"):
        fit(path, out, RANGES)
    fit(path, out, RANGES, resume=False)
    expected = [sum(row) for row in pq.read_table(path).column("output_tokens").to_pylist()]
    assert pq.read_table(out).column("total").to_pylist() == expected


def test_starting_over_forgets_finished_blocks(tmp_path):
    path, out, log = (
        write(lists(100), tmp_path / "samples.parquet"),
        tmp_path / "out.parquet",
        tmp_path / "log",
    )
    interrupted(path, out)
    fit(path, out, RANGES, partial(mean_lengths, log=log), resume=False)
    assert len(log.read_text().splitlines()) == 100


def test_a_folder_that_is_not_ours_is_left_alone(tmp_path):
    path = write(lists(100), tmp_path / "samples.parquet")
    folder = tmp_path / "out.parquet.parts"
    folder.mkdir()
    (folder / "thesis.txt").write_text("years of work")
    for resume in (True, False):
        with pytest.raises(InputError, match="a name that is free"):
            fit(path, tmp_path / "out.parquet", RANGES, resume=resume)
    assert (folder / "thesis.txt").exists()


def test_some_group_must_have_three_answers(tmp_path):
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
    counts = fit(write(longer, path), tmp_path / "out.parquet", BlockLimits(groups=1))
    assert (counts.num_groups, counts.num_samples) == (3, 6)


def test_failed_answers_are_counted_in_the_file(tmp_path):
    table = answers(100)
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
    path, out = write(answers(3000, longest=5), tmp_path / "samples.parquet"), tmp_path / "out.parquet"
    limits = BlockLimits(held_bytes=100_000)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(TailcastError, match="out: cannot write .*the same command goes on"):
            fit(path, out, limits)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not out.exists()
    assert not [file for file in tmp_path.rglob("*") if file.name.startswith(".")]
    assert fit(path, out, limits).num_groups == len(pq.read_table(out))


def test_progress_counts_rows(case, tmp_path, capsys):
    path, limits = case
    fit(path, tmp_path / "out.parquet", limits, progress=True)
    shown = capsys.readouterr().err
    assert "fitting: 100%" in shown
    assert ("sorting: 100%" in shown) == (limits is SCATTERED)
    fit(path, tmp_path / "out.parquet", limits, progress=False)
    assert capsys.readouterr().err == ""


def test_number_of_processes():
    assert check_processes(None, slow=True) == usable_cores() >= 1
    assert check_processes(None, slow=False) == 1
    assert check_processes(5, slow=False) == 5
    with pytest.raises(InputError, match="processes: got 0"):
        check_processes(0, slow=False)
