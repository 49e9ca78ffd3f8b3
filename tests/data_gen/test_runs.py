from __future__ import annotations

import errno
import json
import logging
import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_gen.backend import Failure, SamplingSettings, Work, WorkResult
from data_gen.prompts import Message, Prompt
from data_gen.runs import Observer, RunOptions, RunStoppedError, merge, run
from data_gen.runs.records import Damage, decode, read_records
from data_gen.runs.shards import shard_paths
from data_gen.runs.signals import terminate_as_interrupt
from data_gen.samples import SCHEMA, prompt_sha256, read_samples
from scheduler_core.errors import InputError
from tests.data_gen.fake_backend import FakeBackend

PROMPTS = [Prompt(f"p{i}", f"prompt {i}", "kind") for i in range(11)]
SETTINGS = SamplingSettings(num_samples=4, max_tokens=50, temperature=1.0, top_p=1.0, seed=2)
TOTAL = 44
SMALL = RunOptions(shard_bytes=600)


def whole(tmp_path: Path, prompts: list[Prompt] = PROMPTS) -> pa.Table:
    """The set as an uninterrupted run makes it."""
    out = tmp_path / "whole.parquet"
    run(FakeBackend(), prompts, SETTINGS, out, RunOptions(overwrite=True))
    return read_samples(out)


def cut_off(out: Path, stop_after: int, options: RunOptions = SMALL, prompts: list[Prompt] = PROMPTS) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(FakeBackend(stop_after=stop_after), prompts, SETTINGS, out, options)


def partial_of(out: Path) -> Path:
    return out.with_name(out.name + ".partial")


def test_one_row_for_each_answer_in_the_order_of_the_prompts(tmp_path: Path) -> None:
    out = tmp_path / "s.parquet"
    summary = run(FakeBackend(shuffle=5), PROMPTS, SETTINGS, out, notes={"from": "here"})
    table = read_samples(out)
    assert pq.read_schema(out).metadata[b"tailcast.schema"] == b"samples/2"
    assert table.schema.equals(SCHEMA)
    assert table.column("prompt_id").to_pylist() == [p.prompt_id for p in PROMPTS for _ in range(4)]
    assert table.column("sample_index").to_pylist() == [0, 1, 2, 3] * 11
    assert set(table.column("run_id").to_pylist()) == {summary.run_id}
    assert (summary.num_samples, summary.num_failed, summary.kept) == (TOTAL, 0, None)
    assert summary.num_censored == table.column("finish_reason").to_pylist().count("length") > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s.parquet", "s.parquet.run.json"]
    told = json.loads((tmp_path / "s.parquet.run.json").read_text())
    assert told["settings"] == {
        "num_samples": 4,
        "max_tokens": 50,
        "temperature": 1.0,
        "top_p": 1.0,
        "seed": 2,
    }
    assert told["finish_reasons"]["stop"] + told["finish_reasons"]["length"] == TOTAL
    assert told["output_tokens"] == sum(table.column("output_tokens").to_pylist())
    assert told["notes"] == {"from": "here"}
    assert told["last_process"]["num_answers"] == TOTAL


@pytest.mark.parametrize("stop_after", [1, 2, 17, 43])
@pytest.mark.parametrize("options", [SMALL, RunOptions()])
def test_an_interrupted_run_resumes_to_the_same_file(
    tmp_path: Path, stop_after: int, options: RunOptions
) -> None:
    out = tmp_path / "cut.parquet"
    first = FakeBackend(stop_after=stop_after)
    with pytest.raises(KeyboardInterrupt):
        run(first, PROMPTS, SETTINGS, out, options)
    assert first.num_closed == 1
    assert not out.exists()
    second = FakeBackend(shuffle=stop_after)
    summary = run(second, PROMPTS, SETTINGS, out, options)
    assert read_samples(out).equals(whole(tmp_path))
    assert sorted(first.given + second.given) == sorted((p.prompt_id, i) for p in PROMPTS for i in range(4))
    assert sorted(second.asked) == sorted(second.given)
    assert summary.effort.num_resumed == len(first.given)


def test_each_process_adds_what_it_can_until_the_end(tmp_path: Path) -> None:
    out = tmp_path / "cut.parquet"
    given: list[tuple[str, int]] = []
    for number in range(100):
        backend = FakeBackend(shuffle=number, stop_after=3)
        try:
            run(backend, PROMPTS, SETTINGS, out, SMALL)
            break
        except KeyboardInterrupt:
            given += backend.given
    given += backend.given
    assert sorted(given) == sorted((p.prompt_id, i) for p in PROMPTS for i in range(4))
    assert read_samples(out).equals(whole(tmp_path))


