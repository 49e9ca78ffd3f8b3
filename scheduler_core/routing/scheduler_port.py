"""A `Scheduler` as routing sees it: pictures of it, and the way in and out for requests with their cache."""

from __future__ import annotations

from scheduler_core.effective_urgency import effective_urgency
from scheduler_core.errors import InputError
from scheduler_core.predictions import UrgencyPrediction
from scheduler_core.request import Phase, RequestState, Status
from scheduler_core.routing.migration import Holding
from scheduler_core.routing.snapshot import (
    ReplicaRole,
    ReplicaSnapshot,
    ReplicaStatus,
    RequestView,
    snapshot_from_requests,
)
from scheduler_core.scheduler import Scheduler, SchedulerStateError

#: Batch formers under which a running request can come and go between two steps. Under the others a batch belongs
#: together, or admission has reserved memory that a newcomer does not have.
MOVABLE = ("chunked_prefill", "slai", "vllm")


class SchedulerPort:
    """Implements `migration.MigrationPort` for a scheduler; every change is in its decision log.

    A running request is taken out only between two steps, and a policy forgets what it has learnt about it: to the
    policy of the destination it is an arrival with all its predictions, at its present length.

    Args:
        scheduler: Whose requests come and go.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self._pool = scheduler._pool
        self._tiers: dict[str, tuple[UrgencyPrediction | None, int]] = {}

    @property
    def kv_block_tokens(self) -> int:
        """Tokens per block."""
        return self._pool.kv.block_tokens

    def holding(self, request_id: str) -> Holding:
        """What the scheduler has of the request."""
        state = self._pool.states.get(request_id)
        if state is None:
            return Holding.NOTHING
        if state.status is Status.WAITING:
            return Holding.WAITING
        return Holding.DECODING if state.phase is Phase.DECODE else Holding.PREFILLING

    def cached_tokens(self, request_id: str) -> int:
        """Tokens of the request in its cache; KeyError if it is not here."""
        return self._pool.states[request_id].num_computed_tokens

    def detach(self, request_id: str, now: float) -> RequestState:
        """Takes the request out; see `migration.MigrationPort`.

        Raises:
            InputError: The request is not here.
            SchedulerStateError: It takes part in the step that is open.
        """
        core = self.scheduler
        core._check_time(now)
        state = self._pool.states.get(request_id)
        if state is None:
            raise InputError("request_id", request_id, "a request that is here")
        if state.status is Status.RUNNING:
            self._check_movable()
            if core._open is not None and request_id in _planned(core):
                raise SchedulerStateError(f"request {request_id} takes part in step {core._open[0].step}")
        core._now = now
        self._pool.take_out(state)
        core.policy.on_finish(state)
        core.counters.num_moved_out += 1
        if core._log is not None:
            core._log.detached(request_id, now)
        return state

    def attach(self, state: RequestState, now: float) -> None:
        """Takes the request in; see `migration.MigrationPort`.

        Raises:
            InputError: Its id is here already, or it can never be finished here. Nothing has changed then.
            SchedulerStateError: Less is reserved for it than it has computed.
        """
        core = self.scheduler
        core._check_time(now)
        name = state.request_id
        if name in self._pool.states:
            raise InputError("request_id", name, "an id that is not in the scheduler already")
        refusal = core.refusal(state.request)
        if refusal is not None:
            raise refusal
        room = self._pool.kv.held_by(name) * self._pool.kv.block_tokens
        if name in self._pool.reserved and room < state.num_computed_tokens:
            raise SchedulerStateError(f"{room} tokens are reserved for request {name}, too few")
        core._now = now
        if core._log is not None:
            core._log.attached(state, now)
        state.order = core.counters.num_added
        core.policy.on_arrival(state, now)
        if any(seen is not None for seen in (state.prediction, state.urgency, state.bucket, state.rank)):
            core.policy.on_prediction(state)
        self._pool.put_in(state, now)
        core.counters.num_added += 1
        core.counters.num_moved_in += 1

    def reserve(self, request_id: str, num_blocks: int, now: float) -> bool:
        """Keeps blocks and a seat for a request that is on its way here; see `migration.MigrationPort`.

        Raises:
            InputError: The number of blocks is not above 0 for the first ones, or the batch former does not take
                running requests.
            SchedulerStateError: The request is here, or the open step was promised to be repeated.
        """
        core = self.scheduler
        core._check_time(now)
        self._check_movable()
        if num_blocks < (0 if request_id in self._pool.reserved else 1):
            raise InputError("num_blocks", num_blocks, "integers > 0")
        if request_id in self._pool.states:
            raise SchedulerStateError(f"request {request_id} is here already")
        if core._open is not None and core._promised_steps > 1:
            raise SchedulerStateError(f"step {core._open[0].step} was promised {core._promised_steps} times")
        core._now = now
        granted = self._pool.reserve(request_id, num_blocks)
        if core._log is not None:
            core._log.reserved(request_id, num_blocks, granted, now)
        return granted

    def unreserve(self, request_id: str, now: float) -> None:
        """Gives back what is reserved for the request, if anything is."""
        self.scheduler._check_time(now)
        self.scheduler._now = now
        self._pool.unreserve(request_id)
        if self.scheduler._log is not None:
            self.scheduler._log.unreserved(request_id, now)

    def snapshot(
        self,
        replica_id: str,
        *,
        status: ReplicaStatus = ReplicaStatus.ACTIVE,
        role: ReplicaRole = ReplicaRole.BOTH,
        keep_requests: bool = True,
    ) -> ReplicaSnapshot:
        """A picture of the scheduler, O(requests); several times cheaper without the requests themselves.

        Args:
            replica_id: Id of the replica.
            status: What it may be given.
            role: Which phases it runs.
            keep_requests: Whether the requests themselves are part of the picture (`Router.needs_requests`).
        """
        pool, config = self._pool, self.scheduler.config
        self._tiers = {state.request_id: self._tier(state) for state in pool.states.values()}
        if not keep_requests:
            return self._summary(replica_id, status, role)
        head = pool.waiting.peek()
        states = [*pool.running.values(), *sorted(pool.waiting, key=lambda state: state.order)]
        return snapshot_from_requests(
            replica_id,
            (self._view(state) for state in states),
            num_kv_blocks=config.num_kv_blocks,
            kv_block_tokens=config.kv_block_tokens,
            max_num_seqs=config.max_num_seqs,
            num_reserved_blocks=sum(pool.kv.held_by(name) for name in pool.reserved),
            head=None if head is None else head.request_id,
            status=status,
            role=role,
        )

    def _summary(self, replica_id: str, status: ReplicaStatus, role: ReplicaRole) -> ReplicaSnapshot:
        """The sums of the picture alone."""
        pool, config = self._pool, self.scheduler.config
        reserved = sum(pool.kv.held_by(name) for name in pool.reserved)
        head = pool.waiting.peek()
        return ReplicaSnapshot(
            replica_id=replica_id,
            status=status,
            role=role,
            num_kv_blocks=config.num_kv_blocks,
            num_free_blocks=pool.kv.num_free_blocks,
            kv_block_tokens=config.kv_block_tokens,
            max_num_seqs=config.max_num_seqs,
            num_running=len(pool.running),
            num_waiting=len(pool.waiting),
            used_blocks=config.num_kv_blocks - pool.kv.num_free_blocks - reserved,
            head_demand_blocks=0 if head is None else pool.kv.blocks_for(head.known_tokens),
            waiting_prefill_tokens=sum(
                state.known_tokens - state.num_computed_tokens for state in pool.waiting
            ),
            tiers=tuple(sorted({tier for _, tier in self._tiers.values()})),
        )

    def _tier(self, state: RequestState) -> tuple[UrgencyPrediction | None, int]:
        """(what was predicted, the tier), from the last picture unless something new was predicted."""
        seen = self._tiers.get(state.request_id)
        return seen if seen and seen[0] is state.urgency else (state.urgency, effective_urgency(state))

    def _view(self, state: RequestState) -> RequestView:
        kv = self._pool.kv
        running = state.status is Status.RUNNING
        return RequestView(
            request_id=state.request_id,
            arrival_s=state.request.arrival_s,
            tier=self._tiers[state.request_id][1],
            prompt_tokens=state.request.prompt_tokens,
            max_tokens=state.request.max_tokens,
            num_computed_tokens=state.num_computed_tokens,
            num_output_tokens=state.num_output_tokens,
            kv_blocks=kv.held_by(state.request_id),
            demand_blocks=kv.held_by(state.request_id) if running else kv.blocks_for(state.known_tokens),
            running=running,
            decoding=running and state.phase is Phase.DECODE,
            prediction=state.prediction,
        )

    def _check_movable(self) -> None:
        batching = self.scheduler.config.batching
        if batching not in MOVABLE:
            raise InputError(
                "batching of a replica that takes part in migration", batching, ", ".join(MOVABLE)
            )


def _planned(core: Scheduler) -> set[str]:
    assert core._open is not None
    plan = core._open[0]
    return {*plan.decodes, *(chunk.request_id for chunk in plan.prefills)}
