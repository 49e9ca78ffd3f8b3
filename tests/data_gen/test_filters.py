from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_gen.filters import PromptFilters, filtered, stratified
from data_gen.prompts import Message, Prompt
from data_gen.splits import split_of
from scheduler_core.errors import InputError


def prompts(*texts: str) -> list[Prompt]:
    return [Prompt(f"p{i}", text) for i, text in enumerate(texts)]


def test_deduplication_is_of_the_normalised_conversation() -> None:
    chat = (Message("user", "Hello"), Message("assistant", "?"), Message("user", "hello there"))
    stream = [
        *prompts("Hello  there", " hello THERE\n", "Ｈello there", "Hello there!"),
        Prompt("c", "hello there", messages=chat),
    ]
    dropped = Counter[str]()
    found = list(filtered(stream, PromptFilters(deduplicate=True), dropped))
    assert [p.prompt_id for p in found] == ["p0", "p3", "c"]
    assert dropped == {"duplicate text": 2}


def test_character_bounds() -> None:
    dropped = Counter[str]()
    stream = prompts("a", "bb", "ccc", "dddd", "eeeee")
    kept = list(filtered(stream, PromptFilters(min_characters=2, max_characters=4), dropped))
    assert [p.text for p in kept] == ["bb", "ccc", "dddd"]
    assert dropped == {"fewer than 2 characters": 1, "more than 4 characters": 1}


def test_token_bounds(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.enable_truncation(2)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    filters = PromptFilters(
        tokenizer=str(tmp_path / "tokenizer.json"), min_prompt_tokens=2, max_prompt_tokens=3
    )
    chat = Prompt("c", "b", messages=(Message("system", "a a a"), Message("user", "b")))
    stream = [*prompts("a", "a b", "a b c", "a b c d"), chat]
    assert [p.text for p in filtered(stream, filters)] == ["a b", "a b c"]
    (tmp_path / "bad.json").write_text("{}", encoding="utf-8")
    with pytest.raises(InputError, match="a tokenizer.json"):
        list(filtered(stream, PromptFilters(tokenizer=str(tmp_path / "bad.json"))))


def test_the_three_splits_part_the_prompts() -> None:
    stream = prompts(*map(str, range(200)))
    parts = {
        name: list(filtered(stream, PromptFilters(split=name, split_seed=4)))
        for name in ("train", "validation", "test")
    }
    assert sorted(p.text for part in parts.values() for p in part) == sorted(p.text for p in stream)
    assert all(split_of(p.prompt_id, 4) == name for name, part in parts.items() for p in part)


@settings(deadline=None)
@given(st.lists(st.sampled_from("abc"), max_size=60), st.integers(1, 40), st.integers(0, 5))
def test_strata_share_evenly_what_they_have(kinds: list[str], count: int, seed: int) -> None:
    stream = [Prompt(f"p{i}", "x", kind) for i, kind in enumerate(kinds)]
    dropped = Counter[str]()
    found = stratified(stream, count, "category", seed, dropped)
    assert len(found) == min(count, len(stream))
    assert dropped["not drawn"] == len(stream) - len(found)
    assert [p for p in stream if p in found] == found
    have, got = Counter(kinds), Counter(p.category for p in found)
    fewest = min((got[kind] for kind in have if got[kind] < have[kind]), default=None)
    if fewest is not None:
        assert all(got[kind] <= fewest + 1 for kind in have)


def test_a_draw_depends_on_seed_and_ids_not_on_order() -> None:
    stream = prompts(*(f"{i}" * (1 + i % 7) for i in range(300)))
    drawn = {p.prompt_id for p in stratified(stream, 40, "length", 1)}
    assert drawn == {p.prompt_id for p in stratified(stream[::-1], 40, "length", 1)}
    assert drawn != {p.prompt_id for p in stratified(stream, 40, "length", 2)}


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"sample": 0}, "sample"),
        ({"max_characters": 0}, "max_characters"),
        ({"split": "dev"}, "split"),
        ({"stratify_by": "category"}, "sample"),
        ({"sample": 3, "stratify_by": "mood"}, "stratify_by"),
        ({"min_prompt_tokens": 3}, "tokenizer"),
    ],
)
def test_bad_filters_are_named(options: dict[str, object], field: str) -> None:
    with pytest.raises(InputError, match=f"^{field}:"):
        PromptFilters(**options)  # type: ignore[arg-type]
