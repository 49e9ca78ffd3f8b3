from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_gen.prompts import Message, Prompt, conversation_id_of, prompt_id_of
from data_gen.sources.open import read_prompts
from data_gen.templates import compose
from scheduler_core.errors import InputError


def test_every_format_gives_the_same_prompts(tmp_path: Path) -> None:
    rows = [
        {"prompt_id": "a", "prompt": "Hello there", "category": "chat"},
        {"prompt_id": "b", "prompt": "Größe?", "category": "chat"},
    ]
    (tmp_path / "p.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n", encoding="utf-8")
    (tmp_path / "p.csv").write_text(
        "prompt_id,prompt,category\na,Hello there,chat\nb,Größe?,chat\n", encoding="utf-8"
    )
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "p.parquet")
    expected = [(row["prompt_id"], row["prompt"], row["category"]) for row in rows]
    for suffix in ("jsonl", "csv", "parquet"):
        found = read_prompts(str(tmp_path / f"p.{suffix}"))
        assert [(p.prompt_id, p.text, p.category) for p in found] == expected


def test_text_file_gets_ids_from_the_text(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("first\n\nsecond\n", encoding="utf-8")
    found = read_prompts(str(tmp_path / "p.txt"))
    assert [p.text for p in found] == ["first", "second"]
    assert [p.prompt_id for p in found] == [prompt_id_of("first"), prompt_id_of("second")]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.jsonl", b'{"prompt": "ok"}\n{"prompt": "  "}\n', "row 2: prompt"),
        ("p.jsonl", b'{"prompt": "ok"}\n{"text": "x"}\n', "row 2: columns"),
        ("p.csv", b"prompt\nok\nan,extra\n", "as many values as headings"),
        ("p.jsonl", b'{"prompt": "ok"}\n{"prompt": \n', "row 2"),
        ("p.jsonl", b'{"prompt": "same"}\n{"prompt": "same"}\n', "row 2: prompt_id.*not used before"),
        ("p.jsonl", b'{"prompt": 3}\n', "row 1: prompt"),
        ("p.jsonl", b"[1]\n", "one JSON object"),
        ("p.txt", b"ok\n\xff\xfe\n", "UTF-8"),
        ("p.txt", b"", "not empty"),
        ("p.txt", b"\n\n", "at least one prompt"),
        ("p.parquet", b"PAR1 cut off", "whole Parquet file"),
        ("p.yaml", b"prompt: x", "ending in"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_prompts(str(tmp_path / name))


@pytest.mark.parametrize(
    "source",
    [
        "templates:",
        "templates:0",
        "templates:ten",
        "templates:3?sed=1",
        "templates:3?seed=x",
        "templates:999999",
        "none.jsonl",
    ],
)
def test_bad_sources_are_refused(source: str) -> None:
    with pytest.raises(InputError):
        read_prompts(source)


def test_templates_are_different_balanced_and_stable() -> None:
    prompts = compose(180, seed=5)
    assert len({text for _, text in prompts}) == 180
    counts = Counter(category for category, _ in prompts).values()
    assert len(counts) == 9
    assert max(counts) - min(counts) <= 1
    assert compose(30, seed=5) == prompts[:30]
    assert compose(30, seed=6) != prompts[:30]
    assert not any("{" in text for _, text in prompts)


def test_chat_is_what_is_sent() -> None:
    single = Prompt("a", "Hello")
    assert single.chat == (Message("user", "Hello"),)
    history = (Message("system", "Be brief."), Message("user", "Hello"))
    assert Prompt("a", "Hello", messages=history).chat == history
    assert conversation_id_of(single.chat) == prompt_id_of("Hello")
    assert conversation_id_of(history) != prompt_id_of("Hello")
