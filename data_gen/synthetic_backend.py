"""Synthetic output lengths without a language model: the mixture of TIE's theorem 3.2, for tests and demos.

An output ends after each token with probability p, which is drawn once per output from the density
alpha p^(alpha-1) / p_max^alpha on (0, p_max] (assumption 3.1: c p^(alpha-1) near 0). Its length N is geometric given p, so
with the incomplete beta function B,

    P(N > n) = E[(1-p)^n] = alpha p_max^-alpha B(p_max; alpha, n+1)  ~  Gamma(alpha+1) p_max^-alpha n^-alpha,

a power-law tail of index alpha (theorem 3.2). alpha and p_max of a prompt are determined by a hash of its id.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Generator, Iterable
from dataclasses import dataclass

from data_gen.backend import SampledOutput, SamplingSettings, Work, WorkResult, uniforms

#: Limits of a prompt's tail index (the mean length is finite above 1, the variance above 2), and of its typical length,
#: 1 / p_max, the inverse of its maximum termination rate.
ALPHA = (1.5, 4.0)
TYPICAL_TOKENS = (10.0, 300.0)


@dataclass(frozen=True, slots=True)
class TerminationMixture:
    """Lengths of one prompt: p has density alpha p^(alpha-1) / p_max^alpha on (0, p_max], N is geometric given p."""

    alpha: float
    p_max: float

    @classmethod
    def of(cls, prompt_id: str) -> TerminationMixture:
        """The mixture of a prompt, from a hash of its id: alpha is uniform, 1/p_max log-uniform between the limits."""
        digest = hashlib.sha256(f"synthetic\x00{prompt_id}".encode()).digest()
        first, second = (int.from_bytes(digest[i : i + 8], "big") / 2**64 for i in (0, 8))
        (low, high), (shortest, longest) = ALPHA, TYPICAL_TOKENS
        alpha = low + first * (high - low)
        tokens = shortest * (longest / shortest) ** second
        return cls(alpha, 1 / tokens)

    def length(self, first: float, second: float) -> float:
        """Converts two uniform random numbers in [0, 1) to a length: an integer > 0, or infinity."""
        rate = self.p_max * (1 - first) ** (1 / self.alpha)
        if rate >= 1:
            return 1.0
        tokens = math.log(1 - second) / math.log1p(-rate) if rate > 0 else math.inf
        return math.inf if math.isinf(tokens) else 1.0 + math.floor(tokens)


class SyntheticBackend:
    """Outputs with lengths of `TerminationMixture` and no text; recorded as engine and model "synthetic".

    An output depends only on (seed, prompt id, sample index); temperature and top_p are ignored. prompt_tokens is
    the number of words.
    """

    name = "synthetic"
    version = "1"
    served_model = "synthetic"
    seeded = True

    def sample(self, work: Iterable[Work], settings: SamplingSettings) -> Generator[WorkResult, None, None]:
        """See `Backend.sample`; one result for each output."""
        for item in work:
            mixture = TerminationMixture.of(item.prompt.prompt_id)
            words = sum(len(message.text.split()) for message in item.prompt.chat)
            for index in item.indices:
                length = mixture.length(*uniforms(settings.seed, item.prompt.prompt_id, index, 2))
                if length > settings.max_tokens:
                    output = SampledOutput(index, settings.max_tokens, "length")
                else:
                    output = SampledOutput(index, int(length), "stop")
                yield WorkResult(item.prompt, words, (output,))

    def close(self) -> None:
        """Does nothing; there are no resources to release."""
