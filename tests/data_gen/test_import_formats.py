"""Formats that people have: inputs of public reports with their expected rows, and other inputs of the same kinds."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_gen.commands.import_lengths import main
from data_gen.prompts import prompt_id_of
from scheduler_core.simulator.trace import load_trace
from scheduler_core.simulator.workloads.arrivals import Arrivals
from tests.data_gen.test_importers import imported, response, run, values_of, write, write_lines

REPORTS = Path(__file__).parents[1] / "data" / "reports"
LENGTHS = ("arrival_s", "prompt_tokens", "output_tokens")


def report_file(folder: str, name: str) -> Path:
    [path] = REPORTS.glob(f"{folder}-*/{name}")
    return path


def expected(folder: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(report_file(folder, "expected.json").read_text())
    return content


def rows_of(kind: str, path: Path, out: Path, **options: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The report and the rows of an import, as `imported`, with the output elsewhere."""
    report = run(kind, path, out / "out.parquet", **{"on_error": "skip", **options})
    return report, pq.read_table(out / "out.parquet").to_pylist()


def lengths(rows: list[dict[str, Any]]) -> list[list[Any]]:
    return [[round(row["arrival_s"], 6), row["prompt_tokens"], row["output_tokens"]] for row in rows]


@pytest.mark.mend
def test_an_agent_log_is_imported_whole(tmp_path: Path) -> None:
    """140 of 160 turns were left out for their roles and empty contents, with exit code 0."""
    _, rows = rows_of("openai-log", report_file("01", "agent_log.jsonl"), tmp_path, schema="trace")
    assert len(rows) == expected("01")["agent_log_trace_rows"]
    _, rows = rows_of("openai-log", report_file("01", "agent_log.jsonl"), tmp_path)
    assert len({row["prompt_id"] for row in rows}) == len(rows), "each turn is a prompt of its own"
    _, rows = rows_of("openai-log", report_file("01", "log.jsonl"), tmp_path)
    assert [row["output_tokens"] for row in rows] == expected("01")["output_tokens"]
    prompts = ["Say hi.", "What is the weather in Porto?", "What is the weather in Porto?"]
    prompts += ["What is on this picture?", "Transcribe.", "Name a river.", "Name a tree.", "2+2?"]
    assert [row["prompt"] for row in rows] == prompts
    assert [message["role"] for message in rows[2]["messages"]] == ["system", "user", "assistant", "tool"]
    assert rows[2]["messages"][2]["content"] == 'weather({"city":"Porto"})'


def test_the_prefilled_beginning_of_an_output_is_no_part_of_the_prompt(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "One,"}]
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:x"}}]}]
    lines = [
        {"request": {"messages": each}, "response": response(None, 4, "stop", 1)}
        for each in (messages, image)
    ]
    _, rows = imported("openai-log", write_lines(tmp_path / "o.jsonl", lines))
    assert values_of(rows, "prompt", "messages") == [("Count.", None), ("[image]", None)]
    assert rows[0]["prompt_id"] == prompt_id_of("Count.")


@pytest.mark.parametrize("columns", ["", "prompt_tokens=input_lens,output_tokens=output_lens,arrival_s=start_times,ttft_s=ttfts"])  # fmt: skip
def test_results_of_vllm_bench(tmp_path: Path, columns: str) -> None:
    want = expected("03")
    options = {"schema": "trace", "columns": columns}
    report, rows = rows_of("log", report_file("03", "result.json"), tmp_path, **options)
    assert lengths(rows) == want["rows"]
    assert sum(report["skipped"].values()) == want["skipped"]
    assert [row["ttft_s"] for row in rows] == [0.05, 0.06, 0.05]
    _, rows = rows_of("log", report_file("03", "result-appended.jsonl"), tmp_path, **options)
    assert lengths(rows) == want["rows"] * 2
    assert len({row["request_id"] for row in rows}) == 6
    _, rows = rows_of("log", report_file("03", "custom.jsonl"), tmp_path, model="m-1")
    assert [row["output_tokens"] for row in rows] == [17, 23]


def test_requests_of_a_benchmark_that_failed_after_some_tokens_are_left_out(tmp_path: Path) -> None:
    content = {"model_id": "m", "input_lens": [5, 6], "output_lens": [3, 4], "start_times": [1.5, 1.0]}
    content |= {"errors": ["", "timeout"], "ttfts": [0.1, 0.2], "itls": [[0.01, 0.02], []]}
    report, [row] = rows_of("auto", write(tmp_path / "r.json", json.dumps(content)), tmp_path)
    assert (report["kind"], report["skipped"]) == ("vllm-bench", {"failed": 1})
    assert (row["output_tokens"], row["model"], row["total_s"]) == (3, "m", pytest.approx(0.13))
    uneven = write(tmp_path / "u.json", json.dumps(content | {"input_lens": [5]}))
    assert main(["vllm-bench", str(uneven), "--out", str(tmp_path / "u.parquet")]) == 2


LANGFUSE = "request_id=id,arrival_s=startTime,model=model,messages=input,max_tokens=modelParameters.max_tokens,prompt_tokens=usageDetails.input,output_tokens=usageDetails.output"


@pytest.mark.parametrize("columns", ["", LANGFUSE])
@pytest.mark.parametrize("name", ["observations.json", "observations.csv"])
def test_langfuse_exports(tmp_path: Path, name: str, columns: str) -> None:
    path = report_file("04", name)
    report, rows = rows_of("log", path, tmp_path, schema="trace", columns=columns)
    assert values_of(rows, "output_tokens", "prompt_tokens") == [(87, 412), (240, 413), (33, 414)]
    assert report["finish_reasons"] == {"stop": 2, "length": 1}
    _, rows = rows_of("log", path, tmp_path, columns=columns)
    assert [row["prompt"] for row in rows] == [f"Summarize mail {number}." for number in range(3)]