def test_sigterm_ends_a_run_like_an_interrupt(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    out = tmp_path / "s.parquet"

    class Observed(Observer):
        def arrived(self, result: WorkResult) -> None:
            if len(backend.given) >= 6:
                os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    backend = FakeBackend()
    with caplog.at_level(logging.WARNING), terminate_as_interrupt(), pytest.raises(KeyboardInterrupt):
        run(backend, PROMPTS, SETTINGS, out, observer=Observed())
    assert signal.getsignal(signal.SIGTERM) is before
    assert f"of {TOTAL} answers are safe in {partial_of(out)}; the same command goes on" in caplog.text
    run(FakeBackend(), PROMPTS, SETTINGS, out)
    assert read_samples(out).equals(whole(tmp_path))


def fails(
    times: int, kind: str = "http_500", which: Callable[[str, int], bool] = lambda p, i: (p, i) == ("p3", 1)
):
    """A plan in which some answers fail so many times."""

    def plan(prompt_id: str, sample_index: int, attempt: int) -> Failure | None:
        if attempt <= times and which(prompt_id, sample_index):
            return Failure(sample_index, f"attempt {attempt}", kind)
        return None

    return plan


def test_failed_answers_are_asked_for_again_after_all_others(tmp_path: Path) -> None:
    out = tmp_path / "s.parquet"
    backend = FakeBackend(fails(2))
    summary = run(backend, PROMPTS, SETTINGS, out, RunOptions(retries=2))
    assert read_samples(out).equals(whole(tmp_path))
    assert backend.asked.count(("p3", 1)) == 3
    assert backend.asked[-2:] == [("p3", 1)] * 2
    assert summary.num_failed == 0
    assert summary.effort.failed_attempts == {"http_500": 2}


def test_failures_that_remain_are_rows_and_the_same_call_tries_just_them(tmp_path: Path) -> None:
    out = tmp_path / "s.parquet"
    summary = run(FakeBackend(fails(9)), PROMPTS, SETTINGS, out, RunOptions(retries=1))
    rows = read_samples(out).to_pylist()
    failed = [row for row in rows if row["finish_reason"] == "error"]
    assert len(rows) == TOTAL
    assert [(r["prompt_id"], r["sample_index"], r["output_tokens"]) for r in failed] == [("p3", 1, 0)]
    assert failed[0]["error"] == "http_500: attempt 2"
    assert summary.tally.failures["http_500"].examples[0]["reason"] == "attempt 2"
    assert any("failed, http_500: 1, e.g. prompt p3 answer 1: attempt 2" in line for line in summary.lines())
    assert "tries the failed answers again" in str(summary.kept)
    again = FakeBackend()
    assert run(again, PROMPTS, SETTINGS, out).kept is None
    assert again.asked == [("p3", 1)]
    assert read_samples(out).equals(whole(tmp_path))
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
    summary = run(backend, PROMPTS, SETTINGS, out)
    assert backend.asked.count(("p7", 0)) == 1
    assert (summary.num_failed, summary.kept) == (4, None)
    assert not partial_of(out).exists()


def test_answers_the_engine_forgets_are_failures(tmp_path: Path) -> None:
    class Forgetful(FakeBackend):
        def sample(self, work: Iterator[Work], settings: SamplingSettings) -> Iterator[WorkResult]:  # type: ignore[override]
            for result in super().sample(work, settings):
                if result.prompt.prompt_id != "p2":
                    yield result

    out = tmp_path / "s.parquet"
    summary = run(Forgetful(), PROMPTS, SETTINGS, out, RunOptions(retries=0))
    assert {kind: found.count for kind, found in summary.tally.failures.items()} == {"no_answer": 4}
    assert read_samples(out).num_rows == TOTAL


def test_answers_that_nobody_asked_for_do_not_count(tmp_path: Path) -> None:
    class Stutterer(FakeBackend):
        def sample(self, work: Iterator[Work], settings: SamplingSettings) -> Iterator[WorkResult]:  # type: ignore[override]
            for result in super().sample(work, settings):
                yield result
                yield result
                yield WorkResult(Prompt("stranger", "?"), 1, result.answers)

    out = tmp_path / "s.parquet"
    assert run(Stutterer(), PROMPTS, SETTINGS, out).num_samples == TOTAL
    assert read_samples(out).equals(whole(tmp_path))


def test_a_dead_engine_stops_the_run_and_nothing_is_lost(tmp_path: Path) -> None:
    out = tmp_path / "s.parquet"
    backend = FakeBackend(fails(99, "http_503", lambda p, i: int(p[1:]) > 4))
    with pytest.raises(RunStoppedError, match=r"\d failures in a row, the last: http_503"):
        run(backend, PROMPTS, SETTINGS, out, RunOptions(max_failures_in_a_row=5))
    second = FakeBackend()
    run(second, PROMPTS, SETTINGS, out)
    assert set(second.given).isdisjoint(backend.given)
    assert read_samples(out).equals(whole(tmp_path))


@pytest.mark.parametrize(("kind", "stops"), [("no_token_count", True), ("too_long", False)])
def test_many_failures_in_a_row_stop_a_run_unless_they_lie_in_the_prompts(
    tmp_path: Path, kind: str, stops: bool
) -> None:
    out = tmp_path / "s.parquet"
    backend = FakeBackend(fails(99, kind, lambda p, i: int(p[1:]) > 4))
    options = RunOptions(max_failures_in_a_row=5)
    if stops:
        with pytest.raises(RunStoppedError, match=f"the last: {kind}"):
            run(backend, PROMPTS, SETTINGS, out, options)
    assert run(FakeBackend() if stops else backend, PROMPTS, SETTINGS, out, options).num_failed == 24 * (
        not stops
    )


def test_an_error_of_the_engine_passes_through_and_the_state_is_kept(tmp_path: Path) -> None:
    out = tmp_path / "s.parquet"
    backend = FakeBackend(stop_after=9, stop_with=RuntimeError)
    with pytest.raises(RuntimeError):
        run(backend, PROMPTS, SETTINGS, out)
    second = FakeBackend()
    run(second, PROMPTS, SETTINGS, out)
    assert len(second.given) == TOTAL - len(backend.given)


def test_a_run_without_any_answer_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    out = tmp_path / "s.parquet"
    with pytest.raises(InputError, match=r"prompts: got 'p\d+'.*\(attempt 1\)"):
        run(FakeBackend(fails(99, which=lambda p, i: True)), PROMPTS, SETTINGS, out)
    with pytest.raises(KeyboardInterrupt):
        run(FakeBackend(stop_after=0), PROMPTS, SETTINGS, out)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "options", "engine_options", "named"),
    [
        (SamplingSettings(5, 50, 1.0, 1.0, 2), RunOptions(), {}, "the same settings .*num_samples=4"),
        (SamplingSettings(4, 50, 1.0, 1.0, 3), RunOptions(), {}, "seed=2"),
        (SETTINGS, RunOptions(keep_text=True), {}, "keep_text"),
        (SETTINGS, RunOptions(hash_prompts=True), {}, "hash_prompts"),
        (SETTINGS, RunOptions(), {"dtype": "float16"}, "engine_options"),
    ],
)
def test_another_run_is_not_mixed_in(
    tmp_path: Path,
    settings: SamplingSettings,
    options: RunOptions,
    engine_options: dict[str, object],
    named: str,
) -> None:
    out = tmp_path / "s.parquet"
    cut_off(out, 20)
    with pytest.raises(InputError, match=named):
        run(FakeBackend(), PROMPTS, settings, out, options, engine_options=engine_options)
    run(FakeBackend(), PROMPTS, SETTINGS, out)
    assert read_samples(out).equals(whole(tmp_path))


