"""Prompts: their sources, filters and splits."""

import csv
import gzip
import hashlib
import json
import random
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from data_gen.filters import NearDuplicates, PromptFilters, filtered, lsh_bands, pieces, similarity
from data_gen.prompts import Message, Prompt, conversation_id_of, prompt_id_of
from data_gen.sources.layouts import SourceOptions
from data_gen.sources.open import HUB_SETS, compose, open_prompts
from data_gen.splits import split_of
from scheduler_core.errors import InputError

TURNS = [("system", "Be brief."), ("user", "one"), ("assistant", "1"), ("user", "two"), ("assistant", "2")]
CHAT = [{"role": role, "content": text} for role, text in TURNS]
TEXTS = st.lists(st.text(min_size=1).filter(str.strip), min_size=1, max_size=8, unique=True)
LMSYS = [
    {"conversation_id": "c1", "model": "m", "conversation": CHAT, "turn": 2, "language": "English"},
    {"conversation_id": "c2", "model": "m", "conversation": CHAT[1:3], "turn": 1, "language": "German"},
]
#: Few letters, so that small texts share pieces.
SMALL_TEXTS = st.lists(st.text("ab ", max_size=24) | st.text(max_size=8), max_size=30)


def write_lines(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_turns_of_a_conversation(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "lmsys.jsonl", LMSYS)
    first = list(open_prompts(source))
    prompts = [("c1", "one", ["system", "user"]), ("c2", "one", ["user"])]
    assert [(p.prompt_id, p.text, [message.role for message in p.chat]) for p in first] == prompts
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
    found = list(open_prompts(source, SourceOptions(languages=("english", "French"), category="model")))
    assert [(p.prompt_id, p.category) for p in found] == [("c1", "m")]
    with pytest.raises(InputError, match="row 1: columns.*'topic'"):
        list(open_prompts(source, SourceOptions(category="topic")))


@pytest.mark.parametrize(
    ("row", "text", "category"),
    [
        ({"instruction": "Add.", "input": "2 3", "output": "5", "text": "..."}, "Add.\n\n2 3", ""),
        ({"instruction": "Who?", "context": "Ann sang.", "category": "qa"}, "Who?\n\nAnn sang.", "qa"),
        ({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]}, "Hi", ""),
        ({"id": "x", "items": [{"from": "human", "value": "Hi"}]}, "Hi", ""),
        ({"conversations": [{"role": "user", "content": "Hi"}]}, "Hi", ""),
    ],
)
def test_known_layouts_are_recognized(tmp_path: Path, row: dict[str, Any], text: str, category: str) -> None:
    (tmp_path / "set.json").write_text(json.dumps([row]), encoding="utf-8")
    (prompt,) = open_prompts(str(tmp_path / "set.json"))
    assert (prompt.text, prompt.category) == (text, category)


def test_public_sets_skip_what_cannot_be_sent_and_own_files_refuse_it(tmp_path: Path) -> None:
    reply, question = {"from": "gpt", "value": "..."}, {"from": "human", "value": "go on"}
    gpt_first = {"id": "part_2", "conversations": [reply, question]}
    empty = {"id": "e", "conversations": [question | {"value": " "}]}
    good = {"id": "g", "conversations": [question]}
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


@given(TEXTS, st.integers(0, 3))
@example([f"{i} " + "ä" * 70_000 for i in range(60)], 0)  # an array longer than the window is read in pieces
def test_formats_agree(tmp_path_factory: pytest.TempPathFactory, texts: list[str], indent: int) -> None:
    folder = tmp_path_factory.mktemp("array")
    rows = [{"prompt": text} for text in texts]
    (folder / "a.json").write_text(json.dumps(rows, indent=indent or None), encoding="utf-8")
    with gzip.open(folder / "a.jsonl.gz", "wt", encoding="utf-8") as stream:
        stream.write("".join(json.dumps(row) + "\n" for row in rows))
    pq.write_table(pa.Table.from_pylist(rows), folder / "a.parquet")
    with open(folder / "a.csv", "w", encoding="utf-8", newline="") as stream:
        csv.writer(stream).writerows([["prompt"], *([text] for text in texts)])
    for name in ("a.json", "a.jsonl.gz", "a.parquet", "a.csv"):
        assert [p.text for p in open_prompts(str(folder / name))] == texts


