"""What is left out of a stream of prompts, and samples drawn from it; every step streams but the sampling."""

from __future__ import annotations

import heapq
import itertools
import math
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from data_gen.near_duplicates import NearDuplicates, check_threshold
from data_gen.prompts import Prompt
from data_gen.sources.digests import DigestSet
from data_gen.splits import SPLITS, Split, split_of, unit_hash
from scheduler_core.errors import InputError, MissingExtraError
from scheduler_core.files import existing_file

_TOKENIZER_BATCH = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptFilters:
    """What is kept; applied in the order of the fields. Lengths are of the whole conversation."""

    deduplicate: bool = False
    """Drop prompts whose normalised text was seen: Unicode NFKC, case folded, white space collapsed."""
    near_duplicates: float | None = None
    """Drop prompts that are at least so similar to one kept before: five-character pieces of the normalised text in common, over pieces in either (Jaccard); from 0.5 to 1, e.g. 0.9; unset: keep them."""
    min_characters: int | None = None
    """Shortest length to keep, in characters."""
    max_characters: int | None = None
    """Longest length to keep, in characters."""
    tokenizer: str | None = None
    """A tokenizer.json; needed for the bounds in tokens."""
    min_prompt_tokens: int | None = None
    """Shortest length to keep, in tokens of `tokenizer`, without a chat template."""
    max_prompt_tokens: int | None = None
    """Longest length to keep, in tokens of `tokenizer`, without a chat template."""
    split: Split | None = None
    """Only this split of the prompts, which a hash of their ids decides; unset: all."""
    split_seed: int = 0
    """Seed of the splits."""
    sample: int | None = None
    """Draw so many prompts; unset: all."""
    stratify_by: Literal["category", "dataset", "length"] | None = None
    """Strata that the sample is spread over evenly: category, dataset or length (in characters, by powers of two); unset: draw from all alike."""
    sample_seed: int = 0
    """Seed of the draw."""

    def __post_init__(self) -> None:
        for name in (
            "min_characters",
            "max_characters",
            "min_prompt_tokens",
            "max_prompt_tokens",
            "sample",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(name, value, "a whole number of at least 1, or unset")
        if self.near_duplicates is not None:
            check_threshold(self.near_duplicates)
        if self.split is not None and self.split not in SPLITS:
            raise InputError("split", self.split, ", ".join(SPLITS))
        if self.stratify_by not in (None, "category", "dataset", "length"):
            raise InputError("stratify_by", self.stratify_by, "category, dataset, length or unset")
        if self.stratify_by is not None and self.sample is None:
            raise InputError("sample", None, "a number of prompts, since stratify_by is set")
        by_tokens = self.min_prompt_tokens is not None or self.max_prompt_tokens is not None
        if by_tokens and self.tokenizer is None:
            raise InputError("tokenizer", None, "a tokenizer.json, since prompts are filtered by tokens")


def filtered(
    prompts: Iterable[Prompt], filters: PromptFilters, dropped: Counter[str] | None = None
) -> Iterator[Prompt]:
    """The prompts that pass, in their order.

    Memory: eight bytes for each prompt that `deduplicate` has seen, about a kilobyte for each that `near_duplicates` has
    kept, `sample` prompts for each stratum.

    Args:
        prompts: The stream.
        filters: What is kept.
        dropped: Counts what was left out, by reason.
    """
    counts = Counter[str]() if dropped is None else dropped
    kept = iter(prompts)
    if filters.deduplicate:
        kept = _once(kept, counts)
    if filters.near_duplicates is not None:
        kept = _unlike(kept, filters.near_duplicates, counts)
    kept = _within(kept, filters.min_characters, filters.max_characters, counts)
    if filters.tokenizer is not None:
        kept = _within_tokens(kept, filters, filters.tokenizer, counts)
    if filters.split is not None:
        kept = _in_split(kept, filters.split, filters.split_seed, counts)
    if filters.sample is not None:
        kept = iter(stratified(kept, filters.sample, filters.stratify_by, filters.sample_seed, counts))
    return kept


def normalised(text: str) -> str:
    """A text as deduplication compares it."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def whole_text(prompt: Prompt) -> str:
    """All that is sent, one message a line."""
    return "\n".join(message.content for message in prompt.chat)


def _once(prompts: Iterator[Prompt], counts: Counter[str]) -> Iterator[Prompt]:
    seen = DigestSet()
    for prompt in prompts:
        if seen.add("\x00".join(f"{m.role}\x01{normalised(m.content)}" for m in prompt.chat)):
            yield prompt
        else:
            counts["duplicate text"] += 1


def _unlike(prompts: Iterator[Prompt], threshold: float, counts: Counter[str]) -> Iterator[Prompt]:
    with NearDuplicates(threshold) as kept:
        for prompt in prompts:
            if kept.add("\n".join(normalised(message.content) for message in prompt.chat)):
                yield prompt
            else:
                counts["near-duplicate text"] += 1


def _within(
    prompts: Iterator[Prompt], low: int | None, high: int | None, counts: Counter[str]
) -> Iterator[Prompt]:
    if low is None and high is None:
        yield from prompts
        return
    for prompt in prompts:
        length = sum(len(message.content) for message in prompt.chat)
        if _inside(length, low, high, "characters", counts):
            yield prompt


def _inside(length: int, low: int | None, high: int | None, unit: str, counts: Counter[str]) -> bool:
    if low is not None and length < low:
        counts[f"fewer than {low} {unit}"] += 1
        return False
    if high is not None and length > high:
        counts[f"more than {high} {unit}"] += 1
        return False
    return True


def _within_tokens(
    prompts: Iterator[Prompt], filters: PromptFilters, path: str, counts: Counter[str]
) -> Iterator[Prompt]:
    encode = _encoder(path)
    while batch := list(itertools.islice(prompts, _TOKENIZER_BATCH)):
        for prompt, encoding in zip(batch, encode([whole_text(prompt) for prompt in batch]), strict=True):
            if _inside(
                len(encoding.ids), filters.min_prompt_tokens, filters.max_prompt_tokens, "tokens", counts
            ):
                yield prompt


def _encoder(path: str) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise MissingExtraError("tokenizers", "gen") from error
    file: Path = existing_file(path, "tokenizer")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:
        raise InputError("tokenizer", path, f"a tokenizer.json ({str(error)[:120]})") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return lambda texts: tokenizer.encode_batch_fast(texts, add_special_tokens=False)


def _in_split(prompts: Iterator[Prompt], split: Split, seed: int, counts: Counter[str]) -> Iterator[Prompt]:
    for prompt in prompts:
        if split_of(prompt.prompt_id, seed) == split:
            yield prompt
        else:
            counts["other split"] += 1


def stratified(
    prompts: Iterable[Prompt],
    count: int,
    by: str | None,
    seed: int,
    dropped: Counter[str] | None = None,
) -> list[Prompt]:
    """`count` prompts, spread over the strata as evenly as these allow, in the order of the stream.

    Each prompt's luck is a hash of (seed, its id): a prompt that is drawn from a part of the stream is drawn again
    whenever the competition is no stronger, whatever the order. Strata with fewer prompts than their share give all,
    and the others share the rest.

    Args:
        prompts: The stream; `count` prompts of each stratum are held.
        count: How many to draw; fewer come back if there are fewer.
        by: "category", "dataset", "length" or None.
        seed: Another seed draws others.
        dropped: Counts what was not drawn.
    """
    heaps: dict[str, list[tuple[float, int, Prompt]]] = {}
    total = 0
    for position, prompt in enumerate(prompts):
        total += 1
        heap = heaps.setdefault(_stratum(prompt, by), [])
        # The worst luck is on top of the heap, to be replaced.
        entry = (-unit_hash(f"{seed}\x00{prompt.prompt_id}"), position, prompt)
        if len(heap) < count:
            heapq.heappush(heap, entry)
        elif entry > heap[0]:
            heapq.heapreplace(heap, entry)
    chosen = [
        entry for name, share in _shares(heaps, count).items() for entry in heapq.nlargest(share, heaps[name])
    ]
    if dropped is not None and total > len(chosen):
        dropped["not drawn"] += total - len(chosen)
    return [prompt for _, _, prompt in sorted(chosen, key=lambda entry: entry[1])]


def _stratum(prompt: Prompt, by: str | None) -> str:
    if by is None:
        return ""
    if by == "length":
        return str(int(math.log2(max(1, len(whole_text(prompt))))))
    return prompt.category if by == "category" else prompt.dataset


def _shares(heaps: dict[str, list[tuple[float, int, Prompt]]], count: int) -> dict[str, int]:
    """How many each stratum gives: the smallest first, each an even share of what is left."""
    shares: dict[str, int] = {}
    left = count
    for number, name in enumerate(sorted(heaps, key=lambda name: (len(heaps[name]), name))):
        shares[name] = min(len(heaps[name]), -(-left // (len(heaps) - number)))
        left -= shares[name]
    return shares
