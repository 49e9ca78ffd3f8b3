"""Texts that nearly repeat an earlier one: MinHash finds who may be alike, the texts themselves decide.

Two texts are alike by the Jaccard similarity of their sets of five-character pieces: pieces in common over pieces in
either. MinHash signatures (Broder 1997) in bands (Leskovec et al., Mining of Massive Datasets, 3.4) find who shares a
band; of those, whose signatures agree in too few places are left out (one byte of each place is kept: Li, Koenig 2010).
Both steps miss a pair at the threshold with probability 1e-6 at most, a more similar one less often. Who remains is
compared exactly, so that nothing is taken for alike that is not.

The signatures are datasketch's. Its index of them holds several kB for each text (a dictionary entry and a set for
each band), so the index is our own: 12 bytes a band and 1 byte a place, about 1 kB a text with the spare room of arrays
that grow. The texts themselves wait in a temporary file.
"""

from __future__ import annotations

import hashlib
import math
import tempfile
import zlib
from array import array
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scheduler_core.errors import InputError, MissingExtraError

PIECE = 5
"""Characters in a piece: short enough for prompts of one line, long enough that unrelated texts share few."""
LOWEST_THRESHOLD = 0.5
_MISSED = 1e-6
_MOST_PERMUTATIONS = 256
_MOST_ROWS = 16
_SEED = 1
_PIECES_AT_ONCE = 4096
_BUFFER = 1 << 16


def check_threshold(threshold: float) -> None:
    """Raises an `InputError` for a similarity that is out of range."""
    if not LOWEST_THRESHOLD <= threshold <= 1:
        raise InputError("near_duplicates", threshold, f"a number from {LOWEST_THRESHOLD} to 1, or unset")


def pieces(text: str) -> frozenset[str]:
    """All runs of five characters of a text; a shorter text is its only piece."""
    return frozenset(text[start : start + PIECE] for start in range(max(1, len(text) - PIECE + 1)))


def similarity(one: frozenset[str], other: frozenset[str]) -> float:
    """Jaccard similarity of two sets that are not empty: 0 to 1."""
    common = len(one & other)
    return common / (len(one) + len(other) - common)


def bands(threshold: float) -> tuple[int, int]:
    """(bands, rows in each) of a signature.

    Of two texts at the threshold s, a band of r rows agrees with probability s^r, so that all b bands miss them with
    (1 - s^r)^b. The most rows, and so the fewest candidates, that miss at most one pair in a million.
    """
    for rows in range(_MOST_ROWS, 0, -1):
        agrees = threshold**rows
        num_bands = 1 if agrees >= 1 else math.ceil(math.log(_MISSED) / math.log1p(-agrees))
        if num_bands * rows <= _MOST_PERMUTATIONS:
            return num_bands, rows
    raise AssertionError(f"no bands for a threshold of {threshold}")


def least_agreeing(threshold: float, num_places: int) -> int:
    """Places in which the signatures of two texts at the threshold agree, but for one pair in a million.

    The number that agree is binomial; P(at most k of n) <= exp(-n KL(k/n || s)) for k/n < s (Chernoff).
    """
    least = num_places
    while least > 0:
        share = (least - 1) / num_places
        if share < threshold and num_places * _divergence(share, threshold) >= -math.log(_MISSED):
            break
        least -= 1
    return least


def _divergence(share: float, threshold: float) -> float:
    """KL divergence of two coins, in nats."""
    if threshold >= 1:
        return math.inf
    heads = share * math.log(share / threshold) if share > 0 else 0.0
    return heads + (1 - share) * math.log((1 - share) / (1 - threshold))


