"""SIGKILL at random moments: no stored sample is lost, requested again, or there twice."""

import random
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from data_gen.samples import read_samples
from data_gen.sampling_run import STORE_NAME, run_sampling
from scheduler_core.errors import InputError
from tests.data_gen.fake_backend import FakeBackend
from tests.data_gen.killed_run import OPTIONS, PROMPTS, SETTINGS

ROOT = Path(__file__).parents[2]


def start(out: Path, *, shuffle: int, fatal: int, stored: Path) -> subprocess.CompletedProcess[str]:
    words = [str(out), str(shuffle), str(fatal), str(stored)]
    command = [sys.executable, "-m", "tests.data_gen.killed_run", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[pa.Table, int]:
    """The set of a run that nothing happens to, and how many moments there are to be killed at."""
    folder = tmp_path_factory.mktemp("complete")
    process = start(folder / "s.parquet", shuffle=0, fatal=0, stored=folder / "stored")
    assert process.returncode == 0, process.stderr
    return read_samples(folder / "s.parquet"), int(process.stdout)


def stored_samples(store: Path) -> set[tuple[str, int]]:
    """The content of a store, read as any process may."""
    connection = sqlite3.connect(store)
    try:
        query = "SELECT prompt_id, sample_index FROM samples WHERE finish_reason != 'error'"
        return set(connection.execute(query).fetchall())
    except sqlite3.OperationalError:  # killed before there was a table
        return set()
    finally:
        connection.close()


@pytest.mark.parametrize(
    "number", [pytest.param(number, marks=[pytest.mark.slow] if number >= 8 else []) for number in range(50)]
)
def test_a_killed_run_ends_the_same(tmp_path: Path, uninterrupted: tuple[pa.Table, int], number: int) -> None:
    """Kills one or two processes of a run, then lets it end, and looks at what came of it."""
    (complete, num_moments), rng = uninterrupted, random.Random(number)
    folder = tmp_path / "run"
    folder.mkdir()
    out, stored = folder / "s.parquet", folder / "stored"
    store = out.with_name("s.parquet.partial") / STORE_NAME
    stored.touch()
    safe: set[tuple[str, int]] = set()
    for number in range(rng.choice([1, 1, 2])):
        shuffle = rng.randrange(10**6) if number else 0
        killed = start(out, shuffle=shuffle, fatal=rng.randint(1, num_moments), stored=stored)
        # The second may have less to do than the chosen moment, or nothing at all.
        assert killed.returncode == -signal.SIGKILL or number, killed.stderr
        if not store.exists():
            break
        safe = stored_samples(store)
        declared = {(words[0], int(words[1])) for words in map(str.split, stored.read_text().splitlines())}
        assert declared <= safe
    last = FakeBackend(shuffle=rng.randrange(10**6), window=20)
    if out.exists() and not store.exists():
        with pytest.raises(InputError, match="overwrite"):
            run_sampling(last, PROMPTS, SETTINGS, out, OPTIONS)
    else:
        run_sampling(last, PROMPTS, SETTINGS, out, OPTIONS)
        assert safe.isdisjoint(last.asked)
        assert len(set(last.asked)) == len(last.asked) == complete.num_rows - len(safe)
    assert read_samples(out).equals(complete)
    names = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
    assert names - {"s.parquet.partial"} == {"stored", "s.parquet", "s.parquet.run.json"}
    assert not store.exists()
