from __future__ import annotations

import errno
import json
import logging
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_gen.backend import SampledOutput, SampleFailure, SamplingSettings, Work, WorkResult
from data_gen.prompts import Message, Prompt
from data_gen.samples import SCHEMA, prompt_sha256, read_samples
from data_gen.sampling_run import (
    STORE_NAME,
    RunObserver,
    SamplingRunOptions,
    run_sampling,
)
from data_gen.store import RunStoppedError, SampleStore
from scheduler_core.errors import InputError
from tests.data_gen.fake_backend import FakeBackend

PROMPTS = [Prompt(f"p{i}", f"prompt {i}", "kind") for i in range(11)]
SETTINGS = SamplingSettings(num_samples=4, max_tokens=50, temperature=1.0, top_p=1.0, seed=2)
TOTAL = 44


def complete(tmp_path: Path, prompts: list[Prompt] = PROMPTS) -> pa.Table:
    """The set as an uninterrupted run makes it."""
    out = tmp_path / "complete.parquet"
    run_sampling(FakeBackend(), prompts, SETTINGS, out, SamplingRunOptions(overwrite=True))
    return read_samples(out)


def run_interrupted(out: Path, stop_after: int, prompts: list[Prompt] = PROMPTS) -> None:
    with pytest.raises(KeyboardInterrupt):
        run_sampling(FakeBackend(stop_after=stop_after), prompts, SETTINGS, out)


def partial_of(out: Path) -> Path:
    return out.with_name(out.name + ".partial")


def test_one_row_for_each_answer_in_the_order_of_the_prompts(tmp_path: Path) -> None:
    out = tmp_path / "s.parquet"
    summary = run_sampling(FakeBackend(shuffle=5), PROMPTS, SETTINGS, out, notes={"from": "here"})
    table = read_samples(out)
    assert pq.read_schema(out).metadata[b"tailcast.schema"] == b"samples/2"
    assert table.schema.equals(SCHEMA)
    assert table.column("prompt_id").to_pylist() == [p.prompt_id for p in PROMPTS for _ in range(4)]
    assert table.column("sample_index").to_pylist() == [0, 1, 2, 3] * 11
    assert set(table.column("run_id").to_pylist()) == {summary.run_id}
    assert (summary.num_samples, summary.num_failed, summary.resume_reason) == (TOTAL, 0, None)
    assert summary.num_censored == table.column("finish_reason").to_pylist().count("length") > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s.parquet", "s.parquet.run.json"]
    content = json.loads((tmp_path / "s.parquet.run.json").read_text())
    assert content["settings"] == {
        "num_samples": 4,
        "max_tokens": 50,
        "temperature": 1.0,
        "top_p": 1.0,
        "seed": 2,
    }
    assert content["finish_reasons"]["stop"] + content["finish_reasons"]["length"] == TOTAL
    assert content["output_tokens"] == sum(table.column("output_tokens").to_pylist())
    assert content["notes"] == {"from": "here"}
    assert content["last_process"]["num_samples"] == TOTAL


@pytest.mark.parametrize("stop_after", [1, 2, 17, 43])
def test_an_interrupted_run_resumes_to_the_same_file(tmp_path: Path, stop_after: int) -> None:
    out = tmp_path / "cut.parquet"
    first = FakeBackend(stop_after=stop_after)
    with pytest.raises(KeyboardInterrupt):
        run_sampling(first, PROMPTS, SETTINGS, out)
    assert first.num_closed == 1
    assert not out.exists()
    second = FakeBackend(shuffle=stop_after)
    summary = run_sampling(second, PROMPTS, SETTINGS, out)
    assert read_samples(out).equals(complete(tmp_path))
    assert sorted(first.given + second.given) == sorted((p.prompt_id, i) for p in PROMPTS for i in range(4))
    assert sorted(second.asked) == sorted(second.given)
    assert summary.process.num_resumed == len(first.given)


