"""Finished requests come back: to the log, to training, to the drift alarm, and to the comparison of two artifacts."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from data_gen.importers import ImportOptions, import_lengths
from data_gen.importers.feedback import feedback_records
from predictors.proxy.feedback_log import FeedbackLog
from predictors.proxy.responses import OutputCounter
from scheduler_core.errors import InputError
from tests.predictors.fakes import expected, write_artifact
from tests.predictors.proxy.fake_engine import (
    CHAT,
    break_off,
    chat,
    completion,
    paused,
    running_engine,
    running_proxy,
    stream_events,
    streamed,
    until,
)
from training import cli_read_feedback as cli

SHORT = "name three rivers"


def records(folder: Path) -> list[dict[str, Any]]:
    return [record.model_dump(exclude_unset=True) for _, record in feedback_records(folder)]


def evaluated(stream: Path) -> dict[str, Any]:
    """The last event of the drift command."""
    from training.drift.cli import main

    events = stream.with_suffix(".events")
    assert main([str(stream), "--out", str(events)]) == 0
    last: dict[str, Any] = json.loads(events.read_text().splitlines()[-1])
    events.unlink()
    return last


async def test_lengths_come_back_and_the_client_sees_no_difference(
    artifact_folder: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"engine": "vllm", "predictor": str(artifact_folder), "feedback": str(tmp_path)}
    options |= {"feedback_usage": True}
    plain_stream = b"".join(stream_events(["a", "b", "c"], None))
    full_stream = b"".join(stream_events(["a", "b", "c"], 7))
    async with running_engine() as fake, running_proxy(fake.url, **options) as proxy:
        assert await proxy.post(chat(SHORT, stream=True)) == (200, plain_stream)
        wants = chat(SHORT, stream=True, stream_options={"include_usage": True})
        assert await proxy.post(wants) == (200, full_stream)
        assert json.loads((await proxy.post(chat(SHORT, temperature=0.5)))[1]) == completion(7)
        assert (await proxy.post(chat(SHORT, n=2)))[0] == 200
        wishes = [body.get("stream_options") for body in fake.bodies]
        assert wishes == [{"include_usage": True}] * 2 + [None] * 2
    found = records(tmp_path)
    assert len(found) == 3  # the lengths of two choices come as one sum
    fields = {"output_tokens": 7, "counted_by": "usage", "finish_reason": "stop", "finished": True}
    fields |= {"max_tokens": 500, "served_model": "tiny-llm"}
    for record in found:
        assert {name: record[name] for name in fields} == fields
        assert (record["mu"], record["sigma"]) == pytest.approx(expected(SHORT), rel=1e-5)
        assert "prompt" not in record
        assert len(record["prompt_sha256"]) == 64
        assert SHORT not in json.dumps(record)
    assert found[2]["temperature"] == 0.5


async def test_without_counts_events_or_a_tokenizer_count(artifact_folder: Path, tmp_path: Path) -> None:
    words = ["name ", "three ", "rivers ", "sea"]

    async def script(request: web.Request, body: bytes) -> web.StreamResponse:
        return await streamed(request, stream_events(words, None))

    tokenizer = str(artifact_folder / "tokenizer.json")
    for folder, given, by in ((tmp_path / "a", None, "deltas"), (tmp_path / "b", tokenizer, "tokenizer")):
        options: dict[str, Any] = {"feedback": str(folder), "served_tokenizer": given}
        async with running_engine(script) as fake, running_proxy(fake.url, **options) as proxy:
            assert (await proxy.post(chat("x", stream=True)))[0] == 200
            assert "stream_options" not in fake.bodies[0]
        [record] = records(folder)
        assert (record["counted_by"], record["output_tokens"]) == (by, 4 if given is None else 5)
    with pytest.raises(InputError, match="served_tokenizer"):
        OutputCounter(str(artifact_folder / "manifest.json"))


async def test_who_hangs_up_is_an_answer_that_was_cut(tmp_path: Path) -> None:
    script = paused([b"".join(stream_events(["a", "b"], None)[:2])], None)
    async with running_engine(script) as fake, running_proxy(fake.url, feedback=str(tmp_path)) as proxy:
        response = await proxy.client.post(proxy.url + CHAT, json=chat("x", stream=True))
        await response.content.readany()
        response.close()
        await until(lambda: proxy.server.num_in_flight == 0)
    [record] = records(tmp_path)
    assert (record["finish_reason"], record["finished"], record["counted_by"]) == ("abort", False, "deltas")


async def test_errors_and_broken_answers_are_no_lengths(tmp_path: Path) -> None:
    async def script(request: web.Request, body: bytes) -> web.StreamResponse:
        if len(fake.requests) == 1:
            return web.json_response({"error": {}}, status=500)
        first = stream_events(["a"], None)[0]
        return await break_off(request, first, {"Content-Type": "text/event-stream"})

    async with running_engine(script) as fake, running_proxy(fake.url, feedback=str(tmp_path)) as proxy:
        assert (await proxy.post(chat("x")))[0] == 500
        response = await proxy.client.post(proxy.url + CHAT, json=chat("x", stream=True))
        assert response.status == 200
        response.close()
    assert list(tmp_path.iterdir()) == []  # nor a segment without records


async def test_from_live_traffic_to_training_drift_and_comparison(
    artifact_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(5)
    mu, sigma = expected(SHORT)
    lengths = np.maximum(1, np.exp(mu + sigma * rng.standard_t(3.5, 30))).astype(int)

    async def script(request: web.Request, body: bytes) -> web.StreamResponse:
        tokens = min(int(lengths[len(fake.requests) - 1]), 500)
        return web.json_response(completion(tokens, "length" if tokens == 500 else "stop"))

    wrong = write_artifact(tmp_path / "rival", artifact_id="rival")
    options = {"engine": "vllm", "predictor": str(artifact_folder), "shadow_predictor": str(wrong)}
    options |= {"feedback_prompts": "stored"}
    log = tmp_path / "log"
    async with running_engine(script) as fake, running_proxy(fake.url, feedback=str(log), **options) as proxy:
        for _ in range(30):
            assert (await proxy.post(chat(SHORT)))[0] == 200
        answered = 'tailcast_proxy_shadow_predictions_total{outcome="answered"}'
        async with asyncio.timeout(60):
            while await proxy.metric(answered) < 30:
                await asyncio.sleep(0.01)
    with open(sorted(log.iterdir())[0], "ab") as torn:
        torn.write(b'{"format": "tailcast-fee')
    assert len(records(log)) == 30

    assert cli.main([str(log), "--json", str(tmp_path / "c.json")]) == 0
    found = json.loads((tmp_path / "c.json").read_text())
    assert json.loads(capsys.readouterr().out) == found
    assert (found["num_records"], found["num_compared"]) == (30, 30)
    assert found["main"]["crps_tokens"] == pytest.approx(found["shadow"]["crps_tokens"])
    assert found["main"]["artifacts"] != found["shadow"]["artifacts"]
    assert found["crps_difference_tokens"]["low"] <= 0 <= found["crps_difference_tokens"]["high"]
    assert found["main"]["coverage"]["p50"]["estimate"] == pytest.approx(0.5, abs=0.3)

    assert cli.main([str(log), "--pairs", str(tmp_path / "pairs.jsonl")]) == 0
    last = evaluated(tmp_path / "pairs.jsonl")
    assert (last["num_outcomes"], last["num_bad_lines"], last["num_alarms"]) == (30, 0, 0)
    # The segments themselves are such a stream too: a torn line is one bad line.
    last = evaluated(sorted(log.iterdir())[0])
    assert (last["num_outcomes"], last["num_bad_lines"]) == (30, 1)

    assert cli.main([str(log), "--records", str(tmp_path / "all.jsonl")]) == 0
    report = import_lengths("feedback", tmp_path / "all.jsonl", tmp_path / "samples.parquet")
    assert (report.num_written, sum(report.finish_reasons.values())) == (30, 30)
    import pyarrow.parquet as pq

    rows = pq.read_table(tmp_path / "samples.parquet").to_pylist()
    assert [row["output_tokens"] for row in rows] == [min(int(length), 500) for length in lengths]
    assert {(row["prompt"], row["model"], row["max_tokens"]) for row in rows} == {(SHORT, "tiny-llm", 500)}
    trace = import_lengths(
        "feedback", tmp_path / "all.jsonl", tmp_path / "trace.parquet", ImportOptions(schema="trace")
    )
    assert trace.num_without_arrival == 0


def test_drift_is_seen_through_the_log(tmp_path: Path) -> None:
    from training.drift.stream import DriftStream
    from training.feedback import pairs

    rng = np.random.default_rng(1)
    log = FeedbackLog(tmp_path)
    for length in np.exp(5.0 + rng.standard_t(3.5, 400) * 0.3):  # predicted a third as long
        log.put(record(output_tokens=max(1, int(length)), mu=3.9, sigma=0.3, nu=3.5))
    log.close()
    lines = (json.dumps(found) for found in pairs(feedback_records(tmp_path), "main"))
    alarms = [found for found in DriftStream(window=100, arl=1000).feed(lines) if found["event"] == "alarm"]
    assert alarms
    assert alarms[0]["reason"] in ("longer", "wider", "more_tail")


def record(**more: Any) -> dict[str, Any]:
    found = {"format": "tailcast-feedback/1", "time": 1.0, "output_tokens": 5, "counted_by": "usage"}
    return found | {"finish_reason": "stop", "finished": True, "served_model": "m", "prompt": "p"} | more


def test_segments_rotate_and_a_torn_line_is_passed_over(tmp_path: Path) -> None:
    outcomes: list[str] = []
    log = FeedbackLog(tmp_path, segment_bytes=500, on_outcome=outcomes.append)
    for number in range(20):
        log.put(record(output_tokens=number + 1))
    log.close()
    segments = sorted(tmp_path.iterdir())
    assert len(segments) > 2
    assert all(len(segment.read_bytes()) < 900 for segment in segments)
    assert [found["output_tokens"] for found in records(tmp_path)] == list(range(1, 21))
    assert outcomes == ["written"] * 20
    os.truncate(segments[0], segments[0].stat().st_size - 3)
    kept = [found["output_tokens"] for found in records(tmp_path)]
    assert len(kept) == 19
    with pytest.raises(InputError, match="feedback log"):
        records(tmp_path / "nothing")
    (tmp_path / "bad.jsonl").write_bytes(b"no record\n")
    with pytest.raises(
        InputError, match="at least one record .skipped 1 of 1 lines: 1 x line .allowed: a JSON object"
    ):
        records(tmp_path / "bad.jsonl")


async def test_text_that_utf8_cannot_carry_is_replaced(tmp_path: Path) -> None:
    async with (
        running_engine() as fake,
        running_proxy(fake.url, feedback=str(tmp_path), feedback_prompts="stored") as proxy,
    ):
        assert (await proxy.post(chat("x")))[0] == 200
    [plain] = sorted(tmp_path.iterdir())
    record = json.loads(plain.read_text())
    plain.unlink()
    log = FeedbackLog(tmp_path)
    log.put(record | {"prompt": "half \ud83d of an emoji", "request_id": "a"})
    log.put(record | {"served_model": "tiny\udc00", "request_id": "b"})
    log.close()
    assert [(found["prompt"], found["served_model"]) for found in records(tmp_path)] == [
        ("half \ufffd of an emoji", "tiny-llm"),
        ("x", "tiny\ufffd"),
    ]
    assert import_lengths("feedback", sorted(tmp_path.iterdir())[0], tmp_path / "s.parquet").num_written == 2


# What a field may hold wrongly, and the keys that the readers name.
WRONG: list[tuple[str, list[Any]]] = [
    ("format", ["tailcast-feedback/2", None]),
    ("time", ["1", None, -1, 1e308, True, [], float("nan")]),
    ("output_tokens", [-1, 2**31, 1.5, "5", None, True, {}, 10**4000]),
    ("counted_by", ["guess", None, 3]),
    ("finish_reason", [None, 3, []]),
    ("finished", [1, "true"]),
    ("served_model", [3, []]),
    ("max_tokens", [0, -1, 2**40, "5", False]),
    ("temperature", ["1", -1, float("inf")]),
    ("prompt_tokens", [-1, 1.5]),
    ("tier", ["0", -1]),
    ("ttft_s", ["0", float("inf")]),
    ("prompt", [3, [], {}]),
    ("prompt_sha256", [3]),
    ("messages", ["x", [1], [{"role": "user"}], [{"role": "user", "content": None}]]),
    ("mu", ["1", 51, None, float("nan")]),
    ("sigma", [0, -1]),
    ("nu", [None, 0]),
    ("shadow", [1, {"mu": 1.0}, {"mu": "x", "sigma": 1.0, "nu": 3.5}]),
    ("request_id", [3]),
]


def test_bad_lines_are_skipped_and_counted_by_all_readers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    good = record(mu=1.0, sigma=0.5, nu=3.5, shadow={"mu": 1.2, "sigma": 0.5, "nu": 3.5})
    good |= {"request_id": "r", "max_tokens": 4}  # a token more than the cap
    bad = [json.dumps(good | {name: value}) for name, values in WRONG for value in values]
    bad += ["{", "[1]", "[" * 100_000, "9" * 5000, json.dumps(good)]
    surrogate = json.dumps(
        good | {"prompt": "\ud800", "request_id": "s"}
    )  # as logs of earlier versions have it
    path = tmp_path / "feedback-1.jsonl"
    path.write_bytes("\n".join([json.dumps(good), *bad, surrogate]).encode() + b"\n\xff\n")
    summary = f"skipped {len(bad) + 1} of {len(bad) + 3} lines: "
    assert [found["prompt"] for found in records(tmp_path)] == ["p", "\ufffd"]
    assert summary in caplog.text
    assert "1 x shadow.mu (allowed: a valid number)" in caplog.text
    assert "1 x record (allowed: one not read before)" in caplog.text

    assert cli.main([str(path)]) == 0
    assert json.loads(capsys.readouterr().out)["num_compared"] == 2
    for schema in ("samples", "trace"):
        report = import_lengths("feedback", path, tmp_path / "s.parquet", ImportOptions(schema=schema))  # type: ignore[arg-type]
        assert (report.num_rows, report.num_written) == (len(bad) + 3, 2)
        assert sum(report.skipped.values()) == len(bad) + 1
    last = evaluated(path)
    # The copy of a record is an outcome too: a stream is not searched for what came before.
    assert (last["num_outcomes"], last["num_bad_lines"]) == (3, len(bad))


class Disk:
    """Counts outcomes, and tells when one has come."""

    def __init__(self) -> None:
        self.outcomes: list[str] = []
        self.changed = threading.Condition()

    def __call__(self, outcome: str) -> None:
        with self.changed:
            self.outcomes.append(outcome)
            self.changed.notify_all()

    def wait(self, number: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.outcomes) >= number, 60)


def test_a_removed_folder_is_made_again_and_loses_nothing(tmp_path: Path) -> None:
    disk = Disk()
    folder = tmp_path / "log"
    log = FeedbackLog(folder, on_outcome=disk)
    log.put(record(output_tokens=1))
    disk.wait(1)
    shutil.rmtree(folder)
    for number in range(2, 5):
        log.put(record(output_tokens=number))
    disk.wait(4)
    shutil.rmtree(folder)
    log.put(record(output_tokens=5))
    log.close()
    assert disk.outcomes == ["written"] * 5
    assert [found["output_tokens"] for found in records(folder)] == [5]


def test_a_disk_that_refuses_for_a_while_costs_no_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, attempts = Disk(), threading.Semaphore(0)
    log = FeedbackLog(tmp_path, on_outcome=disk, retry_s=(0.001, 0.001))
    real = os.fsync

    def refused(descriptor: int) -> None:
        attempts.release()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", refused)
    for number in range(1, 4):
        log.put(record(output_tokens=number))
    for _ in range(5):
        assert attempts.acquire(timeout=60)
    assert disk.outcomes == []
    monkeypatch.setattr(os, "fsync", real)
    disk.wait(3)
    log.close()
    assert disk.outcomes == ["written"] * 3
    assert [found["output_tokens"] for found in records(tmp_path)] == [1, 2, 3]
    assert len(list(tmp_path.iterdir())) == 1


def test_a_record_that_is_no_json_is_counted(tmp_path: Path) -> None:
    disk = Disk()
    log = FeedbackLog(tmp_path, on_outcome=disk)
    log.put(record(temperature=float("nan")))
    log.close()
    assert disk.outcomes == ["failed"]
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(InputError, match="a folder to write to"):
        (tmp_path / "file").write_text("x")
        FeedbackLog(tmp_path / "file" / "log")


FULL_DISK = """
import json, os, signal, sys
from collections import Counter
from predictors.proxy.feedback_log import FeedbackLog
{limit}
counts = Counter()
log = FeedbackLog(sys.argv[1], on_outcome=lambda outcome: counts.update([outcome]), retry_s=(0.001, 0.01))
for number in range(300):
    log.put({{"number": number, "text": "x" * 1000}})
{end}
print(json.dumps(counts), flush=True)
os.kill(os.getpid(), signal.{signal})
"""
KILLED = "while not counts['written']: pass"


def test_a_record_counted_as_written_survives_a_killed_process(tmp_path: Path) -> None:
    code = FULL_DISK.format(limit="", end=KILLED, signal="SIGKILL")
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == -9, done.stderr
    lines = [line for segment in tmp_path.iterdir() for line in segment.read_bytes().split(b"\n")]
    written = json.loads(done.stdout)["written"]
    assert [json.loads(line)["number"] for line in lines[:written]] == list(range(written))


def full_disk(folder: Path, limit: str, *command: str) -> tuple[dict[str, int], list[int]]:
    """Outcomes of 300 records of 1 KB, and the numbers of those that are in the files."""
    code = FULL_DISK.format(limit=limit, end="log.close()", signal="SIGCONT")
    done = subprocess.run(
        [*command, sys.executable, "-c", code, str(folder)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    found = done.stdout.splitlines()
    return json.loads(found[0]), [int(line) for line in found[1:]]


def test_a_full_disk_leaves_whole_segments_only(tmp_path: Path) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))"
    counts, _ = full_disk(tmp_path, limit)
    segments = [segment.read_bytes() for segment in sorted(tmp_path.iterdir())]
    lines = [json.loads(line)["number"] for segment in segments for line in segment.splitlines()]
    assert all(segment.endswith(b"\n") for segment in segments)
    assert counts["written"] == len(set(lines)) == len(lines)
    assert counts["written"] + counts["failed"] == 300


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="mounts a disk of its own")
def test_a_truly_full_disk_leaves_no_empty_segments(tmp_path: Path) -> None:
    script = (
        'mount -t tmpfs -o size=100k none "$0" || { echo "{}"; exit 0; }; "$@" && '
        'cat "$0"/* | grep -o \'^{"number":[0-9]*\' | cut -d: -f2; find "$0" -size 0 -type f | sed s/.*/-1/'
    )
    counts, lines = full_disk(tmp_path, "", "unshare", "-m", "sh", "-c", script, str(tmp_path))
    if not counts:
        pytest.skip("may not mount")
    assert counts["written"] + counts["failed"] == 300
    assert 50 < counts["written"] < 110
    assert lines == list(range(counts["written"]))
