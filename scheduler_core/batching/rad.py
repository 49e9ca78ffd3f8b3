"""RAD: throughput-optimal batches of optimally tiled matrix products.

Source: Bari, Hegde and de Veciana 2025, "Optimal Scheduling Algorithms for LLM Inference: Theory and Practice"
(arXiv:2508.01002): Algorithm 1 (section 4) and Algorithm 2 (appendix D).
"""

import math
from dataclasses import dataclass, field

from scheduler_core.batching.base import BatchFormer, steps_that_fit
from scheduler_core.batching.batch import Batch
from scheduler_core.engine.kv_cache import Limits
from scheduler_core.engine.pool import Pool
from scheduler_core.errors import InputError
from scheduler_core.ranges import INTEGERS, check_ranges


@dataclass(kw_only=True, slots=True)
class Rad(BatchFormer):
    """Algorithm 1: keep exactly t_col requests decoding, and prefill one request at a time whenever there are fewer.

    decode mode if |D| = t_col or P is empty or n requests were started in this cycle: one token of each in D
    otherwise prefill mode: only the first of P, in chunks of t_lcm = LCM(t_row, t_col, t_red) tokens
    A cycle ends when D is empty.

    | symbol | meaning | unit |
    | --- | --- | --- |
    | P, D | requests in prefill (waiting or started) and in decode | requests |
    | n | maximum number of requests started in a cycle; None: no limit, `simulate` takes theorem 2's for its trace | requests |
    | t_row, t_col, t_red | output tile and reduction tile of the matrix products; 128, 256, 32 are best on A100 | tokens |

    n > (t_col - 1) T_max / (epsilon T_R) makes the system stable at every load lambda T_R <= 1 - epsilon (theorem 2), with T_max
    the time of the longest request without batching and T_R the mean engine time of a request in full tiles
    (`simulator.step_time.stability.rad_bounds`). That no scheduler is stable at lambda T_R > 1 (theorem 1) assumes that a
    step takes no time but that of its tiles and tokens (Eq. 7). A real step also has a fixed time, to read the weights
    and to start the kernels; then larger batches, as those of chunked prefill, sustain more than RAD.

    Differs from the paper: P is in the order of the policy (paper: FCFS); if t_col is unset it is max_num_seqs; memory
    is limited: a request that does not fit is temporarily not in P, and a decode without a free block preempts the
    request admitted last (the largest eviction key under a policy that evicts by key), which does not count as started
    again.
    """

    allows_preemptive = False

    n: int | None = None
    t_row: int = 128
    t_col: int | None = None
    t_red: int = 32
    _num_started: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        check_ranges(self, **dict.fromkeys(("n", "t_row", "t_col", "t_red"), (1, INTEGERS)))

    def check(self, limits: Limits) -> None:
        if self.t_col is not None and self.t_col > limits.max_num_seqs:
            raise InputError("t_col", self.t_col, f"at most max_num_seqs = {limits.max_num_seqs}")
        t_lcm = self.chunk_tokens(limits.max_num_seqs)
        if t_lcm > limits.max_num_batched_tokens:
            allowed = f"a least common multiple of at most {limits.max_num_batched_tokens} batched tokens"
            raise InputError("t_row, t_col, t_red", (self.t_row, self.t_col, self.t_red), allowed)

    @property
    def max_started(self) -> int:
        """n, as an integer."""
        return INTEGERS if self.n is None else self.n

    def tile_columns(self, max_num_seqs: int) -> int:
        """t_col."""
        return max_num_seqs if self.t_col is None else self.t_col

    def chunk_tokens(self, max_num_seqs: int) -> int:
        """t_lcm."""
        return math.lcm(self.t_row, self.tile_columns(max_num_seqs), self.t_red)

    def form(self, pool: Pool, max_num_batched_tokens: int, now: float) -> Batch:
        batch = Batch(max_num_batched_tokens)
        if not pool.num_running:
            self._num_started = 0  # end of cycle
        if not self._prefill(pool, batch, self.tile_columns(pool.max_num_seqs), now):
            batch.add_decodes(batch.allocate(pool, pool.by_phase()[1], now))
        return batch

    def _prefill(self, pool: Pool, batch: Batch, max_running: int, now: float) -> bool:
        """Lines 11 to 18: adds a chunk of the started or first waiting request; False in decode mode (line 6)."""
        prefilling, _ = pool.by_phase()
        if prefilling:
            batch.add_chunk(prefilling[0], self.chunk_tokens(pool.max_num_seqs))
            return True
        while pool.num_running < max_running and self._num_started < self.max_started:
            head = pool.waiting.peek()
            if head is None or not batch.admit(pool, head, now):
                return False
            self._num_started += head.num_preemptions == 0
            if head.num_computed_tokens < head.prefill_target_tokens:
                batch.add_chunk(head, self.chunk_tokens(pool.max_num_seqs))
                return True
        return False

    def steady_steps(self, pool: Pool, batch: Batch, limit: int) -> int:
        full = len(batch.decodes) == self.tile_columns(pool.max_num_seqs)
        may_prefill = len(pool.waiting) and not full and self._num_started < self.max_started
        if may_prefill and pool.policy.key_changes == "with_time":
            return 1  # another request may become the first, and fit
        return steps_that_fit(pool, batch, limit)


@dataclass(kw_only=True, slots=True)
class RadPrefillFirst(Rad):
    """Algorithm 2: all prompts of a cycle first, up to n, then their decodes, t_col at a time.

    Prefills are as in Algorithm 1. In decode mode the first t_col of D are active; a finished one is replaced by the
    next of D. When D is empty the next cycle starts. The time between tokens is short, the time to the first token long.

    Differs from the paper: the first token of a request is sampled by its prefill (paper: by its first decode);
    prefill mode also ends when the next request does not fit into memory; a request preempted in decode mode
    resumes in the next cycle.
    """

    _decoding: bool = field(default=False, init=False, repr=False)

    def max_running(self, limits: Limits) -> int:
        return self.max_started

    def form(self, pool: Pool, max_num_batched_tokens: int, now: float) -> Batch:
        batch = Batch(max_num_batched_tokens)
        if not pool.num_running:
            self._num_started, self._decoding = 0, False
        if not self._decoding and self._prefill(pool, batch, self.max_started, now):
            return batch
        self._decoding = True
        active = pool.by_phase()[1][: self.tile_columns(pool.max_num_seqs)]
        batch.add_decodes(batch.allocate(pool, active, now))
        return batch

    def steady_steps(self, pool: Pool, batch: Batch, limit: int) -> int:
        return steps_that_fit(pool, batch, limit)
