"""Request rates above which an engine cannot be stable: under any scheduler, and under RAD.

Source: Bari, Hegde and de Veciana 2025, "Optimal Scheduling Algorithms for LLM Inference: Theory and Practice"
(arXiv:2508.01002), section 4.3, theorems 1 and 2.
"""

from dataclasses import dataclass
from statistics import fmean

from scheduler_core.batching.rad import Rad
from scheduler_core.errors import InputError
from scheduler_core.scheduler import SchedulerConfig
from scheduler_core.simulator.step_time import prefill_s
from scheduler_core.simulator.step_time.base import SeparableStepTime, StepTime
from scheduler_core.simulator.trace import Trace


def max_rate_rps(trace: Trace, config: SchedulerConfig, step_time: StepTime) -> float:
    """1 / T, the request rate of one replica above which no policy and no batch former is stable.

    T = E[attention] + least_s(N, E[p], E[o - 1])
    N = max( E[ceil(p / K) + o - 1] / M,   E[p + o - 1] / K,   E[sum over t from p to p + o - 1 of ceil(t / b)] / B )

    | symbol | meaning | unit |
    | --- | --- | --- |
    | p, o | prompt and output tokens; the first output token is that of the last prompt chunk | tokens |
    | N | least steps per request: slots, tokens and memory of a step are all in use | steps |
    | M, K | max_num_seqs, max_num_batched_tokens | requests, tokens |
    | B, b | num_kv_blocks, kv_block_tokens | blocks, tokens |
    | least_s, attention | see `SeparableStepTime` | s |

    Each step of any scheduler is in these sums, so the engine is busy for at least n T with n requests of the trace,
    whatever the arrivals. It generalizes theorem 1, whose T_R is T for Eq. 7 (model "staircase" with base_s 0) if N is small
    enough for full tiles, N <= E[p + o - 1] / t_col, and prompts are multiples of t_col (assumption 3). A step with a
    fixed time, as that of every other model, is the shorter per token the more requests share it, so that RAD's batches of
    t_col tokens are not optimal: 1 / T is then above 1 / T_R, and theorem 1 does not apply.

    Raises:
        InputError: T is unknown for the model of step times, or requests share prefixes.
    """
    if not isinstance(step_time, SeparableStepTime):
        raise InputError("step time", type(step_time).__name__, "linear, staircase or roofline")
    rows = trace.requests
    if config.prefix_caching and any(row.content for row in rows):
        raise InputError("prefix_caching", True, "false for prompts that share prefixes")
    budget, block = config.max_num_batched_tokens, config.kv_block_tokens
    prefill, decodes = fmean(row.prompt_tokens for row in rows), fmean(row.output_tokens - 1 for row in rows)
    chunks = fmean(-(-row.prompt_tokens // budget) for row in rows)
    ends = [(row.prompt_tokens - 1, row.prompt_tokens + row.output_tokens - 1) for row in rows]
    blocks = fmean(_sum_of_blocks(last, block) - _sum_of_blocks(first, block) for first, last in ends)
    num_steps = max(
        (chunks + decodes) / config.max_num_seqs,
        (prefill + decodes) / budget,
        blocks / config.capacity_blocks,
    )
    attention_s = fmean(step_time.least_attention_s(row.prompt_tokens, row.output_tokens) for row in rows)
    return 1.0 / (attention_s + step_time.least_s(num_steps, prefill, decodes))


def _sum_of_blocks(num_tokens: int, block_tokens: int) -> int:
    """Sum over t from 1 to `num_tokens` of the blocks for t tokens."""
    full, rest = divmod(num_tokens, block_tokens)
    return block_tokens * full * (full + 1) // 2 + rest * (full + 1)


@dataclass(frozen=True, slots=True)
class RadBounds:
    """Quantities of RAD's theorems.

    Attributes:
        expected_s: T_R, the mean engine time of a request in RAD's optimally tiled batches. RAD is unstable above a rate
            of 1 / T_R. Other schedulers are as well only if `max_rate_rps` is 1 / T_R (theorem 1).
        longest_s: T_max, the time of the longest prompt and output without batching, in chunks of one token.
        num_per_cycle: Least n with which RAD is stable at every load up to 1 - epsilon, if there is memory for t_col of the
            longest requests (assumption 4): n > (t_col - 1) T_max / (epsilon T_R)   (theorem 2)
    """

    expected_s: float
    longest_s: float
    num_per_cycle: int


def rad_bounds(trace: Trace, config: SchedulerConfig, step_time: StepTime, epsilon: float = 0.1) -> RadBounds:
    """RAD's quantities for requests like those of a trace and any model of step times, up to a load of 1 - `epsilon`.

    The time of a request is that of its prompt in chunks of t_lcm tokens, and the t_col-th part of the decode steps of t_col
    such requests.

    Differs from the paper: the last chunk of a prompt samples the first output token, so that o - 1 decodes remain; prompts
    need not be multiples of t_lcm: a chunk with the rest takes its own time.
    """
    if not 0 < epsilon < 1:
        raise InputError("epsilon", epsilon, "numbers between 0 and 1")
    rad = Rad(**config.batching_parameters)  # type: ignore[arg-type]
    t_col, t_lcm = rad.tile_columns(config.max_num_seqs), rad.chunk_tokens(config.max_num_seqs)
    sizes = [(row.prompt_tokens, row.output_tokens) for row in trace.requests]
    prompts_s = {prompt: prefill_s(prompt, t_lcm, step_time) for prompt, _ in sizes}
    full = step_time.run((0,) * t_col, 0.0)
    before_s, after_s = (
        [full.elapsed_s(context) if context else 0.0 for context in contexts]
        for contexts in ([prompt for prompt, _ in sizes], [prompt + output - 1 for prompt, output in sizes])
    )
    decodes_s = fmean(after_s) - fmean(before_s)
    expected_s = fmean(prompts_s[prompt] for prompt, _ in sizes) + decodes_s / t_col
    longest = max(prompt for prompt, _ in sizes) + max(output for _, output in sizes)
    longest_s = step_time.run((0,), 0.0).elapsed_s(longest)
    return RadBounds(expected_s, longest_s, int((t_col - 1) * longest_s / (epsilon * expected_s)) + 1)
