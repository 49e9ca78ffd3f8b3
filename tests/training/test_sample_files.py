"""Every format of answer lengths: the same groups out of all, and what is wrong named."""

import csv
import json

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from scheduler_core.errors import InputError
from tests.training.data import finished_of, lengths_of
from training.fitting.sample_files import open_samples
from training.fitting.samples import GROUP, ROW, group_table

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
SHARED = ("prompt_id", "model", "prompt", "prompt_tokens", "temperature", "max_tokens")
ANSWERS = [
    {name: row[name] for name in SHARED}
    | {"output_tokens": length, "finish_reason": "stop" if ended else "length", "weights": weight}
    for row in LISTS
    for length, ended, weight in zip(row["output_tokens"], row["finished"], row["weights"], strict=True)
]
HEAD = "prompt_id,model,output_tokens,finished\n"
GOOD = '{"prompt_id": "a", "model": "m", "output_tokens": [5, 6, 7]}\n'
TEMPERATURES = "temperature,output_tokens,finished\n0.5,4,true\n1,8,False\n0.5,6,TRUE\n0.5,2,false\n"
#: A byte order mark is no part of the first name; empty lists and fields are missing values.
WINDOWS = '\ufeffprompt_id,model,output_tokens,max_tokens\r\na,m,"[ 1 ,2,3 ]",\r\nb,m,[],7\r\n'
GOOD_B = GOOD.replace('"a"', '"b"')


def save(folder, form, rows):
    """The rows in one format; returns the path to open."""
    path = folder / f"samples.{form}"
    if form == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=3)
    elif form == "jsonl":
        path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    elif form == "csv":
        cells = ([json.dumps(v) if isinstance(v, list) else v for v in row.values()] for row in rows)
        with open(path, "w", encoding="utf-8", newline="") as stream:
            csv.writer(stream).writerows([rows[0], *cells])
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
    options["locate"] = lambda row: source.locate(table.column(ROW)[row].as_py())
    return group_table(table.drop_columns([ROW, GROUP]), source.path, **options)


@pytest.mark.parametrize("rows", [LISTS, ANSWERS], ids=["lists", "answers"])
@pytest.mark.parametrize("form", ["parquet", "jsonl", "csv", "datasets", "dataset dict", "parquet folder"])
def test_every_format_gives_the_same_groups(form, rows, tmp_path):
    groups = groups_of(save(tmp_path, form, rows), weights="weights")
    assert lengths_of(groups) == [row["output_tokens"] for row in LISTS]
    assert finished_of(groups) == [row["finished"] for row in LISTS]
    assert groups.flat_weights.tolist() == [weight for row in LISTS for weight in row["weights"]]
    assert groups.max_tokens == [100] * len(LISTS)
    for name in ("prompt_id", "model", "prompt", "prompt_tokens", "temperature"):
        assert groups.column(name) == [row[name] for row in LISTS]


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
    assert lengths_of(groups) == [[1, 2], [3, 4], [5, 6]]
    assert groups.column("prompt") == ["A", "B", "A"]


@pytest.mark.parametrize(
    ("content", "keys", "names", "lengths", "finished", "limits"),
    [
        (
            TEMPERATURES,
            ("temperature",),
            [0.5, 1.0],
            [[4, 6, 2], [8]],
            [[True, True, False], [False]],
            [None] * 2,
        ),
        (WINDOWS, ("prompt_id", "model"), ["a", "b"], [[1, 2, 3], []], [[True] * 3, []], [None, 7]),
    ],
)
def test_csv_is_read_as_people_write_it(content, keys, names, lengths, finished, limits, tmp_path):
    path = tmp_path / "x.csv"
    path.write_text(content, encoding="utf-8")
    groups = groups_of(path, keys=keys)
    assert groups.column(keys[0]) == names
    assert lengths_of(groups) == lengths
    assert finished_of(groups) == finished
    assert groups.max_tokens == limits


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.jsonl", GOOD + "\n" + '{"prompt_id": "b", "model"\n', r"x.jsonl, line 3: got .*one JSON object"),
        ("x.jsonl", GOOD + "[1]\n", "an undamaged file .*line 2: Expected OBJECT, but got ARRAY"),
        ("x.jsonl", GOOD + GOOD_B.replace("[5, 6, 7]", "5"), "row 1, column output_tokens: got '5'; allowed: a list"),
        ("x.jsonl", GOOD + GOOD_B.replace("}", ', "max_tokens": 7.5}'), "column max_tokens: got '7.5'; allowed: an int"),
        ("x.jsonl", GOOD.encode() + GOOD.encode().replace(b'"a"', b'"\xff"'), "line 2: got .*one JSON object"),
        ("x.jsonl", "\n\n", "x.jsonl: got 'no rows'"),
        ("x.jsonl", '{"prompt_id": "a", "output_tokens": [1]}', "also model"),
        ("x.csv", HEAD + 'a,m,"[5, 6]",\nb,m,"[5, x]",\n', r"row 1, column output_tokens: got '\[5, x\]'"),
        ("x.csv", HEAD + "a,m,5,true\na,m,6,perhaps\n", "row 1, column finished: got 'perhaps'"),
        ("x.csv", HEAD + "a,m,5,true\na,m,,true\n", "row 1, column output_tokens: got nan"),
        ("x.csv", HEAD + "a,m,5,true\na,m,6,true,9\n", r"an undamaged file .*Line: 3 .*Columns: 4 Found: 5"),
        ("x.csv", HEAD.encode() + b"a,m,5,true\n\xff,m,6,true\n", r"x.csv.*Line: 3 .*not utf-8"),
        ("x.csv", HEAD.replace("\n", ",model\n") + "a,m,5,true,m\n", "got 'model'; allowed: each name once"),
        ("x.txt", GOOD, "allowed: a Parquet, .jsonl or .csv file"),
        ("x.parquet", "PAR1 and no more", "a whole Parquet file"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_a_file_is_named(name, content, message, tmp_path):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError, match=message):
        groups_of(path)


def test_text_and_keys_of_parquet_are_checked_too(tmp_path):
    text = pa.Array.from_buffers(pa.string(), 2, pa.array([b"a", b"\xff\xfe"], pa.binary()).buffers())
    listed = ([["a"], ["b"]], "prompt_id: got 'list<.*plain values")
    for keys, message in ((text, "x.parquet.*not valid UTF8"), listed):
        table = pa.table({"prompt_id": keys, "model": ["m"] * 2, "output_tokens": [[1], [2]]})
        pq.write_table(table, tmp_path / "x.parquet")
        with pytest.raises(InputError, match=message):
            groups_of(tmp_path / "x.parquet")


def test_folders_name_the_file_in_which_something_is_wrong(tmp_path):
    folder = save(tmp_path, "parquet folder", ANSWERS)
    table = pq.read_table(folder / "part-2.parquet")
    at = table.column_names.index("finish_reason")
    for wrong, message in (
        (["stop", "eos", "stop", "stop", "stop"], "row 1, column finish_reason: got 'eos'"),
        ([1] * 5, "column finish_reason: got 'int64'; allowed: string"),
    ):
        pq.write_table(table.set_column(at, "finish_reason", pa.array(wrong)), folder / "part-2.parquet")
        with pytest.raises(InputError, match=f"many/part-2.parquet, {message}"):
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
    with pytest.raises(InputError, match="an undamaged folder saved by datasets"):
        open_samples(folder)
