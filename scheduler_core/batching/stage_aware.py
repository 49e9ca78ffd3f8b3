"""Stage-aware batches with priority-based eviction.

Source: "Semantic Scheduling for LLM Inference", section 3.3, Algorithms 2 to 5.
"""

from contextlib import closing
from dataclasses import dataclass, field

from scheduler_core.batching.base import BatchFormer, steps_that_fit
from scheduler_core.batching.batch import Batch
from scheduler_core.engine.kv_cache import Limits
from scheduler_core.engine.pool import Pool
from scheduler_core.errors import InputError
from scheduler_core.kv_cost import Form, KVCost
from scheduler_core.policies.base import Policy
from scheduler_core.ranges import check_choice
from scheduler_core.request import RequestState, Status

Ranked = tuple[int, float, float, int, RequestState]


@dataclass(kw_only=True, slots=True)
class StageAware(BatchFormer):
    """The b requests of highest priority, running or waiting; without prompts while the first of them decodes.

    1. Candidates C: the b first waiting requests; ongoing O: all that hold memory.        (Algorithm 2, line 3)
    2. p* = the first of C and O. If p* is in prefill, M = C + O; else M = their decoding requests.   (lines 4 to 12)
    3. The batch is the first b of M. The others wait; those in memory keep it.            (lines 13 to 15)
    4. If memory is short, the request in memory with the lowest priority is evicted. Its keys and values are
       discarded, or copied to the host if loading them is faster.                         (Algorithm 4, `KVCost`)

    | symbol | meaning | here |
    | --- | --- | --- |
    | b | requests in a batch | max_num_seqs |
    | priority | (f_e, f_t): urgency, then remaining time | declared level, then the policy's key; the paper's is policy "semantic" |
    | cache_rule | cache-or-recompute rule, "exact" or "paper" | used if preemption is "swap" |

    The first of all requests always runs. An arrival costs O(log n) of n waiting requests, a step O(b log n + r log r)
    and an eviction O(r) of the r requests in memory (section 3.3 has O(log r) with a second heap). No request ends
    before a more urgent one that was there at its last step (Eq. 2) if b = 1; with more, less urgent decodes use
    the slots beside an urgent one.

    Differs from the paper: new requests enter the heap at once, without an unsorted buffer; a batch has at most
    max_num_batched_tokens tokens, so prompts may be processed in chunks; a partly processed prompt counts as
    a prefill; no request is evicted for one of lower or equal priority; admission keeps the watermark free;
    with preemption "recompute" the cache of evicted requests is discarded.
    """

    evicts_by_key = True

    cache_rule: Form = "exact"
    alpha_1: float = KVCost().alpha_1
    alpha_2: float = KVCost().alpha_2
    gamma_1: float = KVCost().gamma_1
    gamma_2: float = KVCost().gamma_2
    beta: float = KVCost().beta
    _cost: KVCost = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_choice("cache_rule", self.cache_rule, ("exact", "paper"))
        names = ("alpha_1", "alpha_2", "gamma_1", "gamma_2", "beta")
        self._cost = KVCost(**{name: getattr(self, name) for name in names})

    def check_policy(self, policy: Policy) -> None:
        BatchFormer.check_policy(self, policy)
        if policy.protects_running:
            # A swapped request that is first could neither evict a prompt in process, nor let it go on.
            allowed = "policies under which a running request may be evicted for one that waits"
            raise InputError(f"policy under {type(self).__name__}", type(policy).__name__, allowed)

    def max_running(self, limits: Limits) -> int:
        return limits.capacity_blocks  # memory is the limit

    def form(self, pool: Pool, max_num_batched_tokens: int, now: float) -> Batch:
        batch = Batch(max_num_batched_tokens)
        may_admit = True
        for *_, state in self._select(pool, now):
            if batch.budget == 0 or len(batch.prefills) + len(batch.decodes) == pool.max_num_seqs:
                break
            if state.status is Status.RUNNING:
                has_memory = self._allocate(pool, batch, state, now)
            else:
                is_new = may_admit and state.request_id not in batch.preempted
                has_memory = is_new and self._admit(pool, batch, state, now)
            if has_memory:
                batch.add(state)
            else:  # The memory of one that was just evicted is not for those of lower priority.
                may_admit = False
        return batch

    def _select(self, pool: Pool, now: float) -> list[Ranked]:
        """Algorithm 2: M in order of priority."""
        ongoing = [_ranked(pool, state, now) for state in pool.running.values()]
        first = pool.waiting.peek()
        best = min([*ongoing, *([_ranked(pool, first, now)] if first is not None else [])], default=None)
        if best is None:
            return []
        if _decodes(best[-1]):
            ongoing = [item for item in ongoing if _decodes(item[-1])]
        return sorted(ongoing + self._candidates(pool, now, only_decodes=_decodes(best[-1])))

    @staticmethod
    def _candidates(pool: Pool, now: float, *, only_decodes: bool) -> list[Ranked]:
        """C; with `only_decodes` only those that would decode, because their cache is on the host."""
        kv = pool.kv
        if only_decodes and kv.num_free_host_blocks == kv.num_host_blocks:
            return []
        candidates = []
        with closing(pool.waiting.ascending()) as waiting:
            for state, _ in zip(waiting, range(pool.max_num_seqs), strict=False):
                if not only_decodes or _decodes(state):
                    candidates.append(_ranked(pool, state, now))
        return candidates

    def _admit(self, pool: Pool, batch: Batch, state: RequestState, now: float) -> bool:
        """Algorithm 4 for a waiting request."""
        rank = _ranked(pool, state, now)[:4]
        while not batch.admit(pool, state, now):
            if not self._evict_below(pool, batch, rank, now):
                return False
        return True

    def _allocate(self, pool: Pool, batch: Batch, state: RequestState, now: float) -> bool:
        """Algorithm 4 for the next token of a request in memory; False if it had to be evicted itself."""
        if not _decodes(state):
            return True
        while not pool.grow(state, state.num_computed_tokens + 1):
            victim = pool.memory_victim(now)
            self._evict(pool, batch, victim, now)
            if victim is state:
                return False
        return True

    def _evict_below(self, pool: Pool, batch: Batch, rank: tuple[int, float, float, int], now: float) -> bool:
        """Evicts the request of lowest priority, if its priority is below `rank`. Returns whether it did."""
        victim = pool.memory_victim(now)
        key = pool.policy.eviction_key(victim, now)
        worst = (victim.declared_level, key, victim.request.arrival_s, victim.order)
        if worst <= rank:
            return False
        self._evict(pool, batch, victim, now)
        return True

    def _evict(self, pool: Pool, batch: Batch, victim: RequestState, now: float) -> None:
        computed = victim.num_computed_tokens
        prompt = min(computed, victim.request.prompt_tokens)
        offload_tokens = None
        if pool.preemption == "swap":
            offload_tokens = self._cost.offload_tokens(prompt, computed - prompt, self.cache_rule)
        batch.evict(pool, victim, now, offload_tokens)

    def steady_steps(self, pool: Pool, batch: Batch, limit: int) -> int:
        static = pool.policy.key_changes != "with_time" and pool.policy.running_keys == "on_event"
        # Otherwise the order may change in the next step.
        return steps_that_fit(pool, batch, limit) if static else 1


def _ranked(pool: Pool, state: RequestState, now: float) -> Ranked:
    return (state.declared_level, pool.policy.key(state, now), state.request.arrival_s, state.order, state)


def _decodes(state: RequestState) -> bool:
    """Whether the request needs no prefill before its next token."""
    return state.num_computed_tokens >= state.prefill_target_tokens