def test_each_process_adds_what_it_can_until_the_end(tmp_path: Path) -> None:
    out = tmp_path / "cut.parquet"
    given: list[tuple[str, int]] = []
    for number in range(100):
        backend = FakeBackend(shuffle=number, stop_after=3)
        try:
            run_sampling(backend, PROMPTS, SETTINGS, out)
            break
        except KeyboardInterrupt:
            given += backend.given
    given += backend.given
    assert sorted(given) == sorted((p.prompt_id, i) for p in PROMPTS for i in range(4))
    assert read_samples(out).equals(complete(tmp_path))


def fails(
    times: int, kind: str = "http_500", which: Callable[[str, int], bool] = lambda p, i: (p, i) == ("p3", 1)
):
    """A plan in which some answers fail so many times."""

    def plan(prompt_id: str, sample_index: int, attempt: int) -> SampleFailure | None:
        if attempt <= times and which(prompt_id, sample_index):
            return SampleFailure(sample_index, f"attempt {attempt}", kind)
        return None

    return plan


def test_failed_answers_are_asked_for_again_after_all_others(tmp_path: Path) -> None:
    out = tmp_path / "s.parquet"
    backend = FakeBackend(fails(2))
    summary = run_sampling(backend, PROMPTS, SETTINGS, out, SamplingRunOptions(retries=2))
    assert read_samples(out).equals(complete(tmp_path))
    assert backend.asked.count(("p3", 1)) == 3
    assert backend.asked[-2:] == [("p3", 1)] * 2
    assert summary.num_failed == 0
    assert summary.process.failed_attempts == {"http_500": 2}


def test_failures_that_remain_are_rows_and_the_same_call_tries_just_them(tmp_path: Path) -> None:
    out = tmp_path / "s.parquet"
    summary = run_sampling(FakeBackend(fails(9)), PROMPTS, SETTINGS, out, SamplingRunOptions(retries=1))
    rows = read_samples(out).to_pylist()
    failed = [row for row in rows if row["finish_reason"] == "error"]
    assert len(rows) == TOTAL
    assert [(r["prompt_id"], r["sample_index"], r["output_tokens"]) for r in failed] == [("p3", 1, 0)]
    assert failed[0]["error"] == "http_500: attempt 2"
    assert summary.failures["http_500"].examples[0]["reason"] == "attempt 2"
    assert any("failed, http_500: 1, e.g. prompt p3 sample 1: attempt 2" in line for line in summary.lines())
    assert "tries the failed samples again" in str(summary.resume_reason)
    again = FakeBackend()
    assert run_sampling(again, PROMPTS, SETTINGS, out).resume_reason is None
    assert again.asked == [("p3", 1)]
    assert read_samples(out).equals(complete(tmp_path))
    assert not partial_of(out).exists()


@pytest.mark.parametrize(
    "kind",
    [
        "too_long",
        "refused",
        "content_filter",
        "template",
        "no_token_count",
        "finish_reason",
        "too_many_tokens",
    ],
)
def test_what_cannot_pass_is_not_tried_again(tmp_path: Path, kind: str) -> None:
    out = tmp_path / "s.parquet"
    backend = FakeBackend(fails(9, kind, lambda p, i: p == "p7"))
    summary = run_sampling(backend, PROMPTS, SETTINGS, out)
    assert backend.asked.count(("p7", 0)) == 1
    assert (summary.num_failed, summary.resume_reason) == (4, None)
    assert not partial_of(out).exists()


def test_answers_the_engine_forgets_are_failures(tmp_path: Path) -> None:
    class Forgetful(FakeBackend):
        def sample(self, work: Iterator[Work], settings: SamplingSettings) -> Iterator[WorkResult]:  # type: ignore[override]
            for result in super().sample(work, settings):
                if result.prompt.prompt_id != "p2":
                    yield result

    out = tmp_path / "s.parquet"
    summary = run_sampling(Forgetful(), PROMPTS, SETTINGS, out, SamplingRunOptions(retries=0))
    assert {kind: found.count for kind, found in summary.failures.items()} == {"no_output": 4}
    assert read_samples(out).num_rows == TOTAL


def test_answers_that_nobody_asked_for_do_not_count(tmp_path: Path) -> None:
    class Stutterer(FakeBackend):
        def sample(self, work: Iterator[Work], settings: SamplingSettings) -> Iterator[WorkResult]:  # type: ignore[override]
            for result in super().sample(work, settings):
                yield result
                yield result
                yield WorkResult(Prompt("stranger", "?"), 1, result.outputs)

    out = tmp_path / "s.parquet"
    assert run_sampling(Stutterer(), PROMPTS, SETTINGS, out).num_samples == TOTAL
    assert read_samples(out).equals(complete(tmp_path))


