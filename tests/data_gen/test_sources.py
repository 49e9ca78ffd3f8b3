from __future__ import annotations

import gzip
import json
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_gen.prompts import Message, Prompt
from data_gen.sources.layouts import HUB_SETS, LAYOUTS, SourceOptions
from data_gen.sources.open import open_prompts
from data_gen.splits import split_of
from scheduler_core.errors import InputError

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "1"},
    {"role": "user", "content": "two"},
    {"role": "assistant", "content": "2"},
]
LMSYS = [
    {"conversation_id": "c1", "model": "m", "conversation": CHAT, "turn": 2, "language": "English"},
    {"conversation_id": "c2", "model": "m", "conversation": CHAT[1:3], "turn": 1, "language": "German"},
]


def roles(prompt: Prompt) -> list[str]:
    return [message.role for message in prompt.chat]


def write_lines(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_turns_of_a_conversation(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "lmsys.jsonl", LMSYS)
    first = list(open_prompts(source))
    assert [(p.prompt_id, p.text, roles(p)) for p in first] == [
        ("c1", "one", ["system", "user"]),
        ("c2", "one", ["user"]),
    ]
    assert first[1].messages == ()
    last = list(open_prompts(source, SourceOptions(turns="last")))
    assert [(p.text, len(p.chat)) for p in last] == [("two", 4), ("one", 1)]
    every = list(open_prompts(source, SourceOptions(turns="all")))
    assert [p.prompt_id for p in every] == ["c1#turn-1", "c1#turn-2", "c2#turn-1"]
    assert every[1].messages == tuple(Message(m["role"], m["content"]) for m in CHAT[:4])
    skipped = Counter[str]()
    second = list(open_prompts(source, SourceOptions(turns=2), skipped=skipped))
    assert [p.prompt_id for p in second] == ["c1"]
    assert skipped == {"too few turns": 1}


def test_all_turns_of_a_conversation_share_a_split(tmp_path: Path) -> None:
    rows = [{"conversation": [*CHAT[1:3], {"role": "user", "content": f"again {i}"}]} for i in range(40)]
    prompts = list(open_prompts(write_lines(tmp_path / "c.jsonl", rows), SourceOptions(turns="all")))
    # 40 conversations with one beginning: their first turn is one prompt, and none may leak into another split.
    assert len(prompts) == 41
    assert len({split_of(p.prompt_id, seed=3) for p in prompts}) == 1


def test_language_and_category(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "lmsys.jsonl", LMSYS)
    options = SourceOptions(languages=("english", "French"), category="model")
    found = list(open_prompts(source, options))
    assert [(p.prompt_id, p.category) for p in found] == [("c1", "m")]
    with pytest.raises(InputError, match="row 1: columns.*'topic'"):
        list(open_prompts(source, SourceOptions(category="topic")))


@pytest.mark.parametrize(
    ("row", "text", "category"),
    [
        ({"instruction": "Add.", "input": "2 3", "output": "5", "text": "..."}, "Add.\n\n2 3", ""),
        ({"instruction": "Sing.", "input": "", "output": "la", "text": "..."}, "Sing.", ""),
        (
            {"instruction": "Who?", "context": "Ann sang.", "response": "Ann", "category": "closed_qa"},
            "Who?\n\nAnn sang.",
            "closed_qa",
        ),
        (
            {"id": "x", "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]},
            "Hi",
            "",
        ),
        ({"id": "x", "items": [{"from": "human", "value": "Hi"}]}, "Hi", ""),
        ({"conversations": [{"role": "user", "content": "Hi"}]}, "Hi", ""),
        (
            {
                "conversation_hash": "h",
                "conversation": [{"role": "user", "content": "Hi", "language": "English", "toxic": False}],
                "language": "English",
            },
            "Hi",
            "",
        ),
    ],
)
def test_known_layouts_are_recognised(tmp_path: Path, row: dict[str, Any], text: str, category: str) -> None:
    (tmp_path / "set.json").write_text(json.dumps([row]), encoding="utf-8")
    found = list(open_prompts(str(tmp_path / "set.json")))
    assert [(p.text, p.category) for p in found] == [(text, category)]


def test_public_sets_skip_what_cannot_be_sent_and_own_files_refuse_it(tmp_path: Path) -> None:
    gpt_first = {
        "id": "part_2",
        "conversations": [{"from": "gpt", "value": "..."}, {"from": "human", "value": "go on"}],
    }
    empty = {"id": "e", "conversations": [{"from": "human", "value": " "}]}
    good = {"id": "g", "conversations": [{"from": "human", "value": "Hi"}]}
    skipped = Counter[str]()
    source = write_lines(tmp_path / "s.jsonl", [gpt_first, empty, good, good])
    assert [p.prompt_id for p in open_prompts(source, skipped=skipped)] == ["g"]
    assert skipped == {"unusable": 2, "repeated": 1}
    with pytest.raises(InputError, match="row 4: prompt_id"):
        list(open_prompts(source, SourceOptions(repeated="refuse")))
    own = write_lines(tmp_path / "own.jsonl", [{"messages": [{"role": "assistant", "content": "Hi"}]}])
    with pytest.raises(InputError, match="row 1 message 1: role: got 'assistant'"):
        list(open_prompts(own))


def test_own_messages_keep_their_id_and_whole_history(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "own.jsonl", [{"prompt_id": "mine", "messages": CHAT, "category": "k"}])
    (prompt,) = open_prompts(source)
    assert (prompt.prompt_id, prompt.text, prompt.category, len(prompt.messages)) == ("mine", "two", "k", 4)


@settings(deadline=None)
@given(
    st.lists(st.text(min_size=1).filter(str.strip), min_size=1, max_size=8, unique=True), st.integers(0, 3)
)
def test_an_array_reads_like_its_lines(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], indent: int
) -> None:
    folder = tmp_path_factory.mktemp("array")
    rows = [{"prompt": text} for text in texts]
    (folder / "a.json").write_text(json.dumps(rows, indent=indent or None), encoding="utf-8")
    with gzip.open(folder / "a.jsonl.gz", "wt", encoding="utf-8") as stream:
        stream.write("".join(json.dumps(row) + "\n" for row in rows))
    pq.write_table(pa.Table.from_pylist(rows), folder / "a.parquet")
    found = [
        [p.text for p in open_prompts(str(folder / name))] for name in ("a.json", "a.jsonl.gz", "a.parquet")
    ]
    assert found == [texts, texts, texts]


def test_an_array_longer_than_the_window_is_read_piece_by_piece(tmp_path: Path) -> None:
    texts = [f"{i} " + "ä" * 70_000 for i in range(60)]
    (tmp_path / "a.json").write_text(json.dumps([{"prompt": text} for text in texts]), encoding="utf-8")
    assert [p.text for p in open_prompts(str(tmp_path / "a.json"))] == texts


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"prompt": "x"}', "row 1.*JSON array"),
        ('[{"prompt": "x"}', "complete JSON array"),
        ('[{"prompt": "x"} {"prompt": "y"}]', "after row 1.*comma"),
        ('[{"prompt": "x"}] tail', "nothing after"),
        ('[{"prompt": "x"}, {"prompt": ]', "row 2"),
        ("[3]", "row 1.*one JSON object"),
    ],
)
def test_bad_arrays_are_named(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "a.json").write_text(content, encoding="utf-8")
    with pytest.raises(InputError, match=message):
        list(open_prompts(str(tmp_path / "a.json")))