def test_langfuse_observations_of_other_versions(tmp_path: Path) -> None:
    """`usage`, prompts as text and as objects, cached tokens, failures; observations that are no generations."""
    common = {"type": "GENERATION", "startTime": "2026-09-01T10:00:00Z", "model": "m", "modelParameters": {}}
    asked = {"messages": [{"role": "user", "content": "Hi"}], "tools": []}
    rows: list[dict[str, Any]] = [
        common | {"id": "a", "input": asked, "usage": {"input": 9, "output": 5}},
        common | {"id": "b", "input": "Ho", "usage": {"promptTokens": 8, "completionTokens": 6}},
        common | {"id": "c", "input": "Ha", "usageDetails": {"input": 2, "input_cached_tokens": 6, "output": 3, "output_reasoning_tokens": 4}},
        common | {"id": "d", "input": "He", "level": "ERROR"},
        {"id": "e", "type": "SPAN", "startTime": "2026-09-01T10:00:00Z", "input": {}},
    ]  # fmt: skip
    path = write(tmp_path / "l.json", json.dumps({"data": rows, "meta": {"page": 1}}))
    report, samples = rows_of("auto", path, tmp_path)
    expect = [("Hi", 9, 5), ("Ho", 8, 6), ("Ha", 8, 7)]
    assert values_of(samples, "prompt", "prompt_tokens", "output_tokens") == expect
    assert (report["kind"], report["skipped"], report["num_other_rows"]) == ("langfuse", {"failed": 1}, 1)


CONSOLE = "arrival_s=start_time,model=attributes.gen_ai.request.model,prompt_tokens=attributes.gen_ai.usage.input_tokens,output_tokens=attributes.gen_ai.usage.output_tokens"


@pytest.mark.parametrize(("name", "columns"), [("console", CONSOLE), ("console", ""), ("otlp", "")])
def test_spans_of_opentelemetry(tmp_path: Path, name: str, columns: str) -> None:
    path = report_file("05", f"{name}.jsonl")
    _, rows = rows_of("log", path, tmp_path, schema="trace", columns=columns)
    assert lengths(rows) == expected("05")[name]
    assert {row["model"] for row in rows} == {"m-1"}


def attributes(**values: Any) -> list[dict[str, Any]]:
    """Attributes as OTLP has them; `__` in a name stands for a dot."""
    kinds = {int: "intValue", float: "doubleValue", str: "stringValue", bool: "boolValue"}

    def any_value(value: Any) -> dict[str, Any]:
        if isinstance(value, list):
            return {"arrayValue": {"values": [any_value(each) for each in value]}}
        return {kinds[type(value)]: str(value) if type(value) is int else value}

    return [{"key": name.replace("__", "."), "value": any_value(value)} for name, value in values.items()]


def otlp(*spans: dict[str, Any]) -> dict[str, Any]:
    timed = [
        {
            "spanId": f"{number}",
            "startTimeUnixNano": f"{10**18 + number}",
            "endTimeUnixNano": f"{10**18 + 10**9}",
        }
        | span
        for number, span in enumerate(spans)
    ]
    return {"resourceSpans": [{"resource": {"attributes": []}, "scopeSpans": [{"spans": timed}]}]}


def test_spans_with_other_names(tmp_path: Path) -> None:
    """OpenLLMetry, OpenInference and current conventions; spans of agents, tools and web requests are no requests."""
    call = {"type": "tool_call", "id": "c", "name": "f", "arguments": {}}
    result = {"type": "tool_call_response", "id": "c", "response": "19"}
    prompt = json.dumps([
        {"role": "user", "parts": [{"type": "text", "content": "Hi"}]},
        {"role": "assistant", "parts": [call]},
        {"role": "tool", "parts": [result]},
    ])  # fmt: skip
    spans: list[dict[str, Any]] = [
        {"attributes": attributes(http__route="/chat")},
        {"attributes": attributes(
            gen_ai__request__model="a", gen_ai__usage__prompt_tokens=9, gen_ai__usage__completion_tokens=5,
            gen_ai__prompt__0__role="system", gen_ai__prompt__0__content="Be short.",
            gen_ai__prompt__1__role="user", gen_ai__prompt__1__content="Hi",
            gen_ai__response__finish_reasons=["length"], gen_ai__request__max_tokens=5,
        )},
        {"attributes": attributes(
            openinference__span__kind="LLM", llm__model_name="b", llm__token_count__prompt=8, llm__token_count__completion=6,
            llm__input_messages__0__message__role="user", llm__input_messages__0__message__content="Hi",
            llm__invocation_parameters='{"max_tokens": 70, "temperature": 0.5}',
        )},
        {"attributes": attributes(openinference__span__kind="AGENT", llm__token_count__completion=600)},
        {"attributes": attributes(
            gen_ai__operation__name="chat", gen_ai__response__model="c", gen_ai__input__messages=prompt,
            gen_ai__usage__input_tokens=7, gen_ai__usage__output_tokens=4, gen_ai__response__finish_reasons=["tool_call"],
        )},
        {"attributes": attributes(gen_ai__operation__name="execute_tool", gen_ai__usage__output_tokens=1)},
        {"attributes": attributes(gen_ai__operation__name="chat", gen_ai__request__model="c"), "status": {"code": 2}},
    ]  # fmt: skip
    path = write_lines(tmp_path / "o.jsonl", [otlp(*spans)])
    report, rows = rows_of("otel", path, tmp_path)
    names = (
        "model",
        "prompt",
        "prompt_tokens",
        "output_tokens",
        "finish_reason",
        "max_tokens",
        "temperature",
    )
    assert values_of(rows, *names) == [
        ("a", "Hi", 9, 5, "length", 5, None),
        ("b", "Hi", 8, 6, "stop", 70, 0.5),
        ("c", "Hi", 7, 4, "stop", None, None),
    ]
    assert [message["content"] for message in rows[2]["messages"]] == ["Hi", "f({})", "19"]
    assert (report["num_other_rows"], sum(report["skipped"].values())) == (3, 1)
    _, rows = rows_of("auto", path, tmp_path, schema="trace")
    assert [row["request_id"] for row in rows] == ["1", "2", "4"]
    assert rows[0]["total_s"] == pytest.approx(1, abs=1e-6)


