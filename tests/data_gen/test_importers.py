from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_gen.cli_import_lengths import main
from data_gen.importers import IMPORTERS, ImportOptions, ImportReport, import_lengths
from data_gen.importers.rows import ImportedRows
from data_gen.importers.writers import TraceWriter
from data_gen.prompts import prompt_id_of
from data_gen.samples import read_samples
from data_gen.trace import read_trace
from scheduler_core.errors import InputError
from scheduler_core.simulator.trace import load_trace

SHARED = Path(__file__).parents[2].parent / "shared" / "data"


def imported(kind: str, path: Path, **options: Any) -> tuple[ImportReport, list[dict[str, Any]]]:
    out = path.with_name(path.name + ".imported.parquet")
    report = import_lengths(kind, path, out, ImportOptions(**options))
    table = read_samples(out) if report.schema == "samples/2" else read_trace(out)
    assert table.num_rows == report.num_written
    return report, table.to_pylist()


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


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


def test_azure_2023_and_2024(tmp_path: Path) -> None:
    _, rows = imported("azure", write(tmp_path / "a.csv", AZURE_2023), max_tokens=1000)
    assert [(r["prompt_tokens"], r["output_tokens"], r["max_tokens"]) for r in rows] == [
        (374, 44, 1000),
        (396, 109, 1000),
    ]
    assert [r["arrival_s"] for r in rows] == [0.0, pytest.approx(4.314579, abs=1e-9)]
    report, rows = imported("azure", write(tmp_path / "b.csv", AZURE_2024))
    assert [r["arrival_s"] for r in rows] == [pytest.approx(0.00993), 0.0, 2 * 86400.0]
    assert report.num_out_of_order == 1
    assert report.num_without_max_tokens == 3
    with gzip.open(tmp_path / "c.csv.gz", "wt", encoding="utf-8") as stream:
        stream.write(AZURE_2024)
    assert imported("azure", tmp_path / "c.csv.gz")[1] == rows


def test_burstgpt_leaves_out_failures_and_keeps_who_asked(tmp_path: Path) -> None:
    report, rows = imported("burstgpt", write(tmp_path / "b.csv", BURST))
    assert [(r["request_id"], r["arrival_s"], r["model"], r["category"]) for r in rows] == [
        ("r2", 0.0, "ChatGPT", "Conversation log"),
        ("r4", 113.5, "GPT-4", "API log"),
    ]
    assert report.skipped == {"no output: 0 output tokens": 1}
    second = BURST.replace("Timestamp,", "Timestamp,Session ID,Elapsed time,").replace(
        "5,Chat", "5,s-1,43,Chat"
    )
    second = second.replace("45,GPT", "45,s-2,1,GPT").replace("118.5,GPT", "118.5,s-1,9,GPT")
    assert [r["tenant"] for r in imported("burstgpt", write(tmp_path / "c.csv", second))[1]] == ["s-1", "s-1"]


def test_mooncake_counts_milliseconds(tmp_path: Path) -> None:
    _, rows = imported("mooncake", write(tmp_path / "m.jsonl", MOONCAKE))
    assert [(r["arrival_s"], r["prompt_tokens"], r["output_tokens"]) for r in rows] == [
        (0.0, 6755, 500),
        (3.052, 7319, 490),
    ]


def test_any_table_is_a_trace_by_a_mapping(tmp_path: Path) -> None:
    """Vidur's columns, as docs/importing.md maps them; and a table with our own names."""
    columns = "prompt_tokens=num_prefill_tokens,output_tokens=num_decode_tokens"
    text = "arrived_at,num_prefill_tokens,num_decode_tokens\n7.5,10,5\n9,3,2\n"
    source = write(tmp_path / "v.csv", text)
    report, rows = imported("log", source, columns=columns, schema="trace")
    assert (rows[0]["arrival_s"], rows[0]["prompt_tokens"], report.num_without_arrival) == (None, 10, 2)
    _, rows = imported("log", source, columns=f"{columns},arrival_s=arrived_at", schema="trace")
    assert [r["arrival_s"] for r in rows] == [0.0, 1.5]
    own = write(
        tmp_path / "o.csv", "arrival_s,prompt_tokens,output_tokens,tier,other\n3,1,2,0,x\n4,1,3,2,y\n"
    )
    _, rows = imported("log", own, schema="trace")
    assert [(r["arrival_s"], r["output_tokens"], r["tier"]) for r in rows] == [(0.0, 2, 0), (1.0, 3, 2)]