def test_lines_of_a_text_are_prompts_with_ids_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("first\n\nsecond\n", encoding="utf-8")
    prompts = [(p.text, p.prompt_id) for p in open_prompts(str(tmp_path / "p.txt"))]
    assert prompts == [(text, prompt_id_of(text)) for text in ("first", "second")]
    assert conversation_id_of([Message("user", "first")]) == prompt_id_of("first")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b'{"prompt": "x"}', "row 1.*JSON array"),
        ("a.json", b'[{"prompt": "x"}', "complete JSON array"),
        ("a.json", b'[{"prompt": "x"} {"prompt": "y"}]', "after row 1.*comma"),
        ("p.jsonl", b'{"prompt": "ok"}\n{"prompt": "  "}\n', "row 2: prompt"),
        ("p.jsonl", b'{"prompt": "ok"}\n{"prompt": \n', "row 2"),
        ("p.jsonl", b'{"prompt": "same"}\n{"prompt": "same"}\n', "row 2: prompt_id.*not used before"),
        ("p.jsonl", b"[1]\n", "one JSON object"),
        ("p.jsonl", b'{"question": "?"}', "a column named 'prompt', or one of"),
        ("p.csv", b"prompt\nok\nan,extra\n", "as many values as headings"),
        ("p.txt", b"ok\n\xff\xfe\n", "UTF-8"),
        ("p.parquet", b"PAR1 cut off", "whole Parquet file"),
        ("p.yaml", b"prompt: x", "ending in"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        list(open_prompts(str(tmp_path / name)))


def test_templates_are_different_balanced_and_stable() -> None:
    prompts = compose(180, seed=5)
    assert len({text for _, text in prompts}) == 180
    counts = Counter(category for category, _ in prompts).values()
    assert len(counts) == 9
    assert max(counts) - min(counts) <= 1
    assert compose(30, seed=5) == prompts[:30] != compose(30, seed=6)
    assert not any("{" in text for _, text in prompts)


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
    short_name, file = HUB_SETS[name]
    chat = {"id": "1", "conversations": [{"from": "human", "value": "one"}]}
    rows = {
        "sharegpt": chat,
        "alpaca": {"instruction": "one", "input": "", "output": "", "text": ""},
        "dolly": {"instruction": "one", "context": "", "response": "", "category": "qa"},
    }
    row = rows.get(short_name, {"conversation_id": "1", "conversation": CHAT, "language": "English"})
    loads: list[tuple[str, dict[str, Any]]] = []

    def load(path: str, **options: Any) -> Any:
        loads.append((path, options))
        data = datasets.Dataset.from_list([row])
        return datasets.IterableDatasetDict({"train": data.to_iterable_dataset()})

    monkeypatch.setattr(datasets, "load_dataset", load)
    (prompt,) = open_prompts(f"hf:{name}")
    assert (prompt.text, prompt.dataset) == ("one", short_name)
    assert loads == [(name, {"streaming": True} | ({} if file is None else {"data_files": file}))]


def test_an_unreachable_set_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: str, **options: Any) -> Any:
        raise ConnectionError("Couldn't reach it\nmore")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(InputError, match="reachable data set.*Couldn't reach it"):
        list(open_prompts("hf:some/set"))


def test_bad_options_are_named(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "x.jsonl", [{"question": "?"}])
    with pytest.raises(InputError, match="also a column named 'messages'"):
        list(open_prompts(source, SourceOptions(layout="messages")))
    with pytest.raises(InputError, match="turns"):
        SourceOptions(turns=0)


def prompts(*texts: str) -> list[Prompt]:
    return [Prompt(f"p{i}", text) for i, text in enumerate(texts)]


def test_token_bounds(tmp_path: Path, word_tokenizer: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(word_tokenizer / "tokenizer.json"))
    tokenizer.enable_truncation(2)
    tokenizer.save(str(tmp_path / "short.json"))
    filters = PromptFilters(tokenizer=str(tmp_path / "short.json"), min_prompt_tokens=2, max_prompt_tokens=3)
    chat = Prompt("c", "b", messages=(Message("system", "a a a"), Message("user", "b")))
    stream = [*prompts("a", "a b", "a b c", "a b c d"), chat]
    dropped = Counter[str]()
    assert [p.text for p in filtered(stream, filters, dropped)] == ["a b", "a b c"]
    assert dropped == {"fewer than 2 tokens": 1, "more than 3 tokens": 2}
    (tmp_path / "bad.json").write_text("{}", encoding="utf-8")
    with pytest.raises(InputError, match="a tokenizer.json"):
        list(filtered(stream, PromptFilters(tokenizer=str(tmp_path / "bad.json"))))


@given(st.lists(st.sampled_from("abc"), max_size=60), st.integers(1, 40), st.integers(0, 5))
def test_strata_share_evenly_what_they_have(kinds: list[str], count: int, seed: int) -> None:
    stream, dropped = [Prompt(f"p{i}", "x", kind) for i, kind in enumerate(kinds)], Counter[str]()
    filters = PromptFilters(sample=count, stratify_by="category", sample_seed=seed, deduplicate=False)
    drawn = list(filtered(stream, filters, dropped))
    assert len(drawn) == min(count, len(stream))
    assert dropped["not drawn"] == len(stream) - len(drawn)
    assert [p for p in stream if p in drawn] == drawn
    have, got = Counter(kinds), Counter(p.category for p in drawn)
    fewest = min((got[kind] for kind in have if got[kind] < have[kind]), default=None)
    if fewest is not None:
        assert all(got[kind] <= fewest + 1 for kind in have)


