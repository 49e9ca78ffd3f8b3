"""Files that no command should trip over, and small good ones to compare with."""

import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

#: Levels of nesting at which Python's JSON and YAML readers stop with RecursionError.
DEEP = 100_000

TRACE = {"request_id": "a", "arrival_s": 0.0, "prompt_tokens": 5, "output_tokens": 3, "max_tokens": 8}
SAMPLES: dict[str, list[object]] = {"prompt_id": ["p"] * 8, "prompt": ["tell me"] * 8, "model": ["m"] * 8}
SAMPLES |= {"output_tokens": [3, 5, 8, 13, 21, 34, 55, 89], "finish_reason": ["stop"] * 8}


def bomb(levels: int = 9) -> str:
    """A YAML text of a few hundred bytes whose value has 10**levels items."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    for level in range(1, levels):
        items = ", ".join([f"*a{level - 1}"] * 10)
        lines.append(f"a{level}: &a{level} [{items}]")
    return "\n".join(lines) + "\n"


def write_good_files(folder: Path) -> dict[str, Path]:
    """By name: a trace, samples and texts that commands accept."""
    folder.mkdir(parents=True, exist_ok=True)
    names = ("trace.jsonl", "samples.parquet", "prompts.jsonl", "labels.parquet")
    files = {name: folder / name for name in names}
    rows = [TRACE | {"request_id": f"r{place}", "arrival_s": 0.1 * place} for place in range(5)]
    files["trace.jsonl"].write_text("".join(json.dumps(row) + "\n" for row in rows))
    pq.write_table(pa.table(SAMPLES), files["samples.parquet"])
    files["prompts.jsonl"].write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    labels = {"text": [f"text {place}" for place in range(30)], "level": [0, 1, 2, 3, 4] * 6}
    pq.write_table(pa.table(labels), files["labels.parquet"])
    return files


def write_hostile_files(folder: Path) -> list[Path]:
    """Writes them; a path that does not exist, a folder and a pipe are among them."""
    folder.mkdir(parents=True, exist_ok=True)
    deep = "[" * DEEP + "]" * DEEP
    objects = '{"a":' * DEEP + "1" + "}" * DEEP
    huge = "9" * 5000
    texts = {
        "empty": "",
        "deep": deep,
        "objects": objects,
        "bomb": bomb(),
        "number": huge,
        "null": "null",
        "list": "[1, [2], {}]\n",
        "words": "no data, just words\n",
        "constants": '{"request_id": NaN, "arrival_s": Infinity, "prompt_tokens": -Infinity}\n',
        "huge": '{"prompt": 1, "output_tokens": ' + huge + ', "x": 1e999}\n',
        "surrogate": '{"prompt": "\\ud800", "prompt_id": "\\udfff", "request_id": "\\ud800"}\n',
        "newer": '{"schema": "tailcast.simulation/999", "op": "open", "schema_version": 999, "runs": []}\n',
        "twice": '{"prompt": "a", "prompt": "b"}\n',
        "nul": '{"prompt": "a\\u0000b", "text": "\\u0000"}\n\0\n',
        "columns": "prompt,prompt\na,b\n",
        "ragged": "prompt,output_tokens\na\nb,1,2,3\n",
        "quote": 'prompt,level\n"never closed,1\n',
        "far": json.dumps(TRACE | {"arrival_s": 1e308}) + "\n" + json.dumps(TRACE | {"request_id": "b"}) + "\n",
        "long": json.dumps(TRACE | {"max_tokens": 2**63, "output_tokens": 2**63}) + "\n",
    }  # fmt: skip
    paths = []
    for name, text in texts.items():
        for suffix in (".json", ".jsonl", ".csv", ".yaml"):
            path = folder / f"{name}{suffix}"
            path.write_text(text)
            paths.append(path)
    for suffix in (".json", ".jsonl", ".csv", ".yaml", ".parquet", ".txt", ".safetensors"):
        path = folder / f"bytes{suffix}"
        path.write_bytes(b"\xff\xfe\x00caf\xe9\n" * 20)
        paths.append(path)
    good = folder / "whole.parquet"
    pq.write_table(pa.table(SAMPLES), good)
    content = good.read_bytes()
    (folder / "cut.parquet").write_bytes(content[: len(content) // 2])
    flipped = bytes(255 - one for one in content[60:90])
    (folder / "flipped.parquet").write_bytes(content[:60] + flipped + content[90:])
    tables = {
        "none": pa.table({}),
        "rowless": pa.table({"output_tokens": pa.array([], pa.int64()), "prompt": pa.array([], pa.string())}),
        "doubled": pa.Table.from_arrays([pa.array([1, 2])] * 2, names=["output_tokens", "output_tokens"]),
        "typed": pa.table({"output_tokens": ["x", None], "prompt": [1.5, float("nan")], "mu": [[1], None]}),
        "newer": pa.table(SAMPLES).replace_schema_metadata({"tailcast.schema": "samples/999", "schema": "x"}),
        "negative": pa.table(SAMPLES | {"output_tokens": [-1, 0, 2**62, 2**63 - 1, 1, 1, 1, 1]}),
        "infinite": pa.table(
            {name: [0.0, float("inf"), float("nan")] for name in ("mu", "sigma", "nu", "output_tokens", "arrival_s")}
        ),
    }  # fmt: skip
    for name, table in tables.items():
        pq.write_table(table, folder / f"{name}.parquet")
        paths.append(folder / f"{name}.parquet")
    (folder / "folder").mkdir(exist_ok=True)
    pipe = folder / "pipe.jsonl"
    if not pipe.exists():
        os.mkfifo(pipe)
    artifact = folder / "artifact"
    artifact.mkdir(exist_ok=True)
    (artifact / "manifest.json").write_text('{"schema_version": 999}')
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir(exist_ok=True)
    (checkpoint / "training.json").write_text(deep)
    others = "cut.parquet flipped.parquet folder pipe.jsonl artifact checkpoint missing.jsonl"
    return [*paths, *(folder / name for name in others.split())]