def test_a_foreign_folder_is_left_alone(tmp_path: Path) -> None:
    out = tmp_path / "s.parquet"
    partial_of(out).mkdir()
    (partial_of(out) / "shard-000000.log").write_text("mine")
    with pytest.raises(InputError, match="manifest"):
        run(FakeBackend(), PROMPTS, SETTINGS, out)
    (partial_of(out) / "manifest.json").write_text("{")
    with pytest.raises(InputError, match="readable state"):
        run(FakeBackend(), PROMPTS, SETTINGS, out)
    assert (partial_of(out) / "shard-000000.log").read_text() == "mine"


def test_a_resumed_run_may_have_more_prompts_or_fewer(tmp_path: Path) -> None:
    for count in (2, 6, 9):
        out = tmp_path / f"{count}.parquet"
        cut_off(out, 14, prompts=PROMPTS[:6])
        summary = run(FakeBackend(), PROMPTS[:count], SETTINGS, out)
        fresh = whole(tmp_path, PROMPTS[:count])
        assert read_samples(out).equals(fresh)
        assert partial_of(out).exists() == (count == 2) == (summary.kept is not None)
    # The surplus was paid for, so it is still there.
    before = FakeBackend()
    run(before, PROMPTS[:6], SETTINGS, tmp_path / "2.parquet")
    assert len(before.given) < 24 - 8
    assert read_samples(tmp_path / "2.parquet").equals(whole(tmp_path, PROMPTS[:6]))


