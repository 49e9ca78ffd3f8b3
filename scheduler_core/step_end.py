"""The end of a step: tokens are counted, finished requests leave."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from scheduler_core.batching.batch import Batch
from scheduler_core.lockstep import LockstepGroup
from scheduler_core.plan import Finished, PrefillChunk, StepResult
from scheduler_core.policies.base import Policy
from scheduler_core.pool import Pool
from scheduler_core.request import RequestState, Status

TokensHook = Callable[[RequestState, int, float], None]


class StepEnd:
    """Counts what a step has done for its requests, and notifies the policy."""

    def __init__(self, pool: Pool, policy: Policy) -> None:
        self._pool = pool
        self._policy = policy
        #: None where the policy does not implement it: a call for every token of every request is expensive.
        self._on_tokens: TokensHook | None = (
            None if type(policy).on_tokens is Policy.on_tokens else policy.on_tokens
        )

    def complete(self, batch: Batch, result: StepResult, now: float) -> list[Finished]:
        """The batch was carried out `result.num_steps` times, to its end now; returns the finished requests, in the order of
        the plan."""
        finished: list[Finished] = []
        stopped = result.stopped
        group = self._pool.lockstep
        ended: Iterable[RequestState] = ()
        if group is not None and batch.decodes:
            ended = self._decode_in_lockstep(group, result.num_steps, stopped, now)
        for state, chunk in batch.prefills:
            if state.status is Status.RUNNING:
                self._prefill(state, chunk, result.num_steps, now)
                if self._on_tokens is not None:
                    self._on_tokens(state, chunk.num_tokens, now)
                if chunk.is_last or self._on_tokens is not None:
                    if state.num_output_tokens >= state.request.max_tokens or state.request_id in stopped:
                        self._end(state, stopped, finished)
                    if chunk.is_last and group is not None and state.status is Status.RUNNING:
                        self._pool.prefilled(state)
        if group is None:
            ended = self._decode_individually(batch.decodes, result.num_steps, stopped, now)
        on_tokens, num_steps = self._on_tokens, result.num_steps
        for state in ended:
            if on_tokens is not None:
                on_tokens(state, num_steps, now)
            if state.num_output_tokens >= state.request.max_tokens or state.request_id in stopped:
                self._end(state, stopped, finished)
        return finished

    def _decode_in_lockstep(
        self, group: LockstepGroup, num_steps: int, stopped: tuple[str, ...], now: float
    ) -> list[RequestState]:
        """Advances all requests in lockstep; returns those that may have ended, in sync and in order."""
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
        """Advances the requests one by one; returns those that may have ended. No calls, as it runs for every token.

        All memory is taken before any is given back, so that its peak is the same for one long run and for single steps.
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
                grown = self._pool.grow(state, computed)
                assert grown, "steady_steps promised memory that is not there"
            if outputs == state.request.max_tokens or state.request_id in stopped:
                ended.append(state)
        if self._on_tokens is not None:
            ended = [state for state in planned if state.status is running]
        return ended

    def _prefill(self, state: RequestState, chunk: PrefillChunk, num_steps: int, now: float) -> None:
        """So many chunks have been processed; after the last one of a prompt there is a token."""
        tokens = chunk.num_tokens * num_steps
        state.num_computed_tokens += tokens
        state.last_scheduled_s = now
        if state.num_computed_tokens > state.kv_tokens:
            grown = self._pool.grow(state, state.num_computed_tokens)
            assert grown, "a prompt was admitted without memory"
        if chunk.is_last:
            state.decode_entered_s = state.last_token_s = now
            state.num_output_tokens += 1
            if state.first_token_s is None:
                state.first_token_s = now

    def _end(self, state: RequestState, stopped: tuple[str, ...], finished: list[Finished]) -> None:
        """The request is done, by its limit or because it has stopped."""
        self._pool.leave(state)
        self._policy.on_finish(state)
        assert state.first_scheduled_s is not None and state.first_token_s is not None  # noqa: PT018
        finished.append(
            Finished(
                request_id=state.request_id,
                reason="stop" if state.request_id in stopped else "length",
                output_tokens=state.num_output_tokens,
                num_preemptions=state.num_preemptions,
                first_scheduled_s=state.first_scheduled_s,
                first_token_s=state.first_token_s,
            )
        )