def test_a_trace_with_a_cap_is_what_the_simulator_reads(tmp_path: Path) -> None:
    imported("mooncake", write(tmp_path / "m.jsonl", MOONCAKE), max_tokens=500, model="kimi")
    trace = load_trace(tmp_path / "m.jsonl.imported.parquet")
    assert [
        (row.arrival_s, row.prompt_tokens, row.output_tokens, row.max_tokens) for row in trace.requests
    ] == [(0.0, 6755, 500, 500), (3.052, 7319, 490, 500)]
    imported("mooncake", tmp_path / "m.jsonl")
    with pytest.raises(InputError, match="max_tokens"):
        load_trace(tmp_path / "m.jsonl.imported.parquet")


@pytest.mark.parametrize(
    ("kind", "name", "text", "message"),
    [
        ("azure", "a.csv", AZURE_2023.replace("374", "3.5"), r"a.csv row 2 column ContextTokens: got '3.5'"),
        (
            "azure",
            "a.csv",
            AZURE_2023.replace("109", "many"),
            r"a.csv row 3 column GeneratedTokens: got 'many'",
        ),
        ("azure", "a.csv", AZURE_2023.replace("109", "-1"), r"row 3 column GeneratedTokens: got '-1'"),
        (
            "azure",
            "a.csv",
            AZURE_2023.replace("2023-11-16 18:15:50", "noon"),
            r"row 3 column TIMESTAMP: got 'noon",
        ),
        ("azure", "a.csv", AZURE_2023.replace("GeneratedTokens", "Tokens"), "also GeneratedTokens"),
        ("azure", "a.csv", AZURE_2023 + "1,2\n", "as many values as headings"),
        ("azure", "a.csv", AZURE_2023.splitlines()[0] + "\n", "at least one usable row"),
        ("burstgpt", "b.csv", BURST.replace("118.5", "inf"), "row 4 column Timestamp: got 'inf'"),
        ("mooncake", "m.jsonl", MOONCAKE.replace("490", '"x"'), "row 2 column output_length: got 'x'"),
        ("mooncake", "m.jsonl", MOONCAKE.replace("490", "true"), "row 2 column output_length: got True"),
        (
            "mooncake",
            "m.jsonl",
            MOONCAKE.replace('"output_length": 490, ', ""),
            "row 2: columns.*output_length",
        ),
        (
            "log",
            "v.csv",
            "prompt_tokens,output_tokens,model,prompt_id\n3,,m,p\n",
            "row 2 column output_tokens",
        ),
        ("burstgpt", "b.csv", BURST.replace("118.5", "1e308"), r"row 4 column Timestamp: got '1e308'"),
        ("mooncake", "m.jsonl", MOONCAKE.replace("3052", "1e308"), "row 2 column timestamp: got 1e"),
        ("azure", "a.csv", AZURE_2023.replace("2023", "12023"), "row 2 column TIMESTAMP"),
        (
            "azure",
            "a.csv",
            AZURE_2023.replace("ContextTokens", "ContextTokens,ContextTokens"),
            "got 'ContextTokens'; allowed: each name once",
        ),
        ("mooncake", "m.jsonl", MOONCAKE + "[" * 100_000, "row 3: .*nested too deeply"),
        ("mooncake", "m.jsonl", MOONCAKE.replace("490", "9" * 5000), "row 2: .*one JSON object"),
        ("castillo", "c.json", "[" * 100_000, "row 1: .*nested too deeply"),
        ("nothing", "v.csv", "a\n1\n", "^kind: got 'nothing'"),
        ("castillo", "c.json", '[{"prompt_id": "a"}]', "row 1: columns.*also prompt_text"),
        ("log", "l.jsonl", "{}", "also output_tokens"),
    ],
)
def test_bad_sources_name_row_column_and_value(
    tmp_path: Path, kind: str, name: str, text: str, message: str
) -> None:
    out = tmp_path / "out.parquet"
    with pytest.raises(InputError, match=message):
        import_lengths(kind, write(tmp_path / name, text), out)
    assert not out.exists()


