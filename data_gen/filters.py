"""Filters of a stream of prompts, and samples drawn from it; every step streams but the sampling."""

from __future__ import annotations

import heapq
import math
import unicodedata
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from data_gen.prompts import Prompt
from data_gen.splits import Split, digest64, split_of, unit_hash
from scheduler_core.errors import InputError
from scheduler_core.files import existing_file
from scheduler_core.ranges import INTEGERS, check_ranges

#: Characters in a piece: few enough for prompts of one line, enough that unrelated texts have few in common.
PIECE = 5
_MINHASH_SEED = 1
_PIECES_AT_ONCE = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptFilters:
    """Conditions for prompts, applied in the order of the fields. Lengths are of the entire conversation."""

    deduplicate: bool = False
    """Drop prompts whose normalized text is a repetition: Unicode NFKC, case folded, white space collapsed."""
    near_duplicates: float | None = None
    """Drop prompts that are at least so similar to an earlier one: five-character pieces of the normalized text in common, over pieces in either (Jaccard); from 0.5 to 1, e.g. 0.9; unset: keep them."""
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
        counts = ("min_characters", "max_characters", "min_prompt_tokens", "max_prompt_tokens", "sample")
        check_ranges(self, **dict.fromkeys(counts, (1, INTEGERS)), near_duplicates=(0.5, 1.0))
        if self.stratify_by is not None and self.sample is None:
            raise InputError("sample", None, "a number of prompts, since stratify_by is set")
        by_tokens = self.min_prompt_tokens is not None or self.max_prompt_tokens is not None
        if by_tokens and self.tokenizer is None:
            raise InputError("tokenizer", None, "a tokenizer.json, since prompts are filtered by tokens")


def filtered(
    prompts: Iterable[Prompt], filters: PromptFilters, dropped: Counter[str] | None = None
) -> Iterator[Prompt]:
    """The prompts that pass, in their order.

    Memory: about 70 bytes for each prompt that `deduplicate` passes, its text and several kilobytes for each that
    `near_duplicates` passes, `sample` prompts for each stratum. `dropped` counts the dropped ones by reason.
    """
    counts = Counter[str]() if dropped is None else dropped
    passed = _passing(prompts, list(_checks(filters)), counts)
    if filters.sample is None:
        return passed
    return _drawn(passed, filters.sample, filters.stratify_by, filters.sample_seed, counts)


#: Why a prompt is dropped; None if it passes.
Check = Callable[[Prompt], str | None]


def _passing(prompts: Iterable[Prompt], checks: Sequence[Check], counts: Counter[str]) -> Iterator[Prompt]:
    for prompt in prompts:
        reason = next(filter(None, (check(prompt) for check in checks)), None)
        if reason is None:
            yield prompt
        else:
            counts[reason] += 1


def _checks(filters: PromptFilters) -> Iterator[Check]:
    if filters.deduplicate:
        digests: set[int] = set()

        def repeated(prompt: Prompt) -> str | None:
            digest = digest64("\x00".join(f"{m.role}\x01{normalized(m.content)}" for m in prompt.chat))
            if digest in digests:
                return "duplicate text"
            digests.add(digest)
            return None

        yield repeated
    if filters.near_duplicates is not None:
        index = NearDuplicates(filters.near_duplicates)

        def alike(prompt: Prompt) -> str | None:
            is_new = index.add("\n".join(normalized(message.content) for message in prompt.chat))
            return None if is_new else "near-duplicate text"

        yield alike
    yield _bounds(filters.min_characters, filters.max_characters, "characters", len)
    if filters.tokenizer is not None:
        count = token_counter(filters.tokenizer)
        limits = (filters.min_prompt_tokens, filters.max_prompt_tokens)
        yield _bounds(*limits, "tokens", lambda text: count([text])[0])
    if filters.split is not None:
        yield (
            lambda prompt: (
                None if split_of(prompt.prompt_id, filters.split_seed) == filters.split else "other split"
            )
        )


def _bounds(low: int | None, high: int | None, unit: str, length_of: Callable[[str], int]) -> Check:
    def out_of_bounds(prompt: Prompt) -> str | None:
        length = length_of(whole_text(prompt))
        if low is not None and length < low:
            return f"fewer than {low} {unit}"
        return f"more than {high} {unit}" if high is not None and length > high else None

    return out_of_bounds