class NearDuplicates:
    """Remembers texts that are not alike; use it in a `with` block, or close it.

    What it keeps depends on the texts and their order alone.

    Args:
        threshold: Similarity from which two texts are alike.

    Raises:
        InputError: The threshold is out of range.
        MissingExtraError: datasketch is not installed.
    """

    def __init__(self, threshold: float) -> None:
        check_threshold(threshold)
        try:
            from datasketch import MinHash
        except ImportError as error:
            raise MissingExtraError("datasketch", "gen") from error
        self._threshold = threshold
        self._bands, self._rows = bands(threshold)
        places = self._bands * self._rows
        self._least = least_agreeing(threshold, places)
        self._empty: Any = MinHash(places, seed=_SEED, hashfunc=zlib.crc32)
        self._signatures = _Signatures(places)
        self._index = _BandIndex()
        self._kept = _KeptTexts()

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, text: str) -> bool:
        """Remembers a text; False, and nothing is remembered, if it is alike to one that was kept before."""
        found = pieces(text)
        signature = self._signature(found)
        keys = self._keys(signature)
        places = signature.astype(np.uint8)
        candidates = self._index.find(keys)
        for number in candidates[self._signatures.agreeing(candidates, places) >= self._least].tolist():
            if similarity(found, pieces(self._kept.read(number))) >= self._threshold:
                return False
        self._index.add(keys, len(self._kept))
        self._signatures.append(places)
        self._kept.append(text)
        return True

    def _signature(self, found: frozenset[str]) -> NDArray[np.uint32]:
        encoded = [piece.encode("utf-8", "surrogatepass") for piece in found]
        sketch = self._empty.copy()
        for start in range(0, len(encoded), _PIECES_AT_ONCE):
            sketch.update_batch(encoded[start : start + _PIECES_AT_ONCE])
        return np.asarray(sketch.hashvalues, np.uint32)

    def _keys(self, signature: NDArray[np.uint32]) -> list[int]:
        """One number of 64 bits for each band."""
        return [
            int.from_bytes(
                hashlib.blake2b(row.tobytes(), digest_size=8, salt=number.to_bytes(2, "big")).digest(), "big"
            )
            for number, row in enumerate(signature.reshape(self._bands, self._rows))
        ]

    def close(self) -> None:
        """Removes the temporary file."""
        self._kept.close()

    def __enter__(self) -> NearDuplicates:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _BandIndex:
    """Which texts have a band: new ones in a dictionary, older ones in sorted arrays of doubling size."""

    def __init__(self) -> None:
        self._new: dict[int, list[int]] = {}
        self._num_new = 0
        self._runs: list[tuple[NDArray[np.uint64], NDArray[np.uint32]]] = []

    def add(self, keys: list[int], number: int) -> None:
        """Remembers the bands of a text."""
        for key in keys:
            self._new.setdefault(key, []).append(number)
        self._num_new += len(keys)
        if self._num_new >= _BUFFER:
            self._pack()

    def find(self, keys: list[int]) -> NDArray[np.int64]:
        """The texts that have one of these bands, each once, increasing."""
        seen: set[int] = set()
        wanted = np.array(keys, np.uint64)
        for known, numbers in self._runs:
            starts, ends = np.searchsorted(known, wanted), np.searchsorted(known, wanted, "right")
            for place in np.flatnonzero(starts < ends).tolist():
                seen.update(numbers[starts[place] : ends[place]].tolist())
        for key in keys:
            seen.update(self._new.get(key, ()))
        return np.array(sorted(seen), np.int64)

    def _pack(self) -> None:
        pairs = [(key, number) for key, listed in self._new.items() for number in listed]
        keys = np.array([key for key, _ in pairs], np.uint64)
        numbers = np.array([number for _, number in pairs], np.uint32)
        self._new, self._num_new = {}, 0
        while self._runs and len(self._runs[-1][0]) <= len(keys):
            older = self._runs.pop()
            keys, numbers = np.concatenate([older[0], keys]), np.concatenate([older[1], numbers])
        order = np.argsort(keys, kind="stable")
        self._runs.append((keys[order], numbers[order]))


class _Signatures:
    """The last byte of every place of every signature; room doubles when it is full."""

    def __init__(self, num_places: int) -> None:
        self._rows: NDArray[np.uint8] = np.empty((256, num_places), np.uint8)
        self._count = 0

    def append(self, places: NDArray[np.uint8]) -> None:
        """Remembers a signature under the next number."""
        if self._count == len(self._rows):
            self._rows = np.concatenate([self._rows, np.empty_like(self._rows)])
        self._rows[self._count] = places
        self._count += 1

    def agreeing(self, numbers: NDArray[np.int64], places: NDArray[np.uint8]) -> NDArray[np.int64]:
        """In how many places each of these signatures agrees with `places`; shape [numbers]."""
        return np.asarray(np.count_nonzero(self._rows[numbers] == places, axis=1), np.int64)


class _KeptTexts:
    """Texts by number, in a temporary file; eight bytes of memory for each."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="tailcast-texts-")  # noqa: SIM115
        self._ends = array("q", [0])

    def __len__(self) -> int:
        return len(self._ends) - 1

    def append(self, text: str) -> None:
        """Adds a text under the next number."""
        data = text.encode("utf-8", "surrogatepass")
        self._file.seek(self._ends[-1])
        self._file.write(data)
        self._ends.append(self._ends[-1] + len(data))

    def read(self, number: int) -> str:
        """The text of a number."""
        self._file.seek(self._ends[number])
        return self._file.read(self._ends[number + 1] - self._ends[number]).decode("utf-8", "surrogatepass")

    def close(self) -> None:
        """Removes the file."""
        self._file.close()
