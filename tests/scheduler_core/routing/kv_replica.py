"""A replica for the tests of migration: real block accounting, and requests that generate when they are told to."""

from __future__ import annotations

from scheduler_core.kv_cache import KVCache
from scheduler_core.request import Request, RequestState, Status
from scheduler_core.routing.migration import Holding


class KvReplica:
    """Waiting, prefilling and generating requests on a KV cache; implements `MigrationPort`."""

    def __init__(self, num_blocks: int, block_tokens: int = 4, seats: int = 4) -> None:
        self.kv = KVCache(num_blocks, block_tokens, 0.0)
        self.seats = seats
        self.waiting: dict[str, RequestState] = {}
        self.running: dict[str, RequestState] = {}
        self.reserved: set[str] = set()

    @property
    def kv_block_tokens(self) -> int:
        return self.kv.block_tokens

    def add(self, name: str, prompt: int) -> None:
        asked = Request(request_id=name, arrival_s=0.0, prompt_tokens=prompt, max_tokens=1000)
        self.waiting[name] = RequestState(asked, order=0)

    def admit(self, name: str, *, prefilled: bool) -> bool:
        state = self.waiting[name]
        if len(self.running) + len(self.reserved) >= self.seats:
            return False
        if not self.kv.admit(name, state.known_tokens, alone=True):
            return False
        self.running[name] = self.waiting.pop(name)
        state.status, state.prefill_target_tokens = Status.RUNNING, state.known_tokens
        state.num_computed_tokens = state.known_tokens if prefilled else 0
        return True

    def generate(self, name: str, tokens: int) -> bool:
        """More tokens; False if there is no memory for them."""
        state = self.running[name]
        if not self.kv.grow(name, state.num_computed_tokens + tokens):
            return False
        state.num_computed_tokens += tokens
        state.num_output_tokens += tokens
        return True

    def preempt(self, name: str) -> None:
        state = self.running.pop(name)
        self.kv.release(name)
        state.status, state.num_computed_tokens = Status.WAITING, 0
        self.waiting[name] = state

    def drop(self, name: str) -> None:
        """Finished or given up."""
        if self.waiting.pop(name, None) is None:
            del self.running[name]
            self.kv.release(name)

    def holding(self, request_id: str) -> Holding:
        if request_id in self.waiting:
            return Holding.WAITING
        state = self.running.get(request_id)
        if state is None:
            return Holding.NOTHING
        decoding = state.num_computed_tokens >= state.prefill_target_tokens
        return Holding.DECODING if decoding else Holding.PREFILLING

    def cached_tokens(self, request_id: str) -> int:
        return self.running[request_id].num_computed_tokens

    def detach(self, request_id: str, now: float) -> RequestState:
        if request_id in self.waiting:
            return self.waiting.pop(request_id)
        self.reserved.add(request_id)
        return self.running.pop(request_id)

    def attach(self, state: RequestState, now: float) -> None:
        name = state.request_id
        if name in self.reserved:
            self.reserved.remove(name)
            assert self.kv.held_by(name) * self.kv.block_tokens >= state.num_computed_tokens
            self.running[name] = state
        else:
            self.waiting[name] = state

    def reserve(self, request_id: str, num_blocks: int, now: float) -> bool:
        if request_id not in self.reserved:
            if len(self.running) + len(self.reserved) >= self.seats:
                return False
            if not self.kv.admit(request_id, num_blocks * self.kv.block_tokens, alone=True):
                return False
            self.reserved.add(request_id)
            return True
        held = self.kv.held_by(request_id)
        return self.kv.grow(request_id, (held + num_blocks) * self.kv.block_tokens)

    def unreserve(self, request_id: str, now: float) -> None:
        if request_id in self.reserved:
            self.reserved.remove(request_id)
            self.kv.release(request_id)

    def validate(self) -> None:
        assert not set(self.waiting) & (set(self.running) | self.reserved)
        assert not set(self.running) & self.reserved
        assert len(self.running) + len(self.reserved) <= self.seats
        self.kv.validate(set(self.running) | self.reserved, set())