def test_spans_as_columns(tmp_path: Path) -> None:
    """A data frame of Phoenix; its agent counts the tokens of its calls again."""
    names = ("span_kind", "llm.model_name", "llm.token_count.prompt", "llm.token_count.completion")
    spans = [("AGENT", None, 90, 60), ("LLM", "m", 9, 5), ("TOOL", None, None, None)]
    rows = [
        {f"attributes.{name}" if "." in name else name: value for name, value in zip(names, span, strict=True)}
        | {"context.span_id": str(number), "start_time": "2026-09-01 10:00:00 UTC", "end_time": "2026-09-01 10:00:02 UTC"}
        for number, span in enumerate(spans)
    ]  # fmt: skip
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "p.parquet")
    report, requests = rows_of("auto", tmp_path / "p.parquet", tmp_path, schema="trace")
    assert values_of(requests, "request_id", "model", "prompt_tokens", "output_tokens", "total_s") == [
        ("1", "m", 9, 5, 2.0)
    ]
    assert report["num_other_rows"] == 2


def test_batches_and_their_inputs(tmp_path: Path) -> None:
    want, trace = expected("10"), {"schema": "trace"}
    names = ("prompt_tokens", "output_tokens")
    report, rows = rows_of("openai-log", report_file("10", "chat_output.jsonl"), tmp_path, **trace)
    assert values_of(rows, *names) == [tuple(row[:2]) for row in want["chat_trace"]]
    assert (report["finish_reasons"], report["skipped"]) == ({"stop": 1, "length": 1}, {"failed": 2})
    inputs = str(report_file("10", "chat_input.jsonl"))
    _, rows = rows_of("openai-log", report_file("10", "chat_output.jsonl"), tmp_path, inputs=inputs)
    assert len(rows) == want["chat_samples_with_inputs"]
    assert values_of(rows, "prompt", "max_tokens") == [("Question 0?", 100), ("Question 1?", 100)]
    report, rows = rows_of("openai-log", report_file("10", "responses_output.jsonl"), tmp_path, **trace)
    assert values_of(rows, *names) == [tuple(row[:2]) for row in want["responses_trace"]]
    assert report["finish_reasons"] == {"stop": 1, "length": 1}
    _, rows = rows_of("openai-log", report_file("10", "responses_pairs.jsonl"), tmp_path)
    assert len(rows) == want["responses_samples"]
    assert values_of(rows[:1], "prompt", "max_tokens") == [("Question 0?", 100)]
    assert [message["content"] for message in rows[0]["messages"]] == ["Be brief.", "Question 0?"]


def test_batches_of_other_apis_are_joined_with_their_inputs(tmp_path: Path) -> None:
    ask = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    inputs = [
        {"custom_id": "a", "body": {"model": "m", "input": ask, "instructions": "Be short.", "max_output_tokens": 9}},
        {"custom_id": "b", "params": {"model": "n", "messages": ask, "max_tokens": 7, "system": [{"type": "text", "text": "Be short."}]}},
    ]  # fmt: skip
    usage = {
        "input_tokens": 3,
        "cache_read_input_tokens": 40,
        "cache_creation_input_tokens": 2,
        "output_tokens": 7,
    }
    outputs = [
        {"custom_id": "a", "response": {"body": {"id": "r", "created_at": 5, "status": "completed", "model": "m", "usage": {"input_tokens": 45, "output_tokens": 6}}}},
        {"custom_id": "b", "result": {"type": "succeeded", "message": {"id": "s", "model": "n", "stop_reason": "max_tokens", "usage": usage}}},
        {"custom_id": "c", "result": {"type": "errored", "error": {"message": "overloaded"}}},
    ]  # fmt: skip
    joined = str(write_lines(tmp_path / "in.jsonl", inputs))
    report, rows = rows_of("auto", write_lines(tmp_path / "out.jsonl", outputs), tmp_path, inputs=joined)
    names = ("model", "prompt", "prompt_tokens", "output_tokens", "finish_reason", "max_tokens")
    assert values_of(rows, *names) == [("m", "Hi", 45, 6, "stop", 9), ("n", "Hi", 45, 7, "length", 7)]
    assert [row["messages"][0]["content"] for row in rows] == ["Be short."] * 2
    assert sum(report["skipped"].values()) == 1, "a failure without a prompt is no sample"
    with pytest.raises(ValueError, match="^inputs: "):
        imported("log", write_lines(tmp_path / "l.jsonl", [{"output_tokens": 3}]), inputs=joined)


