from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_gen.prompts import Message, Prompt
from data_gen.samples import (
    SCHEMA,
    SCHEMA_1_NAMES,
    iter_samples,
    join_samples,
    prompt_sha256,
    read_samples,
    write_samples,
)
from examples.quickstart.steps import SHIPPED_SAMPLES
from scheduler_core.errors import InputError
from tests.data_gen.sample_rows import SampleRow, to_table

SAMPLE = SampleRow(
    prompt_id="a",
    prompt="Größe?",
    category="",
    model="m",
    temperature=0.7,
    top_p=0.9,
    seed=3,
    sample_index=0,
    max_tokens=10,
    prompt_tokens=5,
    output_tokens=7,
    finish_reason="stop",
    engine="e",
    engine_version="1",
    run_id="r",
)
FULL = replace(
    SAMPLE,
    sample_index=1,
    prompt=None,
    prompt_sha256="0" * 64,
    messages=({"role": "user", "content": "x"},),
    dataset="set",
    temperature=None,
    max_tokens=None,
    prompt_tokens=None,
    output_tokens=0,
    finish_reason="error",
    error="timeout: after 3 s",
    queue_s=0.5,
    ttft_s=1.5,
    total_s=2.5,
    text="so far",
)


def version_1(samples: list[SampleRow]) -> pa.Table:
    """A file as `samples/1` had it."""
    columns = to_table(samples).select(SCHEMA_1_NAMES)
    schema = pa.schema([field.with_nullable(False) for field in columns.schema])
    return columns.cast(schema).replace_schema_metadata({b"tailcast.schema": b"samples/1"})


def test_every_column_comes_back_as_it_went_in(tmp_path: Path) -> None:
    path = tmp_path / "s.parquet"
    write_samples(path, to_table([SAMPLE, FULL]))
    table = read_samples(path)
    assert table.schema.equals(SCHEMA, check_metadata=True)
    first, second = table.to_pylist()
    assert second["messages"] == [{"role": "user", "content": "x"}]
    assert {name for name, value in first.items() if value is None} == {
        "prompt_sha256", "messages", "error", "queue_s", "ttft_s", "total_s", "text",
    }  # fmt: skip
    for sample, row in ((SAMPLE, first), (FULL, second)):
        assert all(row[name] == getattr(sample, name) for name in SCHEMA.names if name != "messages")


def test_the_table_in_the_documentation_is_the_schema() -> None:
    import data_gen.samples

    documented: dict[str, str] = {}
    for line in (data_gen.samples.__doc__ or "").splitlines():
        if line.startswith("| ") and not line.startswith("| column"):
            names, kind, _ = (cell.strip() for cell in line.strip("|").split("|", 2))
            documented |= dict.fromkeys(names.split(", "), kind)
    assert list(documented) == SCHEMA.names
    for field in SCHEMA:
        assert documented[field.name].endswith("or null") == field.nullable, field.name
        assert documented[field.name].startswith(
            ("list" if field.name == "messages" else str(field.type))[:4]
        )


def test_samples_1_files_stay_readable(tmp_path: Path) -> None:
    path = tmp_path / "old.parquet"
    pq.write_table(version_1([SAMPLE]), path)
    (row,) = read_samples(path).to_pylist()
    assert row["prompt_sha256"] == hashlib.sha256("Größe?".encode()).hexdigest()
    assert row["dataset"] == ""
    assert {row[name] for name in ("messages", "error", "queue_s", "ttft_s", "total_s", "text")} == {None}
    assert all(row[name] == getattr(SAMPLE, name) for name in SCHEMA_1_NAMES)
    unlabelled = tmp_path / "unlabelled.parquet"
    pq.write_table(version_1([SAMPLE]).replace_schema_metadata(None), unlabelled)
    assert read_samples(unlabelled).equals(read_samples(path))


def test_the_shipped_set_is_read_and_joins_new_ones(tmp_path: Path) -> None:
    shipped = read_samples(SHIPPED_SAMPLES)
    assert shipped.schema.equals(SCHEMA)
    assert pq.read_schema(SHIPPED_SAMPLES).names == SCHEMA_1_NAMES
    write_samples(tmp_path / "new.parquet", to_table([SAMPLE, FULL]))
    joined = join_samples([SHIPPED_SAMPLES, tmp_path / "new.parquet"])
    assert joined.num_rows == shipped.num_rows + 2
    with pytest.raises(InputError, match="'a'.*each \\(prompt_id, model, sample_index\\) once"):
        join_samples([tmp_path / "new.parquet", SHIPPED_SAMPLES, tmp_path / "new.parquet"])


def test_files_can_be_read_in_parts(tmp_path: Path) -> None:
    path = tmp_path / "s.parquet"
    write_samples(path, to_table([replace(SAMPLE, sample_index=i) for i in range(10)]))
    parts = list(iter_samples(path, batch_rows=4))
    assert [part.num_rows for part in parts] == [4, 4, 2]
    assert pa.concat_tables(parts).equals(read_samples(path))


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    good = tmp_path / "s.parquet"
    write_samples(good, to_table([SAMPLE]))
    cut = tmp_path / "cut.parquet"
    cut.write_bytes(good.read_bytes()[:-40])
    with pytest.raises(InputError, match="whole Parquet file"):
        read_samples(cut)
    table = pq.read_table(good)
    other = tmp_path / "other.parquet"
    pq.write_table(table.drop_columns(["finish_reason"]), other)
    with pytest.raises(InputError, match="also finish_reason"):
        read_samples(other)
    pq.write_table(table.replace_schema_metadata({b"tailcast.schema": b"samples/9"}), other)
    with pytest.raises(
        InputError,
        match=r"other.parquet: schema: got 'samples/9'; allowed: samples/2 or older; a newer tailcast wrote it",
    ):
        read_samples(other)
    for name, values in (("output_tokens", ["many"]), ("finish_reason", [None])):
        wrong = table.set_column(table.column_names.index(name), name, pa.array(values, pa.string()))
        pq.write_table(wrong, other)
        with pytest.raises(InputError, match="columns of the documented types"):
            read_samples(other)


def test_the_hash_of_a_prompt_is_that_of_what_is_sent() -> None:
    plain = Prompt("a", "hello")
    assert prompt_sha256(plain) == hashlib.sha256(b"hello").hexdigest()
    chat = Prompt("a", "hello", messages=(Message("system", "ß"), Message("user", "hello")))
    sent = '[["system", "ß"], ["user", "hello"]]'
    assert prompt_sha256(chat) == hashlib.sha256(sent.encode()).hexdigest()
    assert prompt_sha256(Prompt("b", "half \ud83d")) != prompt_sha256(Prompt("b", "half ?"))