@pytest.mark.parametrize(("kind", "stops"), [("no_token_count", True), ("too_long", False)])
def test_many_failures_in_a_row_stop_a_run_unless_they_lie_in_the_prompts(
    tmp_path: Path, kind: str, stops: bool
) -> None:
    out = tmp_path / "s.parquet"
    backend = FakeBackend(fails(99, kind, lambda p, i: int(p[1:]) > 4))
    options = SamplingRunOptions(max_failures_in_a_row=5)
    if stops:
        with pytest.raises(RunStoppedError, match=f"the last: {kind}"):
            run_sampling(backend, PROMPTS, SETTINGS, out, options)
    assert run_sampling(
        FakeBackend() if stops else backend, PROMPTS, SETTINGS, out, options
    ).num_failed == 24 * (not stops)


def test_a_run_without_any_answer_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    out = tmp_path / "s.parquet"
    with pytest.raises(InputError, match=r"prompts: got 'p\d+'.*\(attempt 1\)"):
        run_sampling(FakeBackend(fails(99, which=lambda p, i: True)), PROMPTS, SETTINGS, out)
    with pytest.raises(KeyboardInterrupt):
        run_sampling(FakeBackend(stop_after=0), PROMPTS, SETTINGS, out)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "options", "engine_options", "named"),
    [
        (SamplingSettings(5, 50, 1.0, 1.0, 2), SamplingRunOptions(), {}, "the same settings .*num_samples=4"),
        (SamplingSettings(4, 50, 1.0, 1.0, 3), SamplingRunOptions(), {}, "seed=2"),
        (SETTINGS, SamplingRunOptions(keep_text=True), {}, "keep_text"),
        (SETTINGS, SamplingRunOptions(hash_prompts=True), {}, "hash_prompts"),
        (SETTINGS, SamplingRunOptions(), {"dtype": "float16"}, "engine_options"),
    ],
)
def test_another_run_is_not_mixed_in(
    tmp_path: Path,
    settings: SamplingSettings,
    options: SamplingRunOptions,
    engine_options: dict[str, object],
    named: str,
) -> None:
    out = tmp_path / "s.parquet"
    run_interrupted(out, 20)
    with pytest.raises(InputError, match=named):
        run_sampling(FakeBackend(), PROMPTS, settings, out, options, engine_options=engine_options)
    run_sampling(FakeBackend(), PROMPTS, SETTINGS, out)
    assert read_samples(out).equals(complete(tmp_path))


def test_a_foreign_folder_is_left_alone(tmp_path: Path) -> None:
    out = tmp_path / "s.parquet"
    partial_of(out).mkdir()
    (partial_of(out) / "shard-000000.log").write_text("mine")
    with pytest.raises(InputError, match="the state of an interrupted run"):
        run_sampling(FakeBackend(), PROMPTS, SETTINGS, out)
    assert (partial_of(out) / "shard-000000.log").read_text() == "mine"


def test_a_resumed_run_may_have_more_prompts_or_fewer(tmp_path: Path) -> None:
    for count in (2, 6, 9):
        out = tmp_path / f"{count}.parquet"
        run_interrupted(out, 14, PROMPTS[:6])
        summary = run_sampling(FakeBackend(), PROMPTS[:count], SETTINGS, out)
        fresh = complete(tmp_path, PROMPTS[:count])
        assert read_samples(out).equals(fresh)
        assert partial_of(out).exists() == (count == 2) == (summary.resume_reason is not None)
    # The surplus was paid for, so it is still there.
    before = FakeBackend()
    run_sampling(before, PROMPTS[:6], SETTINGS, tmp_path / "2.parquet")
    assert len(before.given) < 24 - 8
    assert read_samples(tmp_path / "2.parquet").equals(complete(tmp_path, PROMPTS[:6]))


