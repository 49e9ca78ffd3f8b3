"""Finished requests come back: to the log, to training, to the drift alarm, to the comparison of two artifacts, to online calibration."""

import json
import logging
import os
import queue
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from data_gen.commands.import_lengths import main as import_command
from data_gen.importers.config import ImportLengthsConfig
from data_gen.importers.import_lengths import import_lengths
from data_gen.importers.logs import feedback_rows, openai_rows
from data_gen.importers.values import SkippedRows
from predictors.proxy.feedback_log import FeedbackLog
from scheduler_core.adapters.live_calibration import unpacked
from scheduler_core.errors import InputError
from scheduler_core.prediction.outcome import parse_outcome, read_log
from scheduler_core.prediction.predictions import LengthPrediction
from tests.predictors.fakes import expected, write_artifact
from tests.predictors.proxy import fake_engine
from tests.predictors.proxy.fake_engine import chat, running_engine, running_proxy
from training.commands import read_feedback as cli

SHORT = "name three rivers"
OUTPUTS = 'tailcast_proxy_calibration_outputs{served_model="tiny-llm"}'
CENSORED = 'tailcast_proxy_calibration_censored_outputs{served_model="tiny-llm"}'


def records(folder: Path) -> list[dict[str, Any]]:
    left_out = Counter[str]()
    rows = [outcome.to_json() for _, outcome in read_log(folder, left_out)]
    if left_out:
        logging.warning("skipped %s", left_out)
    return rows


def imported(log: Path, out: Path, **options: Any) -> dict[str, Any]:
    return import_lengths(ImportLengthsConfig(kind="feedback", file=str(log), out=str(out), **options))


def evaluated(stream: Path) -> dict[str, Any]:
    """The last event of the drift command."""
    from training.commands.evaluate_stream import main

    events = stream.with_suffix(".events")
    assert main([str(stream), "--out", str(events)]) == 0
    last: dict[str, Any] = json.loads(events.read_text().splitlines()[-1])
    events.unlink()
    return last


async def test_lengths_come_back_and_clients_see_no_difference(artifact_folder: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"engine": "vllm", "predictor": str(artifact_folder), "feedback": str(tmp_path)}
    usage = {"stream_options": {"include_usage": True}}
    async with running_engine() as fake, running_proxy(fake.url, feedback_usage=True, **options) as proxy:
        for more, tokens in (({}, None), (usage, 7)):
            stream = b"".join(fake_engine.stream_events(["a", "b", "c"], tokens))
            assert await proxy.post(chat(SHORT, stream=True, **more)) == (200, stream)
        assert json.loads((await proxy.post(chat(SHORT, temperature=0.5)))[1]) == fake_engine.completion(7)
        assert (await proxy.post(chat(SHORT, n=2)))[0] == 200
        wishes = [body.get("stream_options") for body in fake.bodies]
        assert wishes == [usage["stream_options"]] * 2 + [None] * 2
    rows = records(tmp_path)
    assert len(rows) == 3  # the lengths of two choices come as one sum
    fields = {"output_tokens": 7, "counted_by": "usage", "finish_reason": "stop", "finished": True}
    fields |= {"max_tokens": 500, "served_model": "tiny-llm"}
    for row in rows:
        assert {name: row[name] for name in fields} == fields
        assert (row["mu"], row["sigma"]) == pytest.approx(expected(SHORT), rel=1e-5)
        assert len(row["prompt_sha256"]) == 64
        assert SHORT not in json.dumps(row)
    assert rows[2]["temperature"] == 0.5


async def test_without_counts_events_are_counted(tmp_path: Path) -> None:
    async with running_engine() as fake, running_proxy(fake.url, feedback=str(tmp_path)) as proxy:
        assert (await proxy.post(chat("x", stream=True)))[0] == 200
        assert "stream_options" not in fake.bodies[0]
    [row] = records(tmp_path)
    assert (row["counted_by"], row["output_tokens"]) == ("deltas", 3)


async def hang_up(proxy: fake_engine.RunningProxy, body: Any) -> None:
    """Leaves a stream after its first bytes."""
    response = await proxy.client.post(proxy.url + fake_engine.CHAT, json=body)
    await response.content.readany()
    response.close()
    await fake_engine.until(lambda: proxy.server.num_in_flight == 0)


