"""Step times of a running engine: an online fit of the simulator's model classes, of which the best one is used."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

#: Weight of a step relative to that of the next one, so that about the last thousand count.
_FADE = 0.999
#: Steps between two fits; fewer at the start.
_REFIT_STEPS = 16
#: A class is used instead of the linear one if its error is at most this fraction of the linear one's.
_BETTER = 0.95
#: A step counts at most as this multiple of the predicted time, after the first steps: others are pauses of the process.
_PAUSE, _MIN_STEPS = 3.0, 32
#: Sides of tiles, and numbers of tokens up to which reading the weights takes longer than computing.
_SIDES, _KNEES = (64, 128, 256), (64, 96, 128, 192, 256, 384)
#: Terms of each class besides those of `LinearStepTime` (1, P, D, C), as positions in `_features`.
CLASSES: dict[str, tuple[int, ...]] = {
    "linear": (),
    "quadratic": (4,),
    **{f"staircase {side}": (4, 5 + number) for number, side in enumerate(_SIDES)},
    **{f"roofline {knee}": (4, 5 + len(_SIDES) + number) for number, knee in enumerate(_KNEES)},
}
_TERMS = [[0, 1, 2, 3, *more] for more in CLASSES.values()]
#: Prior, in the units of `_features`: `LinearStepTime`, and none of the other terms. It counts as a twentieth of a step.
_PRIOR = np.array([0.017, 0.055, 5.5e-5, 0.0137, 0.0, *[0.0 for _ in (*_SIDES, *_KNEES)]])
_PRIOR_SCALES = np.array(
    [0.017, 0.055, 5.5e-5, 0.0137, 0.01, *[0.005 for _ in _SIDES], *[0.1 for _ in _KNEES]]
)
_PRIOR_STEPS = 0.05
#: A coefficient is 0 if no more than this, in seconds per step of its usual size, is gained by it.
_MIN_GAIN = 1e-9

Vector = NDArray[np.float64]
#: First token and number of tokens of a chunk of a prompt.
Chunk = tuple[int, int]


def _features(chunks: Iterable[Chunk], num_decodes: int, context_tokens: float) -> Vector:
    prefill_tokens, attention = 0, 0
    for start, num_tokens in chunks:
        prefill_tokens += num_tokens
        context_tokens += start
        attention += num_tokens * (2 * start + num_tokens)
    tokens = prefill_tokens + num_decodes
    tiles = [-(-tokens // side) for side in _SIDES]
    computed = [max(tokens - knee, 0) / 1e3 for knee in _KNEES]
    linear = [1.0, prefill_tokens / 1e3, num_decodes, context_tokens / 1e5, attention / 1e6]
    return np.array([*linear, *tiles, *computed])


def _nonnegative(gram: Vector, response: Vector, start: Vector) -> Vector:
    """The x >= 0 with the smallest x^T gram x / 2 - response^T x, by the active-set method of Lawson and Hanson (1974), from
    the feasible x `start`."""
    x, scale = start.copy(), np.sqrt(np.diag(gram))
    is_free = x > 0.0
    for _ in range(3 * len(x)):
        while is_free.any():
            free = np.flatnonzero(is_free)
            solution = np.linalg.solve(gram[np.ix_(free, free)], response[free])
            if solution.min() > 0.0:
                x[free] = solution
                break
            before = x[free]
            shrinking = solution <= 0.0
            ratios = before[shrinking] / np.maximum(before[shrinking] - solution[shrinking], 1e-300)
            x[free] = before + ratios.min() * (solution - before)
            is_free[free[shrinking][ratios == ratios.min()]] = False
            x[~is_free] = 0.0
        gain = np.where(is_free, 0.0, (response - gram @ x) / scale)
        if gain.max() <= _MIN_GAIN:
            break
        is_free[gain.argmax()] = True
    return x


class StepTimes:
    """Least squares of the step time for several classes of models. In use is the one whose predictions before each step have
    the smallest error, and the linear one unless another is 5 % better.

        t = c_0 + c_1 P + c_2 D + c_3 C                     linear, as `LinearStepTime`
              + c_4 sum of e^2 - s^2                        quadratic: attention of the prompts
                + c_5 ceil((P + D) / t_col)                 staircase: also tiles of the linear layers
                or + c_5 max(P + D - knee, 0)               roofline: also tokens beyond those bound by memory

    with P prompt tokens in chunks from token s to e, D decodes, C tokens read from the KV cache, and several t_col and knees.
    Coefficients are never negative. The simulator's models of these names have more terms.
    """

    def __init__(self) -> None:
        size = len(_PRIOR)
        self._gram, self._response = np.zeros((size, size)), np.zeros(size)
        #: Of each class; without steps those of the prior.
        self._coefficients = np.tile(_PRIOR, (len(CLASSES), 1))
        #: Sums of the errors of each class over the last steps.
        self._errors = np.zeros(len(CLASSES))
        self._num_steps = self._num_new = 0
        self._best = 0

    @property
    def name(self) -> str:
        """The class in use."""
        return [*CLASSES][self._best]

    def observe(
        self, step_s: float, chunks: Iterable[Chunk], num_decodes: int, context_tokens: float
    ) -> None:
        """Adds a step of `step_s` seconds; `context_tokens` are those of all its decodes."""
        x = _features(chunks, num_decodes, context_tokens)
        if self._num_steps >= _MIN_STEPS:
            predicted = self._coefficients @ x
            if predicted[self._best] > 0.0:
                step_s = min(step_s, _PAUSE * float(predicted[self._best]))
            self._errors = _FADE * self._errors + np.abs(predicted - step_s)
        self._gram = _FADE * self._gram + np.outer(x, x)
        self._response = _FADE * self._response + step_s * x
        self._num_steps += 1
        self._num_new += 1
        if self._num_new >= min(_REFIT_STEPS, self._num_steps / 2):
            self._fit()

    def batch_s(self, chunks: Iterable[Chunk], num_decodes: int, context_tokens: float) -> float:
        """Seconds of a step with this content."""
        return float(self._coefficients[self._best] @ _features(chunks, num_decodes, context_tokens))

    def _fit(self) -> None:
        self._num_new = 0
        scale = _PRIOR_STEPS * (_PRIOR[0] / _PRIOR_SCALES) ** 2
        gram, response = self._gram + np.diag(scale), self._response + scale * _PRIOR
        for row, terms in zip(self._coefficients, _TERMS, strict=True):
            row[terms] = _nonnegative(gram[np.ix_(terms, terms)], response[terms], row[terms])
        best = int(self._errors.argmin())
        self._best = best if self._errors[best] <= _BETTER * self._errors[0] else 0
