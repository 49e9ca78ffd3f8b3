"""Costs of an engine's work in seconds, measured from its steps."""

import numpy as np

#: Weight of a step relative to that of the next one, so that about the last thousand count; and the largest weight.
_FADE, _MAX_WEIGHT = 0.999, 1e12
#: Prior: seconds per step, and per thousand prompt tokens, decode, thousand copied tokens (`LinearStepTime`).
_PRIOR = (0.017, 0.055, 5.5e-5, 0.0052)
#: Prior of the decodes in a step.
_PRIOR_DECODES = 32.0
#: Variance of the prior relative to that of a step: each coefficient is known to about itself.
_PRIOR_STEPS = 2.0


class StepCosts:
    """Least squares of the step time on prompt tokens P, decodes D and tokens S copied from host memory.

        t = c_0 + c_1 P + c_2 D + c_3 S

    The seconds of an output token are those that it adds to a step, c_2, and its share c_0 / D of the step itself, with D the
    mean number of decodes in a step. Estimates are never negative.

    `is_measured`: whether they may be relied on; where the first observation comes late, False until one with prompt tokens.
    """

    def __init__(self, *, is_measured: bool = True) -> None:
        prior = np.array(_PRIOR)
        scale = _PRIOR_STEPS * (_PRIOR[0] / prior) ** 2
        self._prior = np.diag(scale), scale * prior
        #: Weighted sums of x x^T and of t x over the steps, x = (1, P / 1000, D, S / 1000).
        self._gram = [[0.0] * 4 for _ in range(4)]
        self._response = [0.0] * 4
        self._weight = 1.0
        self._solution: list[float] | None = [float(value) for value in prior]
        self._decodes, self._decode_steps = _PRIOR_DECODES, 1.0
        self.is_measured = is_measured

    def observe(
        self, step_s: float, prefill_tokens: float, num_decodes: float, copied_tokens: float = 0.0
    ) -> None:
        """Adds a step of `step_s` seconds."""
        weight = self._weight = self._weight / _FADE
        if weight > _MAX_WEIGHT:
            self._rescale(weight)
            weight = 1.0
        x = [(0, 1.0)]
        if prefill_tokens:
            x.append((1, prefill_tokens / 1000.0))
            self.is_measured = True
        if num_decodes:
            x.append((2, float(num_decodes)))
            self._decodes += weight * num_decodes
            self._decode_steps += weight
        if copied_tokens:
            x.append((3, copied_tokens / 1000.0))
        for row, value in x:
            self._response[row] += weight * value * step_s
            for column, other in x:
                self._gram[row][column] += weight * value * other
        self._solution = None

    def _rescale(self, weight: float) -> None:
        self._gram = [[value / weight for value in row] for row in self._gram]
        self._response = [value / weight for value in self._response]
        self._decodes, self._decode_steps = self._decodes / weight, self._decode_steps / weight
        self._weight = 1.0

    @property
    def _coefficients(self) -> list[float]:
        """c, solved if there are new steps."""
        if self._solution is None:
            gram, response = self._prior
            gram = np.array(self._gram) / self._weight + gram
            solution = np.linalg.solve(gram, np.array(self._response) / self._weight + response)
            self._solution = [max(float(value), 0.0) for value in solution]
        return self._solution

    def prefill_s(self, num_tokens: float) -> float:
        """Seconds to process prompt tokens."""
        return self._coefficients[1] * num_tokens / 1000.0

    def decode_s(self, num_tokens: float) -> float:
        """Seconds of the engine for output tokens of one request, among others in the same steps."""
        share = self._decodes / self._decode_steps
        return num_tokens * (self._coefficients[2] + self._coefficients[0] / share)

    @property
    def step_s(self) -> float:
        """Seconds of a step with the mean number of decodes and nothing else."""
        return self._coefficients[0] + self._coefficients[2] * self._decodes / self._decode_steps

    def reload_s(self, num_tokens: float) -> float:
        """Seconds to copy tokens from host memory."""
        return self._coefficients[3] * num_tokens / 1000.0
