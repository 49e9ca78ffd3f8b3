"""The scheduler: a state machine without clock, threads, I/O or randomness.

The simulator or engine adapter calls `add` when a request arrives, `update` when its prediction arrives or
fails, `schedule` for the next step, `complete` when that step has ended, and `abort` when a client cancels.
Each call gets the time in seconds, non-decreasing. The same sequence of calls always results in the same plans.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import get_args

from scheduler_core.batching import BATCH_FORMERS, make_former
from scheduler_core.batching.batch import Batch
from scheduler_core.engine.decision_log import SCHEMA, DecisionLog
from scheduler_core.engine.kv_cache import Limits
from scheduler_core.engine.lockstep import LockstepGroup
from scheduler_core.engine.memory_victim import MemoryVictims
from scheduler_core.engine.plan import Counters, Finished, PrefillChunk, StepPlan, StepResult
from scheduler_core.engine.pool import Pool
from scheduler_core.errors import InputError, TailcastError
from scheduler_core.policies import policy_name, policy_parameters
from scheduler_core.policies.base import Policy
from scheduler_core.prediction.predictions import Prediction
from scheduler_core.ranges import check_choice
from scheduler_core.request import Request, RequestState, Status


class SchedulerStateError(TailcastError):
    """A call in the wrong state: a second open step, a result without a plan, or a decreasing time."""


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig(Limits):
    """Limits of one engine replica, and its batch former. `InputError` for values outside their range."""

    batching: str = "chunked_prefill"
    """Batch former; one of: chunked_prefill (Sarathi-Serve), orca, quantile_reserve, rad, rad_prefill_first, request_level,
    slai, stage_aware, uniboost, vllm (prefill first)."""
    batching_parameters: dict[str, bool | int | float | str] = field(default_factory=dict)
    """Overrides of the batch former's parameters, such as {max_decodes: 64} for slai."""
    memory_victims: MemoryVictims = "last_admitted"
    """Request to preempt when memory runs out, if neither policy nor batch former chooses by eviction key: last_admitted
    (vLLM's rule), or cheapest (fewest tokens to recompute, see engine/memory_victim.py)."""

    def __post_init__(self) -> None:
        Limits.__post_init__(self)
        check_choice("memory_victims", self.memory_victims, get_args(MemoryVictims))
        make_former(self.batching, self.batching_parameters).check(self)