@pytest.mark.parametrize(
    "changed",
    [[Prompt("p0", "another text"), *PROMPTS[1:]], [PROMPTS[1], PROMPTS[0], *PROMPTS[2:]], PROMPTS[1:]],
)
def test_changed_prompts_are_refused(tmp_path: Path, changed: list[Prompt]) -> None:
    out = tmp_path / "s.parquet"
    cut_off(out, 30)
    with pytest.raises(InputError, match="another prompt at position [01]"):
        run(FakeBackend(), changed, SETTINGS, out)
    run(FakeBackend(), PROMPTS, SETTINGS, out)
    assert read_samples(out).equals(whole(tmp_path))


def test_prompts_that_change_during_the_run_stop_it(tmp_path: Path) -> None:
    class Changing:
        def __init__(self, later: list[Prompt]) -> None:
            self.lists = iter([PROMPTS, later])

        def __iter__(self) -> Iterator[Prompt]:
            return iter(next(self.lists))

    with pytest.raises(RunStoppedError, match="first at position 5"):
        run(FakeBackend(), Changing([*PROMPTS[:5], PROMPTS[8]]), SETTINGS, tmp_path / "a.parquet")
    with pytest.raises(RunStoppedError, match="9 of 11 are left"):
        run(FakeBackend(), Changing(PROMPTS[:9]), SETTINGS, tmp_path / "b.parquet")


def test_bad_prompts_are_refused_before_the_engine_is_asked(tmp_path: Path) -> None:
    backend = FakeBackend()
    out = tmp_path / "s.parquet"
    with pytest.raises(InputError, match="'p0'; allowed: each prompt id once"):
        run(backend, [PROMPTS[0], PROMPTS[1], PROMPTS[0]], SETTINGS, out)
    with pytest.raises(InputError, match="at least one prompt"):
        run(backend, [], SETTINGS, out)
    with pytest.raises(TypeError, match="more than once"):
        run(backend, iter(PROMPTS), SETTINGS, out)
    assert backend.asked == []
    assert list(tmp_path.iterdir()) == []


def test_a_second_process_is_kept_out(tmp_path: Path) -> None:
    out = tmp_path / "s.parquet"
    refused: list[str] = []

    class Intruder(Observer):
        def arrived(self, result: WorkResult) -> None:
            if not refused:
                with pytest.raises(InputError, match=f"process {os.getpid()} is") as error:
                    run(FakeBackend(), PROMPTS, SETTINGS, out)
                refused.append(str(error.value))

    run(FakeBackend(), PROMPTS, SETTINGS, out, observer=Intruder())
    assert len(refused) == 1
    assert read_samples(out).equals(whole(tmp_path))


def test_a_finished_file_is_not_replaced_unasked(tmp_path: Path) -> None:
    out = tmp_path / "s.parquet"
    run(FakeBackend(), PROMPTS[:2], SETTINGS, out)
    with pytest.raises(InputError, match="overwrite"):
        run(FakeBackend(), PROMPTS, SETTINGS, out)
    assert read_samples(out).num_rows == 8
    run(FakeBackend(), PROMPTS, SETTINGS, out, RunOptions(overwrite=True))
    assert read_samples(out).num_rows == TOTAL


