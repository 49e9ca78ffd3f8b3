"""Many groups at once out of a few: random subsets of their answers, or draws from a distribution."""

from __future__ import annotations

import math

import numpy as np
from numba import njit
from numpy.typing import NDArray

from training.fitting.estimate import Sample
from training.fitting.families import FloatArray

_LARGEST = 1e15


@njit(cache=True)
def _subsets(
    rng: np.random.Generator, keys: np.ndarray, offsets: np.ndarray, count: int, repeats: int
) -> np.ndarray:
    out = np.empty((offsets.size - 1) * repeats * count, dtype=np.int64)
    at = 0
    for g in range(offsets.size - 1):
        pool = keys[offsets[g] : offsets[g + 1]].copy()
        for _ in range(repeats):
            for i in range(count):  # the first steps of a shuffle
                j = i + int(rng.random() * (pool.size - i))
                pool[i], pool[j] = pool[j], pool[i]
                out[at] = pool[i]
                at += 1
    return out


def subsets(sample: Sample, count: int, repeats: int, rng: np.random.Generator) -> Sample:
    """`repeats` subsets of `count` answers of each of G groups, without replacement: G * repeats groups, in order."""
    keys = _subsets(rng, sample.keys, sample.offsets, count, repeats)
    return _sample_of_keys(keys, count)


def log_t_draws(
    mu: FloatArray,
    sigma: FloatArray,
    nu: float,
    caps: FloatArray,
    count: int,
    repeats: int,
    rng: np.random.Generator,
) -> Sample:
    """`repeats` groups of `count` answers from each of G log-t distributions, in whole tokens, cut at the caps [G]."""
    shape = (len(mu), repeats * count)
    t = rng.standard_normal(shape) if math.isinf(nu) else rng.standard_t(nu, shape)
    logs = np.minimum(mu[:, None] + sigma[:, None] * t, math.log(_LARGEST))
    lengths = np.maximum(np.rint(np.exp(logs)), 1.0)
    cut = lengths > caps[:, None]
    keys = 2 * np.minimum(lengths, caps[:, None]).astype(np.int64) + cut
    return _sample_of_keys(keys.ravel(), count)


def cut_at(sample: Sample, caps: FloatArray) -> Sample:
    """The sample with answers longer than their group's cap [G] cut there; caps in whole tokens, inf = none."""
    wide = np.repeat(caps, np.diff(sample.offsets))
    lengths = sample.keys >> 1
    longer = lengths > wide
    keys = np.where(longer, 2 * np.where(longer, wide, 0.0).astype(np.int64) + 1, sample.keys)
    return _sorted(keys, sample.offsets)


def as_ended(sample: Sample) -> Sample:
    """The sample with cut answers taken for ended ones."""
    return _sorted(sample.keys & ~np.int64(1), sample.offsets)


def _sample_of_keys(keys: NDArray[np.int64], count: int) -> Sample:
    return _sorted(keys, np.arange(0, len(keys) + 1, count))


def _sorted(keys: NDArray[np.int64], offsets: NDArray[np.int64]) -> Sample:
    return Sample.of(keys >> 1, (keys & 1) == 0, offsets)
