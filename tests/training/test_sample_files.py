"""Every format of answer lengths: the same groups out of all, and what is wrong named."""

from __future__ import annotations

import json

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from scheduler_core.errors import InputError
from training.fitting.sample_files import GROUP, ROW, open_samples
from training.fitting.samples import group_table

LISTS = [
    {
        "prompt_id": f"p{number}",
        "model": "m",
        "prompt": f'Zeile 1\n"Größe", {number}?',
        "prompt_tokens": 3 + number,
        "temperature": 0.7,
        "max_tokens": 100,
        "output_tokens": [5 + number, 9, 100][: 3 - number % 2] + [7] * (number % 4),
        "finished": [True, True, False][: 3 - number % 2] + [True] * (number % 4),
        "weights": [1.0, 2.5, 1.0][: 3 - number % 2] + [0.5] * (number % 4),
    }
    for number in range(8)
]
ANSWERS = [
    {
        name: row[name]
        for name in ("prompt_id", "model", "prompt", "prompt_tokens", "temperature", "max_tokens")
    }
    | {"output_tokens": length, "finish_reason": "stop" if ended else "length", "weights": weight}
    for row in LISTS
    for length, ended, weight in zip(row["output_tokens"], row["finished"], row["weights"], strict=True)
]


def quoted(value):
    text = json.dumps(value) if isinstance(value, list) else str(value)
    return '"' + text.replace('"', '""') + '"'


def save(folder, form, rows):
    """The rows in one format; returns the path to open."""
    path = folder / f"samples.{form}"
    if form == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=3)
    elif form == "jsonl":
        path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    elif form == "csv":
        lines = [",".join(rows[0]), *(",".join(map(quoted, row.values())) for row in rows)]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    elif form in ("datasets", "dataset dict"):
        path = folder / "saved"
        dataset = datasets.Dataset.from_list(rows)
        if form == "dataset dict":
            dataset = datasets.DatasetDict({"train": dataset})
        dataset.save_to_disk(path, num_shards=2) if form == "datasets" else dataset.save_to_disk(path)
    else:
        path = folder / "many"
        path.mkdir()
        for number, start in enumerate(range(0, len(rows), 5)):
            pq.write_table(pa.Table.from_pylist(rows[start : start + 5]), path / f"part-{number}.parquet")
        (path / "README.md").write_text("not samples")
    return path


def groups_of(path, **options):
    source = open_samples(path, **{name: options[name] for name in ("keys", "weights") if name in options})
    (table,) = source.blocks(1_000_000, path.parent / "work")
    rows = table.column(ROW).to_pylist()
    return group_table(
        table.drop_columns([ROW, GROUP]), source.path, locate=lambda row: source.locate(rows[row]), **options
    )


@pytest.mark.parametrize("rows", [LISTS, ANSWERS], ids=["lists", "answers"])
@pytest.mark.parametrize("form", ["parquet", "jsonl", "csv", "datasets", "dataset dict", "parquet folder"])
def test_every_format_gives_the_same_groups(form, rows, tmp_path):
    groups = groups_of(save(tmp_path, form, rows), weights="weights")
    assert [lengths.tolist() for lengths in groups.lengths] == [row["output_tokens"] for row in LISTS]
    assert [ended.tolist() for ended in groups.finished] == [row["finished"] for row in LISTS]
    assert groups.flat_weights.tolist() == [weight for row in LISTS for weight in row["weights"]]
    assert groups.max_tokens == [100] * len(LISTS)
    for name in ("prompt_id", "model", "prompt", "prompt_tokens", "temperature"):
        assert groups.column(name) == [row[name] for row in LISTS]


@pytest.mark.parametrize("form", ["jsonl", "csv"])
def test_text_larger_than_what_is_parsed_at_a_time(form, tmp_path):
    long = "x" * 2000
    rows = [
        row | {"prompt": f"{long} {number}", "prompt_id": f"q{number}"}
        for number, row in enumerate(LISTS * 300)
    ]
    groups = groups_of(save(tmp_path, form, rows))
    assert groups.column("prompt_id") == [row["prompt_id"] for row in rows]
    assert [lengths.tolist() for lengths in groups.lengths] == [row["output_tokens"] for row in rows]


