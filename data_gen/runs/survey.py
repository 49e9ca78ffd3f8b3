"""A look at all prompts before anything is paid for: how many there are, that no id repeats, and what each one is."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from data_gen.prompts import Prompt
from data_gen.samples import prompt_sha256
from scheduler_core.errors import InputError


@dataclass(frozen=True, slots=True)
class Survey:
    """`fingerprints` [prompts], uint64: of id and content, in the order of the source."""

    fingerprints: NDArray[np.uint64]

    def __len__(self) -> int:
        return len(self.fingerprints)


def fingerprint(prompt_id: str, sha256: str) -> int:
    """64 bits that tell prompts apart by id and content."""
    return _hash64(json.dumps([prompt_id, sha256], ensure_ascii=False))


def _hash64(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(errors="replace"), digest_size=8).digest(), "little")


def survey(prompts: Iterable[Prompt]) -> Survey:
    """Reads all prompts once; 16 bytes are held for each.

    Raises:
        InputError: There is none, or an id repeats.
    """
    if isinstance(prompts, Iterator):
        raise TypeError(
            "prompts must be iterable more than once: a list, or an object that opens its source anew"
        )
    found, ids = array("Q"), array("Q")
    for prompt in prompts:
        found.append(fingerprint(prompt.prompt_id, prompt_sha256(prompt)))
        ids.append(_hash64(prompt.prompt_id))
    if not found:
        raise InputError("prompts", "none", "at least one prompt")
    hashes, counts = np.unique(np.frombuffer(ids, dtype=np.uint64), return_counts=True)
    if len(hashes) < len(ids):
        _refuse_repeated(prompts, {int(value) for value in hashes[counts > 1]})
    return Survey(np.frombuffer(found, dtype=np.uint64))


def _refuse_repeated(prompts: Iterable[Prompt], suspects: set[int]) -> None:
    seen: set[str] = set()
    for prompt in prompts:
        if _hash64(prompt.prompt_id) in suspects:
            if prompt.prompt_id in seen:
                raise InputError("prompts", prompt.prompt_id, "each prompt id once")
            seen.add(prompt.prompt_id)
