from __future__ import annotations

import hashlib
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_gen.prompts import Message, Prompt
from data_gen.samples import SCHEMA, prompt_sha256, read_samples, write_samples
from examples.quickstart.steps import SHIPPED_SAMPLES
from examples.quickstart.tables import join_samples
from scheduler_core.errors import InputError
from tests.data_gen.sample_rows import sample_row, to_table

SAMPLE = sample_row(prompt_id="a", prompt="Größe?", temperature=0.7)
FULL = SAMPLE | {
    "sample_index": 1, "prompt": None, "prompt_sha256": "0" * 64, "messages": [{"role": "user", "content": "x"}],
    "dataset": "set", "temperature": None, "max_tokens": None, "prompt_tokens": None, "output_tokens": 0,
    "finish_reason": "error", "error": "timeout: after 3 s", "queue_s": 0.5, "ttft_s": 1.5, "total_s": 2.5, "text": "so far",
}  # fmt: skip


def test_every_column_comes_back_as_it_went_in(tmp_path: Path) -> None:
    path = tmp_path / "s.parquet"
    write_samples(path, to_table([SAMPLE, FULL]))
    table = read_samples(path)
    assert table.schema.equals(SCHEMA, check_metadata=True)
    empty = dict.fromkeys(SCHEMA.names)
    assert table.to_pylist() == [empty | SAMPLE, empty | FULL]


def test_the_shipped_set_is_read_and_joins_new_ones(tmp_path: Path) -> None:
    shipped = read_samples(SHIPPED_SAMPLES)
    assert shipped.schema.equals(SCHEMA)
    write_samples(tmp_path / "new.parquet", to_table([SAMPLE, FULL]))
    joined = join_samples([SHIPPED_SAMPLES, tmp_path / "new.parquet"])
    assert joined.num_rows == shipped.num_rows + 2
    with pytest.raises(InputError, match="'a'.*each \\(prompt_id, model, sample_index\\) once"):
        join_samples([tmp_path / "new.parquet", SHIPPED_SAMPLES, tmp_path / "new.parquet"])


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "s.parquet"
    write_samples(path, to_table([SAMPLE]))
    table = pq.read_table(path)
    tables = {
        "also finish_reason": table.drop_columns(["finish_reason"]),
        "schema: got 'samples/9'; allowed: samples/2 or older": table.replace_schema_metadata(
            {b"tailcast.schema": b"samples/9"}
        ),
    }
    for name, values in (("output_tokens", ["many"]), ("finish_reason", [None])):
        wrong = table.set_column(table.column_names.index(name), name, pa.array(values, pa.string()))
        tables[f"{name}|columns of the documented types"] = wrong
    for message, wrong in tables.items():
        pq.write_table(wrong, path)
        with pytest.raises(InputError, match=message):
            read_samples(path)


def test_the_hash_of_a_prompt_is_that_of_what_is_sent() -> None:
    plain = Prompt("a", "hello")
    assert prompt_sha256(plain) == hashlib.sha256(b"hello").hexdigest()
    chat = Prompt("a", "hello", messages=(Message("system", "ß"), Message("user", "hello")))
    sent = '[["system", "ß"], ["user", "hello"]]'
    assert prompt_sha256(chat) == hashlib.sha256(sent.encode()).hexdigest()
    assert prompt_sha256(Prompt("b", "half \ud83d")) != prompt_sha256(Prompt("b", "half ?"))
