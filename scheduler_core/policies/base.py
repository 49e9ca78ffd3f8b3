"""Interface of policies: an order over requests, and hooks for events."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import ClassVar, Literal, Protocol

from scheduler_core.request import RequestState

KeyChanges = Literal["never", "on_event", "with_time"]
RunningKeys = Literal["on_event", "on_tokens"]
Progress = Literal["unused", "in_runs", "every_step"]

#: Eviction key of requests that only go if memory runs out for running ones, before those at -infinity.
LAST_RESORT = -sys.float_info.max


class Costs(Protocol):
    """Seconds of the engine's time, as measured (`engine.step_costs.StepCosts`)."""

    @property
    def is_measured(self) -> bool:
        """Whether they may be relied on; where not, nothing was measured yet, and they are those of a typical engine."""
        ...

    @property
    def step_s(self) -> float:
        """Of a step that only generates tokens."""
        ...

    def prefill_s(self, num_tokens: float) -> float:
        """To process prompt tokens."""
        ...

    def decode_s(self, num_tokens: float) -> float:
        """For output tokens of one request among others."""
        ...

    def reload_s(self, num_tokens: float) -> float:
        """To copy tokens from host memory into the KV cache."""
        ...


class EngineView(Protocol):
    """What a policy may read of the engine beside the states of requests.

    Attributes:
        capacity_tokens: Tokens that the KV cache has memory for.
        step_tokens: Tokens that fit into one step of the engine.
        has_host_tier: Whether contexts that were evicted are copied back from host memory, and not computed again.
        evicts_by_policy: Whether it evicts unused blocks in the order of `Policy.retention_key`; False: those used least
            recently first, as engines do behind a proxy.
        costs: Measured costs of work; of the policies with "costs" in `inputs`, else those of a typical engine.
    """

    @property
    def capacity_tokens(self) -> int: ...

    @property
    def step_tokens(self) -> int: ...

    @property
    def has_host_tier(self) -> bool: ...

    @property
    def evicts_by_policy(self) -> bool: ...

    @property
    def costs(self) -> Costs: ...

    def resident_tokens(self, session: str) -> int:
        """Tokens of the context of a session, as of its last request, that are in the KV cache; 0 if it is unknown."""
        ...


