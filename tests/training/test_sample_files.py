"""Files and folders of output lengths in both forms: the same groups out of all, and what is wrong named."""

import csv
import json

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
    }
    for number in range(8)
]
SHARED = ("prompt_id", "model", "prompt", "prompt_tokens", "temperature", "max_tokens")
ANSWERS = [
    {name: row[name] for name in SHARED}
    | {"output_tokens": length, "finish_reason": "stop" if ended else "length"}
    for row in LISTS
    for length, ended in zip(row["output_tokens"], row["finished"], strict=True)
]


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
    else:
        path = folder / "many"
        path.mkdir()
        for number, start in enumerate(range(0, len(rows), 5)):
            pq.write_table(pa.Table.from_pylist(rows[start : start + 5]), path / f"part-{number}.parquet")
        (path / "README.md").write_text("not samples")
    return path


def groups_of(path, **options):
    keys = {name: options[name] for name in ("keys",) if name in options}
    source = open_samples(path, **keys, work=path.parent / "converted")
    (table,) = source.blocks(1_000_000, path.parent / "work")
    options["locate"] = lambda row: source.locate(table.column(ROW)[row].as_py())
    return group_table(table.drop_columns([ROW, GROUP]), source.path, **options)


@pytest.mark.mend
@pytest.mark.parametrize("rows", [LISTS, ANSWERS], ids=["lists", "answers"])
@pytest.mark.parametrize("form", ["parquet", "jsonl", "csv", "parquet folder"])
def test_every_format_gives_the_same_groups(form, rows, tmp_path):
    groups = groups_of(save(tmp_path, form, rows))
    assert lengths_of(groups) == [row["output_tokens"] for row in LISTS]
    assert finished_of(groups) == [row["finished"] for row in LISTS]
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
    ("name", "content", "message"),
    [
        ("x.txt", "a", "allowed: a file of Parquet, CSV or JSON lines .* import-lengths"),
        ("x.parquet", "PAR1 and no more", "a whole Parquet file"),
    ],
)
def test_other_files_and_damaged_ones_are_refused(name, content, message, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=message):
        groups_of(tmp_path / name)


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


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(InputError, match="allowed: a file of Parquet, CSV or JSON lines"):
        open_samples(tmp_path, work=tmp_path)


TEMPERATURES = "temperature,output_tokens,finished\n0.5,4,true\n1,8,False\n0.5,6,TRUE\n0.5,2,false\n"
#: A byte order mark is no part of the first name; empty lists and fields are missing values.
WINDOWS = '\ufeffprompt_id,model,output_tokens,max_tokens\r\na,m,"[ 1 ,2,3 ]",\r\nb,m,[],7\r\n'


@pytest.mark.parametrize(
    ("content", "keys", "names", "lengths", "finished", "limits"),
    [
        (TEMPERATURES, ("temperature",), [0.5, 1.0], [[4, 6, 2], [8]], [[True, True, False], [False]], [None] * 2),
        (WINDOWS, ("prompt_id", "model"), ["a", "b"], [[1, 2, 3], []], [[True] * 3, []], [None, 7]),
    ],
)  # fmt: skip
def test_csv_is_read_as_people_write_it(content, keys, names, lengths, finished, limits, tmp_path):
    path = tmp_path / "x.csv"
    path.write_text(content, encoding="utf-8")
    groups = groups_of(path, keys=keys, min_samples=0)
    assert groups.column(keys[0]) == names
    assert lengths_of(groups) == lengths
    assert finished_of(groups) == finished
    assert groups.max_tokens == limits


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.csv", "prompt_id,model,output_tokens\na,m,1_000\n", "x.csv row 2, column output_tokens: got '1_000'; allowed: a number"),
        ("x.csv", "prompt_id,model,output_tokens,finished\na,m,1,yes\n", "column finished: got 'yes'; allowed: true or false"),
        ("x.jsonl", '{"prompt_id": "a", "model": "m", "output_tokens": true}', "row 1, column output_tokens: got True"),
        ("x.jsonl", '{"prompt_id": "a", "model": "m", "output_tokens": 3, "max_tokens": 2.5}', "column max_tokens: got 2.5; allowed: an integer"),
        ("x.jsonl", '{"prompt_id": ["a"], "model": "m", "output_tokens": 3}', "column prompt_id: got .'a'.; allowed: one value"),
        ("x.jsonl", '{"prompt_id": "a", "model": "m", "output_tokens": [3]}\n{"prompt_id": "b", "model": "m", "output_tokens": 3}', "row 2, column output_tokens: got 3; allowed: a list"),
        ("x.jsonl", '{"prompt_id": "a", "output_tokens": 3}', "x.jsonl, columns: got .*; allowed: also model"),
        ("x.jsonl", "", "allowed: a file that is not empty"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_text_is_named_by_row_and_column(name, content, message, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=message):
        groups_of(tmp_path / name)
