"""Fit of a log-t distribution to output lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from scheduler_core.errors import InputError, MissingExtraError

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from scheduler_core.lengths import LogT


def fit(output_tokens: ArrayLike, *, finished: Sequence[bool] | None = None, nu: float | None = 3.5) -> LogT:
    """Fits a log-t distribution by maximum likelihood; needs the extra `train`. `fit-dist` fits many prompts.

    Args:
        output_tokens: Lengths [N] of samples of one distribution, for example of one prompt; integers >= 1.
        finished: Whether each output [N] is complete; False: it was truncated at max_tokens, and its length
            is censored. None: all outputs are complete.
        nu: Degrees of freedom; None: also estimated, inf: log-normal.

    Raises:
        InputError: Lengths are not integers >= 1, there are fewer than 3, all are truncated, or `nu` <= 0.
        MissingExtraError: The extra is not installed.
    """
    from scheduler_core.lengths import LogT

    try:
        from training.fitting.estimate import MIN_SAMPLES, SortedLengths, estimate, family_of
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "a package", "train") from error
    lengths = np.asarray(output_tokens)
    ended = np.asarray(np.ones(lengths.shape) if finished is None else finished, dtype=np.bool_)
    if lengths.ndim != 1 or len(lengths) < MIN_SAMPLES:
        allowed = f"at least {MIN_SAMPLES} lengths, shape [N]"
        raise InputError("output_tokens", f"shape {lengths.shape}", allowed)
    if lengths.dtype.kind not in "iu" or lengths.min() < 1:
        raise InputError("output_tokens", lengths.min().item(), "integers >= 1")
    if ended.shape != lengths.shape:
        raise InputError("finished", f"shape {ended.shape}", f"shape {lengths.shape}, as output_tokens")
    if not ended.any():
        raise InputError("finished", "no complete output", "at least one")
    sample = SortedLengths.of(lengths, ended, np.array([0, len(lengths)]))
    solution = estimate(sample, family_of("log-t", nu)).solution
    return LogT(float(solution.m[0]), float(np.exp(solution.s[0])), float(solution.nu[0]))