async def test_a_hang_up_censors_and_broken_responses_are_no_lengths(tmp_path: Path) -> None:
    first = fake_engine.stream_events(["a"], None)[0]

    async def script(request: web.Request, body: bytes) -> web.StreamResponse:
        match len(fake.requests):
            case 1:
                return web.json_response({"error": {}}, status=500)
            case 2:
                return await fake_engine.break_off(request, first, {"Content-Type": "text/event-stream"})
        return await fake_engine.paused([first], None)(request, body)

    async with running_engine(script) as fake:
        async with running_proxy(fake.url, feedback=str(tmp_path)) as proxy:
            for _ in range(2):
                (await proxy.client.post(proxy.url + fake_engine.CHAT, json=chat("x", stream=True))).close()
            await fake_engine.until(lambda: proxy.server.num_in_flight == 0)
        assert list(tmp_path.iterdir()) == []  # nor a segment without records
        async with running_proxy(fake.url, feedback=str(tmp_path)) as proxy:
            await hang_up(proxy, chat("x", stream=True))
    [row] = records(tmp_path)
    assert (row["finish_reason"], row["finished"], row["counted_by"]) == ("abort", False, "deltas")


async def test_from_live_traffic_to_training_drift_and_comparison(
    artifact_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(5)
    mu, sigma = expected(SHORT)
    lengths = np.maximum(1, np.exp(mu + sigma * rng.standard_t(3.5, 30))).astype(int)

    async def script(request: web.Request, body: bytes) -> web.StreamResponse:
        tokens = min(int(lengths[len(fake.requests) - 1]), 500)
        return web.json_response(fake_engine.completion(tokens, "length" if tokens == 500 else "stop"))

    wrong = write_artifact(tmp_path / "rival", artifact_id="rival")
    options = {"engine": "vllm", "predictor": str(artifact_folder), "shadow_predictor": str(wrong)}
    options |= {"feedback_prompts": "stored"}
    log = tmp_path / "log"
    async with running_engine(script) as fake, running_proxy(fake.url, feedback=str(log), **options) as proxy:
        for _ in range(30):
            assert (await proxy.post(chat(SHORT)))[0] == 200
        await proxy.reaches('tailcast_proxy_shadow_predictions_total{outcome="answered"}', 30)
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

    # A torn line is one bad line.
    for stream in (log, sorted(log.iterdir())[0]):
        last = evaluated(stream)
        assert (last["num_outcomes"], last["num_bad_lines"], last["num_alarms"]) == (30, 1, 0)

    report = imported(log, tmp_path / "samples.parquet")
    assert (report["num_written"], sum(report["finish_reasons"].values())) == (30, 30)
    import pyarrow.parquet as pq

    rows = pq.read_table(tmp_path / "samples.parquet").to_pylist()
    # A record waits for the second predictor, so records can overtake each other.
    assert sorted(row["output_tokens"] for row in rows) == sorted(min(int(length), 500) for length in lengths)
    assert {(row["prompt"], row["model"], row["max_tokens"]) for row in rows} == {(SHORT, "tiny-llm", 500)}
    assert imported(log, tmp_path / "trace.parquet", schema="trace")["num_without_arrival"] == 0


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
    assert len(records(tmp_path)) == 19
    with pytest.raises(InputError, match="feedback log"):
        records(tmp_path / "nothing")
    with pytest.raises(InputError, match="a writable folder"):
        FeedbackLog(segments[0] / "log")
    (tmp_path / "bad.jsonl").write_bytes(b"no record\n")
    with pytest.raises(InputError, match="skipped 1 of 1 lines: 1 x line .allowed: a JSON object"):
        records(tmp_path / "bad.jsonl")


# Wrong values of fields: in each of its ways, each kind of field once.
WRONG: dict[str, list[Any]] = {
    "format": ["tailcast-feedback/2", None],
    "time": ["1", -1, 1e308, True, [], float("nan")],
    "output_tokens": [-1, 2**31, 1.5, "5", None, True, {}, 10**4000],
    "counted_by": ["guess", 3],
    "finished": [1, "true"],
    "max_tokens": [0, 2**40, "5", False],
    "prompt": [3, {}],
    "messages": ["x", [1], [{"content": "x"}], [{"role": "user", "content": 5}]],
    "mu": ["1", 51, None],
    "quantiles": [[1.0], [2.0] * 22 + [1.0], ["1"] * 23, 1],
    "shadow": [1, {"mu": 1.0}, {"mu": "x", "sigma": 1.0, "nu": 3.5}],
}


# One lone surrogate made a whole log unimportable.
@pytest.mark.mend
def test_bad_lines_are_skipped_and_counted_by_all_readers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    good = record(mu=1.0, sigma=0.5, nu=3.5, shadow={"mu": 1.2, "sigma": 0.5, "nu": 3.5})
    good |= {"request_id": "r", "max_tokens": 4}  # a token more than the cap
    bad = [json.dumps(good | {name: value}) for name, values in WRONG.items() for value in values]
    bad += ["{", "[1]", "[" * 100_000, "9" * 5000, json.dumps(good)]
    surrogate = json.dumps(good | {"prompt": "\ud800", "request_id": "s"})  # as in logs of earlier versions
    path = tmp_path / "feedback-1.jsonl"
    path.write_bytes("\n".join([json.dumps(good), *bad, surrogate]).encode() + b"\n\xff\n")
    assert [found["prompt"] for found in records(tmp_path)] == ["p", "\ufffd"]
    left_out = Counter[str]()
    assert len(list(read_log(path, left_out))) == 2
    assert left_out.total() == len(bad) + 1
    assert left_out["shadow.mu (allowed: numbers)"] == 1
    assert left_out["record (allowed: a record that is not a copy of an earlier one)"] == 1

    assert cli.main([str(path)]) == 3  # more than half of the lines are left out
    assert json.loads(capsys.readouterr().out)["num_compared"] == 2
    assert caplog.messages[-1].startswith(f"left out {len(bad) + 1} of {len(bad) + 3} lines: ")
    for schema in ("samples", "trace"):
        report = imported(path, tmp_path / "s.parquet", schema=schema)
        assert (report["num_rows"], report["num_written"]) == (len(bad) + 3, 2)
        assert sum(report["skipped"].values()) == len(bad) + 1
    last = evaluated(path)
    # The copy of a record is an outcome too: a stream is not searched for what came before.
    assert (last["num_outcomes"], last["num_bad_lines"]) == (3, len(bad))


def test_logs_are_summarized_and_folders_imported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No predictor, no shadow predictor; one stream was counted by its events."""
    lines = [record(output_tokens=tokens, served_model="a") for tokens in (10, 20, 60)]
    lines += [record(output_tokens=9, counted_by="deltas"), record(finish_reason="length", served_model="b")]
    segment = tmp_path / "log" / "feedback-1.jsonl"
    segment.parent.mkdir()
    segment.write_text("".join(json.dumps(line | {"prompt": "p"}) + "\n" for line in lines))
    assert cli.main([str(segment.parent)]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["num_records"], summary["num_compared"], summary["shadow"]) == (5, 0, None)
    assert summary["counted_by"]["deltas"] == 1
    assert summary["finish_reasons"]["length"] == 1
    assert summary["served_models"]["a"]["median_tokens"] == 20
    out = tmp_path / "samples.parquet"
    assert import_command(["feedback", str(segment.parent), "--out", str(out), "--model", "m"]) == 0
    reasons = json.loads((tmp_path / "samples.parquet.run.json").read_text())["finish_reasons"]
    assert reasons == {"stop": 4, "length": 1}


def test_predicted_quantiles_are_scored_as_their_distribution(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lengths between the two main quantiles; the log-t beside them is far too short."""
    quantiles = [2.0] * 11 + [3.0] * 12
    main = {"mu": 0.0, "sigma": 0.1, "nu": 3.5, "quantiles": quantiles}
    lines = [
        record(output_tokens=tokens, shadow={"mu": 0.0, "sigma": 0.1, "nu": 3.5}, **main)
        for tokens in (12, 15)
    ]
    path = tmp_path / "feedback-1.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [line["quantiles"] for line in records(tmp_path)] == [tuple(quantiles)] * 2
    assert cli.main([str(path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["main"]["crps_tokens"] < 0.5 * found["shadow"]["crps_tokens"]
    p90 = [found[side]["coverage"]["p90"]["estimate"] for side in ("main", "shadow")]
    assert p90 == [1, 0]
    assert parse_outcome(json.dumps(lines[0])).prediction == LengthPrediction(
        0.0, 0.1, 3.5, quantiles=tuple(quantiles)
    )


@pytest.fixture
def outcomes() -> Iterator[queue.Queue[str]]:
    """Outcomes of the records of a log, which have to be right by the end of the test: all written."""
    found: queue.Queue[str] = queue.Queue()
    yield found
    assert found.empty()


def wait_written(outcomes: queue.Queue[str], number: int) -> None:
    assert [outcomes.get(timeout=60) for _ in range(number)] == ["written"] * number


# Records counted as written were lost with a removed folder.
@pytest.mark.mend
def test_a_removed_folder_is_made_again_and_loses_nothing(tmp_path: Path, outcomes: queue.Queue[str]) -> None:
    folder = tmp_path / "log"
    log = FeedbackLog(folder, on_outcome=outcomes.put)
    for numbers in ([1], [2, 3, 4], [5]):
        for number in numbers:
            log.put(record(output_tokens=number))
        wait_written(outcomes, len(numbers))
        assert [row["output_tokens"] for row in records(folder)] == numbers
        shutil.rmtree(folder)
    log.close()


# A full disk left 234 empty segments for 297 records.
@pytest.mark.mend
def test_a_disk_that_refuses_for_a_while_costs_no_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outcomes: queue.Queue[str]
) -> None:
    attempts, real = threading.Semaphore(0), os.fsync
    log = FeedbackLog(tmp_path, on_outcome=outcomes.put, retry_s=(0.001, 0.001))

    def refused(descriptor: int) -> None:
        attempts.release()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", refused)
    for number in range(1, 4):
        log.put(record(output_tokens=number))
    for _ in range(5):
        assert attempts.acquire(timeout=60)
    assert outcomes.empty()
    monkeypatch.setattr(os, "fsync", real)
    wait_written(outcomes, 3)
    log.close()
    assert [row["output_tokens"] for row in records(tmp_path)] == [1, 2, 3]
    assert len(list(tmp_path.iterdir())) == 1


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


# Records counted as written were not on disk.
@pytest.mark.mend
@pytest.mark.parametrize("case", ["killed", "full"])
def test_what_is_counted_as_written_survives(case: str, tmp_path: Path) -> None:
    """A process logs 300 records of 1 KB; it is killed, or may not write as much."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))"
    parts = {"limit": limit, "end": "log.close()", "signal": "SIGCONT"}
    if case == "killed":
        parts = {"limit": "", "end": "while not counts['written']: pass", "signal": "SIGKILL"}
    words = [sys.executable, "-c", FULL_DISK.format(**parts), str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == (-9 if case == "killed" else 0), done.stderr
    counts = json.loads(done.stdout)
    segments = [segment.read_bytes() for segment in sorted(tmp_path.iterdir())]
    lines = b"".join(segments).split(b"\n")[: counts["written"]]
    assert [json.loads(line)["number"] for line in lines] == list(range(counts["written"]))
    if case == "full":
        assert counts["written"] + counts["failed"] == 300
        assert all(segment.endswith(b"\n") for segment in segments)
        assert sum(segment.count(b"\n") for segment in segments) == counts["written"]


def options(artifact_folder: Path, **more: Any) -> dict[str, Any]:
    return {"engine": "vllm", "predictor": str(artifact_folder), "policy": "sept", **more}


async def test_hints_follow_true_lengths_also_after_a_restart(artifact_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "calibration.json"

    async def script(request: web.Request, body: bytes) -> web.StreamResponse:
        return await fake_engine.plain(request, body, tokens=300)

    settings = options(artifact_folder, calibration_file=str(file), resolution=1.0)
    async with running_engine(script) as fake:
        async with running_proxy(fake.url, **settings) as proxy:
            for _ in range(60):
                assert (await proxy.post(chat(SHORT)))[0] == 200
            assert await proxy.metric(OUTPUTS) == 60
            crps = 'tailcast_proxy_calibration_crps_log_tokens{predictions="%s",served_model="tiny-llm"}'
            raw, corrected = [await proxy.metric(crps % which) for which in ("raw", "corrected")]
            assert 0 < corrected < 0.5 * raw
        async with running_proxy(fake.url, **settings) as proxy:
            await proxy.post(chat(SHORT))
        without = options(artifact_folder, resolution=1.0, online_calibration=False)
        async with running_proxy(fake.url, **without) as proxy:
            await proxy.post(chat(SHORT))
            assert await proxy.metric(OUTPUTS) == 0
    first, last, restarted, off = (fake.bodies[number]["priority"] for number in (0, 59, 60, 61))
    mu, sigma = expected(SHORT)
    assert first == off == round(float(LengthPrediction(mu, sigma, 3.5).distribution().expected(500)))
    assert abs(last - 300) < 60
    assert abs(restarted - last) <= 3
    assert max(pair[2]["num_outputs"] for pair in unpacked(file.read_bytes())["pairs"]) == 61


async def test_what_counts(artifact_folder: Path) -> None:
    """Complete, truncated and aborted outputs, whether tokens or events were counted; not errors, several outputs."""
    first = fake_engine.stream_events(["a"], None)[0]

    async def script(request: web.Request, body: bytes) -> web.StreamResponse:
        match json.loads(body)["messages"][0]["content"]:
            case "fail":
                return web.json_response({"error": {}}, status=500)
            case "truncated":
                return web.json_response(fake_engine.completion(500, "length"))
            case "filtered":
                return web.json_response(fake_engine.completion(5, "content_filter"))
            case "stall":
                return await fake_engine.paused([first], None)(request, body)
        return await fake_engine.plain(request, body)

    unrecorded = 'tailcast_proxy_unrecorded_total{reason="%s"}'
    async with running_engine(script) as fake, running_proxy(fake.url, **options(artifact_folder)) as proxy:
        ignored = [("fail", {}), ("filtered", {}), (SHORT, {"n": 2}), (SHORT, {"n": "3", "stream": True})]
        for text, more in [
            *ignored,
            (SHORT, {"n": "x"}),
            (SHORT, {"ignore_eos": True}),
            (SHORT, {"min_tokens": 5}),
        ]:
            await proxy.post(chat(text, **more))
        assert await proxy.metric(OUTPUTS) == 0
        counts = [
            await proxy.metric(unrecorded % reason) for reason in ("error", "several_outputs", "malformed_n")
        ]
        assert counts == [1, 2, 1]
        assert not any("stream_options" in body for body in fake.bodies)
        counted: list[tuple[str, dict[str, Any]]] = [
            (SHORT, {}),
            (SHORT, {"stream": True}),
            ("truncated", {}),
        ]
        for number, (text, more) in enumerate(counted, start=1):
            await proxy.post(chat(text, **more))
            assert await proxy.metric(OUTPUTS) == number
        assert await proxy.metric(CENSORED) == 1
        await hang_up(proxy, chat("stall", stream=True))
        assert (await proxy.metric(OUTPUTS), await proxy.metric(CENSORED)) == (4, 2)
    settings = options(artifact_folder, feedback_usage=False)
    async with running_engine(script) as fake, running_proxy(fake.url, **settings) as proxy:
        await proxy.post(chat(SHORT, stream=True))
        await hang_up(proxy, chat("stall", stream=True))
        assert not any("stream_options" in body for body in fake.bodies)
        assert (await proxy.metric(OUTPUTS), await proxy.metric(CENSORED)) == (2, 1)


async def test_counts_are_requested_for_streams(artifact_folder: Path) -> None:
    settings = options(artifact_folder)
    async with running_engine() as fake, running_proxy(fake.url, **settings) as proxy:
        status, body = await proxy.post(chat(SHORT, stream=True))
        assert (status, body) == (200, b"".join(fake_engine.stream_events(["a", "b", "c"], None)))
        assert await proxy.metric(OUTPUTS) == 1


@pytest.mark.mend  # lengths that clients had forced were learned as lower bounds of the model's own
async def test_a_length_that_the_client_determined_is_kept_for_traces_alone(tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with (
        running_engine() as fake,
        running_proxy(fake.url, engine="vllm", feedback=str(log), feedback_prompts="stored") as proxy,
    ):
        for more in ({}, {"ignore_eos": True}, {"min_tokens": 5}, {"min_tokens": 1}):
            assert (await proxy.post(chat(SHORT, **more)))[0] == 200
    rows = [row for _, row in feedback_rows(log, Counter())]
    assert [row["finish_reason"] for row in rows] == ["stop", "error", "error", "stop"]
    assert {row["output_tokens"] for row in rows} == {7}
    request = chat(SHORT, ignore_eos=True)
    entry = {"request": request, "response": fake_engine.completion(500, "length")}
    (tmp_path / "log.jsonl").write_text(json.dumps(entry))
    [(_, row)] = openai_rows(tmp_path / "log.jsonl", None, SkippedRows())
    assert (row["finish_reason"], row["output_tokens"]) == ("error", 500)
