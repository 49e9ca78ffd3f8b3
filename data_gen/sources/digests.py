"""A set that only remembers whether a text was seen: eight bytes for each."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

_BUFFER = 1 << 16


def digest64(text: str) -> int:
    """First eight bytes of the SHA-256 of a text."""
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8], "big")


class DigestSet:
    """Texts by their 64-bit digest; among ten million texts two share one with probability 3e-6.

    Newly seen digests are kept in a Python set, older ones in sorted arrays of doubling size.
    """

    def __init__(self) -> None:
        self._new: set[int] = set()
        self._runs: list[NDArray[np.uint64]] = []

    def __len__(self) -> int:
        return len(self._new) + sum(len(run) for run in self._runs)

    def add(self, text: str) -> bool:
        """Adds a text; False if it was there."""
        digest = digest64(text)
        if digest in self._new or any(self._in(run, digest) for run in self._runs):
            return False
        self._new.add(digest)
        if len(self._new) >= _BUFFER:
            self._pack()
        return True

    @staticmethod
    def _in(run: NDArray[np.uint64], digest: int) -> bool:
        value = np.uint64(digest)
        at = int(np.searchsorted(run, value))
        return at < len(run) and bool(run[at] == value)

    def _pack(self) -> None:
        run = np.sort(np.fromiter(self._new, dtype=np.uint64, count=len(self._new)))
        self._new = set()
        while self._runs and len(self._runs[-1]) <= len(run):
            run = np.sort(np.concatenate([self._runs.pop(), run]))
        self._runs.append(run)