def test_a_changed_text_is_refused_and_another_order_is_not(tmp_path: Path) -> None:
    out = tmp_path / "s.parquet"
    run_interrupted(out, 30)
    changed = [Prompt("p0", "another text"), *PROMPTS[1:]]
    with pytest.raises(InputError, match="prompts: got \"another text of 'p0'\""):
        run_sampling(FakeBackend(), changed, SETTINGS, out)
    second = FakeBackend()
    run_sampling(second, PROMPTS[::-1], SETTINGS, out)
    assert len(second.given) <= 14
    assert read_samples(out).equals(complete(tmp_path, PROMPTS[::-1]))


def test_prompts_that_change_during_the_run_stop_it(tmp_path: Path) -> None:
    class Changing:
        def __init__(self, later: list[Prompt]) -> None:
            self.lists = iter([PROMPTS, later])

        def __iter__(self) -> Iterator[Prompt]:
            return iter(next(self.lists))

    with pytest.raises(RunStoppedError, match="first at position 5"):
        run_sampling(FakeBackend(), Changing([*PROMPTS[:5], PROMPTS[8]]), SETTINGS, tmp_path / "a.parquet")
    with pytest.raises(RunStoppedError, match="9 of 11 are left"):
        run_sampling(FakeBackend(), Changing(PROMPTS[:9]), SETTINGS, tmp_path / "b.parquet")


def test_bad_prompts_are_refused_before_the_engine_is_asked(tmp_path: Path) -> None:
    backend = FakeBackend()
    out = tmp_path / "s.parquet"
    with pytest.raises(InputError, match="'p0'; allowed: each prompt id once"):
        run_sampling(backend, [PROMPTS[0], PROMPTS[1], PROMPTS[0]], SETTINGS, out)
    with pytest.raises(InputError, match="at least one prompt"):
        run_sampling(backend, [], SETTINGS, out)
    with pytest.raises(TypeError, match="more than once"):
        run_sampling(backend, iter(PROMPTS), SETTINGS, out)
    assert backend.asked == []
    assert list(tmp_path.iterdir()) == []


def test_a_second_process_is_kept_out(tmp_path: Path) -> None:
    out = tmp_path / "s.parquet"
    refused: list[str] = []

    class Intruder(RunObserver):
        def on_result(self, result: WorkResult) -> None:
            if not refused:
                with pytest.raises(InputError, match="no other process is working on") as error:
                    run_sampling(FakeBackend(), PROMPTS, SETTINGS, out)
                refused.append(str(error.value))

    run_sampling(FakeBackend(), PROMPTS, SETTINGS, out, observer=Intruder())
    assert len(refused) == 1
    assert read_samples(out).equals(complete(tmp_path))


def test_a_finished_file_is_not_replaced_unasked(tmp_path: Path) -> None:
    out = tmp_path / "s.parquet"
    run_sampling(FakeBackend(), PROMPTS[:2], SETTINGS, out)
    with pytest.raises(InputError, match="overwrite"):
        run_sampling(FakeBackend(), PROMPTS, SETTINGS, out)
    assert read_samples(out).num_rows == 8
    run_sampling(FakeBackend(), PROMPTS, SETTINGS, out, SamplingRunOptions(overwrite=True))
    assert read_samples(out).num_rows == TOTAL