class Scheduler:
    """Selects the requests of each step of one engine replica. `InputError` if policy and batch former are
    not compatible.

    `policy` orders the waiting requests; the object must not be shared between schedulers. `log` records
    every call and plan for `replay.replay`.
    """

    def __init__(self, config: SchedulerConfig, policy: Policy, log: DecisionLog | None = None) -> None:
        self.config = config
        self.policy = policy
        self.counters = Counters()
        self._log = log
        former = make_former(config.batching, config.batching_parameters)
        former.check_policy(policy)
        self._former = former
        #: The live requests and their memory, read-only.
        self.pool = Pool(
            policy,
            config.kv_cache(),
            config.max_num_seqs,
            max_running=former.max_running(config),
            preemption=config.preemption,
            step_tokens=config.max_num_batched_tokens,
            evicts_by_key=policy.evicts_by_key or former.evicts_by_key,
            group=former.group,
            lockstep=former.lockstep and policy.progress == "unused",
            memory_victims=config.memory_victims,
        )
        #: None if the policy does not implement it, to avoid a call for every token of every request.
        self._on_tokens = None if type(policy).on_tokens is Policy.on_tokens else policy.on_tokens
        self._measures = policy.reads("costs")
        self._shares = config.prefix_caching
        self._now = -math.inf
        self._num_steps = 0
        self._open: tuple[StepPlan, Batch] | None = None
        self._opened_s = -math.inf
        self._promised_steps = 1
        self._keys_are_fresh = False
        if log is not None:
            name, parameters = policy_name(policy), policy_parameters(policy)
            log.record("open", schema=SCHEMA, config=config, policy=name, parameters=parameters)

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for admission and hold no memory."""
        return len(self.pool.waiting)

    @property
    def num_running(self) -> int:
        """Number of admitted requests."""
        return self.pool.num_running

    def __contains__(self, request_id: str) -> bool:
        return request_id in self.pool

    @property
    def decoding(self) -> Sequence[RequestState]:
        """The requests that generate a token in the open step, in the order of the plan, read-only."""
        batch = self._open_step()[1]
        self.pool.sync()
        return batch.decodes

    @property
    def num_common_steps(self) -> int | None:
        """Number of decode steps in lockstep so far (see `LockstepGroup`); None without a lockstep group."""
        group = self.pool.lockstep
        return None if group is None else group.num_steps

    @property
    def wants_step_ends(self) -> bool:
        """Whether the policy needs the duration of each step if several are completed in one call."""
        return self._measures or type(self.policy).on_steps is not Policy.on_steps

    def find(self, request_id: str) -> RequestState | None:
        """The current state of a request, read-only and valid until the next step; None if it is not live."""
        return self.pool.find(request_id)

    def state(self, request_id: str) -> RequestState:
        """As `find`; KeyError if the request is not live."""
        state = self.pool.find(request_id)
        if state is None:
            raise KeyError(request_id)
        return state

    def refusal(self, request: Request) -> InputError | None:
        """The error if the request could never finish on this replica; None if it could."""
        need, capacity = request.prompt_tokens + request.max_tokens, self.pool.kv.capacity_tokens
        if need <= capacity:
            return self._former.refusal(request, self.config)
        name = f"prompt_tokens + max_tokens of request {request.request_id}"
        return InputError(name, need, f"at most {capacity} tokens, the whole KV cache")

    def add(self, request: Request, now: float) -> None:
        """Adds an arriving request to the waiting queue. `InputError`, without any change, if its id is
        already in use or the request can never finish (see `refusal`)."""
        self._check_time(now)
        self._check_new(request)
        self._now = now
        state = RequestState(request, order=self.counters.num_added)
        self._set_declared_level(state)
        self.pool.look_up(state)
        self.policy.on_arrival(state, now)
        self.pool.enter(state, now)
        self.counters.num_added += 1
        self._record("add", now, request=request)

    def _set_declared_level(self, state: RequestState) -> None:
        """Sets it to the priority, unless that is the policy's own order."""
        state.declared_level = 0 if self.policy.reads("priority") else state.request.priority

    def update(self, request_id: str, prediction: Prediction | None, now: float) -> None:
        """Applies the prediction of a request; None means that the predictor failed.

        A prediction for a request that is no longer live is counted as late and otherwise ignored. After a
        failure the request keeps its position. See `RequestState.apply_prediction`.
        """
        self._check_time(now)
        self._now = now
        self._record("update", now, request_id=request_id, prediction=prediction)
        state = self.pool.find(request_id)
        if state is None:
            self.counters.num_late_predictions += 1
            return
        if not self.pool.update(state, prediction):
            self.counters.num_failed_predictions += 1
            return
        self.counters.num_predictions += 1
        self.policy.on_prediction(state)
        self.pool.rekey(state, now)

    def schedule(self, now: float) -> StepPlan | None:
        """Plans the next step; None if there is no request to run. SchedulerStateError if a step is open."""
        if not self._now <= now < math.inf:
            self._check_time(now)
        if self._open is not None:
            raise SchedulerStateError(f"step {self._open[0].step} is not complete yet")
        self._now = now
        self._rekey(now)
        batch = self._former.form(self.pool, self.config.max_num_batched_tokens, now)
        if batch.preempted:
            self.counters.num_preemptions += len(batch.preempted)
            self.counters.num_swaps += len(batch.swapped_out)
        plan = None
        if batch.prefills or batch.decodes or batch.preempted:
            plan = batch.plan(self._num_steps, self.pool.lockstep)
            self._num_steps += 1
            self._open, self._opened_s, self._promised_steps = (plan, batch), now, 1
        else:
            waits_for_memory = self.pool.reserved and not self.pool.num_running
            assert waits_for_memory or not self.pool.num_live, (
                "the step is empty although there are live requests"
            )
        self._keys_are_fresh = True
        if self._log is not None:
            self._log.record("schedule", now, plan=plan)
        return plan

    def steady_steps(self, limit: int) -> int:
        """How often (1 to `limit`) the open plan may be repeated with the same outcome as `complete` and `schedule`
        after each step, provided that no request arrives, gets a prediction, stops or is aborted meanwhile.

        Each repetition of a prompt chunk continues where the previous one ended.
        """
        _, batch = self._open_step()
        self._promised_steps = 1
        group, policy = self.pool.lockstep, self.policy
        # The policy may choose another batch after a step even without an event.
        reorders = policy.progress == "every_step" or (
            (policy.preemptive or policy.needs_queue) and len(self.pool.waiting) > 0
        )
        if batch.preempted or reorders or policy.reorders_next:
            return 1
        if batch.prefills:
            limit = 1 if group is None else self._former.steady_chunks(batch, limit)
        elif batch.admitted:
            return 1
        if group is not None:
            limit = group.steps_to_first_end(limit)
        else:
            remaining = [state.request.max_tokens - state.num_output_tokens for state in batch.decodes]
            limit = min(limit, min(remaining, default=limit))
        if limit > 1:
            self._promised_steps = self._former.steady_steps(self.pool, batch, limit)
        return self._promised_steps

    def complete(self, result: StepResult, now: float) -> tuple[Finished, ...]:
        """Ends the open step at `now`. Frees the memory of finished requests and returns them in the order of
        the plan. `SchedulerStateError` if the step of `result` is not open; `InputError` if `stopped` has a
        request that sampled no token, or `num_steps` or `ends_s` are invalid."""
        if not self._now <= now < math.inf:
            self._check_time(now)
        plan, batch = self._open or self._open_step()
        if result.step != plan.step:
            raise SchedulerStateError(f"step {plan.step} is open, not {result.step}")
        if not 1 <= result.num_steps <= self._promised_steps:
            raise InputError("num_steps", result.num_steps, f"integers from 1 to {self._promised_steps}")
        bounds = (self._opened_s, *result.ends_s, now) if result.ends_s else ()
        if bounds and (
            len(bounds) != result.num_steps + 1 or any(start > end for start, end in pairwise(bounds))
        ):
            raise InputError("ends_s", result.ends_s, "ends of all steps but the last, in order")
        if result.stopped:
            _check_stopped(result.stopped, plan)
        self._now = now
        self._open = None
        self._keys_are_fresh = False
        finished = self._end_step(batch, result, now)
        if finished:
            self.counters.num_finished += len(finished)
        step_s = (now - self._opened_s) / result.num_steps
        if self._measures:
            copied = sum([transfer.num_tokens for transfer in plan.swapped_in])
            prefill_tokens, num_decodes = plan.num_prefill_tokens, len(plan.decodes)
            for start, end in pairwise(bounds) if bounds else ((self._opened_s, now),):
                self.pool.costs.observe(end - start, prefill_tokens, num_decodes, copied)
        if self._former.reads_step_times:
            chunks = [(chunk.start_token, chunk.num_tokens) for _, chunk in batch.prefills]
            contexts = sum([state.num_computed_tokens for state in batch.decodes]) - len(batch.decodes)
            self.pool.step_times.observe(step_s, chunks, len(batch.decodes), contexts)
        if bounds:
            self.policy.on_steps(now, [end - start for start, end in pairwise(bounds)])
        else:
            self.policy.on_step(now, step_s)
        self._former.on_step(step_s)
        if self._log is not None:
            self._log.record("complete", now, result=result, finished=finished)
        return tuple(finished)

    def _end_step(self, batch: Batch, result: StepResult, now: float) -> list[Finished]:
        """Advances the requests of a batch that was executed `result.num_steps` times; returns the finished
        requests in the order of the plan."""
        finished: list[Finished] = []
        stopped = result.stopped
        group = self.pool.lockstep
        ended: Iterable[RequestState] = ()
        if group is not None and batch.decodes:
            ended = self._decode_in_lockstep(group, result.num_steps, stopped, now)
        for state, chunk in batch.prefills:
            if state.status is Status.RUNNING:
                self._prefill(state, chunk, result.num_steps, now)
                if self._on_tokens is not None:
                    self._on_tokens(state, chunk.num_tokens, now)
                if chunk.is_last:
                    self.policy.on_prefill_end(state, now)
                if chunk.is_last or self._on_tokens is not None:
                    if state.num_output_tokens >= state.request.max_tokens or state.request_id in stopped:
                        self._end(state, result, finished)
                    if chunk.is_last and group is not None and state.status is Status.RUNNING:
                        self.pool.prefilled(state)
        if group is None:
            ended = self._decode_individually(batch.decodes, result.num_steps, stopped, now)
        on_tokens, num_steps = self._on_tokens, result.num_steps
        for state in ended:
            if on_tokens is not None:
                on_tokens(state, num_steps, now)
            if state.num_output_tokens >= state.request.max_tokens or state.request_id in stopped:
                self._end(state, result, finished)
        return finished

    def _decode_in_lockstep(
        self, group: LockstepGroup, num_steps: int, stopped: tuple[str, ...], now: float
    ) -> list[RequestState]:
        """Advances all members of the group; returns those that may have finished, in sync and in order."""
        ended = group.advance(num_steps, now)
        if stopped:
            full = set(ended)
            ended += [
                state for state in map(group.member, stopped) if state is not None and state not in full
            ]
        for state in ended:
            group.sync(state.request_id)
        return group.in_order(ended) if len(ended) > 1 else ended

    def _decode_individually(
        self, planned: list[RequestState], num_steps: int, stopped: tuple[str, ...], now: float
    ) -> list[RequestState]:
        """Advances the requests one by one; returns those that may have finished. Inlined for speed.

        Takes all memory before any is freed, so that the peak is the same for repeated and for single steps.
        """
        running = Status.RUNNING
        ended: list[RequestState] = []
        for state in planned:
            if state.status is not running:
                continue
            state.num_computed_tokens = computed = state.num_computed_tokens + num_steps
            state.num_output_tokens = outputs = state.num_output_tokens + num_steps
            state.last_scheduled_s = state.last_token_s = now
            if computed > state.kv_tokens:
                grown = self.pool.grow(state, computed)
                assert grown, "steady_steps returned more steps than fit into memory"
            if outputs == state.request.max_tokens or state.request_id in stopped:
                ended.append(state)
        if self._on_tokens is not None:
            ended = [state for state in planned if state.status is running]
        return ended

    def _prefill(self, state: RequestState, chunk: PrefillChunk, num_steps: int, now: float) -> None:
        """Advances a request by `num_steps` chunks; the last chunk of a prompt also samples a token."""
        tokens = chunk.num_tokens * num_steps
        state.num_computed_tokens += tokens
        state.last_scheduled_s = now
        if state.num_computed_tokens > state.kv_tokens:
            grown = self.pool.grow(state, state.num_computed_tokens)
            assert grown, "a prompt was admitted without memory"
        if self._shares:
            self.pool.kv.publish(state)
        if chunk.is_last:
            state.decode_entered_s = state.last_token_s = now
            state.num_output_tokens += 1
            if state.first_token_s is None:
                state.first_token_s = now

    def _end(self, state: RequestState, result: StepResult, finished: list[Finished]) -> None:
        """Removes a finished request and appends its result to `finished`."""
        state.ended_by = result.ended_by.get(state.request_id, "")
        self.pool.leave(state)
        self.policy.on_finish(state)
        assert state.first_scheduled_s is not None and state.first_token_s is not None  # noqa: PT018
        finished.append(
            Finished(
                request_id=state.request_id,
                reason="stop" if state.request_id in result.stopped else "length",
                output_tokens=state.num_output_tokens,
                num_preemptions=state.num_preemptions,
                first_scheduled_s=state.first_scheduled_s,
                first_token_s=state.first_token_s,
            )
        )

    def abort(self, request_id: str, now: float) -> bool:
        """Removes a request in any state, also during a step; False if it is not live."""
        self._check_time(now)
        self._now = now
        self._record("abort", now, request_id=request_id)
        state = self.pool.find(request_id)
        if state is None:
            return False
        self.pool.leave(state)
        self.policy.on_finish(state)
        self.counters.num_aborted += 1
        return True

    def end_session(self, session: str, now: float) -> bool:
        """Tells the policy that a session will send no more requests here, because it ended or moved to another replica.
        False, without effect, while requests of it are live."""
        self._check_time(now)
        self._now = now
        is_idle = all(state.request.session != session for state in self.pool.states.values())
        if is_idle:
            self.policy.on_session_end(session, now)
        self._record("end_session", now, session=session, ended=is_idle)
        return is_idle

    def detach(self, request_id: str, now: float) -> RequestState:
        """Removes a request that moves to another replica; blocks and slot of a running one stay reserved. `InputError`
        if the request is not live, or if it is running and the batch former cannot migrate running requests.

        The destination's policy handles it as an arrival with all its predictions and its current length.
        """
        self._check_time(now)
        state = self.pool.find(request_id)
        if state is None:
            raise InputError("request_id", request_id, "a request that is waiting or running")
        if state.status is Status.RUNNING:
            self._check_migratable()
            plan = self._open[0] if self._open else None
            assert plan is None or request_id not in plan.decodes, "the request is part of the open step"
        self._now = now
        self.pool.take_out(state)
        self.policy.on_finish(state)
        self.counters.num_moved_out += 1
        self._record("detach", now, request_id=request_id)
        return state

    def attach(self, state: RequestState, now: float) -> None:
        """Adds a request of another replica: it runs in its reserved slot and blocks, or waits without a reservation.
        `InputError`, without any change, if its id is already in use, or it can never finish on this replica."""
        self._check_time(now)
        name, pool = state.request_id, self.pool
        self._check_new(state.request)
        reserved_tokens = pool.kv.held_by(name) * pool.kv.block_tokens
        is_sufficient = name not in pool.reserved or reserved_tokens >= state.num_computed_tokens
        assert is_sufficient, "too few blocks are reserved"
        self._now = now
        self._record("attach", now, state=state)
        state.order = self.counters.num_added
        self._set_declared_level(state)
        self.policy.on_arrival(state, now)
        if state.has_prediction:
            self.policy.on_prediction(state)
        pool.put_in(state, now)
        self.counters.num_added += 1
        self.counters.num_moved_in += 1

    def reserve(self, request_id: str, num_blocks: int, now: float) -> bool:
        """Reserves `num_blocks` more blocks for a request that moves to this replica, and at its first call a
        slot; False if they are not free. `InputError` if the batch former cannot migrate running requests."""
        self._check_time(now)
        self._check_migratable()
        assert request_id not in self.pool, "the request is already on this replica"
        assert self._open is None or self._promised_steps == 1, "the open step may be repeated (steady_steps)"
        self._now = now
        granted = self.pool.reserve(request_id, num_blocks)
        self._record("reserve", now, request_id=request_id, num_blocks=num_blocks, granted=granted)
        return granted

    def unreserve(self, request_id: str, now: float) -> None:
        """Frees the reservation of a request, if there is one."""
        self._check_time(now)
        self._now = now
        self.pool.unreserve(request_id)
        self._record("unreserve", now, request_id=request_id)

    def _record(self, op: str, now: float, **content: object) -> None:
        if self._log is not None:
            self._log.record(op, now, **content)

    def _check_new(self, request: Request) -> None:
        if request.request_id in self.pool:
            raise InputError("request_id", request.request_id, "an id that is not already in the scheduler")
        refusal = self.refusal(request)
        if refusal is not None:
            raise refusal

    def _check_migratable(self) -> None:
        if not self._former.migratable:
            allowed = ", ".join(name for name, kind in BATCH_FORMERS.items() if kind.migratable)
            name = "batching of a replica that takes part in migration"
            raise InputError(name, self.config.batching, allowed)

    def validate(self) -> None:
        """Checks all invariants, O(requests). AssertionError if one is violated.

        Directly after `schedule` it also checks that no key is stale.
        """
        self.pool.validate(self._now, keys_are_fresh=self._keys_are_fresh)
        counters = self.counters
        live = counters.num_added - counters.num_finished - counters.num_aborted - counters.num_moved_out
        assert live == len(self.pool.states), "requests were lost or duplicated"

    def _rekey(self, now: float) -> None:
        pool = self.pool
        pool.start_step(now)
        pressed = self.policy.on_pressure(len(pool.waiting), self.config.max_num_seqs)
        if pressed or self.policy.key_changes == "with_time":
            pool.look_up_all()
            pool.waiting.rekey_all(now)
            if pressed and pool.evictions is not None:
                pool.evictions.rekey_all(now)
            self.counters.num_rekeys += 1

    def _open_step(self) -> tuple[StepPlan, Batch]:
        if self._open is None:
            raise SchedulerStateError("no step is open: call schedule first")
        return self._open

    def _check_time(self, now: float) -> None:
        if not self._now <= now < math.inf:
            raise SchedulerStateError(f"time {now} is not at or after {self._now}")
        self._keys_are_fresh = False


def _check_stopped(stopped: tuple[str, ...], plan: StepPlan) -> None:
    ends_prefill = [chunk.request_id for chunk in plan.prefills if chunk.is_last]
    for request_id in stopped:  # they are few
        if request_id not in plan.decodes and request_id not in ends_prefill:
            raise InputError("stopped", request_id, "requests that sampled a token in this step")
