"""Sampling runs: what they store and resume; SIGKILL at random moments loses no sample and requests none twice."""

import errno
import json
import logging
import random
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_gen import sampling_run
from data_gen.backend import SampledOutput, SampleFailure, SamplingSettings, Work, WorkResult
from data_gen.prompts import Message, Prompt
from data_gen.samples import SCHEMA, prompt_sha256, read_samples
from data_gen.sampling_run import STORE_NAME, run_sampling
from data_gen.store import FAILED, RunStoppedError, SampleStore
from scheduler_core.errors import InputError
from tests.data_gen import killed_run
from tests.data_gen.conftest import ROOT
from tests.data_gen.fake_backend import FakeBackend, largest_file

PROMPTS = [Prompt(f"p{i}", f"prompt {i}", "kind") for i in range(11)]
SETTINGS = SamplingSettings(num_samples=4, max_tokens=50, temperature=1.0, top_p=1.0, seed=2)
KEYS = sorted((prompt.prompt_id, index) for prompt in PROMPTS for index in range(4))
TOTAL = len(KEYS)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "s.parquet"


def run(
    out: Path, backend: Any = None, prompts: Any = PROMPTS, settings: Any = SETTINGS, **options: Any
) -> dict[str, Any]:
    others = {"engine_options": options.pop("engine_options", None), "notes": {"a": "b"}}
    run_options = sampling_run.SamplingRunOptions(**options)
    return run_sampling(backend or FakeBackend(), prompts, settings, out, run_options, **others)


def interrupt(out: Path, stop_after: int, prompts: list[Prompt] = PROMPTS, **changes: Any) -> FakeBackend:
    backend = FakeBackend(stop_after=stop_after, **changes)
    with pytest.raises(KeyboardInterrupt):
        run(out, backend, prompts)
    return backend


def assert_complete(out: Path, prompts: list[Prompt] = PROMPTS) -> None:
    """The file is that of an uninterrupted run."""
    other = out.with_name("complete.parquet")
    run(other, prompts=prompts, overwrite=True)
    assert read_samples(out).equals(read_samples(other))


def partial_of(out: Path) -> Path:
    return out.with_name(out.name + ".partial")


def fails(
    times: int, kind: str = "http_500", which: Callable[[str, int], bool] = lambda p, i: (p, i) == ("p3", 1)
):
    """A plan in which some outputs fail so many times."""

    def plan(prompt_id: str, sample_index: int, attempt: int) -> SampleFailure | None:
        if attempt <= times and which(prompt_id, sample_index):
            return SampleFailure(sample_index, f"attempt {attempt}", kind)
        return None

    return plan


def test_one_row_for_each_output_in_the_order_of_the_prompts(out: Path) -> None:
    summary = run(out, FakeBackend(shuffle=5))
    table = read_samples(out)
    assert pq.read_schema(out).metadata[b"tailcast.schema"] == b"samples/2"
    assert table.schema.equals(SCHEMA)
    assert table.column("prompt_id").to_pylist() == [p.prompt_id for p in PROMPTS for _ in range(4)]
    assert table.column("sample_index").to_pylist() == [0, 1, 2, 3] * 11
    assert set(table.column("run_id").to_pylist()) == {summary["run_id"]}
    assert sorted(path.name for path in out.parent.iterdir()) == ["s.parquet", "s.parquet.run.json"]
    assert json.loads((out.parent / "s.parquet.run.json").read_text()) == summary
    assert summary["settings"] == asdict(SETTINGS)
    reasons = table.column("finish_reason").to_pylist()
    counts = {name: reasons.count(name) for name in ("stop", "length", "error")}
    assert (summary["finish_reasons"], summary["num_censored"]) == (counts, counts["length"])
    assert counts["stop"] + counts["length"] == summary["last_process"]["num_samples"] == TOTAL
    assert summary["output_tokens"] == sum(table.column("output_tokens").to_pylist())
    assert (summary["notes"], summary["resume_reason"]) == ({"a": "b"}, None)


@pytest.mark.parametrize("stop_after", [1, 17, 43])
def test_an_interrupted_run_resumes_to_the_same_file(out: Path, stop_after: int) -> None:
    first = interrupt(out, stop_after)
    assert first.num_closed == 1
    assert not out.exists()
    second = FakeBackend(shuffle=stop_after)
    summary = run(out, second)
    assert_complete(out)
    assert sorted(first.given + second.given) == KEYS
    assert sorted(second.asked) == sorted(second.given)
    assert summary["last_process"]["num_resumed"] == len(first.given)