def test_compact_types_of_other_writers_are_read(tmp_path):
    table = pa.table(
        {
            "prompt_id": pa.array(["a", "b", "c"]).dictionary_encode(),
            "model": pa.array(["m"] * 3, pa.large_string()),
            "prompt": pa.array(["A", "B", "A"], pa.string_view()),
            "output_tokens": pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.int16(), 2)),
            "finished": pa.array([[True, True]] * 3, pa.large_list(pa.bool_())),
        }
    )
    pq.write_table(table, tmp_path / "x.parquet")
    groups = groups_of(tmp_path / "x.parquet", min_samples=0)
    assert [lengths.tolist() for lengths in groups.lengths] == [[1, 2], [3, 4], [5, 6]]
    assert groups.column("prompt") == ["A", "B", "A"]


def test_rows_may_say_finished_instead_of_a_reason(tmp_path):
    path = tmp_path / "x.csv"
    path.write_text("temperature,output_tokens,finished\n0.5,4,true\n1,8,False\n0.5,6,TRUE\n0.5,2,false\n")
    groups = groups_of(path, keys=("temperature",))
    assert groups.column("temperature") == [0.5, 1.0]
    assert [ended.tolist() for ended in groups.finished] == [[True, True, False], [False]]


def test_a_byte_order_mark_is_no_part_of_the_first_column(tmp_path):
    path = tmp_path / "x.csv"
    path.write_text('\ufeffprompt_id,model,output_tokens\r\na,m,"[4, 5, 6]"\r\n', encoding="utf-8")
    assert groups_of(path).column("prompt_id") == ["a"]


def test_empty_lists_and_fields_are_missing_values(tmp_path):
    path = tmp_path / "x.csv"
    path.write_text('prompt_id,model,output_tokens,max_tokens\na,m,"[ 1 ,2,3 ]",\nb,m,[],7\n')
    groups = groups_of(path)
    assert [lengths.tolist() for lengths in groups.lengths] == [[1, 2, 3], []]
    assert groups.max_tokens == [None, 7]


HEAD = "prompt_id,model,output_tokens,finished\n"
GOOD = '{"prompt_id": "a", "model": "m", "output_tokens": [5, 6, 7]}\n'
GOOD_B = GOOD.replace('"a"', '"b"')


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.jsonl", GOOD + "\n" + '{"prompt_id": "b", "model"\n', r"x.jsonl, line 3: got .*one JSON object"),
        ("x.jsonl", GOOD + "[1]\n", "line 2: got .*one JSON object"),
        (
            "x.jsonl",
            GOOD + GOOD_B.replace("[5, 6, 7]", "5"),
            "row 1, column output_tokens: got '5'; allowed: a list: a number",
        ),
        (
            "x.jsonl",
            GOOD + GOOD_B.replace("}", ', "max_tokens": 7.5}'),
            "row 1, column max_tokens: got '7.5'; allowed: an integer",
        ),
        ("x.jsonl", GOOD + GOOD_B.replace("}", ', "finished": [true]}'), "row 0, column finished: got"),
        ("x.jsonl", GOOD.encode() + GOOD.encode().replace(b'"a"', b'"\xff"'), "line 2: got .*UTF-8"),
        ("x.jsonl", "\n\n", "x.jsonl: got 'no rows'"),
        ("x.jsonl", '{"prompt_id": "a", "output_tokens": [1]}', "also model"),
        (
            "x.csv",
            HEAD + 'a,m,"[5, 6]",\nb,m,"[5, x]",\n',
            r"x.csv, row 1, column output_tokens: got '\[5, x\]'",
        ),
        ("x.csv", HEAD + 'a,m,"[5, 6]",\nb,m,7,\n', "row 1, column output_tokens: got '7'; allowed: a list"),
        ("x.csv", HEAD + "a,m,5,true\na,m,many,true\n", "row 1, column output_tokens: got 'many'"),
        ("x.csv", HEAD + "a,m,5,true\na,m,6,perhaps\n", "row 1, column finished: got 'perhaps'"),
        ("x.csv", HEAD + "a,m,5,true\na,m,,true\n", "row 1, column output_tokens: got nan"),
        ("x.csv", HEAD + "a,m,5,true\na,m,6,\n", "row 1, column finished: got None"),
        (
            "x.csv",
            HEAD + "a,m,5,true\na,m,6,true,9\n",
            r"a whole file .*Line: 3 .*Columns: 4 Found: 5",
        ),
        ("x.csv", HEAD.encode() + b"a,m,5,true\n\xff,m,6,true\n", r"x.csv.*Line: 3 .*not utf-8"),
        ("x.csv", HEAD, "x.csv: got 'no rows'"),
        ("x.csv", HEAD.replace("model", "other") + "a,m,5,true\n", "also model"),
        ("x.csv", HEAD.replace("\n", ",model\n") + "a,m,5,true,m\n", "got 'model'; allowed: each name once"),
        ("x.txt", GOOD, "allowed: a Parquet, .jsonl or .csv file"),
        ("x.parquet", "PAR1 and no more", "a whole Parquet file"),
        ("x.parquet", "", "a file that is not empty"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(name, content, message, tmp_path):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError, match=message):
        groups_of(path)