def normalized(text: str) -> str:
    """A text as deduplication compares it."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def whole_text(prompt: Prompt) -> str:
    """All that is sent, one message a line."""
    return "\n".join(message.content for message in prompt.chat)


class NearDuplicates:
    """Texts of which no two are alike: datasketch's MinHashLSH finds candidates, the texts themselves decide.

    Two texts are alike from a Jaccard similarity `threshold` (0.5 to 1) of their sets of five-character pieces on. What passes
    depends on the texts and their order alone.
    """

    def __init__(self, threshold: float) -> None:
        from datasketch import MinHash, MinHashLSH

        self._threshold = threshold
        params = lsh_bands(threshold)
        num_permutations = params[0] * params[1]
        self._empty: Any = MinHash(num_permutations, seed=_MINHASH_SEED, hashfunc=zlib.crc32)
        self._index: Any = MinHashLSH(num_perm=num_permutations, params=params)
        self._texts: list[str] = []

    def add(self, text: str) -> bool:
        """Adds a text; False, and it is not added, if it is alike to one that was added before."""
        own = pieces(text)
        sketch, encoded = self._empty.copy(), [piece.encode("utf-8", "surrogatepass") for piece in own]
        for start in range(0, len(encoded), _PIECES_AT_ONCE):
            sketch.update_batch(encoded[start : start + _PIECES_AT_ONCE])
        for number in self._index.query(sketch):
            if similarity(own, pieces(self._texts[number])) >= self._threshold:
                return False
        self._index.insert(len(self._texts), sketch)
        self._texts.append(text)
        return True


def lsh_bands(threshold: float) -> tuple[int, int]:
    """(bands, rows in each) of the MinHash index.

    Of two texts at the threshold s, a band of r rows agrees with probability s^r, so that all b bands miss them with
    (1 - s^r)^b (Leskovec et al., Mining of Massive Datasets, 3.4). The most rows, and so the fewest candidates, that
    miss at most one pair in a million.
    """
    for rows in range(16, 0, -1):
        agrees = threshold**rows
        num_bands = 1 if agrees >= 1 else math.ceil(math.log(1e-6) / math.log1p(-agrees))
        if num_bands * rows <= 256:
            return max(2, num_bands), rows  # datasketch wants two bands at least
    raise AssertionError(f"no bands for a threshold of {threshold}")


def pieces(text: str) -> frozenset[str]:
    """All runs of five characters of a text; a shorter text is its only piece."""
    return frozenset(text[start : start + PIECE] for start in range(max(1, len(text) - PIECE + 1)))


def similarity(one: frozenset[str], other: frozenset[str]) -> float:
    """Jaccard similarity of two sets that are not empty: 0 to 1."""
    common = len(one & other)
    return common / (len(one) + len(other) - common)


def token_counter(path: str) -> Callable[[list[str]], list[int]]:
    """Counts the tokens of texts, without special tokens, by a tokenizer.json or that of a folder; InputError if there is
    none."""
    from tokenizers import Tokenizer

    folder = Path(path)
    file = existing_file(folder / "tokenizer.json" if folder.is_dir() else folder, "tokenizer")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # The reader raises bare exceptions.
        raise InputError("tokenizer", path, f"a tokenizer.json ({str(error)[:120]})") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return lambda texts: [
        len(one.ids) for one in tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    ]


def _drawn(
    prompts: Iterable[Prompt], count: int, by: str | None, seed: int, counts: Counter[str]
) -> Iterator[Prompt]:
    """`count` prompts in the order of the stream, from all strata alike as far as these have so many.

    The draw follows from hashes of (seed, id), whatever the order of the stream is.
    """
    strata: dict[str, list[tuple[float, int, Prompt]]] = {}
    total = 0
    for total, prompt in enumerate(prompts, start=1):
        heap = strata.setdefault(_stratum(prompt, by), [])
        entry = (-unit_hash(f"{seed}\x00{prompt.prompt_id}"), total, prompt)
        (heapq.heappush if len(heap) < count else heapq.heappushpop)(heap, entry)
    # The first of each stratum, then the second of each, and so on.
    ranked = sorted(
        (rank, entry) for heap in strata.values() for rank, entry in enumerate(sorted(heap, reverse=True))
    )
    if total > len(drawn := ranked[:count]):
        counts["not drawn"] += total - len(drawn)
    for _, (_, _, prompt) in sorted(drawn, key=lambda item: item[1][1]):
        yield prompt


def _stratum(prompt: Prompt, by: str | None) -> str:
    if by == "length":
        return str(int(math.log2(max(1, len(whole_text(prompt))))))
    return "" if by is None else prompt.category if by == "category" else prompt.dataset