def test_failed_outputs_are_requested_again_after_all_others(out: Path) -> None:
    backend = FakeBackend(fails(2))
    summary = run(out, backend)
    assert_complete(out)
    assert backend.asked.count(("p3", 1)) == 3
    assert backend.asked[-2:] == [("p3", 1)] * 2
    assert summary["finish_reasons"]["error"] == 0
    assert summary["last_process"]["failed_attempts"] == {"http_500": 2}


def test_failures_that_remain_are_rows_and_the_same_call_tries_just_them(out: Path) -> None:
    summary = run(out, FakeBackend(fails(9)), retries=1)
    rows = read_samples(out).to_pylist()
    failed = [row for row in rows if row["finish_reason"] == "error"]
    assert len(rows) == TOTAL
    assert [(r["prompt_id"], r["sample_index"], r["output_tokens"]) for r in failed] == [("p3", 1, 0)]
    assert failed[0]["error"] == "http_500: attempt 2"
    lines = "\n".join(sampling_run.summary_lines(summary, out))
    assert "failed, http_500: 1, e.g. prompt p3 sample 1: attempt 2" in lines
    assert "retries the failed samples" in lines
    again = FakeBackend()
    assert run(out, again)["resume_reason"] is None
    assert again.asked == [("p3", 1)]
    assert_complete(out)
    assert not partial_of(out).exists()


@pytest.mark.parametrize("kind", sorted(sampling_run.PERMANENT_FAILURES))
def test_what_cannot_pass_is_not_tried_again(out: Path, kind: str) -> None:
    backend = FakeBackend(fails(9, kind, lambda p, i: p == "p7"))
    summary = run(out, backend)
    assert backend.asked.count(("p7", 0)) == 1
    assert (summary["finish_reasons"]["error"], summary["resume_reason"]) == (4, None)
    assert not partial_of(out).exists()


def test_lost_outputs_are_failures_and_unrequested_ones_do_not_count(out: Path) -> None:
    class Careless(FakeBackend):
        def sample(self, work: Iterator[Work], settings: SamplingSettings) -> Iterator[WorkResult]:  # type: ignore[override]
            for result in super().sample(work, settings):
                if result.prompt.prompt_id != "p2":
                    yield result
                    yield result
                yield WorkResult(Prompt("unknown", "?"), 1, result.outputs)

    summary = run(out, Careless(), retries=0)
    assert {kind: failure["count"] for kind, failure in summary["failures"].items()} == {"no_output": 4}
    run(out)
    assert_complete(out)


@pytest.mark.parametrize(("kind", "stops"), [("no_token_count", True), ("too_long", False)])
def test_failures_in_a_row_stop_a_run_unless_prompts_cause_them(out: Path, kind: str, stops: bool) -> None:
    backend = FakeBackend(fails(99, kind, lambda p, i: int(p[1:]) > 4))
    if stops:
        with pytest.raises(RunStoppedError, match=f"the last one: {kind}"):
            run(out, backend, max_failures_in_a_row=5)
        backend = FakeBackend()
    assert run(out, backend, max_failures_in_a_row=5)["finish_reasons"]["error"] == 24 * (not stops)


def test_a_run_without_any_output_is_an_error_and_leaves_nothing(out: Path) -> None:
    with pytest.raises(InputError, match=r"prompts: got 'p\d+'.*\(attempt 1\)"):
        run(out, FakeBackend(fails(99, which=lambda p, i: True)))
    interrupt(out, 0)
    assert list(out.parent.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"settings": SamplingSettings(5, 50, 1.0, 1.0, 2)}, "the same settings .*num_samples=4"),
        ({"keep_text": True}, "keep_text"),
        ({"hash_prompts": True}, "hash_prompts"),
        ({"engine_options": {"dtype": "float16"}}, "engine_options"),
        ({"prompts": [Prompt("p0", "another text"), *PROMPTS[1:]]}, "prompts: got \"another text of 'p0'\""),
    ],
)
def test_changes_to_an_interrupted_run_are_refused(out: Path, changes: dict[str, Any], named: str) -> None:
    interrupt(out, 20)
    with pytest.raises(InputError, match=named):
        run(out, **changes)
    run(out)
    assert_complete(out)


def test_a_foreign_folder_is_left_alone(out: Path) -> None:
    partial_of(out).mkdir()
    (partial_of(out) / "mine").write_text("mine")
    with pytest.raises(InputError, match="the state of an interrupted run"):
        run(out)
    assert (partial_of(out) / "mine").read_text() == "mine"