def test_logs_of_other_apis(tmp_path: Path) -> None:
    """An agent's turn of the Anthropic API as JSON text, and a response of Ollama."""
    use = {"type": "tool_use", "id": "t", "name": "read", "input": {"path": "a"}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": "text"}
    messages: list[Any] = [{"role": "user", "content": "Fix it."}, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]  # fmt: skip
    answer = {"id": "m", "type": "message", "model": "c", "stop_reason": "tool_use", "usage": {"input_tokens": 9, "output_tokens": 8}}  # fmt: skip
    lines: list[dict[str, Any]] = [
        {"request": json.dumps({"messages": messages, "max_tokens": 99}), "response": json.dumps(answer), "timestamp": "2026-09-01T10:00:00Z"},
        {"request": {"messages": messages[:1], "options": {"num_predict": 5}}, "response": {"model": "d", "created_at": "2026-09-01T10:00:01Z", "done_reason": "length", "prompt_eval_count": 3, "eval_count": 5}},
    ]  # fmt: skip
    path = write_lines(tmp_path / "a.jsonl", lines)
    _, rows = imported("openai-log", path)
    names = ("prompt", "prompt_tokens", "output_tokens", "finish_reason", "max_tokens")
    assert values_of(rows, *names) == [("Fix it.", 9, 8, "stop", 99), ("Fix it.", 3, 5, "length", 5)]
    assert [message["role"] for message in rows[0]["messages"]] == ["user", "assistant", "tool"]
    _, rows = imported("openai-log", path, schema="trace")
    assert [row["arrival_s"] for row in rows] == [0.0, 1.0]


def test_blocks_and_sessions_of_mooncake(tmp_path: Path) -> None:
    path = report_file("20", "trace.jsonl")
    _, rows = rows_of("mooncake", path, tmp_path)
    assert [row["hash_ids"] for row in rows] == [
        json.loads(line)["hash_ids"] for line in path.read_text().splitlines()
    ]
    _, rows = rows_of("mooncake", report_file("20", "sessions.jsonl"), tmp_path)
    names = ("session_id", "turn", "think_time_s", "arrival_s", "prefix_tokens", "prompt_tokens")
    assert values_of(rows, *names) == [("s1", 0, None, 0.0, None, 600), ("s1", 1, 0.5, 0.5, 600, 700)]
    trace = load_trace(tmp_path / "out.parquet", default_max_tokens=100)
    assert [(row.think_time_s, row.prefix_tokens) for row in trace.requests] == [(None, 0), (0.5, 600)]
    _, rows = rows_of("log", report_file("20", "by_hand_sessions.jsonl"), tmp_path, schema="trace")
    assert sum(row["prefix_tokens"] for row in rows) == 36 * 8192


def test_sessions_of_any_table_arrive_together(tmp_path: Path) -> None:
    rows = [
        {"conv": name, "pause": 1500, "t": 1000 * number, "out": 4, "in": 9}
        for number in range(2)
        for name in "ab"
    ]
    columns = "session_id=conv,think_time_s=pause,arrival_s=t,output_tokens=out,prompt_tokens=in"
    path = write_lines(tmp_path / "s.jsonl", rows)
    options = {"columns": columns, "time_unit": "ms", "schema": "trace"}
    _, requests = imported("log", path, **options)
    names = ("session_id", "turn", "think_time_s", "arrival_s")
    assert values_of(requests, *names) == [
        ("a", 0, None, 0.0),
        ("b", 0, None, 0.0),
        ("a", 1, 1.5, 1.5),
        ("b", 1, 1.5, 1.5),
    ]
    drawn = Arrivals(process="poisson", rate_rps=0.1)
    _, requests = imported("log", path, **options, arrivals=drawn)
    starts = [row["arrival_s"] for row in requests]
    assert 0 < starts[0] < starts[1]
    assert [later - start for start, later in zip(starts[:2], starts[2:], strict=True)] == pytest.approx(
        [1.5, 1.5]
    )


def test_sessions_of_coding_agents(tmp_path: Path) -> None:
    common = {
        "session": "t1",
        "depth": 0,
        "kind": "s",
        "model": "m",
        "stop": "tool_use",
        "input_types": "text",
    }
    rows = [
        common | {"agent": "main", "time_s": 0.0, "input_tokens": 700, "cached_tokens": 0, "output_tokens": 9, "think_time_s": 0.0, "api_time_s": 2.0},
        common | {"agent": "main", "time_s": 5.0, "input_tokens": 704, "cached_tokens": 704, "output_tokens": 8, "think_time_s": 3.0, "api_time_s": 1.0},
        common | {"agent": "sub", "time_s": 6.0, "input_tokens": 100, "cached_tokens": 64, "output_tokens": 7, "think_time_s": 0.0, "api_time_s": 1.0},
    ]  # fmt: skip
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "s.parquet")
    report, requests = rows_of("auto", tmp_path / "s.parquet", tmp_path)
    names = (
        "session_id",
        "turn",
        "think_time_s",
        "arrival_s",
        "prefix_tokens",
        "tenant",
        "total_s",
        "ended_by",
    )
    assert values_of(requests, *names) == [
        ("t1/main", 0, None, 0.0, 0, "t1", 2.0, "tool_use"),
        ("t1/main", 1, 3.0, 3.0, 703, "t1", 1.0, "tool_use"),
        ("t1/sub", 0, None, 6.0, 64, "t1", 1.0, "tool_use"),
    ]
    assert report["kind"] == "agent-sessions"
    trace = load_trace(tmp_path / "out.parquet", default_max_tokens=100)
    assert [(row.session_id, row.content, row.ended_by) for row in trace.requests] == [
        ("t1/main", (("t1/main", 700),), "tool_use"), ("t1/main", (("t1/main", 703), ("t1/main#1+", 1)), "tool_use"),
        ("t1/sub", (("t1/sub#0+", 100),), "tool_use"),
    ]  # fmt: skip


