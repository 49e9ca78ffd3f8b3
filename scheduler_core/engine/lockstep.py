"""Running requests that decode in lockstep: advancing them all costs O(1) per step, not O(requests)."""

from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from scheduler_core.engine.kv_cache import KVCache
from scheduler_core.request import RequestState


@dataclass(slots=True, eq=False)
class _Member:
    """The group's record of one request; a request that leaves and joins again is a new member.

    Attributes:
        rank: Its number in the order of admission.
        synced_step: Number of the step up to which its state is in sync.
        due: Number of the step for which it takes its next block; as of the last sync.
        periodic: Whether it takes a block every `block_tokens` steps from now on; False: not before `due`.
    """

    state: RequestState
    rank: int
    synced_step: int
    due: int
    periodic: bool


class LockstepGroup:
    """Requests that decode in the same steps and generate one token in each of them.

    Only for a policy with `progress = "unused"` under a batch former with `lockstep`. Steps are counted once
    for all members; the state of a request holds its progress as of its last `sync`. Blocks are also taken
    for all at once: a request needs a new block at every `block_tokens`-th step, so requests are counted by
    the step of their next block. `num_steps` is the number of steps taken so far. Blocks have been taken for
    all steps with a number below `allocated_until`.
    """

    def __init__(self, kv: KVCache) -> None:
        self._kv = kv
        self._size = kv.block_tokens
        #: Decode steps taken so far.
        self.num_steps = 0
        #: Sum of the tokens that the members have in the cache.
        self.context_tokens = 0
        self.allocated_until = 0
        self._last_s = 0.0
        self._members: dict[str, _Member] = {}
        #: Number of periodic members that take a block, by step number modulo the size of a block.
        self._borders = [0] * self._size
        self._num_periodic = 0
        #: Heap of (due, running number, member) of the members with more than one free block.
        self._later: list[tuple[int, int, _Member]] = []
        #: Heap of (number of the step after which max_tokens are reached, running number, member).
        self._ends: list[tuple[int, int, _Member]] = []
        self._pushes = 0
        self._is_ordered = True
        self._in_sync = True
        self._states: list[RequestState] | None = []
        self._ids: tuple[str, ...] | None = ()

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._members

    def member(self, request_id: str) -> RequestState | None:
        """The state of a member, not in sync; None for other requests."""
        member = self._members.get(request_id)
        return None if member is None else member.state

    def states(self) -> list[RequestState]:
        """The states of the members in order of admission, not in sync. The list must not be changed."""
        if self._states is None:
            self._sort()
            self._states = [member.state for member in self._members.values()]
        return self._states

    def ids(self) -> tuple[str, ...]:
        """Ids of the members in order of admission."""
        if self._ids is None:
            self._sort()
            self._ids = tuple(self._members)
        return self._ids

    def _sort(self) -> None:
        if not self._is_ordered:
            self._members = dict(sorted(self._members.items(), key=lambda item: item[1].rank))
            self._is_ordered = True

    def join(self, state: RequestState, rank: int) -> None:
        """Adds a running request whose prefill is complete; it decodes from the group's next step on. `rank`
        is its number in the order of admission."""
        now = self.num_steps
        spare = state.kv_tokens - state.num_computed_tokens
        periodic = spare < self._size
        member = _Member(state, rank, now, now + spare, periodic)
        assert member.due >= self.allocated_until, "a request joins without memory for its first step"
        members = self._members
        if members and rank < next(reversed(members.values())).rank:
            self._is_ordered = False
        members[state.request_id] = member
        self._pushes = pushes = self._pushes + 1
        if periodic:
            self._borders[member.due % self._size] += 1
            self._num_periodic += 1
        else:
            heappush(self._later, (member.due, pushes, member))
        remaining = state.request.max_tokens - state.num_output_tokens
        heappush(self._ends, (now + remaining, pushes, member))
        if len(self._ends) > 2 * len(members) + 64:
            self._ends = [entry for entry in self._ends if self._is_here(entry[2])]
            heapify(self._ends)
        self.context_tokens += state.num_computed_tokens
        self._states = self._ids = None

    def leave(self, state: RequestState) -> None:
        """Removes a member and brings its state in sync."""
        member = self._members[state.request_id]
        self._sync(member)
        del self._members[state.request_id]
        if member.periodic:
            self._borders[member.due % self._size] -= 1
            self._num_periodic -= 1
        self.context_tokens -= state.num_computed_tokens
        self._states = self._ids = None

    def _is_here(self, member: _Member) -> bool:
        return self._members.get(member.state.request_id) is member

    def _is_next(self, due: int, member: _Member) -> bool:
        """Whether an entry of `_later` is still valid: the latest one of a current member."""
        return not member.periodic and member.due == due and self._is_here(member)

    def allocate_step(self, max_blocks: int) -> bool:
        """Takes the blocks for the next step; False, without taking any, if it needs more than `max_blocks`."""
        step = self.num_steps
        if self.allocated_until > step:
            return True
        if self._later and self._later[0][0] <= step:
            if self.blocks_until(step + 1) > max_blocks:
                return False
            self.take_until(step + 1)
            return True
        blocks = self._borders[step % self._size]
        if blocks:
            if blocks > max_blocks:
                return False
            self._kv.take(blocks)
            self._in_sync = False
        self.allocated_until = step + 1
        return True

    def blocks_until(self, step: int) -> int:
        """Blocks to take for all steps with a number below `step`."""
        start, size, borders = self.allocated_until, self._size, self._borders
        if step <= start:
            return 0
        rounds, extra = divmod(step - start, size)
        blocks = rounds * self._num_periodic if rounds else 0
        first = start % size
        if extra == 1:
            blocks += borders[first]
        elif first + extra <= size:
            blocks += sum(borders[first : first + extra])
        else:
            blocks += sum(borders[first:]) + sum(borders[: first + extra - size])
        if self._later and self._later[0][0] < step:
            for due, _, member in self._later:
                if due < step and self._is_next(due, member):
                    blocks += (step - 1 - due) // size + 1
        return blocks

    def take_until(self, step: int) -> None:
        """Takes the blocks of `blocks_until(step)`, which must be free."""
        if step <= self.allocated_until:
            return
        blocks = self.blocks_until(step)
        if blocks:
            self._kv.take(blocks)
            self._in_sync = False
        later = self._later
        while later and later[0][0] < step:
            due, _, member = heappop(later)
            if self._is_next(due, member):
                member.periodic = True
                self._borders[due % self._size] += 1
                self._num_periodic += 1
        self.allocated_until = step

    def mark_allocated(self) -> None:
        """Called after every member has taken the block for its next step individually."""
        self.allocated_until = self.num_steps + 1

    def on_grow(self, state: RequestState) -> None:
        """Called after a member in sync has taken blocks individually."""
        member = self._members[state.request_id]
        due = self.num_steps + state.kv_tokens - state.num_computed_tokens
        if member.periodic:
            assert (due - member.due) % self._size == 0
            if due - self.allocated_until >= self._size:  # else its next block is still due in the same step
                member.periodic = False
                self._borders[due % self._size] -= 1
                self._num_periodic -= 1
                self._pushes += 1
                heappush(self._later, (due, self._pushes, member))
        else:
            self._pushes += 1
            heappush(self._later, (due, self._pushes, member))
        member.due = due

    def advance(self, num_steps: int, now: float) -> list[RequestState]:
        """Advances all members by `num_steps` steps, the last of which ended at `now`. Returns those that
        have generated max_tokens, in no particular order."""
        self.num_steps = reached = self.num_steps + num_steps
        if reached > self.allocated_until:
            self.take_until(reached)
        self.context_tokens += num_steps * len(self._members)
        self._last_s = now
        self._in_sync = False
        ended: list[RequestState] = []
        ends = self._ends
        while ends and ends[0][0] <= reached:
            member = heappop(ends)[2]
            if self._is_here(member):
                ended.append(member.state)
        return ended

    def steps_to_first_end(self, limit: int) -> int:
        """Steps until the first member reaches max_tokens, at most `limit`."""
        ends = self._ends
        while ends and not self._is_here(ends[0][2]):
            heappop(ends)
        return min(limit, ends[0][0] - self.num_steps) if ends else limit

    def in_order(self, states: Iterable[RequestState]) -> list[RequestState]:
        """`states`, which are members, in order of admission."""
        return sorted(states, key=lambda state: self._members[state.request_id].rank)

    def sync(self, request_id: str) -> None:
        """Brings the state of a request up to date, if it is a member."""
        member = self._members.get(request_id)
        if member is not None:
            self._sync(member)

    def sync_all(self) -> None:
        """Brings the states of all members up to date."""
        if not self._in_sync:
            for member in self._members.values():
                self._sync(member)
            self._in_sync = True

    def _sync(self, member: _Member) -> None:
        state = member.state
        steps = self.num_steps - member.synced_step
        if steps:
            member.synced_step = self.num_steps
            state.num_computed_tokens += steps
            state.num_output_tokens += steps
            state.last_token_s = state.last_scheduled_s = self._last_s
        past = self.allocated_until - member.due
        if past > 0:
            blocks = (past - 1) // self._size + 1
            self._kv.credit(state.request_id, blocks)
            state.kv_tokens += blocks * self._size
            member.due += blocks * self._size

    def validate(self, running: Iterable[RequestState]) -> None:
        """Checks the invariants, O(members). AssertionError if one is violated."""
        self.sync_all()
        decoding = [s.request_id for s in running if s.num_computed_tokens >= s.prefill_target_tokens]
        assert list(self.ids()) == decoding, "the members differ from the decoding requests"
        members = list(self._members.values())
        assert self.context_tokens == sum(member.state.num_computed_tokens for member in members)
        assert self._num_periodic == sum(self._borders) == sum(member.periodic for member in members)
        for member in members:
            assert member.due == self.num_steps + member.state.kv_tokens - member.state.num_computed_tokens
            assert member.due >= self.allocated_until
            assert not member.periodic or member.due - self.allocated_until < self._size