def test_a_resumed_run_may_have_more_prompts_or_fewer_in_another_order(tmp_path: Path) -> None:
    for count in (2, 6, 9):
        out, prompts = tmp_path / f"{count}.parquet", PROMPTS[:count][::-1]
        interrupt(out, 14, PROMPTS[:6])
        summary = run(out, prompts=prompts)
        assert_complete(out, prompts)
        assert partial_of(out).exists() == (count == 2) == (summary["resume_reason"] is not None)
    # The surplus was paid for, so it is still there.
    later = FakeBackend()
    run(tmp_path / "2.parquet", later, PROMPTS[:6])
    assert len(later.given) < 24 - 8
    assert_complete(tmp_path / "2.parquet", PROMPTS[:6])


def test_prompts_that_change_during_the_run_stop_it(out: Path) -> None:
    class Changing:
        lists = iter([PROMPTS, [*PROMPTS[:5], PROMPTS[8]]])

        def __iter__(self) -> Iterator[Prompt]:
            return iter(next(self.lists))

    with pytest.raises(RunStoppedError, match="first at position 5"):
        run(out, prompts=Changing())


def test_repeated_prompts_are_refused_before_the_engine_is_asked(out: Path) -> None:
    backend = FakeBackend()
    with pytest.raises(InputError, match="'p0'; allowed: each prompt id once"):
        run(out, backend, [PROMPTS[0], PROMPTS[1], PROMPTS[0]])
    assert backend.asked == []
    assert list(out.parent.iterdir()) == []


def test_a_second_process_is_kept_out(out: Path) -> None:
    refused: list[WorkResult] = []

    def intrude(result: WorkResult) -> None:
        with pytest.raises(InputError, match="no other process has locked"):
            run(out)
        refused.append(result)

    run(out, FakeBackend(on_stored=intrude))
    assert refused
    assert_complete(out)


@pytest.mark.parametrize("target", ["file/s.parquet", "folder", "s.parquet"])
def test_targets_that_cannot_be_written_are_named(tmp_path: Path, target: str) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    (tmp_path / "s.parquet.partial").write_text("x")
    with pytest.raises(InputError, match="^out: got"):
        run(tmp_path / target)


@pytest.mark.parametrize("num_bytes", [40_000, 61_000, 90_000])
def test_a_full_disk_while_sampling_loses_nothing(out: Path, num_bytes: int) -> None:
    stored: list[WorkResult] = []
    message = "cannot write .*run the same command again"
    with largest_file(num_bytes), pytest.raises(RunStoppedError, match=message):
        run(out, FakeBackend(on_stored=stored.append))
    second = FakeBackend()
    run(out, second)
    assert len(second.given) == TOTAL - sum(len(result.outputs) for result in stored)
    assert_complete(out)