def test_targets_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    backend = FakeBackend()
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    (tmp_path / "s.parquet.partial").write_text("x")
    for target in ("file/s.parquet", "folder", "s.parquet"):
        with pytest.raises(InputError, match="^out: got"):
            run_sampling(backend, PROMPTS, SETTINGS, tmp_path / target)
    assert backend.asked == []


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """The kernel refuses to let files grow beyond `num_bytes`, as a full disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("num_bytes", [40_000, 61_000, 75_500, 90_000])
def test_a_full_disk_while_sampling_loses_nothing(tmp_path: Path, num_bytes: int) -> None:
    out = tmp_path / "s.parquet"
    first, second = FakeBackend(), FakeBackend()
    stored: list[WorkResult] = []

    class Recorder(RunObserver):
        def on_result(self, result: WorkResult) -> None:
            stored.append(result)

    with (
        largest_file(num_bytes),
        pytest.raises(RunStoppedError, match="cannot write .*same command continues"),
    ):
        run_sampling(first, PROMPTS, SETTINGS, out, observer=Recorder())
    num_stored = sum(len(result.outputs) for result in stored)
    run_sampling(second, PROMPTS, SETTINGS, out)
    assert len(second.given) == TOTAL - num_stored
    assert read_samples(out).equals(complete(tmp_path))


def test_a_full_disk_while_exporting_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "s.parquet"

    def full(writer: pq.ParquetWriter, table: pa.Table) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(pq.ParquetWriter, "write_table", full)
        with pytest.raises(RunStoppedError, match="No space left on device"):
            run_sampling(FakeBackend(), PROMPTS, SETTINGS, out)
    assert not out.exists()
    second = FakeBackend()
    run_sampling(second, PROMPTS, SETTINGS, out)
    assert second.asked == []
    assert read_samples(out).equals(complete(tmp_path))


def test_a_log_truncated_at_any_byte_loses_the_last_results_alone(tmp_path: Path) -> None:
    out = tmp_path / "s.parquet"
    folder = partial_of(out)
    run_interrupted(out, 9)
    # As a killed process leaves it: with the log of what is not in the file yet.
    images: list[tuple[bytes, bytes]] = []

    class Photographer(RunObserver):
        def on_result(self, result: WorkResult) -> None:
            names = (STORE_NAME, f"{STORE_NAME}-wal")
            images.append(tuple((folder / name).read_bytes() for name in names))  # type: ignore[arg-type]

    with pytest.raises(KeyboardInterrupt):
        run_sampling(FakeBackend(stop_after=8), PROMPTS, SETTINGS, out, observer=Photographer())
    database, log = images[-1]
    counts = []
    for length in range(0, len(log) + 1, max(1, len(log) // 23)):
        (folder / STORE_NAME).write_bytes(database)
        (folder / f"{STORE_NAME}-wal").write_bytes(log[:length])
        store = SampleStore(folder / STORE_NAME, sync_interval_s=0)
        with store.transaction():
            store.register(PROMPTS, hash_only=False)
        counts.append(store.num_outputs())
        store.close()
    assert counts == sorted(counts)
    assert counts[0] >= 9
    assert counts[-1] > counts[0]
    run_sampling(FakeBackend(), PROMPTS, SETTINGS, out)
    assert read_samples(out).equals(complete(tmp_path))


def test_a_damaged_store_is_named(tmp_path: Path) -> None:
    out = tmp_path / "s.parquet"
    run_interrupted(out, 9)
    store = partial_of(out) / STORE_NAME
    for content in (b"x" * 5000, store.read_bytes()[:4096] + b"y" * (store.stat().st_size - 4096)):
        store.write_bytes(content)
        with pytest.raises(RunStoppedError, match="is damaged .*recover"):
            run_sampling(FakeBackend(), PROMPTS, SETTINGS, out)
        assert store.read_bytes()[:5000] == content[:5000]


def synced_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interval_s: float
) -> tuple[SampleStore, list[str]]:
    """A store with one prompt, and the names of files whenever one is synced."""
    store = SampleStore(tmp_path / STORE_NAME, sync_interval_s=interval_s)
    with store.transaction():
        store.register(PROMPTS[:1], hash_only=False)
    synced: list[str] = []
    monkeypatch.setattr("data_gen.store._sync", lambda path: synced.append(path.name))
    return store, synced


def add(store: SampleStore, index: int) -> None:
    store.add("p0", 3, [SampledOutput(index, 5, "stop")], {}, engine_version="1", keep_text=False)


def test_every_result_is_synced_with_an_interval_of_zero_and_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, synced = synced_store(tmp_path, monkeypatch, 0.0)
    add(store, 0)
    add(store, 1)
    assert synced == [f"{STORE_NAME}-wal"] * 2
    store.close()
    assert len(synced) == 3


def test_the_last_results_before_a_pause_are_synced_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, _ = synced_store(tmp_path, monkeypatch, 0.01)
    was_synced = threading.Event()
    monkeypatch.setattr("data_gen.store._sync", lambda path: was_synced.set())
    add(store, 0)
    assert was_synced.wait(30)
    store.close()


def test_an_error_of_the_timer_is_raised_by_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for call in ("add", "close"):
        (tmp_path / call).mkdir()
        store, _ = synced_store(tmp_path / call, monkeypatch, 3600.0)

        def broken(path: Path) -> None:
            raise OSError(5, "Input/output error")

        add(store, 0)
        with monkeypatch.context() as patch:
            patch.setattr("data_gen.store._sync", broken)
            store._on_timer()
        with pytest.raises(RunStoppedError, match="Input/output error"):
            add(store, 1) if call == "add" else store.close()
        assert call == "close" or store.num_outputs() == 1
        store.close()


def test_texts_are_kept_only_when_asked_for(tmp_path: Path) -> None:
    out = tmp_path / "s.parquet"
    secret = [
        Prompt("a", "SECRET question"),
        Prompt("b", "x", messages=(Message("user", "SECRET"), Message("user", "x"))),
    ]
    for keep_text in (False, True):
        options = SamplingRunOptions(hash_prompts=True, keep_text=keep_text, overwrite=True)
        with pytest.raises(KeyboardInterrupt):
            run_sampling(FakeBackend(stop_after=6), secret, SETTINGS, out, options)
        stored = b"".join(path.read_bytes() for path in partial_of(out).iterdir())
        assert (b"SECRET" in stored) == keep_text
        run_sampling(FakeBackend(), secret, SETTINGS, out, options)
        rows = read_samples(out).to_pylist()
        assert {row["prompt"] for row in rows} == {None}
        assert {row["messages"] for row in rows} == {None}
        assert {row["prompt_sha256"] for row in rows} == {prompt_sha256(prompt) for prompt in secret}
        assert {row["text"] for row in rows[:1]} == {"answer 0 to SECRET question" if keep_text else None}


def test_conversations_and_any_text_are_recorded_complete(tmp_path: Path) -> None:
    out = tmp_path / "s.parquet"
    chat = (Message("system", 'be\n"brief"'), Message("user", "Größe?\u2028\x00"))
    prompts = [
        Prompt("chat", "Größe?\u2028\x00", "", chat, "a-set"),
        Prompt("lone surrogate", "half \ud83d of an emoji"),
    ]
    run_sampling(FakeBackend(), prompts, SETTINGS, out, SamplingRunOptions(keep_text=True))
    rows = read_samples(out).to_pylist()
    assert rows[0]["messages"] == [{"role": m.role, "content": m.content} for m in chat]
    assert (rows[0]["prompt"], rows[0]["dataset"]) == ("Größe?\u2028\x00", "a-set")
    assert rows[0]["text"] == "answer 0 to Größe?\u2028\x00"
    assert rows[4]["prompt"] == "half \ufffd of an emoji"
    assert rows[4]["messages"] is None


def test_every_row_has_the_version_that_answered_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    out = tmp_path / "s.parquet"
    run_interrupted(out, 10)
    with caplog.at_level(logging.WARNING):
        run_sampling(FakeBackend(version="2"), PROMPTS, SETTINGS, out)
    assert "continuing with fake 2; before it was 1" in caplog.text
    versions = read_samples(out).column("engine_version").to_pylist()
    assert 10 <= versions.count("1") < 20
    assert versions.count("1") + versions.count("2") == TOTAL


def test_runs_of_an_unseeded_engine_have_ids_of_their_own(tmp_path: Path) -> None:
    class Unseeded(FakeBackend):
        seeded = False

    ids = {
        run_sampling(Unseeded(), PROMPTS, SETTINGS, tmp_path / name).run_id
        for name in ("a.parquet", "b.parquet")
    }
    assert len(ids) == 2
    cut = tmp_path / "c.parquet"
    with pytest.raises(KeyboardInterrupt):
        run_sampling(Unseeded(stop_after=5), PROMPTS, SETTINGS, cut)
    run_sampling(Unseeded(), PROMPTS, SETTINGS, cut)
    assert len(set(read_samples(cut).column("run_id").to_pylist())) == 1


@pytest.mark.parametrize("field", ["retries", "max_failures_in_a_row"])
def test_bad_options_are_named(field: str) -> None:
    with pytest.raises(InputError, match=field):
        SamplingRunOptions(**{field: -1})
