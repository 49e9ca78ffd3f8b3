import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_gen.commands.import_lengths import main
from data_gen.importers.config import ImportLengthsConfig
from data_gen.importers.import_lengths import import_lengths
from data_gen.prompts import prompt_id_of
from data_gen.samples import read_samples
from scheduler_core.errors import InputError
from scheduler_core.simulator.trace import load_trace
from scheduler_core.simulator.workloads.arrivals import Arrivals


def run(kind: str, path: Path, out: Path, **options: Any) -> dict[str, Any]:
    fields = {"on_error": "stop"} | options
    return import_lengths(ImportLengthsConfig(kind=kind, file=str(path), out=str(out), **fields))


def imported(kind: str, path: Path, **options: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The report and the rows."""
    out = path.with_name(path.name + ".imported.parquet")
    report = run(kind, path, out, **options)
    rows = (read_samples if report["schema"] == "samples/2" else pq.read_table)(out).to_pylist()
    assert len(rows) == report["num_written"]
    return report, rows


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    return write(path, "".join(json.dumps(row) + "\n" for row in rows))


AZURE_2023 = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
AZURE_2024 = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930+00:00,2162,5\n"
    "2024-05-10 00:00:00+00:00,2399,6\n2024-05-12 00:00:00+00:00,76,15\n"
)
BURST = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,ChatGPT,472,18,490,Conversation log\n45,GPT-4,1087,0,1087,API log\n118.5,GPT-4,417,276,693,API log\n"
)
MOONCAKE = (
    '{"timestamp": 0, "input_length": 6755, "output_length": 500, "hash_ids": [0, 1]}\n'
    '{"timestamp": 3052, "input_length": 7319, "output_length": 490, "hash_ids": [0, 2]}\n'
)


def values_of(rows: list[dict[str, Any]], *names: str) -> list[tuple[Any, ...]]:
    return [tuple(row[name] for name in names) for row in rows]


def test_azure_2023_and_2024(tmp_path: Path) -> None:
    _, rows = imported("azure", write(tmp_path / "a.csv", AZURE_2023), max_tokens=1000)
    names = ("prompt_tokens", "output_tokens", "max_tokens")
    assert values_of(rows, *names) == [(374, 44, 1000), (396, 109, 1000)]
    assert [r["arrival_s"] for r in rows] == [0.0, pytest.approx(4.314579, abs=1e-9)]
    report, rows = imported("azure", write(tmp_path / "b.csv", AZURE_2024))
    # Arrivals count from the earliest, which is not the first here.
    assert [r["arrival_s"] for r in rows] == [pytest.approx(0.00993), 0.0, 2 * 86400.0]
    assert (report["num_out_of_order"], report["num_without_max_tokens"]) == (1, 3)
    with pytest.raises(InputError, match="row 3 column output_tokens: got 109; allowed: at most max_tok"):
        imported("azure", tmp_path / "a.csv", max_tokens=100)


def test_burstgpt_skips_failures_and_keeps_sessions(tmp_path: Path) -> None:
    report, rows = imported("burstgpt", write(tmp_path / "b.csv", BURST))
    requests = [("r2", 0.0, "ChatGPT", "Conversation log"), ("r4", 113.5, "GPT-4", "API log")]
    assert values_of(rows, "request_id", "arrival_s", "model", "category") == requests
    assert report["skipped"] == {"no output: 0 output tokens": 1}
    second = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Log Type\n5,s,4,m,1,2,x"
    assert values_of(imported("burstgpt", write(tmp_path / "c.csv", second))[1], "tenant") == [("s",)]


def test_mooncake_counts_milliseconds_and_the_simulator_reads_it(tmp_path: Path) -> None:
    imported("mooncake", write(tmp_path / "m.jsonl", MOONCAKE), max_tokens=500, model="kimi")
    rows = load_trace(tmp_path / "m.jsonl.imported.parquet").requests
    values = [(row.arrival_s, row.prompt_tokens, row.output_tokens, row.max_tokens) for row in rows]
    assert values == [(0.0, 6755, 500, 500), (3.052, 7319, 490, 500)]
    imported("mooncake", tmp_path / "m.jsonl")
    with pytest.raises(InputError, match="max_tokens"):
        load_trace(tmp_path / "m.jsonl.imported.parquet")


def test_any_table_is_a_trace_by_a_mapping(tmp_path: Path) -> None:
    """Vidur's columns, as docs/importing.md maps them."""
    columns = "prompt_tokens=num_prefill_tokens,output_tokens=num_decode_tokens"
    source = write(tmp_path / "v.csv", "arrived_at,num_prefill_tokens,num_decode_tokens\n7.5,10,5\n9,3,2\n")
    report, rows = imported("log", source, columns=columns, schema="trace")
    assert (rows[0]["arrival_s"], rows[0]["prompt_tokens"], report["num_without_arrival"]) == (None, 10, 2)
    _, rows = imported("log", source, columns=f"{columns},arrival_s=arrived_at", schema="trace")
    assert [r["arrival_s"] for r in rows] == [0.0, 1.5]


@pytest.mark.parametrize(
    ("kind", "name", "text", "message"),
    [
        ("azure", "a.csv", AZURE_2023.replace("374", "3.5"), r"a.csv row 2 column ContextTokens: got '3.5'"),
        ("azure", "a.csv", AZURE_2023.replace("109", "-1"), r"row 3 column GeneratedTokens: got '-1'"),
        ("azure", "a.csv", AZURE_2023.replace("2023-11-16 18:15:50", "noon"), r"row 3 column TIMESTAMP: got 'noon"),
        ("azure", "a.csv", AZURE_2023.replace("GeneratedTokens", "Tokens"), "also GeneratedTokens"),
        ("azure", "a.csv", AZURE_2023.replace("Context", "Generated"), "'GeneratedTokens'; allowed: each name once"),
        ("azure", "a.csv", AZURE_2023 + "1,2\n", "as many values as headings"),
        ("azure", "a.csv", AZURE_2023.splitlines()[0] + "\n", "at least one usable row"),
        ("burstgpt", "b.csv", BURST.replace("118.5", "inf"), "row 4 column Timestamp: got 'inf'"),
        ("mooncake", "m.jsonl", MOONCAKE.replace("490", "true"), "row 2 column output_length: got True"),
        ("mooncake", "m.jsonl", MOONCAKE.replace("490", "null"), "row 2 column output_tokens: got None"),
        ("mooncake", "m.jsonl", MOONCAKE.replace('"output_length": 490, ', ""), "row 2: columns.*output_length"),
        ("castillo", "c.json", "[" * 100_000, "row 1: .*nested too deeply"),
        ("castillo", "c.json", '[{"prompt_id": "a"}]', "row 1: columns.*also"),
        ("nothing", "v.csv", "a\n1\n", "^kind: got 'nothing'"),
        ("log", "l.jsonl", "{}", "also output_tokens"),
        ("log", "v.csv", "prompt_id,output_tokens,model\n3,,m\n", "row 2 column output_tokens"),
    ],
)  # fmt: skip
def test_bad_files_are_named(tmp_path: Path, kind: str, name: str, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        run(kind, write(tmp_path / name, text), tmp_path / "out.parquet")
    assert not (tmp_path / "out.parquet").exists()


def test_castillo_in_its_original_layout(tmp_path: Path) -> None:
    row = {"prompt_id": "p", "model": "google--gemma-3-4b-it", "dataset": "Mbpp", "prompt_text": "Write it."}
    row |= {"input_size": 184, "output_sizes": [170, 15001, 15000], "temp": 1.0, "top_p": 1.0}
    path = write(tmp_path / "preproc_Mbpp_test.json", json.dumps([row]))
    report, rows = imported("castillo", path)
    samples = [(0, 170, "stop"), (1, 15000, "length"), (2, 15000, "length")]
    assert values_of(rows, "sample_index", "output_tokens", "finish_reason") == samples
    common = ("google/gemma-3-4b-it", 15000, 184, "imported:castillo")
    assert set(values_of(rows, "model", "max_tokens", "prompt_tokens", "engine")) == {common}
    assert report["finish_reasons"] == {"stop": 1, "length": 2}
    with pytest.raises(InputError, match="row 2 column prompt_id, model.*each prompt once"):
        imported("castillo", write(path, json.dumps([row, row])))


def lists_file(path: Path) -> Path:
    """One prompt with samples in lists, as Open-Assistant's reports have them."""
    row = {"dataset": "d", "model": "m", "prompt": "Hi", "temperature": 0.5}
    rows = [
        row | {"run": "marked", "tokens": [5, 6, 7], "finished": [True, False, None]},
        row | {"run": "hidden", "tokens": [8, 9], "finished": None},
        row | {"run": "other", "tokens": [10], "finished": None},
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def test_lists_become_samples_and_unknown_ends_stay_unknown_by_default(tmp_path: Path) -> None:
    path = lists_file(tmp_path / "o.parquet")
    names = {"dataset": "dataset", "model": "model", "prompt": "prompt", "temperature": "temperature"}
    names |= {"run_id": "run", "output_tokens": "tokens", "finish_reason": "finished"}
    mapping = ",".join(f"{name}={column}" for name, column in names.items())
    _, rows = imported("log", path, columns=mapping)
    assert values_of(rows, "sample_index", "output_tokens", "finish_reason", "run_id") == [
        (0, 5, "stop", "marked"),
        (1, 6, "length", "marked"),
        (2, 7, "unknown", "marked"),
        (3, 8, "unknown", "hidden"),
        (4, 9, "unknown", "hidden"),
        (5, 10, "unknown", "other"),
    ]
    assert set(values_of(rows, "temperature", "max_tokens", "prompt_id")) == {(0.5, None, prompt_id_of("Hi"))}
    _, rows = imported("log", path, columns=mapping, unknown="stop")
    assert [r["finish_reason"] for r in rows] == ["stop", "length"] + ["stop"] * 4
    report, _ = imported("log", path, columns=mapping, unknown="drop")
    assert report["skipped"] == {"finish reason unknown": 4}
    # With max_tokens in the unit of the lengths, an output of that length was truncated and a shorter one was not.
    _, rows = imported("log", path, columns=mapping, max_tokens=10)
    assert [r["finish_reason"] for r in rows] == ["stop", "length", "stop", "stop", "stop", "length"]
    uneven = pa.table({"output_tokens": [[1, 2]], "finish_reason": [[True]], "model": ["m"], "prompt": ["x"]})
    pq.write_table(uneven, path)
    with pytest.raises(InputError, match="row 1 column finish_reason.*one for each of 2"):
        imported("log", path)


def test_logs_by_mapping(tmp_path: Path) -> None:
    values = [
        ("Hi", 12, "stop", "2024-01-01T00:00:10Z", 7),
        ("Hi", 50, "max_tokens", "2024-01-01T00:00:00+00:00", 8),
        ("Ho", 0, None, "2024-01-01T00:00:20", 7),
        ("Ho", None, "content_filter", None, 7),
    ]
    lines = [
        {"q": prompt, "usage": {"out": out, "in": 3}, "end": end, "t": time, "llm": "m", "user": user}
        for prompt, out, end, time, user in values
    ]
    path = write_lines(tmp_path / "log.jsonl", lines)
    mapping = "prompt=q,output_tokens=usage.out,prompt_tokens=usage.in,finish_reason=end,arrival_s=t,model=llm,tenant=user"
    report, rows = imported("log", path, columns=mapping)
    assert values_of(rows, "prompt_id", "sample_index", "output_tokens", "finish_reason") == [
        (prompt_id_of("Hi"), 0, 12, "stop"),
        (prompt_id_of("Hi"), 1, 50, "length"),
    ]
    assert report["skipped"] == {"no output: 0 output tokens": 1, "failed": 1}
    report, rows = imported("log", path, columns=mapping, schema="trace")
    assert [(r["arrival_s"], r["tenant"]) for r in rows] == [(10.0, "7"), (0.0, "8")]
    assert report["skipped"] == {"no output: 0 output tokens": 1, "failed": 1}


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ("prompt=a", "^columns: "),
        ("output_tokens=a,output_tokens=b", "^columns: "),
        ("length=a", "^columns: "),
        ("output_tokens=nothing", "row 1: columns.*also nothing"),
        ("prompt=a,output_tokens=a", "the model's name"),
        ("output_tokens=a,model=a", "a prompt or its id"),
    ],
)
def test_bad_mappings_are_refused(tmp_path: Path, columns: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        imported("log", write(tmp_path / "l.jsonl", '{"a": 1}\n'), columns=columns)


def response(text_id: str, tokens: int, reason: str | None, created: int) -> dict[str, Any]:
    choice = {"index": 0, "finish_reason": reason, "message": {"role": "assistant", "content": "x"}}
    usage = {"prompt_tokens": 9, "completion_tokens": tokens, "total_tokens": 9 + tokens}
    return {"id": text_id, "model": "gpt-4o", "created": created, "choices": [choice], "usage": usage}


def test_openai_logs_in_three_layouts(tmp_path: Path) -> None:
    roles = ("user", "assistant", "user")
    chat = [{"role": role, "content": text} for role, text in zip(roles, "abc", strict=True)]
    shared = response("r3", 40, "stop", 1004)
    shared["choices"] *= 2
    first = {"messages": chat[:1]}
    asked = {"messages": chat, "max_tokens": 30, "temperature": 0.5, "user": "u"}
    batch = {"status_code": 200, "body": response("x", 5, None, 1001)}
    refused = first | {"model": "gpt-4o"}
    lines = [
        {"request": asked, "response": response("r1", 30, "length", 1002)},
        response("r2", 4, "tool_calls", 1000) | first,
        {"custom_id": "b1", "request": first, "response": batch, "error": None},
        {"request": first, "response": shared},
        {"custom_id": "b2", "request": refused, "response": None, "error": {"message": "expired"}},
    ]
    path = write_lines(tmp_path / "o.jsonl", lines)
    report, rows = imported("openai-log", path)
    ends = [(30, "length"), (4, "stop"), (5, "unknown")]
    assert values_of(rows, "output_tokens", "finish_reason") == ends
    assert values_of(rows, "prompt", "temperature", "max_tokens")[0] == ("c", 0.5, 30)
    assert len(rows[0]["messages"]) == 3
    assert report["skipped"] == {"2 choices share one token count": 1, "failed": 1}
    assert rows[1]["prompt_id"] == rows[2]["prompt_id"] == prompt_id_of("a")
    _, rows = imported("openai-log", path, schema="trace")
    requests = [("r1", 2.0, "u"), ("r2", 0.0, None), ("b1", 1.0, None)]
    assert values_of(rows, "request_id", "arrival_s", "tenant") == requests


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = write(tmp_path / "a.csv", AZURE_2023), tmp_path / "t.parquet"
    assert main(["azure", str(source), "--out", str(out), "--max-tokens", "1000"]) == 0
    assert len(load_trace(out)) == 2
    report = json.loads((tmp_path / "t.parquet.run.json").read_text())
    assert (report["options"]["max_tokens"], report["num_written"]) == (1000, 2)
    assert report["source"]["name"] == "a.csv"
    metadata = pq.read_schema(out).metadata
    assert (metadata[b"tailcast.schema"], metadata[b"tailcast.source"]) == (b"trace/1", b"azure: a.csv")
    assert main(["azure", str(source), "--out", str(tmp_path / "s.parquet"), "--schema", "samples"]) == 2
    assert "schema: got 'samples'" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name", "num_rows", "finish_reasons", "options"),
    [
        ("castillo", "castillo_validation", 267_330, {"stop": 267_065, "length": 265}, {}),
        ("log", "traces/azure2023_conv", 19_366, {"stop": 19_366}, {"max_tokens": 1001, "schema": "trace"}),
    ],
)
def test_public_sets_are_imported_completely(
    tmp_path: Path, kind: str, name: str, num_rows: int, finish_reasons: dict[str, int], options: Any
) -> None:
    file = Path(__file__).parents[2].parent / "shared" / "data" / f"{name}.parquet"
    if not file.exists():
        pytest.skip(f"{file.name} is not here")
    report = run(kind, file, tmp_path / "out.parquet", **options)
    assert report["num_rows"] == report["num_written"] == num_rows
    assert report["finish_reasons"] == finish_reasons
    if kind == "log":
        assert load_trace(tmp_path / "out.parquet").requests[-1].arrival_s == pytest.approx(58.4 * 60, abs=6)


def conversation(name: str, *texts: str, first: str = "human") -> dict[str, Any]:
    speakers = itertools.islice(itertools.cycle(("human", "gpt")), first == "gpt", None)
    return {"id": name, "conversations": [{"from": next(speakers), "value": text} for text in texts]}


SHAREGPT = [
    conversation("c1", "one two three", "four five", "six", ""),
    conversation("c2", "no beginning", first="gpt"),
    conversation("c1", "again", "x"),
    conversation("c3", "a", "b c d"),
]


def test_sharegpt_conversations_become_a_trace(tmp_path: Path, word_tokenizer: Path) -> None:
    path = write(tmp_path / "s.json", json.dumps(SHAREGPT))
    report, rows = imported("sharegpt", path, tokenizer=str(word_tokenizer))
    names = ("request_id", "tenant", "prompt", "prompt_tokens", "output_tokens", "arrival_s")
    turns = [("c1#turn-1", "c1", "one two three", 3, 3, None), ("c1#turn-2", "c1", "six", 6, 1, None)]
    assert values_of(rows, *names) == [*turns, ("c3#turn-1", "c3", "a", 1, 4, None)]
    assert report["skipped"] == {"unusable conversation": 1, "repeated conversation": 1}
    assert (report["num_rows"], report["tokens"]) == (5, str(word_tokenizer))
    with pytest.raises(InputError, match="^tokenizer: got ''"):
        imported("sharegpt", path)


def test_arrivals_of_a_trace_are_drawn_as_workloads_draw_them(tmp_path: Path, word_tokenizer: Path) -> None:
    path, out = write(tmp_path / "s.json", json.dumps(SHAREGPT)), tmp_path / "t.parquet"
    options = ["sharegpt", str(path), "--tokenizer", str(word_tokenizer), "--out", str(out)]
    drawn = "--max-tokens 100 --arrivals.process gamma --arrivals.rate_rps 2 --seed 3"
    assert main([*options, *drawn.split()]) == 0
    expected = Arrivals(process="gamma", rate_rps=2.0).times(3, np.random.Generator(np.random.PCG64(3)))
    assert [row.arrival_s for row in load_trace(out).requests] == expected.tolist()
    # Also in place of those of the source.
    _, rows = imported("azure", write(tmp_path / "a.csv", AZURE_2023), arrivals=Arrivals(process="at_once"))
    assert [row["arrival_s"] for row in rows] == [0.0, 0.0]
    for changes in ({"arrivals": Arrivals(), "schema": "samples"}, {"arrivals": Arrivals(process="trace")}):
        with pytest.raises(InputError, match="arrivals"):
            imported("log", lists_file(tmp_path / "o.parquet"), **changes)


def test_lengths_of_one_row_are_requests_of_their_own(tmp_path: Path) -> None:
    rows = [{"request_id": "a", "output_tokens": [3, 4]}, {"request_id": None, "output_tokens": [5, 6]}]
    _, requests = imported("log", write_lines(tmp_path / "l.jsonl", rows), schema="trace")
    assert [row["request_id"] for row in requests] == ["a", "a-1", "r2", "r2-1"]


def test_a_feedback_log_may_be_a_folder_of_segments(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    for time in (5.0, 3.0):
        record = {"format": "tailcast-feedback/1", "time": time, "output_tokens": 5, "counted_by": "usage"}
        record |= {"finish_reason": "stop", "served_model": "m", "prompt": "p"}
        write(tmp_path / "log" / f"feedback-{9 - time}.jsonl", json.dumps(record) + "\n")
    _, rows = imported("feedback", tmp_path / "log", schema="trace")
    assert [row["arrival_s"] for row in rows] == [2.0, 0.0]


@pytest.mark.parametrize("schema", ["samples", "trace"])
def test_an_id_that_is_in_a_log_twice_is_refused(tmp_path: Path, schema: Any) -> None:
    line = json.dumps(response("r1", 4, "stop", 1000) | {"messages": [{"role": "user", "content": "a"}]})
    with pytest.raises(InputError, match="row 2 column request_id: got 'r1'; allowed: an id not used before"):
        imported("openai-log", write(tmp_path / "o.jsonl", f"{line}\n{line}\n"), schema=schema)


def test_lone_surrogates_of_a_log_are_replaced(tmp_path: Path) -> None:
    path = write(tmp_path / "c.jsonl", json.dumps({"q": "a\ud800", "n": 3, "m": "m"}))
    _, rows = imported("log", path, columns="prompt=q,output_tokens=n,model=m")
    assert rows[0]["prompt"] == "a\ufffd"


def test_bad_rows_are_left_out_with_their_numbers_and_reasons(tmp_path: Path) -> None:
    """Some of a gateway's requests are damaged; others have content parts, as OpenAI's clients write them."""

    def chat(content: Any) -> str:
        request = {"messages": [{"role": "user", "content": content}], "max_tokens": 9}
        return json.dumps({"request": request, "response": response(None, 4, "stop", 1000)})

    parts = [{"type": "text", "text": "name "}, {"type": "text", "text": "rivers"}]
    image = [{"type": "image_url", "image_url": {"url": "http://x"}}]
    none = chat("sea").replace("completion_tokens", "tokens")
    lines = [chat("sea"), chat(parts), "{torn", chat(image), none, none, chat("sea").replace(": 4", ": 40")]
    source = write(tmp_path / "o.jsonl", "\n".join(lines) + "\n")
    report, rows = imported("openai-log", source, on_error="skip")
    assert [row["prompt"] for row in rows] == ["sea", "name rivers", "[image]"]
    assert (report["num_written"], report["num_rows"]) == (3, 7)
    assert sorted(report["skipped"].values()) == [1, 1, 2]
    assert [bad["row"] for bad in report["bad_rows"]] == [3, 5, 6, 7]
    assert "row 5: columns" in report["bad_rows"][1]["reason"]
    with pytest.raises(InputError, match="at least one usable row .skipped: .'bad columns"):
        imported("openai-log", write(tmp_path / "o.jsonl", none + "\n"), on_error="skip")