def test_a_full_disk_while_exporting_loses_nothing(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(writer: pq.ParquetWriter, table: pa.Table) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(pq.ParquetWriter, "write_table", full)
        with pytest.raises(RunStoppedError, match="No space left on device"):
            run(out)
    assert not out.exists()
    second = FakeBackend()
    run(out, second)
    assert second.asked == []
    assert_complete(out)


def test_a_log_truncated_at_any_byte_loses_the_last_results_alone(out: Path) -> None:
    store_path, log_path = partial_of(out) / STORE_NAME, partial_of(out) / f"{STORE_NAME}-wal"
    interrupt(out, 9)
    # As a killed process leaves it: with the log of what is not in the file yet.
    images: list[tuple[bytes, bytes]] = []
    interrupt(out, 8, on_stored=lambda _: images.append((store_path.read_bytes(), log_path.read_bytes())))
    database, log = images[-1]
    counts = []
    for length in range(0, len(log) + 1, max(1, len(log) // 23)):
        store_path.write_bytes(database)
        log_path.write_bytes(log[:length])
        store = SampleStore(store_path, sync_interval_s=0)
        with store.transaction():
            store.register(PROMPTS, hash_only=False)
        counts.append(store.count(f"NOT {FAILED}"))
        store.close()
    assert counts == sorted(counts)
    assert 9 <= counts[0] < counts[-1]
    run(out)
    assert_complete(out)


def test_a_damaged_store_is_named(out: Path) -> None:
    interrupt(out, 9)
    store = partial_of(out) / STORE_NAME
    for content in (b"x" * 5000, store.read_bytes()[:4096] + b"y" * (store.stat().st_size - 4096)):
        store.write_bytes(content)
        with pytest.raises(RunStoppedError, match="is damaged .*recover"):
            run(out)
        assert store.read_bytes()[:5000] == content[:5000]


def new_store(folder: Path, interval_s: float) -> SampleStore:
    """A store with one prompt."""
    store = SampleStore(folder / STORE_NAME, sync_interval_s=interval_s)
    with store.transaction():
        store.register(PROMPTS[:1], hash_only=False)
    return store


def add(store: SampleStore, index: int) -> None:
    store.add("p0", 3, [SampledOutput(index, 5, "stop")], {}, engine_version="1", keep_text=False)


def test_results_are_synced_in_time_and_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = SimpleQueue[str]()
    monkeypatch.setattr("data_gen.store.sync_path", lambda path: synced.put(path.name))
    for interval_s in (0.0, 0.01):  # at once, or the last results before a pause too
        with closing(new_store(tmp_path, interval_s)) as store:
            while not synced.empty():
                synced.get()
            add(store, int(100 * interval_s))
            assert synced.get(timeout=30) == f"{STORE_NAME}-wal"
        assert synced.get(timeout=30) == f"{STORE_NAME}-wal"


def test_a_timer_error_is_raised_by_the_next_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(path: Path) -> None:
        raise OSError(5, "Input/output error")

    store = new_store(tmp_path, 3600.0)
    add(store, 0)
    with monkeypatch.context() as patch:
        patch.setattr("data_gen.store.sync_path", broken)
        store._on_timer()
    with pytest.raises(RunStoppedError, match="Input/output error"):
        add(store, 1)
    store.close()


@pytest.mark.parametrize("keep_text", [False, True])
def test_texts_are_kept_only_when_asked_for(out: Path, keep_text: bool) -> None:
    messages = (Message("user", "SECRET"), Message("user", "x"))
    secret = [Prompt("a", "SECRET question"), Prompt("b", "x", messages=messages)]
    options = {"hash_prompts": True, "keep_text": keep_text}
    with pytest.raises(KeyboardInterrupt):
        run(out, FakeBackend(stop_after=6), secret, **options)
    stored = b"".join(path.read_bytes() for path in partial_of(out).iterdir())
    assert (b"SECRET" in stored) == keep_text
    run(out, prompts=secret, **options)
    rows = read_samples(out).to_pylist()
    assert {row["prompt"] for row in rows} == {row["messages"] for row in rows} == {None}
    assert {row["prompt_sha256"] for row in rows} == {prompt_sha256(prompt) for prompt in secret}
    assert rows[0]["text"] == ("answer 0 to SECRET question" if keep_text else None)


def test_conversations_and_any_text_are_recorded_complete(out: Path) -> None:
    chat = (Message("system", 'be\n"brief"'), Message("user", "Größe?\u2028\x00"))
    half = Prompt("half", "half \ud83d of an emoji")
    run(out, prompts=[Prompt("chat", chat[1].text, "", chat, "a-set"), half], keep_text=True)
    rows = read_samples(out).to_pylist()
    assert rows[0]["messages"] == [{"role": m.role, "content": m.text} for m in chat]
    assert (rows[0]["prompt"], rows[0]["dataset"]) == ("Größe?\u2028\x00", "a-set")
    assert rows[0]["text"] == "answer 0 to Größe?\u2028\x00"
    assert (rows[4]["prompt"], rows[4]["messages"]) == ("half \ufffd of an emoji", None)


def test_every_row_has_the_version_that_sampled_it(out: Path, caplog: pytest.LogCaptureFixture) -> None:
    interrupt(out, 10)
    with caplog.at_level(logging.WARNING):
        run(out, FakeBackend(version="2"))
    assert "resuming with fake 2; it was 1 before" in caplog.text
    versions = read_samples(out).column("engine_version").to_pylist()
    assert 10 <= versions.count("1") < 20
    assert versions.count("1") + versions.count("2") == TOTAL


def test_runs_of_an_unseeded_engine_have_ids_of_their_own(tmp_path: Path) -> None:
    class Unseeded(FakeBackend):
        seeded = False

    assert len({run(tmp_path / name, Unseeded())["run_id"] for name in ("a.parquet", "b.parquet")}) == 2
    out = tmp_path / "c.parquet"
    with pytest.raises(KeyboardInterrupt):
        run(out, Unseeded(stop_after=5))
    run(out, Unseeded())
    assert len(set(read_samples(out).column("run_id").to_pylist())) == 1


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
            run_sampling(last, killed_run.PROMPTS, killed_run.SETTINGS, out, killed_run.OPTIONS)
    else:
        run_sampling(last, killed_run.PROMPTS, killed_run.SETTINGS, out, killed_run.OPTIONS)
        assert safe.isdisjoint(last.asked)
        assert len(set(last.asked)) == len(last.asked) == complete.num_rows - len(safe)
    assert read_samples(out).equals(complete)
    names = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
    assert names - {"s.parquet.partial"} == {"stored", "s.parquet", "s.parquet.run.json"}
    assert not store.exists()