def test_values_that_real_servers_write(tmp_path: Path) -> None:
    path = report_file("25", "log.jsonl")
    report, rows = rows_of("openai-log", path, tmp_path, schema="trace")
    assert (len(rows), report["skipped"]) == (19, {"2 choices share one token count": 1})
    assert [row["max_tokens"] for row in rows[:3]] == [None, None, 50]
    [over] = [row for row in rows if row["output_tokens"] == 11]
    assert over["max_tokens"] == 11
    report, rows = rows_of("openai-log", path, tmp_path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    notes = [line["note"] for line in lines if len(line["response"]["choices"]) == 1]
    reasons = dict(zip(notes, (row["finish_reason"] for row in rows), strict=True))
    odd = {name: reasons[name] for name in ("repetition", "refusal", "insufficient_system_resource", "STOP")}
    assert list(odd.values()) == ["unknown", "unknown", "error", "stop"]


def test_odd_finish_reasons_and_limits_of_a_table(tmp_path: Path) -> None:
    """A named reason is no truncation, whatever the length; two tokens above the limit are an error."""
    rows = [{"prompt_tokens": 9, "output_tokens": 5, "finish_reason": reason, "max_tokens": limit} for reason, limit in
            [("repetition", 5), ("watchdog", -1), ("", 5), (None, 0), ("content_filter", 9), ("stop", 4), ("stop", 3)]]  # fmt: skip
    report, requests = imported(
        "log", write_lines(tmp_path / "l.jsonl", rows), schema="trace", on_error="skip"
    )
    assert [row["max_tokens"] for row in requests] == [5, None, 5, None, 9, 5]
    assert report["finish_reasons"] == {"unknown": 3, "length": 1, "error": 1, "stop": 1}
    assert sum(report["skipped"].values()) == 1


@pytest.mark.parametrize("name", ["sharegpt.json", "sharegpt.jsonl"])
def test_variants_of_sharegpt(tmp_path: Path, name: str, word_tokenizer: Path) -> None:
    options = {"tokenizer": str(word_tokenizer)}
    report, rows = rows_of("sharegpt", report_file("26", name), tmp_path, **options)
    names = ("tenant", "prompt", "prompt_tokens", "output_tokens")
    assert values_of(rows, *names) == [
        ("a", "Name a river.", 3, 2),
        ("b", "Name a lake.", 3, 2),
        ("d", "Weather?", 5, 4),  # with the call and its result
        ("f", "Thanks", 3, 2),  # with the system prompt
        ("h", "one", 1, 2),
    ]
    assert report["skipped"] == {"unusable conversation": 3}
    _, rows = rows_of("sharegpt", report_file("26", "list_of_lists.json"), tmp_path, **options)
    assert [row["prompt"] for row in rows] == ["Name a river.", "Name a lake."]


def test_tools_in_a_conversation_of_openai_messages(tmp_path: Path, word_tokenizer: Path) -> None:
    messages = [
        {"role": "user", "content": "a b"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "content": "c"},
        {"role": "assistant", "content": "d"},
        {"role": "user", "content": "e"},
        {"role": "assistant", "content": "f g"},
    ]
    path = write(tmp_path / "m.json", json.dumps([messages]))
    _, rows = imported("sharegpt", path, tokenizer=str(word_tokenizer))
    names = ("request_id", "prompt", "prompt_tokens", "output_tokens")
    assert values_of(rows, *names) == [("r1#turn-1", "a b", 4, 2), ("r1#turn-2", "e", 6, 3)]


SPENDLOGS = "request_id=request_id,arrival_s=startTime,model=model,prompt_tokens=prompt_tokens,output_tokens=completion_tokens"


def test_spend_logs_of_litellm(tmp_path: Path) -> None:
    path = report_file("27", "spendlogs.csv")
    report, rows = rows_of("log", path, tmp_path, schema="trace", columns=SPENDLOGS)
    assert (len(rows), report["skipped"]) == (2, {"no output: 0 output tokens": 2})
    _, rows = rows_of("log", path, tmp_path, columns=f"{SPENDLOGS},messages=messages")
    assert values_of(rows, "prompt", "output_tokens") == [("Hello 0", 55), ("Hello 3", 14)]
    report, rows = rows_of("auto", path, tmp_path, schema="trace")
    assert values_of(rows, "model", "arrival_s", "ttft_s") == [
        ("m-1", 0.0, pytest.approx(4.309)),
        ("m-1", 3.0, pytest.approx(1.309)),
    ]
    assert report["kind"] == "litellm"


GUIDELLM = {
    "request_id": "a",
    "prompt_tokens": 9,
    "output_tokens": 5,
    "time_to_first_token_ms": 50.0,
    "request_latency": 1.5,
}


def test_exports_of_guidellm(tmp_path: Path) -> None:
    requests = {
        "successful": [GUIDELLM | {"request_start_time": 100.0}, GUIDELLM | {"request_id": "b", "request_start_time": 100.5}],
        "incomplete": [GUIDELLM | {"request_id": "c", "request_start_time": 101.0}],
        "errored": [],
    }  # fmt: skip
    path = write(tmp_path / "benchmarks.json", json.dumps({"benchmarks": [{"requests": requests}]}))
    report, rows = rows_of("auto", path, tmp_path)
    names = ("request_id", "arrival_s", "ttft_s", "total_s")
    assert values_of(rows, *names) == [("a", 0.0, 0.05, 1.5), ("b", 0.5, 0.05, 1.5)]
    assert (report["kind"], report["skipped"]) == ("guidellm", {"failed": 1})


@pytest.mark.parametrize(("unit", "scale"), [("s", 1), ("ms", 10**3), ("us", 10**6), ("ns", 10**9)])
def test_times_have_a_unit(tmp_path: Path, unit: Any, scale: int) -> None:
    start = 1_790_000_000 * scale
    rows = [
        {
            "timestamp": start + number * scale // 2,
            "input_length": 9,
            "output_length": 4,
            "hash_ids": [2**64 - 1],
        }
        for number in range(2)
    ]
    _, requests = imported("mooncake", write_lines(tmp_path / "m.jsonl", rows), time_unit=unit)
    assert [row["arrival_s"] for row in requests] == ([0.0, 0.0] if scale == 1 else [0.0, 0.5])
    assert requests[0]["hash_ids"] == [-1]
    csv = f"began,latency_ms,first,n\n{start},1500,{scale * 2},4\n"
    columns = "output_tokens=n,arrival_s=began,total_s=latency_ms,ttft_s=first"
    options = {"columns": columns, "time_unit": unit, "schema": "trace"}
    _, [row] = imported("log", write(tmp_path / "g.csv", csv), **options)
    assert (row["total_s"], row["ttft_s"]) == (1.5, 2.0)


@pytest.mark.mend
@pytest.mark.parametrize("schema", ["samples", "trace"])
def test_the_feedback_log_of_agents_is_imported_whole(tmp_path: Path, schema: Any) -> None:
    """Records with roles of tools or with empty contents were left out (4 of 22)."""
    record = {
        "format": "tailcast-feedback/1",
        "output_tokens": 5,
        "counted_by": "usage",
        "finish_reason": "stop",
    }
    record |= {"served_model": "m", "prompt_sha256": "0123"}

    def chat(*messages: tuple[str, str]) -> list[dict[str, str]]:
        return [{"role": role, "content": text} for role, text in messages]

    conversations = [
        chat(("user", "a"), ("assistant", ""), ("tool", "b")),
        chat(("system", ""), ("user", "a")),
        chat(("assistant", "c")),
        chat(("user", "")),
        chat(("critic", "d")),
    ]
    lines: list[dict[str, Any]] = [record | {"messages": each, "prompt": ""} for each in conversations]
    lines += [record, record | {"finish_reason": "abort"}, record | {"counted_by": "deltas"}]
    path = write_lines(
        tmp_path / "feedback-1.jsonl", [line | {"time": float(n)} for n, line in enumerate(lines)]
    )
    report, rows = rows_of("auto", path, tmp_path, schema=schema)
    assert (report["kind"], len(rows), report["skipped"]) == ("feedback", len(lines), {})
    assert [row["prompt"] for row in rows[:6]] == ["a", "a", "c", None, "d", None]
    assert {rows[number]["prompt_id"] for number in (3, 5)} == {"0123"}
    if schema == "trace":
        assert {row["output_tokens"] for row in rows} == {5}, "an aborted request has generated its tokens"


def test_prompts_without_text_have_a_hash(tmp_path: Path) -> None:
    """Token ids, and several prompts in a request."""
    prompts: list[Any] = [[1, 2, 3], [1, 2, 4], ["a", "b"], ["c"]]
    lines = [{"request": {"prompt": each}, "response": response(None, 4, "stop", 1)} for each in prompts]  # type: ignore[arg-type]
    _, rows = imported("openai-log", write_lines(tmp_path / "o.jsonl", lines))
    assert [row["prompt"] for row in rows] == [None, None, None, "c"]
    assert len({row["prompt_id"] for row in rows}) == 4


def test_a_command_says_last_what_it_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """More than half of the rows left out is exit code 3."""
    good, bad = json.dumps({"output_tokens": 3, "prompt_tokens": 2}), json.dumps({"output_tokens": -5})
    out = ("--out", str(tmp_path / "o.parquet"), "--schema", "trace", "--overwrite", "true")
    for lines, code in (([good, bad, good, bad], 0), ([good, bad, bad, "{"], 3)):
        path = write(tmp_path / "l.jsonl", "\n".join(lines) + "\n")
        assert main(["log", str(path), *out]) == code
        last = caplog.messages[-1]
        assert last.startswith(
            f"left out {len(lines) - lines.count(good)} of 4 rows: 2 x bad column output_tokens"
        )
        assert pq.read_table(tmp_path / "o.parquet").num_rows == lines.count(good)


@pytest.mark.mend
def test_a_column_that_no_row_has_is_an_error_and_one_that_some_have_is_none(tmp_path: Path) -> None:
    """Rows without an optional column were left out."""
    path = write_lines(tmp_path / "l.jsonl", [{"n": 3, "t": 0.5}, {"n": 4}])
    _, rows = imported("log", path, columns="output_tokens=n,arrival_s=t", schema="trace")
    assert [row["output_tokens"] for row in rows] == [3, 4]
    with pytest.raises(ValueError, match="columns: got 'arrival_s=time'; allowed: columns of l.jsonl"):
        imported("log", path, columns="output_tokens=n,arrival_s=time", schema="trace")


@pytest.mark.parametrize("value", ["1_000", "\u0661\u0662", "1e400"])
def test_lengths_are_in_ascii_digits(tmp_path: Path, value: str) -> None:
    path = write_lines(tmp_path / "l.jsonl", [{"output_tokens": value}])
    with pytest.raises(ValueError, match="row 1 column output_tokens"):
        imported("log", path, schema="trace")


@pytest.mark.mend
def test_missing_values_of_data_frames_are_no_values(tmp_path: Path) -> None:
    """NaN as an error made all rows failures, and as an id all rows repetitions."""
    names = ("request_id", "finish_reason", "error", "max_tokens", "ttft_s", "tenant")
    row = {"prompt": "x", "output_tokens": 5.0, "prompt_tokens": 4.0} | dict.fromkeys(names, float("nan"))
    pair = {"request": {"prompt": "x"}, "response": response(None, 5, "stop", 1), "error": float("nan")}
    for kind, line in (("log", row), ("openai-log", pair)):
        path = write_lines(tmp_path / "l.jsonl", [line, line])
        report, rows = rows_of(kind, path, tmp_path, schema="trace")
        assert (report["skipped"], [each["output_tokens"] for each in rows]) == ({}, [5, 5])


@pytest.mark.mend
def test_prompts_that_litellm_stores_beside_empty_messages(tmp_path: Path) -> None:
    """The prompts of proxy_server_request were not read, because `messages` is "{}" in current versions."""
    asked = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9}
    row = {"call_type": "acompletion", "completion_tokens": 5, "model": "m", "messages": "{}", "response": {}}
    rows = [row | {"proxy_server_request": asked}, row | {"messages": asked["messages"], "model_parameters": {"max_tokens": 9}}]  # fmt: skip
    path = write(tmp_path / "s.json", json.dumps({"data": rows, "total": 2}))
    report, samples = rows_of("auto", path, tmp_path)
    assert report["kind"] == "litellm"
    assert values_of(samples, "prompt", "max_tokens") == [("Hi", 9), ("Hi", 9)]