class Policy(ABC):
    """Orders the requests; the smallest key is served first, ties by arrival.

    A policy is a keyword-only slots dataclass whose fields are the parameters of its paper; values outside
    their range raise InputError. Its key is defined for waiting and for running requests. All hooks do nothing
    by default. If a hook changes keys of other requests than its own, `take_changed` must return them. The
    defaults of the attributes are correct for every policy; more specific values make scheduling faster.

    Attributes:
        key_changes: When the key of a waiting request may change. "never": only by events of the request itself (arrival,
            prediction, preemption); "on_event": also when `on_pressure` (all) or `take_changed` (some) report it;
            "with_time": with every step. The queue is a heap for the first two and is sorted in every step for the last.
        preemptive: A waiting request may displace a running one (see `may_preempt`).
        evicts_by_key: When memory runs out, the running request of the largest `eviction_key` is preempted, as under
            vLLM's priority scheduling. False: the one admitted last, as under vLLM's fcfs. Default: `preemptive`.
        running_keys: When the key or the eviction key of a running request may change. "on_event": only with a
            prediction or when `take_changed` returns it, so that victims come from a heap; "on_tokens":
            possibly in every step, so that all running requests are compared.
        progress: Use of the progress of running requests. "unused": only in their own events (admission, preemption,
            end), without `on_tokens` and `on_step`, so that decoding requests may be advanced in lockstep; "in_runs":
            identical steps may be completed in one call of the hooks (of `on_steps` if it needs each duration), unless a
            waiting request may displace a running one; "every_step": its decisions depend on single steps or the time.
        needs_queue: The order of waiting requests depends on measurements of ended ones. It cannot be used if
            the engine gets each key only once; a proxy counts output tokens for it.
        inputs: Inputs of the key: "length", "urgency", "bucket", "rank", "point" (predictions), "priority",
            "tier", "tenant", "slo", "session" (fields of the request), "cached" (what the prefix cache has of a waiting
            request, looked up before all keys are recomputed), "costs" (of the engine, measured).
        protects_running: The eviction keys of running requests are below the keys of all waiting ones, so that none is evicted
            for one that waits.
        orders_retention: Unused blocks are evicted in the order of `retention_key`. False: least recently used first.
    """

    __slots__ = ()

    key_changes: ClassVar[KeyChanges] = "with_time"
    preemptive: ClassVar[bool] = False
    evicts_by_key: ClassVar[bool] = False
    running_keys: ClassVar[RunningKeys] = "on_tokens"
    progress: ClassVar[Progress] = "every_step"
    needs_queue: ClassVar[bool] = False
    inputs: ClassVar[frozenset[str]] = frozenset()
    protects_running: ClassVar[bool] = False
    orders_retention: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        implemented = cls.on_tokens is not Policy.on_tokens or cls.on_step is not Policy.on_step
        if cls.progress == "unused" and implemented:
            raise TypeError(f'{cls.__name__} implements on_tokens or on_step; its progress is not "unused"')
        if "preemptive" in cls.__dict__ and "evicts_by_key" not in cls.__dict__:
            cls.evicts_by_key = cls.preemptive
        if cls.preemptive and not cls.evicts_by_key:
            raise TypeError(f"{cls.__name__} is preemptive, so it evicts by key")

    def reads(self, name: str) -> bool:
        """Whether it uses one of the inputs (see `inputs`) with its parameters."""
        return name in self.inputs

    @property
    def reorders_next(self) -> bool:
        """Whether the order may change before the next step because of events in this one, such as an admission."""
        return False

    @property
    def reserves_memory(self) -> bool:
        """Whether it determines the KV memory of admitted requests, which engines usually allocate themselves."""
        return type(self).admission_tokens is not Policy.admission_tokens

    @abstractmethod
    def key(self, state: RequestState, now: float) -> float:
        """Sort key; the smallest is served first."""

    def eviction_key(self, state: RequestState, now: float) -> float:
        """Sort key of running requests; the largest is evicted first, the latest arrival of several. -inf: never evicted
        for a waiting request. Used if `evicts_by_key`.

        If memory runs out for the running requests themselves, requests at -inf may be evicted as well; those at
        `LAST_RESORT` before them. At `LAST_RESORT`, `may_preempt` must be false.
        """
        return self.key(state, now)

    def may_preempt(self, running: RequestState, waiting: RequestState, now: float) -> bool:
        """Whether the waiting request may displace the running one.

        Called with the first waiting request and the running one of the largest `eviction_key`, when no slot or
        no memory is free. By default a preemptive policy allows it if the waiting request has the smaller key.
        """
        return self.preemptive and self.key(waiting, now) < self.key(running, now)

    def admission_tokens(self, state: RequestState) -> int:
        """Tokens of KV cache to reserve when the request is admitted; by default the tokens to process.

        The caller reserves at least these, and at most prompt_tokens + max_tokens.
        """
        return state.known_tokens

    def bind(self, engine: EngineView) -> None:  # noqa: B027
        """Called before all other calls, and again when the engine's size becomes known or changes."""

    def may_admit(self, state: RequestState, now: float) -> bool:
        """Whether a waiting request may be admitted while others run. If not, no request after it in the order is either.

        Its result may only change with the events of requests, not with time alone.
        """
        return True

    def retention_key(self, session: str) -> float:
        """Value of keeping the unused blocks of a session in the KV cache; those of the smallest are evicted first. The
        session is empty for requests without one. Used if `orders_retention`; as `may_admit` it changes with events only,
        but not with an arrival, which may come before the evictions of the step it falls into."""
        return 0.0

    def on_pressure(self, num_waiting: int, max_num_seqs: int) -> bool:
        """Called before each step with the length of the queue; True if all keys must be recomputed."""
        return False

    def take_changed(self, now: float) -> Collection[RequestState]:
        """Requests whose keys have changed since the last call without an own event; their keys are recomputed.

        Called before each step. The requests may be waiting or running; those that have left are ignored.
        """
        return ()

    def on_arrival(self, state: RequestState, now: float) -> None:  # noqa: B027
        """Called when the request has arrived, before its first key is computed."""

    def on_prediction(self, state: RequestState) -> None:  # noqa: B027
        """Called when a prediction of the request has arrived, before its key is recomputed."""

    def on_admit(self, state: RequestState, now: float) -> None:  # noqa: B027
        """Called when the request has left the waiting queue and runs."""

    def on_tokens(self, state: RequestState, num_tokens: int, now: float) -> None:  # noqa: B027
        """Called when a step has processed `num_tokens` tokens of the request, in either phase.

        `state` is already updated. Called before `on_finish`.
        """

    def on_prefill_end(self, state: RequestState, now: float) -> None:  # noqa: B027
        """Called when a running request has processed its prompt, after `on_tokens` of that step."""

    def on_preempt(self, state: RequestState, now: float) -> None:  # noqa: B027
        """Called when the request was preempted, before its key as a waiting request is computed."""

    def on_step(self, now: float, step_s: float) -> None:  # noqa: B027
        """Called at the end of a step that took `step_s` seconds, after `on_tokens` of its requests.

        For several steps completed at once it is called once, with their mean, unless `on_steps` is implemented.
        """

    def on_steps(self, now: float, durations_s: Sequence[float]) -> None:
        """Called at the end of several steps completed at once, with the duration of each. Must have the effect of
        `on_step` and `on_pressure` after each step; the next `on_pressure` returns whether keys must be recomputed."""
        self.on_step(now, sum(durations_s) / len(durations_s))

    def on_finish(self, state: RequestState) -> None:  # noqa: B027
        """Called when the request has finished or was aborted."""

    def on_session_end(self, session: str, now: float) -> None:  # noqa: B027
        """Called when a session without live requests will send none here any more: it ended, or moved to another replica."""