def test_targets_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    backend = FakeBackend()
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    (tmp_path / "s.parquet.partial").write_text("x")
    for target in ("file/s.parquet", "folder", "s.parquet"):
        with pytest.raises(InputError, match="^out: got"):
            run(backend, PROMPTS, SETTINGS, tmp_path / target)
    assert backend.asked == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_unwritable_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o555)
    with pytest.raises(InputError, match="writable folder"):
        run(FakeBackend(), PROMPTS, SETTINGS, tmp_path / "locked" / "s.parquet")


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """The kernel refuses to let files grow beyond `num_bytes`, as a full disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("num_bytes", [1500, 1501, 1555, 2222, 3000])
def test_a_full_disk_while_sampling_loses_nothing(tmp_path: Path, num_bytes: int) -> None:
    out = tmp_path / "s.parquet"
    first, second = FakeBackend(), FakeBackend()
    with largest_file(num_bytes), pytest.raises(RunStoppedError, match="cannot write .*same command goes on"):
        run(first, PROMPTS, SETTINGS, out)
    (shard,) = shard_paths(partial_of(out))
    damage = Damage()
    assert len(list(read_records(shard, damage))) > 3
    assert damage.num_lines == 0
    run(second, PROMPTS, SETTINGS, out)
    assert len(second.given) < TOTAL
    assert read_samples(out).equals(whole(tmp_path))


def test_a_full_disk_while_merging_loses_nothing(tmp_path: Path) -> None:
    out = tmp_path / "s.parquet"
    with largest_file(1700), pytest.raises(RunStoppedError, match="cannot write"):
        run(FakeBackend(), PROMPTS, SETTINGS, out, RunOptions(shard_bytes=400))
    assert not out.exists()
    second = FakeBackend()
    run(second, PROMPTS, SETTINGS, out)
    assert second.asked == []
    assert read_samples(out).equals(whole(tmp_path))


def test_no_space_in_the_middle_of_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "s.parquet"
    write, written = os.write, list[int]()

    def full(handle: int, data: bytes) -> int:
        if len(written) == 9:
            written.append(0)
            return write(handle, bytes(data)[:5])
        if len(written) > 9:
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(len(data))
        return write(handle, data)

    with monkeypatch.context() as patch:
        patch.setattr("data_gen.runs.shards.os.write", full)
        with pytest.raises(RunStoppedError, match="No space left on device"):
            run(FakeBackend(), PROMPTS, SETTINGS, out)
    run(FakeBackend(), PROMPTS, SETTINGS, out)
    assert read_samples(out).equals(whole(tmp_path))


def test_a_shard_cut_at_any_byte_loses_at_most_the_torn_record(tmp_path: Path) -> None:
    out = tmp_path / "s.parquet"
    prompts = PROMPTS[:2]
    expected = whole(tmp_path, prompts)
    cut_off(out, 5, RunOptions(), prompts)
    (shard,) = shard_paths(partial_of(out))
    content = shard.read_bytes()
    manifest = (partial_of(out) / "manifest.json").read_bytes()
    # Every byte of the last record, and every seventh of the others.
    last = content.rindex(b"\n", 0, -1)
    for length in sorted({*range(0, last, 7), *range(last, len(content) + 1)}):
        partial_of(out).mkdir(exist_ok=True)
        (partial_of(out) / "manifest.json").write_bytes(manifest)
        shard.write_bytes(content[:length])
        kept = {
            index
            for line in content[:length].splitlines(keepends=True)
            if (record := decode(line)) is not None and record.kind == "r"
            for index in [(record.position, answer[0]) for answer in json.loads(record.payload)[2]]
        }
        backend = FakeBackend()
        run(backend, prompts, SETTINGS, out, RunOptions(overwrite=True))
        assert {(f"p{position}", index) for position, index in kept}.isdisjoint(backend.asked)
        assert len(backend.asked) == 8 - len(kept)
        assert read_samples(out).equals(expected), length


@pytest.mark.parametrize("line", [0, 1, 7])
def test_damaged_records_are_counted_and_asked_for_again(tmp_path: Path, line: int) -> None:
    out = tmp_path / "s.parquet"
    cut_off(out, 30, RunOptions())
    (shard,) = shard_paths(partial_of(out))
    lines = shard.read_bytes().splitlines(keepends=True)
    lines[line] = lines[line].replace(b'"', b"'", 1) if b'"' in lines[line] else b"\0" * len(lines[line])
    shard.write_bytes(b"".join(lines))
    summary = run(FakeBackend(), PROMPTS, SETTINGS, out)
    assert summary.num_damaged == 1
    assert read_samples(out).equals(whole(tmp_path))


def test_shards_of_any_number_merge_in_bounded_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge, "FAN_IN", 2)
    monkeypatch.setattr(merge, "GROUP_ROWS", 5)
    out = tmp_path / "s.parquet"
    shards = []

    class Counter(Observer):
        def arrived(self, result: WorkResult) -> None:
            shards.append(len(shard_paths(partial_of(out))))

    run(
        FakeBackend(shuffle=3, window=40),
        PROMPTS,
        SETTINGS,
        out,
        RunOptions(shard_bytes=1),
        observer=Counter(),
    )
    assert max(shards) > 10
    assert pq.ParquetFile(out).num_row_groups == 9
    assert read_samples(out).equals(whole(tmp_path))


def test_texts_are_kept_only_when_asked_for(tmp_path: Path) -> None:
    out = tmp_path / "s.parquet"
    secret = [
        Prompt("a", "SECRET question"),
        Prompt("b", "x", messages=(Message("user", "SECRET"), Message("user", "x"))),
    ]
    for keep_text in (False, True):
        options = RunOptions(hash_prompts=True, keep_text=keep_text, overwrite=True)
        with pytest.raises(KeyboardInterrupt):
            run(FakeBackend(stop_after=6), secret, SETTINGS, out, options)
        stored = b"".join(path.read_bytes() for path in partial_of(out).iterdir())
        assert (b"SECRET" in stored) == keep_text
        run(FakeBackend(), secret, SETTINGS, out, options)
        rows = read_samples(out).to_pylist()
        assert {row["prompt"] for row in rows} == {None}
        assert {row["messages"] for row in rows} == {None}
        assert {row["prompt_sha256"] for row in rows} == {prompt_sha256(prompt) for prompt in secret}
        assert {row["text"] for row in rows[:1]} == {"answer 0 to SECRET question" if keep_text else None}


def test_conversations_and_any_text_are_recorded_whole(tmp_path: Path) -> None:
    out = tmp_path / "s.parquet"
    chat = (Message("system", 'be\n"brief"'), Message("user", "Größe?\u2028\x00"))
    prompts = [
        Prompt("chat", "Größe?\u2028\x00", "", chat, "a-set"),
        Prompt("lone surrogate", "half \ud83d of an emoji"),
    ]
    run(FakeBackend(), prompts, SETTINGS, out, RunOptions(keep_text=True))
    rows = read_samples(out).to_pylist()
    assert rows[0]["messages"] == [{"role": m.role, "content": m.content} for m in chat]
    assert (rows[0]["prompt"], rows[0]["dataset"]) == ("Größe?\u2028\x00", "a-set")
    assert rows[0]["text"] == "answer 0 to Größe?\u2028\x00"
    assert rows[4]["prompt"] == "half \ufffd of an emoji"
    assert rows[4]["messages"] is None


def test_every_row_has_the_version_that_answered_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    out = tmp_path / "s.parquet"
    cut_off(out, 10)
    with caplog.at_level(logging.WARNING):
        run(FakeBackend(version="2"), PROMPTS, SETTINGS, out)
    assert "going on with fake 2; before it was 1" in caplog.text
    versions = read_samples(out).column("engine_version").to_pylist()
    assert 10 <= versions.count("1") < 20
    assert versions.count("1") + versions.count("2") == TOTAL


def test_runs_of_an_unseeded_engine_have_ids_of_their_own(tmp_path: Path) -> None:
    class Unseeded(FakeBackend):
        seeded = False

    ids = {run(Unseeded(), PROMPTS, SETTINGS, tmp_path / name).run_id for name in ("a.parquet", "b.parquet")}
    assert len(ids) == 2
    cut = tmp_path / "c.parquet"
    with pytest.raises(KeyboardInterrupt):
        run(Unseeded(stop_after=5), PROMPTS, SETTINGS, cut)
    run(Unseeded(), PROMPTS, SETTINGS, cut)
    assert len(set(read_samples(cut).column("run_id").to_pylist())) == 1


def test_the_observer_sees_every_answer_once(tmp_path: Path) -> None:
    class Recorder(Observer):
        def __init__(self) -> None:
            self.start: tuple[int, int] | None = None
            self.num_answers = 0

        def started(self, num_answers: int, num_done: int) -> None:
            self.start = (num_answers, num_done)

        def arrived(self, result: WorkResult) -> None:
            self.num_answers += len(result.answers)

    out = tmp_path / "s.parquet"
    cut_off(out, 12)
    recorder = Recorder()
    summary = run(FakeBackend(), PROMPTS, SETTINGS, out, observer=recorder)
    assert recorder.start == (TOTAL, summary.effort.num_resumed)
    assert recorder.num_answers == TOTAL - summary.effort.num_resumed


@pytest.mark.parametrize("field", ["retries", "max_failures_in_a_row", "shard_bytes"])
def test_bad_options_are_named(field: str) -> None:
    with pytest.raises(InputError, match=field):
        RunOptions(**{field: -1})
