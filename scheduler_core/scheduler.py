"""The scheduler: a state machine without clock, threads, I/O or randomness.

Whoever runs it (simulator or engine adapter) calls, with the time in seconds as an argument that never decreases:
`add` when a request arrives, `update` when its prediction comes or fails, `schedule` for the next step, `complete`
when that step is done, `abort` when a user gives up. The same calls always give the same plans.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

from scheduler_core.batching import Batch, BatchFormer, make_former
from scheduler_core.decision_log import DecisionLog
from scheduler_core.errors import InputError, TailcastError
from scheduler_core.limits import Limits
from scheduler_core.plan import Counters, Finished, StepPlan, StepResult
from scheduler_core.policies import policy_name, policy_parameters
from scheduler_core.policies.base import Policy
from scheduler_core.pool import Pool
from scheduler_core.predictions import LengthPrediction, Prediction
from scheduler_core.request import Request, RequestState
from scheduler_core.step_end import StepEnd


class SchedulerStateError(TailcastError):
    """A call that does not belong here: two steps at once, a result without a plan, time running backwards."""


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig(Limits):
    """Limits of one engine replica, and how its steps are put together.

    Raises:
        InputError: A value is outside its range.
    """

    batching: str = "chunked_prefill"
    """How a step is put together; one of: chunked_prefill (Sarathi-Serve), orca, rad, rad_prefill_first, request_level,
    slai, stage_aware, vllm (prefill first)."""
    batching_parameters: dict[str, bool | int | float | str] = field(default_factory=dict)
    """Parameters of the batch former that shall not have their default, such as {max_decodes: 64} for slai."""

    def __post_init__(self) -> None:
        Limits.__post_init__(self)
        make_former(self.batching, self.batching_parameters).check(self)


class Scheduler:
    """Decides which requests make up each step of one engine replica.

    Args:
        config: Limits of the replica.
        policy: Orders the waiting requests; belongs to this scheduler alone.
        log: Records every call and plan for `decision_log.replay`; None records nothing.

    Raises:
        InputError: Policy and batch former make no sense together; the message says why.
    """

    def __init__(self, config: SchedulerConfig, policy: Policy, log: DecisionLog | None = None) -> None:
        self.config = config
        self.policy = policy
        self.counters = Counters()
        self._log = log
        former = make_former(config.batching, config.batching_parameters)
        former.check_policy(policy)
        if policy.batch_formers is not None and config.batching not in policy.batch_formers:
            allowed = ", ".join(sorted(policy.batch_formers))
            raise InputError(f"batching under policy {policy_name(policy)}", config.batching, allowed)
        self._former = former
        self._pool = Pool(
            policy,
            config.kv_cache(),
            config.max_num_seqs,
            max_running=former.max_running(config),
            preemption=config.preemption,
            evicts_by_key=policy.preemptive or former.evicts_by_key,
            group=former.group,
            lazily=former.decodes_all and not _looks_at_running(policy),
        )
        self._step_end = StepEnd(self._pool, policy, _hook(policy, "on_tokens"))
        #: Hooks that do nothing are not called: these would be called in every step.
        self._may_rekey = self._pool.evictions is not None or policy.key_changes == "with_time"
        self._may_rekey |= _overrides(policy, Policy, "on_pressure", "take_changed")
        self._hears_steps = _overrides(policy, Policy, "on_step")
        self._hears_steps |= _overrides(former, BatchFormer, "on_step")
        self._now = -math.inf
        self._num_steps = 0
        self._open: tuple[StepPlan, Batch] | None = None
        self._opened_s = -math.inf
        self._promised_steps = 1
        self._keys_are_fresh = False
        if log is not None:
            log.opened(asdict(config), policy_name(policy), policy_parameters(policy))

    @property
    def num_waiting(self) -> int:
        """Requests that hold no memory and wait to be admitted."""
        return len(self._pool.waiting)

    @property
    def num_running(self) -> int:
        """Admitted requests."""
        return self._pool.num_running

    @property
    def num_free_kv_blocks(self) -> int:
        """KV blocks nobody holds."""
        return self._pool.kv.num_free_blocks

    @property
    def peak_kv_blocks(self) -> int:
        """Most KV blocks ever held at the same time."""
        return self._pool.kv.peak_blocks

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._pool

    @property
    def decoding(self) -> Sequence[RequestState]:
        """The requests that generate a token in the open step, to read, in the plan's order.

        Raises:
            SchedulerStateError: No step is open.
        """
        batch = self._open_step()[1]
        self._pool.settle()
        return batch.decodes

    @property
    def num_common_steps(self) -> int | None:
        """Decode steps that all requests that decode have taken together so far; None if they do not count so.

        While this is a number, all requests that have processed their prompts generate a token in every step in which one
        of them does.
        """
        cohort = self._pool.cohort
        return None if cohort is None else cohort.num_steps

    def state(self, request_id: str) -> RequestState:
        """The request as it is now, to read; to be asked for again after a step. KeyError if it is not here."""
        state = self._pool.find(request_id)
        if state is None:
            raise KeyError(request_id)
        return state

    def refusal(self, request: Request) -> InputError | None:
        """Why the request could never be finished here; None if it could."""
        need = request.prompt_tokens + request.max_tokens
        if need <= self._pool.kv.capacity_tokens:
            return self._former.refusal(request, self.config)
        return InputError(
            f"prompt_tokens + max_tokens of request {request.request_id}",
            need,
            f"at most {self._pool.kv.capacity_tokens} tokens, the whole KV cache",
        )

    def add(self, request: Request, now: float) -> None:
        """A request arrives and waits.

        Raises:
            InputError: Its id is already here, or it can never be finished (see `refusal`). Nothing has changed then.
        """
        self._check_time(now)
        if request.request_id in self._pool:
            raise InputError("request_id", request.request_id, "an id that is not in the scheduler already")
        refusal = self.refusal(request)
        if refusal is not None:
            raise refusal
        self._now = now
        state = RequestState(request, order=self.counters.num_added)
        self.policy.on_arrival(state, now)
        self._pool.enter(state, now)
        self.counters.num_added += 1
        if self._log is not None:
            self._log.added(request, now)

    def update(self, request_id: str, prediction: Prediction | LengthPrediction | None, now: float) -> None:
        """The prediction of a request has come; None means that the predictor failed.

        A bundle replaces those predictions that it contains; a bare length is a bundle of one.

        A prediction for a request that is no longer here is counted as late and otherwise ignored. A failure keeps
        the request where it is, as if nothing had been predicted.
        """
        self._check_time(now)
        self._now = now
        if self._log is not None:
            self._log.updated(request_id, prediction, now)
        state = self._pool.find(request_id)
        if state is None:
            self.counters.num_late_predictions += 1
            return
        if prediction is None:
            state.prediction_failed = True
            self.counters.num_failed_predictions += 1
            return
        if isinstance(prediction, LengthPrediction):
            prediction = Prediction(length=prediction)
        state.prediction = prediction.length or state.prediction
        state.urgency = prediction.urgency or state.urgency
        state.bucket = prediction.bucket or state.bucket
        state.rank = prediction.rank or state.rank
        state.prediction_failed = False
        self.counters.num_predictions += 1
        self.policy.on_prediction(state)
        self._pool.rekey(state, now)

    def schedule(self, now: float) -> StepPlan | None:
        """The next step; None if there is nothing to do.

        Raises:
            SchedulerStateError: The last step is not complete yet.
        """
        if not self._now <= now < math.inf:
            self._check_time(now)
        if self._open is not None:
            raise SchedulerStateError(f"step {self._open[0].step} is not complete yet")
        self._now = now
        if self._may_rekey:
            self._rekey(now)
        batch = self._former.form(self._pool, self.config.max_num_batched_tokens, now)
        if batch.preempted:
            self.counters.num_preemptions += len(batch.preempted)
            self.counters.num_swaps += len(batch.swapped_out)
        plan = None
        if batch.prefills or batch.decodes or batch.preempted:
            plan = batch.plan(self._num_steps, self._pool.cohort)
            self._num_steps += 1
            self._open = (plan, batch)
            self._opened_s = now
            self._promised_steps = 1
        else:
            waits_for_room = self._pool.reserved and not self._pool.num_running
            assert waits_for_room or self._pool.is_empty, "nobody is served although there are requests"
        self._keys_are_fresh = True
        if self._log is not None:
            self._log.scheduled(plan, now)
        return plan

    def steady_steps(self, limit: int) -> int:
        """How often (1 to `limit`) the open plan may be carried out in a row with the same outcome as calling
        `complete` and `schedule` after each, if until then nothing arrives, is predicted, stops or is aborted.

        A chunk of a prompt goes on each time where the last one ended.
        """
        _, batch = self._open_step()
        self._promised_steps = 1
        cohort = self._pool.cohort
        if batch.preempted or self._may_change_its_mind():
            return 1
        if batch.prefills:
            limit = 1 if cohort is None else self._former.steady_chunks(batch, limit)
        elif batch.admitted:
            return 1
        if cohort is not None:
            limit = cohort.least_left(limit)
        else:
            left = [state.request.max_tokens - state.num_output_tokens for state in batch.decodes]
            limit = min(limit, min(left, default=limit))
        if limit > 1:
            self._promised_steps = self._former.steady_steps(self._pool, batch, limit)
        return self._promised_steps

    def _may_change_its_mind(self) -> bool:
        """Whether the policy may want another batch after a step, although nothing has happened."""
        return self.policy.sees_every_step or (self.policy.preemptive and len(self._pool.waiting) > 0)

    def complete(self, result: StepResult, now: float) -> tuple[Finished, ...]:
        """The open step is done: tokens are counted, finished requests leave and give back their memory.

        Args:
            result: What the engine saw; requests aborted meanwhile may still be named.
            now: End of the step, in seconds.

        Returns:
            The finished requests, in the order of the plan.

        Raises:
            SchedulerStateError: No step is open, or another one.
            InputError: `stopped` names a request that sampled no token, or `num_steps` is not possible.
        """
        if not self._now <= now < math.inf:
            self._check_time(now)
        plan, batch = self._open or self._open_step()
        if result.step != plan.step:
            raise SchedulerStateError(f"step {plan.step} is open, not {result.step}")
        if not 1 <= result.num_steps <= self._promised_steps:
            raise InputError("num_steps", result.num_steps, f"integers from 1 to {self._promised_steps}")
        if result.stopped:
            _check_stopped(result.stopped, plan)
        self._now = now
        self._open = None
        self._keys_are_fresh = False
        finished = self._step_end.complete(batch, result, now)
        if finished:
            self.counters.num_finished += len(finished)
        if self._hears_steps:
            step_s = (now - self._opened_s) / result.num_steps
            self.policy.on_step(now, step_s)
            self._former.on_step(step_s)
        if self._log is not None:
            self._log.completed(result, finished, now)
        return tuple(finished)

    def abort(self, request_id: str, now: float) -> bool:
        """Forgets a request in any state, also in the middle of a step; False if it is not here (any more)."""
        self._check_time(now)
        self._now = now
        if self._log is not None:
            self._log.aborted(request_id, now)
        state = self._pool.find(request_id)
        if state is None:
            return False
        self._pool.leave(state)
        self.policy.on_finish(state)
        self.counters.num_aborted += 1
        return True

    def validate(self) -> None:
        """Checks all invariants, O(requests); AssertionError names the one that does not hold.

        Directly after `schedule` also that no key is stale.
        """
        self._pool.validate(self._now, keys_are_fresh=self._keys_are_fresh)
        counters = self.counters
        gone = counters.num_finished + counters.num_aborted + counters.num_moved_out
        live = counters.num_added - gone
        assert live == len(self._pool.states), "requests were lost or duplicated"

    def _rekey(self, now: float) -> None:
        pool = self._pool
        pool.start_step(now)
        pressed = self.policy.on_pressure(len(pool.waiting), self.config.max_num_seqs)
        if pressed or self.policy.key_changes == "with_time":
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


def _looks_at_running(policy: Policy) -> bool:
    """Whether the policy may read the state of running requests at any time, and not only at their own events."""
    if policy.preemptive or policy.sees_every_step:
        return True
    return _overrides(policy, Policy, "on_tokens", "on_step", "take_changed")


def _hook(policy: Policy, name: str) -> Callable[[RequestState, int, float], None] | None:
    """The policy's hook; None if it does nothing, so that it need not be called for every running request."""
    return getattr(policy, name) if _overrides(policy, Policy, name) else None


def _overrides(item: object, base: type, *names: str) -> bool:
    """Whether the item's class defines one of the base's methods anew."""
    return any(getattr(type(item), name) is not getattr(base, name) for name in names)
