"""Step times of "Semantic Scheduling for LLM Inference": quadratic prefill, decode linear in the context."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from scheduler_core.errors import InputError
from scheduler_core.kv_cost import KVCost
from scheduler_core.ranges import FINITE, POSITIVE, check_ranges
from scheduler_core.simulator.step_time.base import DecodeRun, PolynomialRun, StepWork


@dataclass(frozen=True, kw_only=True)
class QuadraticStepTime(KVCost):
    """prefill(n) = alpha_1 n^2 + alpha_2 n; a decode after c tokens takes gamma_1 c + gamma_2; copies beta per token.

    See `KVCost` for the constants. Source: section 3.3, Eqs. 3 and 4; the constants are those of its code
    (Wenyueh/latency_optimization_with_priority_constraints @ 6d232be), see `PRESETS`. In the paper alpha_1 of
    the first setting is 1.466e-2; in the code it is 1.466e-9.

    The code models no cost of batching: a step takes as long as its longest member.
    """

    def __post_init__(self) -> None:
        KVCost.__post_init__(self)
        check_ranges(self, alpha_2=(POSITIVE, FINITE), gamma_2=(POSITIVE, FINITE))

    def step_s(self, work: StepWork) -> float:
        """See `StepTime`. A chunk takes the time of the prompt up to its end less that up to its start."""
        times = [
            self.prefill_s(chunk.start_token + chunk.num_tokens) - self.prefill_s(chunk.start_token)
            for chunk in work.prefills
        ]
        times += [self.gamma_1 * context + self.gamma_2 for context in work.contexts]
        return max(times, default=0.0) + self.beta * work.num_swapped_tokens

    def run(self, contexts: Sequence[int], start_s: float) -> DecodeRun:
        """Each step takes gamma_1 longer than the previous one."""
        return PolynomialRun(start_s, self.gamma_1 * max(contexts) + self.gamma_2, self.gamma_1)


#: The settings of the paper's experiments by GPU and model (all Qwen1.5).
PRESETS: dict[str, QuadraticStepTime] = {
    "a100-4b": QuadraticStepTime(),
    "a100-7b": QuadraticStepTime(
        alpha_1=5.13462572e-07, alpha_2=1.48057167e-04, gamma_1=1.34911080e-08, gamma_2=1.330198e-02, beta=1e-4
    ),
    "a5000-4b": QuadraticStepTime(
        alpha_1=1.58625005e-09, alpha_2=1.30542054e-04, gamma_1=2.86938135e-06, gamma_2=3.00834536e-02, beta=3e-4
    ),
    "a5000-7b": QuadraticStepTime(
        alpha_1=1.85905340e-09, alpha_2=2.17527368e-04, gamma_1=2.11725653e-06, gamma_2=2.72656264e-02, beta=3e-4
    ),
}  # fmt: skip


def quadratic_step_time(preset: str | None = None, **constants: Any) -> QuadraticStepTime:
    """A model with the constants of a setting of the paper, by name, or with these constants."""
    if preset is None:
        return QuadraticStepTime(**constants)
    if preset not in PRESETS or constants:
        raise InputError("preset", preset, ", ".join(PRESETS) + ", with no other parameter")
    return PRESETS[preset]
