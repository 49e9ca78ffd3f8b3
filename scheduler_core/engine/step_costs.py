"""Costs of an engine's work in seconds, measured from its steps."""

import numpy as np

#: Weight of a step is multiplied by this with each further one, so that about the last thousand count.
_FADE = 0.999
#: Prior: seconds per step, and per thousand prompt tokens, decode, thousand copied tokens (`LinearStepTime`).
_PRIOR = (0.017, 0.055, 5.5e-5, 0.0052)
#: Variance of the prior relative to that of a step: each coefficient is known to about itself.
_PRIOR_STEPS = 2.0
#: Steps between two solutions.
_REFRESH = 16


class StepCosts:
    """Least squares of the step time on prompt tokens P, decodes D and tokens S copied from host memory.

        t = c_0 + c_1 P + c_2 D + c_3 S

    The seconds of an output token are those that it adds to a step, c_2, and its share c_0 / D of the step itself, with D the
    mean number of decodes in a step. Estimates are never negative.
    """

    def __init__(self) -> None:
        prior = np.array(_PRIOR)
        scale = _PRIOR_STEPS * (_PRIOR[0] / prior) ** 2
        #: Sums of x x^T and of t x over the steps, x = (1, P / 1000, D, S / 1000); and their prior.
        self._prior = np.diag(scale), scale * prior
        self._gram, self._response = np.zeros((4, 4)), np.zeros(4)
        self._coefficients = [float(value) for value in prior]
        self._num_new = 0
        self._decodes = self._decode_steps = 1.0

    def observe(
        self, step_s: float, prefill_tokens: float, num_decodes: float, copied_tokens: float = 0.0
    ) -> None:
        """Adds a step of `step_s` seconds; of several equal ones the mean."""
        x = np.array((1.0, prefill_tokens / 1000.0, num_decodes, copied_tokens / 1000.0))
        self._gram = _FADE * self._gram + np.multiply.outer(x, x)
        self._response = _FADE * self._response + step_s * x
        if num_decodes:
            self._decodes = _FADE * self._decodes + num_decodes
            self._decode_steps = _FADE * self._decode_steps + 1.0
        self._num_new += 1
        if self._num_new >= _REFRESH:
            self._num_new = 0
            gram, response = self._prior
            solution = np.linalg.solve(self._gram + gram, self._response + response)
            self._coefficients = [max(float(value), 0.0) for value in solution]

    def prefill_s(self, num_tokens: float) -> float:
        """Seconds to process prompt tokens."""
        return self._coefficients[1] * num_tokens / 1000.0

    def decode_s(self, num_tokens: float) -> float:
        """Seconds of the engine for output tokens of one request, among others in the same steps."""
        share = self._decodes / self._decode_steps
        return num_tokens * (self._coefficients[2] + self._coefficients[0] / share)

    def reload_s(self, num_tokens: float) -> float:
        """Seconds to copy tokens from host memory."""
        return self._coefficients[3] * num_tokens / 1000.0
