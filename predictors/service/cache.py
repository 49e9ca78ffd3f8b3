"""Predictions of prompts that were asked before: bounded, least recently used first out, prompts kept as hashes only."""

from __future__ import annotations

import hashlib
import struct
from collections import OrderedDict
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from scheduler_core.errors import InputError

V = TypeVar("V")


class LruCache(Generic[V]):
    """Key -> value for the most recently used keys.

    Args:
        max_entries: Most entries, >= 1.
    """

    def __init__(self, max_entries: int) -> None:
        if max_entries < 1:
            raise InputError("cache_entries", max_entries, "an integer >= 1, or 0 for no cache")
        self._max_entries = max_entries
        self._entries: OrderedDict[bytes, V] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: bytes) -> V | None:
        """The value, which is then the most recently used one; None if there is none."""
        found = self._entries.get(key)
        if found is not None:
            self._entries.move_to_end(key)
        return found

    def put(self, key: bytes, value: V) -> None:
        """Remembers the value, and forgets the least recently used one where there are too many."""
        self._entries[key] = value
        self._entries.move_to_end(key)
        if len(self._entries) > self._max_entries:
            self._entries.popitem(last=False)


def cache_key(prompt: str | NDArray[Any], served_model: str | None, temperature: float | None) -> bytes:
    """128 bits that two requests share only if they get the same prediction of the same artifact."""
    digest = hashlib.blake2b(digest_size=16)
    name = (served_model or "").encode()
    told = b"" if temperature is None else struct.pack("<d", temperature)
    kind = b"text" if isinstance(prompt, str) else b"ids"
    # With the lengths of all parts but the last in front, no two sets of parts give the same bytes.
    digest.update(struct.pack("<BBQ", len(kind), len(told), len(name)) + kind + told + name)
    if isinstance(prompt, str):
        digest.update(prompt.encode("utf-8", "surrogatepass"))
    else:
        digest.update(np.ascontiguousarray(prompt, dtype=np.int64).tobytes())
    return digest.digest()
