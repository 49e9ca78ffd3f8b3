"""Filters of a stream of prompts, and random sampling; all steps except the sampling are streaming."""

from __future__ import annotations

import heapq
import math
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from data_gen.prompts import Prompt
from data_gen.splits import Split, digest64, split_of, unit_hash
from scheduler_core.errors import InputError
from scheduler_core.ranges import INTEGERS, check_ranges
from scheduler_core.shell.files import existing_file


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptFilters:
    """Filters for prompts, applied in the order of the fields. Lengths are those of the entire conversation."""

    deduplicate: bool = False
    """Drop prompts whose normalized text (Unicode NFKC, case-folded, white space collapsed) equals an earlier one."""
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
        check_ranges(self, **dict.fromkeys(counts, (1, INTEGERS)))
        if self.stratify_by is not None and self.sample is None:
            raise InputError("sample", None, "a number of prompts, since stratify_by is set")
        by_tokens = self.min_prompt_tokens is not None or self.max_prompt_tokens is not None
        if by_tokens and self.tokenizer is None:
            raise InputError("tokenizer", None, "a tokenizer.json, since prompts are filtered by tokens")


def filtered(
    prompts: Iterable[Prompt], filters: PromptFilters, dropped: Counter[str] | None = None
) -> Iterator[Prompt]:
    """Yields the prompts that pass all filters, in their order; `dropped` counts the other ones by reason.

    Memory: with `deduplicate` about 70 bytes per passing prompt; with `sample`, that number of prompts per stratum.
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