def test_a_long_file_does_not_fill_memory(tmp_path: Path) -> None:
    source = tmp_path / "long.jsonl"
    with open(source, "w", encoding="utf-8") as stream:
        for i in range(30_000):
            stream.write(json.dumps({"prompt": f"{i} " + "x" * 1000}) + "\n")
    tracemalloc.start()
    count = sum(1 for _ in open_prompts(str(source)))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count == 30_000
    # The file has 30 MB; eight bytes an id and a few rows are held.
    assert peak < 8_000_000


def test_datasets_folders(tmp_path: Path) -> None:
    import datasets

    rows = datasets.Dataset.from_list([{"prompt": "a", "prompt_id": "1"}, {"prompt": "b", "prompt_id": "2"}])
    rows.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": rows, "test": rows.select([1])}).save_to_disk(str(tmp_path / "several"))
    assert [p.text for p in open_prompts(str(tmp_path / "one"))] == ["a", "b"]
    assert [p.text for p in open_prompts(str(tmp_path / "several"))] == ["a", "b"]
    assert [p.text for p in open_prompts(f"{tmp_path / 'several'}:test")] == ["b"]
    with pytest.raises(InputError, match="a split of train, test"):
        list(open_prompts(f"{tmp_path / 'several'}:dev"))
    with pytest.raises(InputError, match="no split"):
        list(open_prompts(f"{tmp_path / 'one'}:test"))


@pytest.mark.parametrize("name", sorted(HUB_SETS))
def test_hub_sets_need_only_their_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    rows = {
        "conversation": {"conversation_id": "1", "conversation": CHAT, "language": "English"},
        "sharegpt": {"id": "1", "conversations": [{"from": "human", "value": "one"}]},
        "alpaca": {"instruction": "one", "input": "", "output": "", "text": ""},
        "dolly": {"instruction": "one", "context": "", "response": "", "category": "qa"},
    }
    asked: list[tuple[str, dict[str, Any]]] = []

    def load(path: str, **options: Any) -> Any:
        asked.append((path, options))
        data = datasets.Dataset.from_list([rows[HUB_SETS[name].layout]])
        return datasets.IterableDatasetDict({"train": data.to_iterable_dataset()})

    monkeypatch.setattr(datasets, "load_dataset", load)
    (prompt,) = open_prompts(f"hf:{name}")
    assert (prompt.text, prompt.dataset) == ("one", HUB_SETS[name].dataset)
    assert asked[0][0] == name
    assert asked[0][1]["streaming"] is True
    assert asked[0][1].get("data_files") == HUB_SETS[name].data_files


def test_an_unreachable_set_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def fail(path: str, **options: Any) -> Any:
        raise ConnectionError("Couldn't reach it\nmore")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(InputError, match="can be reached.*Couldn't reach it"):
        list(open_prompts("hf:some/set"))


def test_layout_errors_name_what_is_known(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "x.jsonl", [{"question": "?"}])
    with pytest.raises(InputError, match="a column named 'prompt', or one of"):
        list(open_prompts(source))
    with pytest.raises(InputError, match="layout"):
        list(open_prompts(source, SourceOptions(layout="none")))
    with pytest.raises(InputError, match="also a column named 'messages'"):
        list(open_prompts(source, SourceOptions(layout="messages")))
    assert {known.layout for known in HUB_SETS.values()} <= set(LAYOUTS)
    for bad in ("some", 0, True):
        with pytest.raises(InputError, match="turns"):
            SourceOptions(turns=bad)  # type: ignore[arg-type]
