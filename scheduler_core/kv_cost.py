"""Cost of resuming an evicted request: load its keys and values from the host, or recompute them.

Source: "Semantic Scheduling for LLM Inference", section 3.3, "Cache and Recomputation Strategy", Eqs. 3 to 6; the
constants are those of its code (Wenyueh/latency_optimization_with_priority_constraints).
"""

from dataclasses import dataclass
from typing import Literal

from scheduler_core.ranges import FINITE, POSITIVE, check_ranges

Form = Literal["exact", "paper"]


@dataclass(frozen=True, kw_only=True, slots=True)
class KVCost:
    """Times of prefill, decode and copying for one model on one device (A100 with Qwen1.5-4B). `InputError` if a constant is
    negative or not finite, or gamma_1 is 0.

    prefill(n) = alpha_1 n^2 + alpha_2 n
    decode(n, m) = gamma_1 (m^2 / 2 + n m + m / 2) + gamma_2 m           (Eq. 4)
    load(k) = beta k

    | symbol | meaning | unit |
    | --- | --- | --- |
    | n, m | tokens processed in prefill; tokens decoded after them | tokens |
    | alpha_1, alpha_2 | prefill time per token: increase with the context, constant part | s per token^2, s per token |
    | gamma_1, gamma_2 | decode time per token: increase with the context, constant part | s per token^2, s per token |
    | beta | time to copy the keys and values of a token back | s per token |

    `offload_tokens` has two forms. "exact" (default): the tokens that were not offloaded are recomputed in one prefill,
    as in engines. Offloading k of c tokens costs beta k + prefill(c) - prefill(k). This is concave in k, so the minimum
    is at one end: all if beta c < prefill(c), else none. "paper": as printed. (1) Inequality 3, the prompt: offload its
    n tokens if beta n > prefill(n). (2) Eq. 6, the decoded tokens: offload
    m'_* = max(0, (beta - gamma_1 n - (gamma_1 + 2 gamma_2) / 2) / (2 gamma_1)) of them.

    Errata of the paper: inequality 3 is reversed, because loading is cheaper when beta n is the *smaller* time.
    Setting the derivative of Eq. 5 to 0 gives m' - m'_* = (beta - gamma_1 n - gamma_1 / 2 - gamma_2) /
    gamma_1 instead of Eq. 6, which lacks m' and has a factor 2. Eq. 5 charges the recomputed tokens as if
    they directly followed the prompt and were recomputed one at a time.
    """

    alpha_1: float = 1.46584975e-09
    alpha_2: float = 1.0515576e-04
    gamma_1: float = 5.91298857e-09
    gamma_2: float = 1.195828e-02
    beta: float = 1e-4

    def __post_init__(self) -> None:
        check_ranges(self, alpha_1=(0, FINITE), alpha_2=(0, FINITE), beta=(0, FINITE))
        check_ranges(self, gamma_1=(POSITIVE, FINITE), gamma_2=(0, FINITE))

    def prefill_s(self, num_tokens: float) -> float:
        """Time of a prefill of `num_tokens` tokens, in seconds."""
        return self.alpha_1 * num_tokens**2 + self.alpha_2 * num_tokens

    def decode_s(self, prompt_tokens: float, num_tokens: float) -> float:
        """Time to decode `num_tokens` tokens after a prompt, in seconds (Eq. 4)."""
        pairs = num_tokens**2 / 2 + prompt_tokens * num_tokens + num_tokens / 2
        return self.gamma_1 * pairs + self.gamma_2 * num_tokens

    def return_s(self, num_tokens: int, offload_tokens: int) -> float:
        """Time to restore `num_tokens` tokens, the first `offload_tokens` of them offloaded, in seconds."""
        return self.beta * offload_tokens + self.prefill_s(num_tokens) - self.prefill_s(offload_tokens)

    def offload_tokens(self, prompt_tokens: int, decoded_tokens: int, form: Form = "exact") -> int:
        """Number of leading tokens of the cache (prompt, then decoded tokens) to copy to the host.

        `form`: see the class.
        """
        num_tokens = prompt_tokens + decoded_tokens
        if form == "exact":
            return num_tokens if self.return_s(num_tokens, num_tokens) < self.return_s(num_tokens, 0) else 0
        if not self.beta * prompt_tokens > self.prefill_s(prompt_tokens):
            return 0  # decoded tokens cannot be used without the prompt
        half = (self.gamma_1 + 2 * self.gamma_2) / 2
        best = (self.beta - self.gamma_1 * prompt_tokens - half) / (2 * self.gamma_1)
        return prompt_tokens + int(min(max(best, 0.0), decoded_tokens))
