"""SLAI: decodes wait until they are critical, and prompts are processed meanwhile.

Source: Bari, Hegde and de Veciana 2025, "Optimal Scheduling Algorithms for LLM Inference: Theory and Practice"
(arXiv:2508.01002), sections 6 and 7, Eqs. 8 and 9; "paying first" is the variant of appendix F.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from scheduler_core.batching.base import BatchFormer
from scheduler_core.batching.batch import Batch, still_running
from scheduler_core.engine.memory_victim import least_urgent
from scheduler_core.engine.pool import Pool
from scheduler_core.ranges import FINITE, INTEGERS, check_ranges
from scheduler_core.request import Phase, RequestState, Status


@dataclass(kw_only=True, slots=True)
class Slai(BatchFormer):
    """Schedules each decode before its last schedulable time C, and prompts before decodes that are not critical.

    C = e + TBT - delta * t_batch; a decode is critical when now >= C.                     (Eq. 8)
    delta = delta_low if the KV use is below memory_limit, else delta_high                 (section 7.1)

    Batch: (1) critical decodes by increasing C; (2) prompts in progress, then new ones in the policy's order (SPF or
    FCFS in the paper) while the token budget and slots last; (3) other decodes by increasing C. It has at
    most max_decodes decodes.

    | symbol | meaning | here |
    | --- | --- | --- |
    | e | end of the batch with the request's previous token | s |
    | TBT | target of the time between tokens | the request's tbt_slo_s, or default_tbt_s; s |
    | t_batch | mean time of the batches so far; with `fitted` that of a full batch now | s |
    | delta | safety offset, fixed if delta_low = delta_high | batches |
    | tau_budget | maximum number of tokens in a batch, 512 in the paper | max_num_batched_tokens |
    | alpha | maximum number of requests in memory, 128 in the paper | max_num_seqs |
    | beta | maximum number of decodes in a batch | max_decodes |
    | paying_first | new prompts of paying requests (TBT <= paying_tbt_s) go before all other new ones | 0 or 1 |

    A decode without a free block evicts the prompt in progress that was started last, or itself without such a prompt;
    under a policy that evicts by key, the request of the largest eviction key. Requests of less urgent declared levels go first.

    With `fitted` a batch has tau_budget tokens, and its time is by the best fit to this engine's steps (`StepTimes`), so
    that a decode that is held back once more can still follow the largest batch. Ours: the mean of all batches so far is too
    short where few of them have prompts.

    Differs from the paper: C uses delta and t_batch at the time when a batch is formed; the released code fixes C with
    the previous token, so that a change of delta does not affect waiting decodes. Non-critical decodes also
    count for beta (not always in the released code); without a free block they wait instead of evicting,
    unless the batch would be empty.
    """

    allows_preemptive = False
    migratable = True

    delta_low: float = 5.0
    delta_high: float = 10.0
    memory_limit: float = 0.96
    max_decodes: int = 128
    default_tbt_s: float = 0.5
    paying_first: bool = False
    paying_tbt_s: float = 0.1
    fitted: bool = False
    _batch_s: float = field(default=0.0, init=False, repr=False)
    _num_steps: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        finite, fraction = (0, FINITE), (0.0, 1.0)
        check_ranges(self, delta_low=finite, delta_high=finite, default_tbt_s=finite, paying_tbt_s=finite)
        check_ranges(self, memory_limit=fraction, max_decodes=(1, INTEGERS))

    @property
    def group(self) -> Callable[[RequestState], int] | None:
        return self._unpaid if self.paying_first else None

    @property
    def reads_step_times(self) -> bool:
        return self.fitted

    def _unpaid(self, state: RequestState) -> int:
        target = state.request.tbt_slo_s
        return int((self.default_tbt_s if target is None else target) > self.paying_tbt_s)

    def on_step(self, step_s: float) -> None:
        self._num_steps += 1
        if not self.fitted:
            self._batch_s += (step_s - self._batch_s) / self._num_steps

    def offset_s(self, kv_use: float) -> float:
        """delta * t_batch in seconds; `kv_use` is the fraction of used KV blocks."""
        return (self.delta_low if kv_use < self.memory_limit else self.delta_high) * self._batch_s

    def form(self, pool: Pool, max_num_batched_tokens: int, now: float) -> Batch:
        batch = Batch(max_num_batched_tokens)
        prefilling, decodes = pool.by_phase()
        if self.fitted and self._num_steps:
            num_decodes = min(len(decodes), self.max_decodes)
            contexts = (
                sum([state.num_computed_tokens for state in decodes]) * num_decodes / max(len(decodes), 1)
            )
            start = prefilling[0].num_computed_tokens if prefilling else 0
            chunk = (start, max_num_batched_tokens - num_decodes)
            self._batch_s = pool.step_times.batch_s([chunk], num_decodes, contexts)
        due_s = self._due_s(decodes)
        order = sorted(range(len(decodes)), key=due_s.__getitem__)  # stable: ties by admission
        latest = now + self.offset_s(pool.kv.use)
        num_critical = min(sum([due <= latest for due in due_s]), self.max_decodes)
        critical = [decodes[index] for index in order[:num_critical]]
        others = [decodes[index] for index in order[num_critical : self.max_decodes]]
        self._add_critical(pool, batch, critical, now)
        batch.fill(pool, list(still_running(prefilling)), now)  # step 3
        # Under a policy that evicts by key, a critical decode may have taken the memory of one of the others.
        self._add_others(pool, batch, list(still_running(others)), now)
        return batch

    def _due_s(self, decodes: list[RequestState]) -> list[float]:
        """C + delta * t_batch = e + TBT of each, in seconds."""
        default = self.default_tbt_s
        return [
            last + (default if (target := state.request.tbt_slo_s) is None else target)
            for state in decodes
            if (last := state.last_token_s) is not None
        ]

    def _add_critical(self, pool: Pool, batch: Batch, decodes: list[RequestState], now: float) -> None:
        """Step 2: adds the critical decodes, which take memory from prompts if necessary."""
        for state in [state for state in decodes if state.num_computed_tokens >= state.kv_tokens]:
            while state.status is Status.RUNNING and not pool.grow(state, state.num_computed_tokens + 1):
                batch.evict(pool, self._victim(pool, state, now), now)
        batch.add_decodes(list(still_running(decodes)) if batch.preempted else decodes)

    @staticmethod
    def _victim(pool: Pool, state: RequestState, now: float) -> RequestState:
        """The request to evict for a critical decode, of the least urgent level in memory."""
        if pool.policy.evicts_by_key:
            return pool.memory_victim(now)
        candidates = least_urgent(list(pool.running.values()))
        started = [other for other in candidates if other.phase is Phase.PREFILL]
        if started:
            return started[-1]
        return state if state in candidates else pool.memory_victim(now)

    def _add_others(self, pool: Pool, batch: Batch, decodes: list[RequestState], now: float) -> None:
        """Step 4: adds other decodes; those without a free block wait, unless the batch would be empty."""
        batch.add_decodes(
            [
                state
                for state in decodes[: batch.budget]
                if state.num_computed_tokens < state.kv_tokens
                or pool.grow(state, state.num_computed_tokens + 1)
            ]
        )
        if decodes and not batch.prefills and not batch.decodes:
            self._add_critical(pool, batch, decodes, now)

    def steady_steps(self, pool: Pool, batch: Batch, limit: int) -> int:
        return 1  # the set of critical decodes depends on the time
