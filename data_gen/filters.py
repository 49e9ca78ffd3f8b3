"""Filters of a stream of prompts, and random sampling; all steps except the sampling are streaming."""

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
from scheduler_core.ranges import INTEGERS, check_ranges
from scheduler_core.shell.files import existing_file

#: Shingle length in characters: short enough for one-line prompts, long enough that unrelated texts share few shingles.
PIECE = 5
_MINHASH_SEED = 1
_PIECES_AT_ONCE = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptFilters:
    """Filters for prompts, applied in the order of the fields. Lengths are those of the entire conversation."""

    deduplicate: bool = False
    """Drop prompts whose normalized text (Unicode NFKC, case-folded, white space collapsed) equals an earlier one."""
    near_duplicates: float | None = None
    """Similarity to an earlier prompt from which on a prompt is dropped: Jaccard similarity of the five-character shingles of the normalized texts, from 0.5 to 1, e.g. 0.9; unset: keep all."""
    min_characters: int | None = None
    """Minimum length of a prompt in characters."""
    max_characters: int | None = None
    """Maximum length of a prompt in characters."""
    tokenizer: str | None = None
    """A tokenizer.json; required for min_prompt_tokens and max_prompt_tokens."""
    min_prompt_tokens: int | None = None
    """Minimum length of a prompt in tokens of `tokenizer`, without a chat template."""
    max_prompt_tokens: int | None = None
    """Maximum length of a prompt in tokens of `tokenizer`, without a chat template."""
    split: Split | None = None
    """Keep only prompts of this split, which is determined by a hash of the prompt id; unset: all."""
    split_seed: int = 0
    """Seed of the splits."""
    sample: int | None = None
    """Number of prompts to draw; unset: all."""
    stratify_by: Literal["category", "dataset", "length"] | None = None
    """Draw equal numbers of prompts from each category, dataset or length (in characters, by powers of two); unset: no stratification."""
    sample_seed: int = 0
    """Seed of the random sample."""

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
    """Yields the prompts that pass all filters, in their order; `dropped` counts the other ones by reason.

    Memory: with `deduplicate` about 70 bytes per passing prompt, with `near_duplicates` its text and several kilobytes;
    with `sample`, that number of prompts per stratum.
    """
    counts = Counter[str]() if dropped is None else dropped
    passed = _passing(prompts, list(_checks(filters)), counts)
    if filters.sample is None:
        return passed
    return _drawn(passed, filters.sample, filters.stratify_by, filters.sample_seed, counts)


#: Returns the reason for dropping a prompt; None if it passes.
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
            digest = digest64("\x00".join(f"{m.role}\x01{normalized(m.text)}" for m in prompt.chat))
            if digest in digests:
                return "duplicate text"
            digests.add(digest)
            return None

        yield repeated
    if filters.near_duplicates is not None:
        index = NearDuplicates(filters.near_duplicates)

        def alike(prompt: Prompt) -> str | None:
            is_new = index.add("\n".join(normalized(message.text) for message in prompt.chat))
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
    """Normalizes a text for deduplication."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def whole_text(prompt: Prompt) -> str:
    """All messages of a prompt, one per line."""
    return "\n".join(message.text for message in prompt.chat)


class NearDuplicates:
    """Index of texts without near-duplicates: candidates from datasketch's MinHashLSH are checked by exact similarity.

    Two texts are near-duplicates if the Jaccard similarity of their sets of five-character shingles is at least `threshold`
    (0.5 to 1). The result depends only on the texts and their order.
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
        """Adds a text and returns True; a near-duplicate of an earlier text is not added, and returns False."""
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
    """(number of bands, rows per band) of the MinHash index.

    For two texts of similarity s, a band of r rows matches with probability s^r, and all b bands miss the pair with
    probability (1 - s^r)^b (Leskovec et al., Mining of Massive Datasets, 3.4). Selects the largest r, which gives the fewest
    candidates, for which at most one pair in a million is missed at the threshold.
    """
    for rows in range(16, 0, -1):
        agrees = threshold**rows
        num_bands = 1 if agrees >= 1 else math.ceil(math.log(1e-6) / math.log1p(-agrees))
        if num_bands * rows <= 256:
            return max(2, num_bands), rows  # datasketch requires at least two bands
    raise AssertionError(f"no bands for a threshold of {threshold}")


def pieces(text: str) -> frozenset[str]:
    """Set of the shingles of a text, its substrings of five characters; a shorter text is a single shingle."""
    return frozenset(text[start : start + PIECE] for start in range(max(1, len(text) - PIECE + 1)))


def similarity(one: frozenset[str], other: frozenset[str]) -> float:
    """Jaccard similarity of two non-empty sets, from 0 to 1."""
    common = len(one & other)
    return common / (len(one) + len(other) - common)


def token_counter(path: str) -> Callable[[list[str]], list[int]]:
    """Returns a function that counts the tokens of texts, without special tokens. `path` is a tokenizer.json, or a folder
    with one; InputError if it does not exist."""
    from tokenizers import Tokenizer

    folder = Path(path)
    file = existing_file(folder / "tokenizer.json" if folder.is_dir() else folder, "tokenizer")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except BaseException as error:  # plain Exception, or pyo3's PanicException
        if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
            raise
        raise InputError("tokenizer", path, f"a tokenizer.json ({str(error)[:120]})") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return lambda texts: [
        len(encoding.ids) for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    ]


def _drawn(
    prompts: Iterable[Prompt], count: int, by: str | None, seed: int, counts: Counter[str]
) -> Iterator[Prompt]:
    """Draws `count` prompts, as evenly from all strata as possible, and yields them in the order of the stream.

    The selection depends on hashes of (seed, id), not on the order of the stream.
    """
    strata: dict[str, list[tuple[float, int, Prompt]]] = {}
    total = 0
    for total, prompt in enumerate(prompts, start=1):
        heap = strata.setdefault(_stratum(prompt, by), [])
        entry = (-unit_hash(f"{seed}\x00{prompt.prompt_id}"), total, prompt)
        (heapq.heappush if len(heap) < count else heapq.heappushpop)(heap, entry)
    # Round-robin over the strata: the first prompt of each, then the second of each, and so on.
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
