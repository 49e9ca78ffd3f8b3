"""SIGKILL at random moments: nothing that was answered is lost, asked for again, or there twice."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from data_gen.runs import run
from data_gen.runs.records import RESULT, Damage, read_records
from data_gen.runs.shards import shard_paths
from data_gen.samples import read_samples
from scheduler_core.errors import InputError
from tests.data_gen.fake_backend import FakeBackend
from tests.data_gen.killed_run import OPTIONS, PROMPTS, SETTINGS

ROOT = Path(__file__).parents[2]


def start(out: Path, *, shuffle: int, fatal: int, heard: Path) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "tests.data_gen.killed_run",
        str(out),
        str(shuffle),
        str(fatal),
        str(heard),
    ]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[pa.Table, int]:
    """The set of a run that nothing happens to, and how many moments there are to be killed at."""
    folder = tmp_path_factory.mktemp("whole")
    done = start(folder / "s.parquet", shuffle=0, fatal=0, heard=folder / "heard")
    assert done.returncode == 0, done.stderr
    return read_samples(folder / "s.parquet"), int(done.stdout)


def safe_answers(partial: Path) -> set[tuple[str, int]]:
    """What the shards hold."""
    found = set()
    for shard in shard_paths(partial):
        for record in read_records(shard, Damage()):
            if record.kind == RESULT:
                found |= {
                    (PROMPTS[record.position].prompt_id, answer[0])
                    for answer in json.loads(record.payload)[2]
                }
    return found


def check_killed(folder: Path, whole: pa.Table, num_moments: int, rng: random.Random) -> None:
    """Kills one or two processes of a run, then lets it end, and looks at what came of it."""
    folder.mkdir()
    out, heard = folder / "s.parquet", folder / "heard"
    partial = out.with_name("s.parquet.partial")
    heard.touch()
    safe: set[tuple[str, int]] = set()
    for number in range(rng.choice([1, 1, 2])):
        shuffle = rng.randrange(10**6) if number else 0
        killed = start(out, shuffle=shuffle, fatal=rng.randint(1, num_moments), heard=heard)
        # The second may have less to do than the chosen moment, or nothing at all.
        assert killed.returncode == -signal.SIGKILL or number, killed.stderr
        if not partial.exists():
            break
        safe = safe_answers(partial)
        told = {(words[0], int(words[1])) for words in map(str.split, heard.read_text().splitlines())}
        assert told <= safe
    last = FakeBackend(shuffle=rng.randrange(10**6), window=20)
    if out.exists() and not partial.exists():
        with pytest.raises(InputError, match="overwrite"):
            run(last, PROMPTS, SETTINGS, out, OPTIONS)
    else:
        run(last, PROMPTS, SETTINGS, out, OPTIONS)
        assert safe.isdisjoint(last.asked)
        assert len(set(last.asked)) == len(last.asked) == whole.num_rows - len(safe)
    assert read_samples(out).equals(whole)
    assert sorted(path.name for path in folder.iterdir()) == ["heard", "s.parquet", "s.parquet.run.json"]


@pytest.mark.parametrize("number", range(8))
def test_a_killed_run_goes_on_to_the_same_set(
    tmp_path: Path, uninterrupted: tuple[pa.Table, int], number: int
) -> None:
    check_killed(tmp_path / "run", *uninterrupted, random.Random(number))


@pytest.mark.slow
@pytest.mark.parametrize("number", range(8, 50))
def test_a_killed_run_goes_on_to_the_same_set_many_times(
    tmp_path: Path, uninterrupted: tuple[pa.Table, int], number: int
) -> None:
    check_killed(tmp_path / "run", *uninterrupted, random.Random(number))
