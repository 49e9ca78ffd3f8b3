"""Steps of a batch former for an engine that allocates memory and executes steps itself."""

from collections.abc import Callable, Iterable, Mapping

from scheduler_core.adapters.live_order import LiveEngine, LiveOrder
from scheduler_core.batching.base import BatchFormer
from scheduler_core.batching.batch import Batch
from scheduler_core.engine.kv_cache import KVCache, Limits
from scheduler_core.engine.memory_victim import MemoryVictims
from scheduler_core.engine.pool import Pool
from scheduler_core.engine.step_costs import StepCosts
from scheduler_core.policies.base import Policy
from scheduler_core.prediction.predictions import Prediction
from scheduler_core.request import RequestState, Status


class EnginePool(Pool):
    """The requests of an engine; what its prefix cache has of them is looked up there."""

    engine: LiveEngine
    #: Updates `num_output_tokens` of a running request, if its progress is not reported in every step.
    read_outputs: Callable[[RequestState], None] | None = None

    def look_up(self, state: RequestState) -> None:
        """See `Pool`."""
        self.engine.look_up([state])

    def preempt(self, state: RequestState, now: float, offload_tokens: int | None = None) -> int:
        """See `Pool`."""
        if self.read_outputs is not None:
            self.read_outputs(state)
        return super().preempt(state, now, offload_tokens)

    def adopt(self, state: RequestState, now: float) -> None:
        """Runs a request that the engine has admitted without a plan; `kv` has its blocks already."""
        if state.request_id not in self:
            self.enter(state, now)
        self._stop_waiting(state)
        state.status = Status.RUNNING
        state.prefill_target_tokens = state.known_tokens
        if state.first_scheduled_s is None:
            state.first_scheduled_s = now
        self._running[state.request_id] = state
        self._on_running(state, now)


class LiveBatches(LiveOrder):
    """A `LiveOrder` in which a batch former also decides what each step contains.

    The former changes its own copy of the engine's state (`pool`), in which a request is running as soon as a plan has admitted
    it. The engine executes a plan as far as it can. Before the next one the adapter copies its memory and progress: what was
    not executed is planned again.

    `kv` has the engine's blocks, `limits` its sizes, `costs` its measured step times. `InputError` if the former is
    incompatible with them or with the policy.
    """

    def __init__(
        self,
        policy: Policy,
        former: BatchFormer,
        kv: KVCache,
        limits: Limits,
        costs: StepCosts,
        level: Callable[[RequestState], int] | None = None,
        engine: LiveEngine | None = None,
        memory_victims: MemoryVictims = "last_admitted",
    ) -> None:
        super().__init__(policy, limits.max_num_seqs, level, engine)
        former.check(limits)
        former.check_policy(policy)
        self.former = former
        self.max_num_batched_tokens = limits.max_num_batched_tokens
        self.pool = EnginePool(
            policy,
            kv,
            limits.max_num_seqs,
            max_running=former.max_running(limits),
            preemption="recompute",
            evicts_by_key=former.evicts_by_key or policy.evicts_by_key,
            step_tokens=limits.max_num_batched_tokens,
            group=former.group,
            lockstep=False,
            memory_victims=memory_victims,
        )
        if engine is not None:
            policy.bind(engine)
        self.pool.engine = self.engine
        self.pool.costs = costs
        self.waiting = self.pool.waiting
        #: Requests that a plan has admitted and the engine has not.
        self.unexecuted: set[str] = set()

    def form(self, now: float) -> Batch:
        """Plans the next step."""
        batch = self.former.form(self.pool, self.max_num_batched_tokens, now)
        for request_id in batch.preempted:
            self.states[request_id].decode_entered_s = None
        self.unexecuted.update(batch.admitted)
        self.unexecuted.difference_update(batch.preempted)
        return batch

    def enqueue(self, request_id: str, now: float) -> None:
        """Adds a new request to the waiting ones; others are there, or running in `pool`."""
        if request_id not in self.pool:
            self.pool.enter(self.states[request_id], now)

    def dequeue(self, request_id: str) -> None:
        """Nothing: requests leave the queue with a plan or with `leave`."""

    def start_step(self, now: float) -> bool:
        """See `LiveOrder`."""
        evictions = self.pool.evictions
        if evictions is not None:
            evictions.start_step()
        is_rekeyed = super().start_step(now)
        if is_rekeyed and evictions is not None:
            evictions.rekey_all(now)
        return is_rekeyed

    def schedule(self, request_ids: Iterable[str], now: float) -> None:
        """Notes which requests the engine has admitted."""
        self.unexecuted.difference_update(request_ids)

    def end_step(self, step_s: float, scheduled: Mapping[str, int], prefills: Iterable[str]) -> None:
        """Ends a step with the tokens of each of its requests; of `prefills` they are tokens of the prompt."""
        self.former.on_step(step_s)
        if not self.former.reads_step_times:
            return
        tokens = {name: scheduled[name] for name in prefills}
        computed = {name: state.num_computed_tokens for name in scheduled if (state := self.states.get(name))}
        chunks = [(max(computed.get(name, 0) - num, 0), num) for name, num in tokens.items()]
        contexts = sum([num for name, num in computed.items() if name not in tokens])
        self.pool.step_times.observe(step_s, chunks, len(scheduled) - len(tokens), contexts)

    def preempt(self, request_id: str, now: float) -> None:
        """Marks a running request as preempted if the plan has not done so."""
        state = self.states.get(request_id)
        if state is not None and state.status is Status.RUNNING:
            self.unexecuted.discard(request_id)
            self.pool.preempt(state, now)
            state.decode_entered_s = None

    def leave(self, request_id: str, ended_by: str = "") -> RequestState | None:
        """See `LiveOrder`."""
        state = self.states.get(request_id)
        if state is None or request_id not in self.pool:
            return super().leave(request_id, ended_by)
        self.unexecuted.discard(request_id)
        self._unknown.discard(request_id)
        del self.states[request_id]
        state.ended_by = ended_by
        self.pool.leave(state)
        self.policy.on_finish(state)
        return state

    def _apply(self, state: RequestState, prediction: Prediction | None, now: float) -> None:
        if state.request_id not in self.pool:
            super()._apply(state, prediction, now)
        elif self.pool.update(state, prediction):
            self.policy.on_prediction(state)
            self._rekey(state, now)

    def _rekey(self, state: RequestState, now: float) -> None:
        if state.request_id in self.pool:
            self.pool.rekey(state, now)