@pytest.mark.mend
def test_requests_and_responses_as_texts_beside_their_counts(tmp_path: Path) -> None:
    """Ollama's outputs were counted as failures, because their member `response` is no object."""
    counts = {"usage": {"prompt_tokens": 3, "completion_tokens": 4}}
    rows: list[dict[str, Any]] = [
        {"model": "m", "prompt": "Hi", "response": "a", "done_reason": "stop", "prompt_eval_count": 3, "eval_count": 4},
        {"model": "m", "prompt": "Hi", "response": "a", **counts},
        {"request": "Hi", "response": {"model": "m", **counts}},
        {"request": [{"role": "user", "content": "Hi"}], "response": {"model": "m", **counts}},
        {"request": "Hi", "response": "a", "model": "m", "prompt_tokens": 3, "completion_tokens": 4},
        {"request_body": {"prompt": "Hi"}, "response_body": {"model": "m", **counts}, "request_created_at": "2026-09-01T10:00:00Z"},
        {"request": {"prompt": "Hi"}, "response": [{"choices": []}]},
    ]  # fmt: skip
    report, samples = rows_of("openai-log", write_lines(tmp_path / "o.jsonl", rows), tmp_path)
    names = ("prompt", "prompt_tokens", "output_tokens")
    assert values_of(samples, *names) == [("Hi", 3, 4)] * 6
    assert report["skipped"] == {"bad column response (allowed: an object with token counts)": 1}


