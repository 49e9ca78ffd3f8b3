"""Clients that do not wait for ever: they give up, and send their requests again."""

import math
from dataclasses import dataclass
from heapq import heappop, heappush

from scheduler_core.errors import InputError
from scheduler_core.ranges import INTEGERS, POSITIVE, check_ranges
from scheduler_core.simulator.trace import MAX_TIME_S


@dataclass(frozen=True, kw_only=True)
class ClientPlan:
    """How long clients wait, and what they do then; the engine aborts the request at that time, with all its work."""

    timeout_s: float | None = None
    """Seconds without a token after which a client gives up: from sending to the first token, and between two. A token that
    comes at that very time is in time. Unset: they wait."""
    max_retries: int = 0
    """How often a client sends a request again after giving up; then the request has failed."""
    retry_after_s: float = 0.0
    """Seconds from giving up to sending again."""

    def __post_init__(self) -> None:
        check_ranges(
            self,
            "clients.",
            timeout_s=(POSITIVE, MAX_TIME_S),
            max_retries=(0, INTEGERS),
            retry_after_s=(0, MAX_TIME_S),
        )
        for name in ("max_retries", "retry_after_s"):
            if self.timeout_s is None and getattr(self, name):
                raise InputError(f"clients.{name}", getattr(self, name), "0 without timeout_s")


#: Reason for which a request has failed, in front of the number of retries.
GAVE_UP = "its client gave up"
#: Clients that wait until the end.
PATIENT = ClientPlan()


class WaitingClients:
    """The times at which clients give up, in order.

    They are only known as far as tokens are: `due` returns those that may give up, of which some have got another token.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        #: By request: the time in the heap that counts.
        self._due_s: dict[str, float] = {}
        self._heap: list[tuple[float, int, str]] = []
        self._num_pushed = 0

    @property
    def next_s(self) -> float:
        """Time at which the next client may give up; infinite without any."""
        heap, due_s = self._heap, self._due_s
        while heap and due_s.get(heap[0][2]) != heap[0][0]:
            heappop(heap)
        return heap[0][0] if heap else math.inf

    def wait(self, request_id: str, since_s: float, now: float) -> None:
        """Called when a client has sent a request, or got a token, at `since_s`."""
        due_s = max(now, since_s + self.timeout_s)
        self._due_s[request_id] = due_s
        self._num_pushed += 1
        heappush(self._heap, (due_s, self._num_pushed, request_id))

    def leave(self, request_id: str) -> None:
        """Called when a request has ended, or a client has given up."""
        self._due_s.pop(request_id, None)

    def due(self, now: float) -> list[str]:
        """Removes and returns the requests whose time has come."""
        names = []
        while self.next_s <= now:
            name = heappop(self._heap)[2]
            del self._due_s[name]
            names.append(name)
        return names
