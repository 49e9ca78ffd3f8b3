"""The heap with lazy deletion against a plain sorted list."""

from __future__ import annotations

from typing import ClassVar

from hypothesis import given
from hypothesis import strategies as st

from scheduler_core.policies.base import KeyChanges, Policy
from scheduler_core.queues import WaitingQueue
from scheduler_core.request import RequestState
from tests.scheduler_core.helpers import request


class Table(Policy):
    """Keys are looked up."""

    key_changes: ClassVar[KeyChanges] = "on_event"

    def __init__(self) -> None:
        self.keys: dict[str, float] = {}

    def key(self, state: RequestState, now: float) -> float:
        return self.keys[state.request_id]


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["push", "remove", "rekey"]), st.integers(0, 7), st.integers(-3, 3)),
    max_size=60,
)


@given(OPERATIONS)
def test_the_head_is_always_the_smallest_live_key(operations: list[tuple[str, int, int]]) -> None:
    policy = Table()
    queue = WaitingQueue(policy)
    states = [RequestState(request(f"r{i}", arrival_s=float(i % 3)), order=i) for i in range(8)]
    live: set[int] = set()
    for name, index, value in operations:
        if name == "push":
            policy.keys[f"r{index}"] = value
            queue.push(states[index], 0.0)
            live.add(index)
        elif name == "remove" and index in live:
            queue.remove(states[index])
            live.discard(index)
        elif name == "rekey":
            policy.keys = {key: old * value for key, old in policy.keys.items()}
            queue.rekey_all(0.0)
        queue.validate()
        queue.validate_keys(0.0)
        assert len(queue) == len(live)
        assert {state.order for state in queue} == live
        expected = min(
            (states[i] for i in live),
            key=lambda s: (policy.keys[s.request_id], s.request.arrival_s, s.order),
            default=None,
        )
        assert queue.peek() is expected