def test_logs_of_gemini(tmp_path: Path) -> None:
    """Contents with parts; thoughts are tokens of the output."""
    call = {"functionCall": {"name": "f", "args": {"a": 1}}}
    contents = [
        {"role": "user", "parts": [{"text": "Hi"}]},
        {"role": "model", "parts": [call]},
        {"role": "user", "parts": [{"functionResponse": {"name": "f", "response": {"output": "19"}}}]},
    ]
    config = {"maxOutputTokens": 10, "temperature": 0.5}
    asked = {
        "contents": contents,
        "generationConfig": config,
        "systemInstruction": {"parts": [{"text": "Be short."}]},
    }
    counts = {"promptTokenCount": 5, "candidatesTokenCount": 6, "thoughtsTokenCount": 4}
    answer = {"candidates": [{"finishReason": "MAX_TOKENS"}], "usageMetadata": counts, "modelVersion": "m"}
    path = write_lines(tmp_path / "g.jsonl", [{"request": asked, "response": answer}])
    report, rows = rows_of("auto", path, tmp_path)
    names = ("model", "prompt_tokens", "output_tokens", "finish_reason", "max_tokens", "temperature")
    assert values_of(rows, *names) == [("m", 5, 10, "length", 10, 0.5)]
    assert [message["content"] for message in rows[0]["messages"]] == ["Be short.", "Hi", 'f({"a": 1})', "19"]
    assert report["kind"] == "openai-log"


def test_requests_of_other_benchmarks_and_traces(tmp_path: Path) -> None:
    """AIPerf, inference-perf, and the traces of Bailian, which look like Mooncake's, but are in seconds."""
    metrics = {"input_sequence_length": {"value": 9}, "output_sequence_length": {"value": 5}, "time_to_first_token": {"value": 250.0}}  # fmt: skip
    asked, streamed = json.dumps({"model": "m", "prompt": "Hi", "max_tokens": 5}), "data: [DONE]"
    files: dict[str, list[dict[str, Any]]] = {
        "aiperf": [
            {"metadata": {"request_start_ns": 10**18, "request_end_ns": 10**18 + 10**9}, "metrics": metrics},
            {"metadata": {"request_start_ns": 10**18 + 10**9}, "metrics": {}, "error": {"message": "timeout"}},
            {"metadata": {"request_start_ns": 10**18 + 2 * 10**9}, "metrics": metrics},
        ],
        "inference-perf": [
            {"start_time": 1.0, "end_time": 2.0, "request": asked, "response": streamed, "error": None, "info": {"input_tokens": 9, "output_tokens": 5, "output_token_times": [1.25]}},
            {"start_time": 3.0, "end_time": 4.0, "request": asked, "response": streamed, "error": None, "info": {"input_tokens": 9, "output_tokens": 5, "output_token_times": [3.25]}},
        ],
        "bailian": [
            {"chat_id": 7, "parent_chat_id": -1, "timestamp": 1.0, "input_length": 9, "output_length": 5},
            {"chat_id": 8, "parent_chat_id": 7, "timestamp": 3.0, "input_length": 9, "output_length": 5},
        ],
    }  # fmt: skip
    for kind, lines in files.items():
        report, rows = rows_of("auto", write_lines(tmp_path / "r.jsonl", lines), tmp_path, schema="trace")
        assert report["kind"] == kind
        assert lengths(rows) == [[0.0, 9, 5], [2.0, 9, 5]]
        if kind != "bailian":
            assert [row["ttft_s"] for row in rows] == [0.25, 0.25]


def test_columns_of_a_table_that_are_not_used_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Names of the APIs' token counts are known."""
    caplog.set_level("INFO")
    rows = [{"prompt": "x", "input_tokens": 4, "completion_tokens": 5, "when": 1}]
    path = write_lines(tmp_path / "l.jsonl", rows)
    assert main(["auto", str(path), "--schema", "trace", "--out", str(tmp_path / "o.parquet")]) == 0
    assert "l.jsonl: columns that are not used (see --columns): when" in caplog.messages
    assert values_of(pq.read_table(tmp_path / "o.parquet").to_pylist(), "prompt_tokens", "output_tokens") == [(4, 5)]  # fmt: skip