def test_an_answer_beyond_the_given_cap_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"a.csv row 3 column output_tokens: got 109; allowed: at most max_tokens = 100"
    ):
        imported("azure", write(tmp_path / "a.csv", AZURE_2023), max_tokens=100)


def castillo_row(**changes: Any) -> dict[str, Any]:
    row = {
        "sample_id": "s",
        "prompt_id": "p",
        "model": "google--gemma-3-4b-it",
        "dataset": "Mbpp",
        "prompt_text": "Write it.",
        "input_size": 184,
        "output_sizes": [170, 15001, 15000],
        "temp": 1.0,
        "top_p": 1.0,
        "category": "undefined",
    }
    return row | changes


def test_castillo_in_its_original_layout(tmp_path: Path) -> None:
    path = write(tmp_path / "preproc_Mbpp_test.json", json.dumps([castillo_row()]))
    report, rows = imported("castillo", path)
    assert [(r["sample_index"], r["output_tokens"], r["finish_reason"]) for r in rows] == [
        (0, 170, "stop"),
        (1, 15000, "length"),
        (2, 15000, "length"),
    ]
    assert {r["model"] for r in rows} == {"google/gemma-3-4b-it"}
    assert {(r["max_tokens"], r["prompt_tokens"], r["engine"]) for r in rows} == {
        (15000, 184, "imported:castillo")
    }
    assert report.finish_reasons == {"stop": 1, "length": 2}
    twice = write(tmp_path / "twice.json", json.dumps([castillo_row(), castillo_row()]))
    with pytest.raises(InputError, match="row 2 column prompt_id, model.*each prompt once"):
        imported("castillo", twice)


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
    columns = "dataset=dataset,model=model,prompt=prompt,temperature=temperature,run_id=run,output_tokens=tokens,finish_reason=finished"
    report, rows = imported("log", path, columns=columns)
    assert [r["finish_reason"] for r in rows] == ["stop", "length", *["unknown"] * 4]
    assert [r["output_tokens"] for r in rows] == [5, 6, 7, 8, 9, 10]
    assert [r["sample_index"] for r in rows] == list(range(6))
    assert [r["run_id"] for r in rows] == ["marked"] * 3 + ["hidden"] * 2 + ["other"]
    assert {(r["temperature"], r["max_tokens"], r["prompt_id"]) for r in rows} == {
        (0.5, None, prompt_id_of("Hi"))
    }
    _, rows = imported("log", path, columns=columns, unknown="stop")
    assert [r["finish_reason"] for r in rows] == ["stop", "length"] + ["stop"] * 4
    report, rows = imported("log", path, columns=columns, unknown="drop")
    assert report.skipped == {"end unknown": 4}
    assert [r["sample_index"] for r in rows] == [0, 1]
    # With max_tokens in the unit of the lengths, an output of that length was truncated and a shorter one was not.
    _, rows = imported("log", path, columns=columns, max_tokens=10)
    assert [r["finish_reason"] for r in rows] == ["stop", "length", "stop", "stop", "stop", "length"]
    uneven = pa.table({"tokens": [[1, 2]], "finished": [[True]], "model": ["m"], "prompt": ["x"]})
    pq.write_table(uneven, path)
    with pytest.raises(InputError, match="row 1 column finished.*one for each of 2"):
        imported("log", path, columns="output_tokens=tokens,finish_reason=finished,model=model,prompt=prompt")


