"""Session affinity, by tailcast: a session stays on the replica that has its context, and may move once that is evicted."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from scheduler_core.routing.base import Router, RoutingRequest
from scheduler_core.routing.snapshot import ReplicaSnapshot


@dataclass(slots=True)
class _Session:
    """A session, or a request without one: its replica, tokens of its last prompt, number of its unfinished requests."""

    replica_id: str
    tokens: int
    num_live: int = 0


@dataclass(kw_only=True, slots=True)
class SessionAffine(Router):
    """The replica of the session, as long as that has half of its context or an unfinished request of it; else the one with the
    least C, then with the fewest requests.

    C(r) = sum of the contexts of the sessions whose replica is r and that have half of their context or a request there

    | symbol | meaning | unit |
    | --- | --- | --- |
    | C | contexts for which memory is needed | tokens |

    So hardly a context is computed twice because of routing, and memory, which limits how many sessions an engine can serve
    without losing contexts, is shared equally. A session whose context is lost has no reason to stay, though a prefix that
    others share, such as a system prompt, is still there.
    """

    sees_tokens: ClassVar[bool] = True

    _sessions: dict[str, _Session] = field(default_factory=dict, init=False, repr=False)
    #: Unfinished request -> its session.
    _requests: dict[str, str] = field(default_factory=dict, init=False, repr=False)

    def choose(self, item: RoutingRequest, replicas: Sequence[ReplicaSnapshot], now: float) -> str:
        eligible = {replica.replica_id: replica for replica in replicas}
        name = _name(item)
        session = self._sessions.get(name)
        replica = None if session is None else eligible.get(session.replica_id)
        if session is not None and replica is not None and _is_there(name, session, replica):
            return session.replica_id
        contexts = dict.fromkeys(eligible, 0)
        for other, session in [*self._sessions.items()]:
            replica = eligible.get(session.replica_id)
            if replica is None:
                continue
            if _is_there(other, session, replica):
                contexts[session.replica_id] += session.tokens
            else:
                del self._sessions[other]
        return min(
            replicas, key=lambda replica: (contexts[replica.replica_id], replica.num_requests)
        ).replica_id

    def on_dispatched(self, item: RoutingRequest, replica_id: str, now: float) -> None:
        name = self._requests[item.request.request_id] = _name(item)
        session = self._sessions.setdefault(name, _Session(replica_id, 0))
        session.replica_id, session.tokens = replica_id, item.request.prompt_tokens
        session.num_live += 1

    def on_finished(self, request_id: str, replica_id: str, now: float) -> None:
        session = self._sessions.get(self._requests.pop(request_id))
        if session is not None:
            session.num_live = max(session.num_live - 1, 0)

    def on_aborted(self, request_id: str, replica_id: str, now: float) -> None:
        self.on_finished(request_id, replica_id, now)

    def on_migrated(self, request_id: str, source: str, destination: str, now: float) -> None:
        session = self._sessions.get(self._requests[request_id])
        if session is not None:
            session.replica_id = destination

    def on_gone(self, replica_id: str, now: float) -> None:
        self._sessions = {
            name: item for name, item in self._sessions.items() if item.replica_id != replica_id
        }


def _is_there(name: str, session: _Session, replica: ReplicaSnapshot) -> bool:
    return session.num_live > 0 or 2 * replica.resident_tokens(name) >= session.tokens > 0


def _name(item: RoutingRequest) -> str:
    return item.request.session or f"\0{item.request.request_id}"