def test_spans_of_logfire_vercel_and_traces_of_langfuse(tmp_path: Path) -> None:
    used = {"gen_ai.request.model": "m", "gen_ai.usage.input_tokens": 9, "gen_ai.usage.output_tokens": 5}
    spans = [
        {"start_timestamp": "2026-09-01T10:00:00Z", "attributes": used | {"request_data": {"messages": [{"role": "user", "content": "Hi"}]}}},
        {"start_timestamp": "2026-09-01T10:00:02Z", "attributes": used | {"ai.prompt.messages": '[{"role": "user", "content": "Hi"}]'}},
    ]  # fmt: skip
    path = write_lines(tmp_path / "s.jsonl", spans)
    _, rows = rows_of("auto", path, tmp_path, schema="trace")
    assert lengths(rows) == [[0.0, 9, 5], [2.0, 9, 5]]
    _, rows = rows_of("auto", path, tmp_path)
    assert [row["prompt"] for row in rows] == ["Hi", "Hi"]
    seen = {
        "id": "o",
        "type": "GENERATION",
        "model": "m",
        "input": "Hi",
        "usageDetails": {"input": 9, "output": 5},
    }
    trace = {"id": "t", "input": {}, "observations": [seen, {"id": "p", "type": "SPAN", "input": {}}]}
    report, rows = rows_of("auto", write(tmp_path / "t.json", json.dumps(trace)), tmp_path)
    assert (report["kind"], values_of(rows, "prompt", "output_tokens")) == ("langfuse", [("Hi", 5)])


@pytest.mark.mend
def test_spans_over_several_lines_are_read_whatever_the_file_is_called(tmp_path: Path) -> None:
    """OpenTelemetry's console exporter indents its JSON: all lines of a .jsonl file were left out."""
    used = {"gen_ai.request.model": "m", "gen_ai.usage.input_tokens": 9, "gen_ai.usage.output_tokens": 5}
    spans = [
        {"name": "chat", "start_time": f"2026-09-01T10:00:0{second}Z", "attributes": used}
        for second in (0, 2)
    ]
    for text in ("\n".join(json.dumps(span, indent=4) for span in spans), json.dumps(spans, indent=1)):
        path = write(tmp_path / "spans.jsonl", "\n" + text.replace("\n", "\r\n"))
        _, rows = rows_of("auto", path, tmp_path, schema="trace")
        assert lengths(rows) == [[0.0, 9, 5], [2.0, 9, 5]]
    path = write(tmp_path / "array.jsonl", json.dumps(spans))
    with pytest.raises(ValueError, match="an array belongs in a .json file"):
        run("otel", path, tmp_path / "o.parquet", on_error="stop")


def test_counts_beside_messages_and_every_finish_reason_of_the_proxy(tmp_path: Path) -> None:
    """Requests with a usage beside their messages were taken for conversations to tokenize."""
    reasons = ["stop", "model_context_window_exceeded", "stop_token", "limit"]
    rows = [
        {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "completion": "a", "finish_reason": reason,
         "usage": {"prompt_tokens": 9, "completion_tokens": 5}}
        for reason in reasons
    ]  # fmt: skip
    report, samples = rows_of("auto", write_lines(tmp_path / "u.jsonl", rows), tmp_path)
    assert report["kind"] == "openai-log"
    names = ("prompt", "prompt_tokens", "output_tokens", "finish_reason")
    expect = [("Hi", 9, 5, reason) for reason in ("stop", "length", "stop", "length")]
    assert values_of(samples, *names) == expect


def test_chains_of_langsmith_do_not_count_the_tokens_of_their_calls_again(tmp_path: Path) -> None:
    run_of = {
        "start_time": "2026-09-01T10:00:00.1",
        "inputs": {"messages": [{"role": "user", "content": "Hi"}]},
    }
    run_of |= {"prompt_tokens": 9, "completion_tokens": 5, "extra": {"invocation_params": {"model": "m"}}}
    kinds = ("chain", "llm", "tool", "llm")
    rows = [run_of | {"id": str(number), "run_type": kind} for number, kind in enumerate(kinds)]
    report, samples = rows_of("auto", write_lines(tmp_path / "l.jsonl", rows), tmp_path)
    assert (report["kind"], report["num_other_rows"]) == ("langsmith", 2)
    assert values_of(samples, "prompt", "model", "output_tokens") == [("Hi", "m", 5)] * 2


def test_conversations_as_json_text(tmp_path: Path, word_tokenizer: Path) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "a b"}]
    path = write(
        tmp_path / "m.json", json.dumps([{"messages": json.dumps(messages)}, {"messages": messages}])
    )
    _, rows = rows_of("sharegpt", path, tmp_path, tokenizer=str(word_tokenizer))
    assert values_of(rows, "prompt", "output_tokens") == [("Hi", 3), ("Hi", 3)]


@pytest.mark.mend  # a column `finished` was not read, so that truncated outputs counted as unknown
@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_a_column_finished_is_a_finish_reason(suffix: str, tmp_path: Path) -> None:
    file = tmp_path / f"log{suffix}"
    if suffix == ".csv":
        file.write_text("prompt,model,output_tokens,finished\nHi,m,5,true\nHi,m,9,False\nHi,m,7,\n")
    else:
        rows = [
            {"prompt": "Hi", "model": "m", "output_tokens": 5, "finished": each}
            for each in (True, False, None)
        ]
        file.write_text("\n".join(map(json.dumps, rows)))
    report, _ = rows_of("auto", file, tmp_path)
    assert report["finish_reasons"] == {"stop": 1, "length": 1, "unknown": 1}
