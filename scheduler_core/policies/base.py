"""What a policy is: an order over requests, and hooks for the events it may learn from."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import ClassVar, Literal

from scheduler_core.request import RequestState

KeyChanges = Literal["never", "on_event", "with_time"]
RunningKeys = Literal["on_event", "on_tokens"]
Progress = Literal["unused", "in_runs", "every_step"]


class Policy(ABC):
    """Orders the requests; the smallest key is served first, ties by arrival.

    A policy is a keyword-only slots dataclass whose fields are the parameters of its paper; values outside their range raise
    InputError. Its key is defined for waiting and for running requests. All hooks do nothing by default; a hook that changes
    keys of requests other than the one it is called with names them in `take_changed`. The defaults of the attributes are
    correct for every policy; a policy that declares more is scheduled faster.

    Attributes:
        key_changes: When the key of a waiting request becomes wrong. "never": only the request's own events (arrival,
            prediction, preemption) change it; "on_event": also when `on_pressure` (all) or `take_changed` (some) report it;
            "with_time": with every step. The queue is a heap for the first two and is sorted at every step for the last.
        preemptive: A waiting request may displace a running one (see `may_preempt`).
        running_keys: When the eviction key of a running request becomes wrong. "on_event": only with a prediction or
            when `take_changed` names it, so that victims come from a heap; "on_tokens": possibly with every step, so
            that all running requests are compared.
        progress: What it uses of the progress of running requests. "unused": nothing but in their own events (admission,
            preemption, end), without `on_tokens` and `on_step`, so that requests that decode may be advanced in lockstep;
            "in_runs": identical steps may be taken at once, with one call of the hooks (of `on_steps` if it needs the
            duration of each), unless a request waits that the policy may put before a running one; "every_step": its
            decisions depend on single steps or the time.
        needs_queue: It moves waiting requests with time, by what it measures of those that have ended: it cannot be used
            where the engine gets each key once, and a proxy counts output tokens for it.
        inputs: What it uses: of "length", "urgency", "bucket", "rank", "point" (predictions), "priority", "tier", "tenant",
            "slo" (fields of the request).
    """

    __slots__ = ()

    key_changes: ClassVar[KeyChanges] = "with_time"
    preemptive: ClassVar[bool] = False
    running_keys: ClassVar[RunningKeys] = "on_tokens"
    progress: ClassVar[Progress] = "every_step"
    needs_queue: ClassVar[bool] = False
    inputs: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls) -> None:
        implemented = cls.on_tokens is not Policy.on_tokens or cls.on_step is not Policy.on_step
        if cls.progress == "unused" and implemented:
            raise TypeError(f'{cls.__name__} implements on_tokens or on_step; its progress is not "unused"')

    @property
    def reserves_memory(self) -> bool:
        """Whether it decides how much KV cache a request gets when admitted: no policy for an engine that does that itself."""
        return type(self).admission_tokens is not Policy.admission_tokens

    @abstractmethod
    def key(self, state: RequestState, now: float) -> float:
        """Smallest is served first."""

    def eviction_key(self, state: RequestState, now: float) -> float:
        """Largest among the running requests is evicted first; -inf: not to be evicted for a waiting request.

        Where memory runs out for the running requests themselves one must go, also one at -inf.
        """
        return self.key(state, now)

    def may_preempt(self, running: RequestState, waiting: RequestState, now: float) -> bool:
        """Whether the waiting request may displace the running one.

        Called with the first waiting request and the running one of the largest `eviction_key`, when no slot or no
        memory is free. By default a preemptive policy displaces if that makes the order right.
        """
        return self.preemptive and self.key(waiting, now) < self.key(running, now)

    def admission_tokens(self, state: RequestState) -> int:
        """Tokens of KV cache to reserve when the request is admitted; by default what it has to process now.

        Less than that is never reserved, and more than prompt and max_tokens is never needed.
        """
        return state.known_tokens

    def on_pressure(self, num_waiting: int, max_num_seqs: int) -> bool:
        """Called before each step with the queue's length; True if all keys must be recomputed."""
        return False

    def take_changed(self, now: float) -> Collection[RequestState]:
        """Requests whose keys have changed since the last call without an event of their own; they get new keys.

        Called before each step. Waiting and running requests may be named; those gone meanwhile are ignored.
        """
        return ()

    def on_arrival(self, state: RequestState, now: float) -> None:  # noqa: B027
        """The request has arrived; called before its first key is computed."""

    def on_prediction(self, state: RequestState) -> None:  # noqa: B027
        """A prediction of the request has come; called before its key is recomputed."""

    def on_admit(self, state: RequestState, now: float) -> None:  # noqa: B027
        """The request has left the waiting queue and runs."""

    def on_tokens(self, state: RequestState, num_tokens: int, now: float) -> None:  # noqa: B027
        """A step has processed `num_tokens` tokens of the request, in either phase, and all is counted.

        Called before the request finishes, if it does.
        """

    def on_preempt(self, state: RequestState, now: float) -> None:  # noqa: B027
        """The request was preempted; called before its key among the waiting is computed."""

    def on_step(self, now: float, step_s: float) -> None:  # noqa: B027
        """A step has ended after `step_s` seconds; called after `on_tokens` of its requests.

        When several steps were taken at once it is called once, with their mean, unless `on_steps` is implemented.
        """

    def on_steps(self, now: float, durations_s: Sequence[float]) -> None:
        """Several steps taken at once have ended, each with its own duration; what `on_step` and `on_pressure` would have
        done after each is done here. The next `on_pressure` says whether keys must be recomputed."""
        self.on_step(now, sum(durations_s) / len(durations_s))

    def on_finish(self, state: RequestState) -> None:  # noqa: B027
        """The request has finished or was aborted."""
