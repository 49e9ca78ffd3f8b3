"""Files as blocks of whole groups: the same groups however little may be held at a time."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_core.errors import InputError, TailcastError
from training.fitting.reading import key_hashes as hashing
from training.fitting.reading.blocks import BlockLimits, Grouping, read_blocks
from training.fitting.reading.formats import open_samples
from training.fitting.reading.key_hashes import SeenHashes, key_hashes
from training.fitting.reading.table import group_table

GROUPING = Grouping(keys=("prompt_id", "model"))


def answers(num_groups, *, seed=0, longest=9):
    """A table with one row for each answer: ragged groups, their rows scattered over the whole table."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, longest, num_groups)
    group = rng.permutation(np.repeat(np.arange(num_groups), counts))
    lengths = rng.integers(1, 400, len(group))
    return pa.table(
        {
            "prompt_id": pa.array([f"p{number}" for number in group // 2]),
            "model": pa.array(np.where(group % 2, "large", "small")),
            "prompt": pa.array([f"prompt {number}" for number in group // 2]),
            "output_tokens": lengths,
            "finish_reason": pa.array(np.where(lengths > 300, "length", "stop")),
            "max_tokens": pa.array(np.full(len(group), 300)),
            "w": lengths / 100,
        }
    )


def lists(num_groups, *, longest=9, seed=0):
    rng = np.random.default_rng(seed)
    return pa.table(
        {
            "prompt_id": [f"p{number}" for number in range(num_groups)],
            "model": ["m"] * num_groups,
            "output_tokens": [
                rng.integers(1, 400, size).tolist() for size in rng.integers(0, longest, num_groups)
            ],
        }
    )


def write(table, path, rows=50):
    pq.write_table(table, path, row_group_size=rows)
    return path


def blocks_of(path, work, limits=BlockLimits(), grouping=GROUPING, **options):  # noqa: B008
    source = open_samples(path, keys=grouping.keys, weights=grouping.weights)
    return [(block, block.load()) for block in read_blocks(source, grouping, limits, work, **options)]


def content(groups):
    """Groups by name: what a fit sees of each."""
    weights = [None] * len(groups)
    if groups.flat_weights is not None:
        weights = np.split(groups.flat_weights, groups.offsets[1:-1])
    return {
        groups.name(number): (
            groups.lengths[number].tolist(),
            groups.finished[number].tolist(),
            None if weights[number] is None else weights[number].tolist(),
            groups.max_tokens[number],
            groups.rows.slice(number, 1).to_pylist(),
        )
        for number in range(len(groups))
    }


def test_scattered_rows_larger_than_memory_give_the_same_groups(tmp_path):
    table = answers(300)
    path = write(table, tmp_path / "x.parquet")
    whole = group_table(table, path, weights="w")
    found = {}
    parts = blocks_of(path, tmp_path, BlockLimits(held_bytes=4000), Grouping(weights="w"))
    assert len(parts) > 20
    for _, groups in parts:
        assert not found.keys() & content(groups).keys()
        found |= content(groups)
    assert found == content(whole)
    assert sum(block.num_rows for block, _ in parts) == table.num_rows


def test_what_is_held_does_not_grow_with_the_file(tmp_path):
    """A run that is sorted has as many rows for a file eight times as long, and a partition fewer than a run."""
    largest = {}
    for num_groups in (400, 3200):
        folder = tmp_path / str(num_groups)
        folder.mkdir()
        path = write(answers(num_groups), folder / "x.parquet")
        steps = []
        parts = blocks_of(path, folder, BlockLimits(held_bytes=32_000), advance=steps.append)
        largest[num_groups] = (max(steps), max(block.num_rows for block, _ in parts))
    (small_run, small_part), (large_run, large_part) = largest[400], largest[3200]
    assert large_run <= 1.1 * small_run
    assert small_part < small_run
    assert large_part < small_run


def test_partitions_are_written_once(tmp_path):
    path = write(answers(200), tmp_path / "x.parquet")
    limits = BlockLimits(held_bytes=4000)
    rows = []
    first = blocks_of(path, tmp_path, limits, advance=rows.append)
    assert sum(rows) == sum(block.num_rows for block, _ in first)
    again = blocks_of(path, tmp_path, limits, advance=lambda rows: pytest.fail("sorted a second time"))
    assert [content(groups) for _, groups in again] == [content(groups) for _, groups in first]


def test_a_pass_that_was_interrupted_begins_anew(tmp_path):
    path = write(answers(200), tmp_path / "x.parquet")
    limits = BlockLimits(held_bytes=4000)

    def stop(rows):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        blocks_of(path, tmp_path, limits, advance=stop)
    assert (tmp_path / "partitions.unfinished").exists()
    found = [content(groups) for _, groups in blocks_of(path, tmp_path, limits)]
    (tmp_path / "other").mkdir()
    assert found == [content(groups) for _, groups in blocks_of(path, tmp_path / "other", limits)]


def test_small_files_are_grouped_in_order_of_first_appearance(tmp_path):
    table = answers(100)
    path = write(table, tmp_path / "x.parquet")
    parts = blocks_of(path, tmp_path, BlockLimits(groups=16))
    assert [len(groups) for _, groups in parts] == [16] * 6 + [4]
    names = [groups.name(number) for _, groups in parts for number in range(len(groups))]
    assert names == list(content(group_table(table, path)))
    assert sum(block.num_rows for block, _ in parts) == table.num_rows
    assert list(tmp_path.iterdir()) == [path]


def test_failed_answers_are_counted_once_over_all_blocks(tmp_path):
    table = answers(60)
    reasons = ["error" if row % 7 == 0 else "stop" for row in range(table.num_rows)]
    table = table.set_column(4, "finish_reason", pa.array(reasons))
    path = write(table, tmp_path / "x.parquet")
    for limits in (BlockLimits(groups=8), BlockLimits(held_bytes=1000)):
        parts = blocks_of(path, tmp_path, limits)
        assert len(parts) > 5
        assert sum(groups.num_errors for _, groups in parts) == reasons.count("error")
        assert sum(block.num_rows for block, _ in parts) == table.num_rows


@pytest.mark.parametrize(
    "limits",
    [BlockLimits(groups=7), BlockLimits(answers=20), BlockLimits(answers=1), BlockLimits(held_bytes=3000)],
)
def test_rows_with_lists_are_cut_into_consecutive_blocks(limits, tmp_path):
    table = lists(230)
    path = write(table, tmp_path / "x.parquet")
    parts = blocks_of(path, tmp_path, limits)
    assert len(parts) > 2
    assert [x.tolist() for _, groups in parts for x in groups.lengths] == table.column(
        "output_tokens"
    ).to_pylist()
    assert [block.number for block, _ in parts] == list(range(len(parts)))
    assert all(len(groups) <= limits.groups for _, groups in parts)
    assert all(len(groups) == 1 or len(groups.flat_lengths) <= limits.answers for _, groups in parts)


def test_keys_that_come_again_are_named_with_both_rows(tmp_path):
    table = lists(200)
    again = pa.concat_tables([table, table.slice(17, 1)])
    for rows, limits in ((again, BlockLimits(groups=10)), (again, BlockLimits())):
        path = write(rows, tmp_path / "x.parquet")
        with pytest.raises(
            InputError,
            match=r"x.parquet, row 200: got .*prompt_id='p17', model='m'.* each group in one row \(x.parquet, row 17 has",
        ):
            blocks_of(path, tmp_path, limits)


def test_keys_with_the_same_hash_are_no_repetition(tmp_path, monkeypatch):
    path = write(lists(40), tmp_path / "x.parquet")
    monkeypatch.setattr(hashing, "_text_hashes", lambda values: np.arange(len(values), dtype=np.uint64) // 3)
    assert sum(len(groups) for _, groups in blocks_of(path, tmp_path, BlockLimits(groups=10))) == 40


@pytest.mark.parametrize("held_bytes", [1 << 20, 3000])
def test_bad_values_are_named_by_their_row_in_the_file(held_bytes, tmp_path):
    table = answers(100)
    lengths = table.column("output_tokens").to_pylist()
    lengths[123] = 0
    path = write(table.set_column(3, "output_tokens", pa.array(lengths)), tmp_path / "x.parquet")
    with pytest.raises(InputError, match=r"x.parquet, row 123, column output_tokens: got 0.0"):
        blocks_of(path, tmp_path, BlockLimits(held_bytes=held_bytes))
    keys = table.column("prompt_id").to_pylist()
    keys[124] = keys[125] = None
    path = write(table.set_column(0, "prompt_id", pa.array(keys)), tmp_path / "y.parquet")
    (tmp_path / "y").mkdir()
    with pytest.raises(InputError, match=r"y.parquet, row 124, column prompt_id: got None"):
        blocks_of(path, tmp_path / "y", BlockLimits(held_bytes=held_bytes))


def test_bad_values_in_lists_are_named_by_their_row_in_the_file(tmp_path):
    table = lists(100)
    names = table.column("prompt_id").to_pylist()
    names[40] = names[41] = None
    path = write(table.set_column(0, "prompt_id", pa.array(names)), tmp_path / "x.parquet")
    with pytest.raises(InputError, match=r"x.parquet, row 40, column prompt_id: got None"):
        blocks_of(path, tmp_path, BlockLimits(groups=9))


def test_a_work_folder_that_cannot_be_written_is_an_error(tmp_path):
    path = write(answers(200), tmp_path / "x.parquet")
    (tmp_path / "file").touch()
    with pytest.raises(TailcastError, match="cannot write"):
        blocks_of(path, tmp_path / "file" / "work", BlockLimits(held_bytes=4000))


@pytest.mark.parametrize("name", ["groups", "answers", "held_bytes"])
def test_limits_are_at_least_one(name):
    with pytest.raises(InputError, match=f"block {name}: got 0"):
        BlockLimits(**{name: 0})


texts = st.lists(st.one_of(st.none(), st.text(max_size=6)), min_size=1, max_size=30)


@given(texts, texts)
def test_equal_keys_have_equal_hashes_and_others_do_not(first, second):
    """Also across arrays, whatever else they hold; None and the empty text are both no key."""
    values = [*first, *second]
    found = [
        int(word)
        for part in (first, second)
        for word in key_hashes([pa.array(part, pa.string()), pa.array([7] * len(part))])
    ]
    by_value = dict(zip([value or "" for value in values], found, strict=True))
    assert found == [by_value[value or ""] for value in values]
    assert len(set(found)) == len(by_value)


@pytest.mark.parametrize(
    "values",
    [[1, 2, 3], [0.5, 0.7, 1.5], [True, False], [b"\xff", b"a"]],
    ids=["int", "float", "bool", "bytes"],
)
def test_keys_of_any_plain_type_have_hashes(values):
    found = key_hashes([pa.array(values + values)])
    assert len(set(found.tolist())) == len(values)
    assert found[: len(values)].tolist() == found[len(values) :].tolist()


def test_the_order_of_key_columns_matters():
    one, other = pa.array(["a", "b"]), pa.array(["b", "a"])
    assert len(set(key_hashes([one, other]).tolist())) == 2


@given(st.lists(st.lists(st.integers(0, 60), min_size=1, max_size=20), max_size=20))
def test_seen_hashes_are_a_set(parts):
    seen, expected = SeenHashes(), []
    for part in parts:
        known = set(expected)
        repeated = {value for value in part if value in known or part.count(value) > 1}
        assert set(seen.add(np.array(part, dtype=np.uint64)).tolist()) == repeated
        expected += part
    assert len(seen) == len(expected)