def test_logs_by_mapping(tmp_path: Path) -> None:
    lines = [
        {
            "q": "Hi",
            "usage": {"out": 12, "in": 3},
            "end": "stop",
            "t": "2024-01-01T00:00:10Z",
            "llm": "m",
            "user": 7,
        },
        {
            "q": "Hi",
            "usage": {"out": 50, "in": 3},
            "end": "max_tokens",
            "t": "2024-01-01T00:00:00+00:00",
            "llm": "m",
            "user": 8,
        },
        {
            "q": "Ho",
            "usage": {"out": 0, "in": 3},
            "end": None,
            "t": "2024-01-01T00:00:20",
            "llm": "m",
            "user": 7,
        },
        {
            "q": "Ho",
            "usage": {"out": None, "in": 3},
            "end": "content_filter",
            "t": None,
            "llm": "m",
            "user": 7,
        },
    ]
    path = write(tmp_path / "log.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    mapping = "prompt=q,output_tokens=usage.out,prompt_tokens=usage.in,finish_reason=end,arrival_s=t,model=llm,tenant=user"
    _, rows = imported("log", path, columns=mapping)
    assert [(r["prompt_id"], r["sample_index"], r["output_tokens"], r["finish_reason"]) for r in rows] == [
        (prompt_id_of("Hi"), 0, 12, "stop"),
        (prompt_id_of("Hi"), 1, 50, "length"),
        (prompt_id_of("Ho"), 0, 0, "error"),
        (prompt_id_of("Ho"), 1, 0, "error"),
    ]
    assert rows[2]["error"].startswith("empty: ")
    assert rows[3]["error"].startswith("content_filter: ")
    report, rows = imported("log", path, columns=mapping, schema="trace")
    assert [(r["arrival_s"], r["tenant"]) for r in rows] == [(10.0, "7"), (0.0, "8")]
    assert report.skipped == {"no output: 0 output tokens": 1, "failed": 1}
    with pytest.raises(InputError, match="row 1: columns.*also nothing"):
        imported("log", path, columns="output_tokens=nothing")
    with pytest.raises(InputError, match="the model's name"):
        imported("log", path, columns="prompt=q,output_tokens=usage.out,finish_reason=end")
    with pytest.raises(InputError, match="a prompt or its id"):
        imported("log", path, columns="output_tokens=usage.out,model=llm,finish_reason=end")


@pytest.mark.parametrize(
    "columns", ["prompt=q", "output_tokens", "output_tokens=a,output_tokens=b", "length=a"]
)
def test_bad_mappings_are_refused(tmp_path: Path, columns: str) -> None:
    with pytest.raises(InputError, match="^columns: "):
        imported("log", write(tmp_path / "l.jsonl", '{"a": 1}\n'), columns=columns)


def response(text_id: str, tokens: int, reason: str | None, created: int) -> dict[str, Any]:
    return {
        "id": text_id,
        "model": "gpt-4o",
        "created": created,
        "choices": [{"index": 0, "finish_reason": reason, "message": {"role": "assistant", "content": "x"}}],
        "usage": {"prompt_tokens": 9, "completion_tokens": tokens, "total_tokens": 9 + tokens},
    }


def test_openai_logs_in_three_layouts(tmp_path: Path) -> None:
    chat = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    shared = response("r3", 40, "stop", 1004)
    shared["choices"] *= 2
    lines = [
        {
            "request": {"messages": chat, "max_tokens": 30, "temperature": 0.5, "user": "u"},
            "response": response("r1", 30, "length", 1002),
        },
        response("r2", 4, "tool_calls", 1000) | {"messages": chat[:1]},
        {
            "custom_id": "b1",
            "request": {"messages": chat[:1]},
            "response": {"status_code": 200, "body": response("x", 5, None, 1001)},
            "error": None,
        },
        {"request": {"messages": chat[:1]}, "response": shared},
        {
            "custom_id": "b2",
            "request": {"messages": chat[:1], "model": "gpt-4o"},
            "response": None,
            "error": {"message": "expired"},
        },
    ]
    path = write(tmp_path / "o.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    _, rows = imported("openai-log", path)
    assert [(r["output_tokens"], r["finish_reason"]) for r in rows] == [
        (30, "length"),
        (4, "stop"),
        (5, "unknown"),
        (0, "error"),
        (0, "error"),
    ]
    assert (rows[0]["prompt"], len(rows[0]["messages"]), rows[0]["temperature"], rows[0]["max_tokens"]) == (
        "c",
        3,
        0.5,
        30,
    )
    assert [r["error"] for r in rows[3:]] == [
        "shared_count: 2 choices share one token count",
        "refused: expired",
    ]
    assert rows[1]["prompt_id"] == rows[2]["prompt_id"] == prompt_id_of("a")
    _, rows = imported("openai-log", path, schema="trace")
    assert [(r["request_id"], r["arrival_s"], r["tenant"]) for r in rows] == [
        ("r1", 2.0, "u"),
        ("r2", 0.0, None),
        ("b1", 1.0, None),
    ]


def test_run_file_and_metadata_say_where_it_comes_from(tmp_path: Path) -> None:
    imported("azure", write(tmp_path / "a.csv", AZURE_2023), max_tokens=1000)
    run = json.loads((tmp_path / "a.csv.imported.parquet.run.json").read_text())
    assert run["options"]["max_tokens"] == 1000
    assert run["num_written"] == 2
    assert run["source"]["name"] == "a.csv"
    metadata = pq.read_schema(tmp_path / "a.csv.imported.parquet").metadata
    assert metadata[b"tailcast.schema"] == b"trace/1"
    assert metadata[b"tailcast.source"] == b"azure: a.csv"


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = write(tmp_path / "a.csv", AZURE_2023), tmp_path / "t.parquet"
    assert main(["azure", str(source), "--out", str(out), "--max-tokens", "1000"]) == 0
    assert len(load_trace(out)) == 2
    assert main(["azure", str(source), "--out", str(out), "--schema", "samples"]) == 2
    assert "schema: got 'samples'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert all(kind in shown for kind in IMPORTERS)


# (file, rows of the result, how many of them are truncated); castillo_train has 26,711 rows where its README says 36,711.
SETS = [("castillo_train", 267_110, 161), ("castillo_validation", 267_330, 265)]
TRACES = [
    ("azure2023_conv", 19_366, 1000, True),
    ("slai_sharegpt4_8k", 30_731, 1024, False),
    ("burstgpt_8k_sample", 8_000, 4096, False),
    ("lmsys_vicuna13b_lengths", 85_482, 511, False),
]


def shared(name: str) -> Path:
    path = SHARED / f"{name}.parquet"
    if not path.exists():
        pytest.skip(f"{path.name} is not here")
    return path


@pytest.mark.slow
@pytest.mark.parametrize(("name", "num_rows", "num_truncated"), SETS)
def test_castillo_is_imported_completely(
    tmp_path: Path, name: str, num_rows: int, num_truncated: int
) -> None:
    report = import_lengths("castillo", shared(name), tmp_path / "samples.parquet")
    assert report.num_rows == report.num_written == num_rows
    assert report.finish_reasons == {"stop": num_rows - num_truncated, "length": num_truncated}


@pytest.mark.parametrize(("name", "num_rows", "max_tokens", "has_arrivals"), TRACES)
def test_every_shared_trace_is_imported_and_read_by_the_simulator(
    tmp_path: Path, name: str, num_rows: int, max_tokens: int, has_arrivals: bool
) -> None:
    out = tmp_path / "trace.parquet"
    options = ImportOptions(max_tokens=max_tokens, schema="trace")
    report = import_lengths("log", shared(f"traces/{name}"), out, options)
    assert report.num_rows == report.num_written == num_rows
    assert report.num_without_max_tokens == 0
    if name == "lmsys_vicuna13b_lengths":
        # Its prompts' lengths are not known, and the simulator says so.
        with pytest.raises(InputError, match="prompt_tokens"):
            load_trace(out, need_arrivals=False)
        return
    trace = load_trace(out, need_arrivals=has_arrivals)
    assert len(trace) == num_rows
    if has_arrivals:
        assert trace.requests[-1].arrival_s == pytest.approx(58.4 * 60, abs=6)


def test_negative_and_unsorted_arrivals_count_from_the_earliest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = "Timestamp,Model,Request tokens,Response tokens,Log Type\n-5,m,1,2,x\n7,m,1,2,x\n-6,m,1,2,x\n"
    report, rows = imported("burstgpt", write(tmp_path / "b.csv", text))
    assert [row["arrival_s"] for row in rows] == [1.0, 13.0, 0.0]
    assert report.num_out_of_order == 1
    assert "1 requests come before the one above them" in caplog.text


@pytest.mark.parametrize("schema", ["samples", "trace"])
def test_an_answer_that_is_in_a_log_twice_is_refused(tmp_path: Path, schema: Any) -> None:
    line = (
        json.dumps(response("r1", 4, "stop", 1000) | {"messages": [{"role": "user", "content": "a"}]}) + "\n"
    )
    with pytest.raises(
        InputError, match=r"o.jsonl row 2 column id: got 'r1'; allowed: an id not used before"
    ):
        imported("openai-log", write(tmp_path / "o.jsonl", line * 2), schema=schema)


def test_lone_surrogates_of_a_log_are_replaced(tmp_path: Path) -> None:
    for name, form in (("c.jsonl", "{}\n"), ("c.json", "[{}]")):
        row = json.dumps({"q": "a\ud800", "n": 3, "m": "m"})
        path = write(tmp_path / name, form.format(row))
        _, rows = imported("log", path, columns="prompt=q,output_tokens=n,model=m")
        assert rows[0]["prompt"] == "a\ufffd"


@pytest.mark.parametrize("name", ["a.csv.gz", "m.jsonl.gz", "a.parquet"])
def test_truncated_files_are_named(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / name
    if name == "a.parquet":
        pq.write_table(pa.table({"output_tokens": list(range(1, 1000))}), path)
    else:
        heading, _, rows = AZURE_2023.partition("\n") if name == "a.csv.gz" else ("", "", MOONCAKE)
        path.write_bytes(gzip.compress(f"{heading}\n{rows * 100}".encode()))
    path.write_bytes(path.read_bytes()[:-40])
    assert (
        main([{"a": "azure", "m": "mooncake"}[name[0]], str(path), "--out", str(tmp_path / "out.parquet")])
        == 2
    )
    assert "allowed: a whole " in capsys.readouterr().err
    assert [entry.name for entry in tmp_path.iterdir()] == [name]


def test_traces_of_a_newer_schema_are_refused(tmp_path: Path) -> None:
    imported("mooncake", write(tmp_path / "m.jsonl", MOONCAKE), max_tokens=500)
    path = tmp_path / "m.jsonl.imported.parquet"
    table = pq.read_table(path)
    pq.write_table(table.replace_schema_metadata({"tailcast.schema": "trace/2"}), path)
    for read in (load_trace, read_trace, lambda path: import_lengths("log", path, tmp_path / "out.parquet")):
        with pytest.raises(
            InputError,
            match=r"(schema: got .trace/2.; allowed: trace/1|schema trace/1; this one has trace/2)",
        ):
            read(path)


def test_an_interrupted_import_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(writer: TraceWriter, batch: ImportedRows) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(TraceWriter, "write", interrupted)
    source = write(tmp_path / "m.jsonl", MOONCAKE)
    assert main(["mooncake", str(source), "--out", str(tmp_path / "t.parquet")]) == 130
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.jsonl"]