def test_a_draw_depends_on_seed_and_ids_not_on_order() -> None:
    stream, dropped = prompts(*map(str, range(300))), Counter[str]()
    drawn = list(filtered(stream, PromptFilters(sample=40, sample_seed=1), dropped))
    assert len(drawn) == 40
    assert [prompt for prompt in stream if prompt in drawn] == drawn
    assert dropped == {"not drawn": 260}
    assert set(drawn) == set(filtered(stream[::-1], PromptFilters(sample=40, sample_seed=1)))
    assert set(drawn) != set(filtered(stream, PromptFilters(sample=40, sample_seed=2)))
    assert list(filtered(stream, PromptFilters(sample=400))) == stream


def unlike(texts: list[str], threshold: float) -> list[str]:
    index = NearDuplicates(threshold)
    return [text for text in texts if index.add(text)]


def compared_with_all(texts: list[str], threshold: float) -> list[str]:
    """The same by comparing each text with every one that passed."""
    passed: list[str] = []
    for text in texts:
        if all(similarity(pieces(text), pieces(other)) < threshold for other in passed):
            passed.append(text)
    return passed


@given(SMALL_TEXTS, st.sampled_from([0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0]), st.randoms(use_true_random=False))
@example(["aaaaa", "aaaaaa", "", ""], 1.0, random.Random(0))
def test_near_duplicates_as_by_all_pairs(texts: list[str], threshold: float, order: random.Random) -> None:
    passed = unlike(texts, threshold)
    assert passed == compared_with_all(texts, threshold) == unlike([*texts, *texts], threshold)
    twice = [*texts, *texts]
    order.shuffle(twice)
    assert all(count == 1 for count in Counter(unlike(twice, threshold)).values())


@pytest.mark.parametrize("threshold", [0.5, 0.65, 0.8, 0.9, 0.99, 1.0])
def test_a_pair_at_the_threshold_is_missed_once_in_a_million_at_most(threshold: float) -> None:
    num_bands, rows = lsh_bands(threshold)
    assert num_bands * rows <= 256
    assert (1 - threshold**rows) ** num_bands <= 1e-6


@pytest.mark.mend
def test_near_duplicates_are_of_the_normalized_conversation() -> None:
    story = "Write a short story about a lighthouse keeper who finds a letter from the sea, in the past."
    turns = (Message("user", "Hi"), Message("assistant", "Hello, what can I do?"), Message("user", story))
    poem = "Write a long poem about a mountain guide who loses a map, in rhyme."
    changed = story.upper().replace(" ", "  "), story.replace("sea,", "sea")
    stream = [*prompts(story, *changed, poem, "ok", "ok", "no"), Prompt("chat", story, messages=turns)]
    dropped = Counter[str]()
    passed = list(filtered(stream, PromptFilters(near_duplicates=0.9), dropped))
    assert [prompt.prompt_id for prompt in passed] == ["p0", "p3", "p4", "p6", "chat"]
    assert dropped == {"near-duplicate text": 3}
    # Repetitions alone: of other case, width or white space.
    wide = [*prompts(story, *changed), Prompt("wide", story.replace("W", "\uff37"))]
    wide.append(Prompt("chat", story, messages=turns))
    both, exact = Counter[str](), Counter[str]()
    list(filtered(stream, PromptFilters(deduplicate=True, near_duplicates=0.9), both))
    assert both == {"duplicate text": 2, "near-duplicate text": 1}
    passed = list(filtered(wide, PromptFilters(deduplicate=True), exact))
    assert [prompt.prompt_id for prompt in passed] == ["p0", "p2", "chat"]
    assert exact == {"duplicate text": 2}


def test_splits_are_stable_and_have_their_fractions() -> None:
    names = ("train", "validation", "test")
    stream = prompts(*map(str, range(6000)))
    parts = {name: list(filtered(stream, PromptFilters(split=name, split_seed=1))) for name in names}
    assert sorted(p.prompt_id for part in parts.values() for p in part) == sorted(p.prompt_id for p in stream)
    # Standard error of a fraction of 0.6 over 6,000 is 0.006.
    assert [len(parts[name]) / 6000 for name in names] == pytest.approx([0.6, 0.2, 0.2], abs=0.025)
    assert all(split_of(p.prompt_id, 1) == name for name, part in parts.items() for p in part)
    assert any(split_of(p.prompt_id, 2) != "train" for p in parts["train"])
    # Worked out by hand from SHA-256: a changed hash would silently move test prompts into training.
    golden = {"a": "train", "b": "validation", "c": "train", "m": split_by_hand("m"), "z": split_by_hand("z")}
    assert {name: split_of(name, seed=0) for name in golden} == golden


def split_by_hand(prompt_id: str) -> str:
    first_byte = hashlib.sha256(b"0\x00" + prompt_id.encode()).digest()[0]
    assert first_byte not in (153, 204)  # the bytes in which the borders 0.6 and 0.8 fall
    return "train" if first_byte < 153 else "validation" if first_byte < 204 else "test"