def test_text_of_parquet_is_checked_too(tmp_path):
    binary = pa.array([b"a", b"\xff\xfe"], pa.binary())
    text = pa.Array.from_buffers(pa.string(), 2, binary.buffers())
    pq.write_table(
        pa.table({"prompt_id": text, "model": ["m"] * 2, "output_tokens": [[1], [2]]}), tmp_path / "x.parquet"
    )
    with pytest.raises(InputError, match=r"x.parquet.*not valid UTF8"):
        groups_of(tmp_path / "x.parquet")


def test_keys_must_be_plain_values(tmp_path):
    pq.write_table(pa.table({"prompt_id": [["a"]], "output_tokens": [[1, 2, 3]]}), tmp_path / "x.parquet")
    with pytest.raises(InputError, match="column prompt_id: got 'list<.*plain values"):
        open_samples(tmp_path / "x.parquet", keys=("prompt_id",))


def test_folders_name_the_file_in_which_something_is_wrong(tmp_path):
    folder = save(tmp_path, "parquet folder", ANSWERS)
    table = pq.read_table(folder / "part-2.parquet")
    wrong = pa.array(["stop", "eos", "stop", "stop", "stop"])
    at = table.column_names.index("finish_reason")
    pq.write_table(table.set_column(at, "finish_reason", wrong), folder / "part-2.parquet")
    with pytest.raises(InputError, match="many/part-2.parquet, row 1, column finish_reason: got 'eos'"):
        groups_of(folder)
    pq.write_table(table.set_column(at, "finish_reason", pa.array([1] * 5)), folder / "part-2.parquet")
    with pytest.raises(
        InputError, match="many/part-2.parquet, column finish_reason: got 'int64'; allowed: string"
    ):
        groups_of(folder)
    pq.write_table(table.drop_columns(["finish_reason"]), folder / "part-2.parquet")
    with pytest.raises(InputError, match="column finish_reason: got 'no such column'"):
        groups_of(folder)


def test_a_dataset_of_several_splits_asks_for_one(tmp_path):
    dataset = datasets.Dataset.from_list(LISTS)
    datasets.DatasetDict({"train": dataset, "test": dataset}).save_to_disk(tmp_path / "d")
    with pytest.raises(InputError, match="one split of this dataset: .*d/train, .*d/test"):
        open_samples(tmp_path / "d")
    assert len(groups_of(tmp_path / "d" / "test")) == len(LISTS)


def test_damaged_folders_are_named(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="allowed: a Parquet, .jsonl or .csv file, a folder saved by"):
        open_samples(tmp_path / "empty")
    folder = save(tmp_path, "datasets", LISTS)
    file = sorted(folder.glob("*.arrow"))[-1]
    file.write_bytes(file.read_bytes()[:-700])
    with pytest.raises(InputError, match="a whole Arrow file"):
        groups_of(folder)
    (folder / "state.json").write_text("{")
    with pytest.raises(InputError, match="JSON as datasets writes it"):
        open_samples(folder)
