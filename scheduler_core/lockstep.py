"""Running requests that decode in lockstep: a step of all of them costs the same, however many they are."""

from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from scheduler_core.kv_cache import KVCache
from scheduler_core.request import RequestState


@dataclass(slots=True, eq=False)
class _Member:
    """The group's record of one request; a request that leaves and comes back is another member.

    Attributes:
        rank: Its number in the order of admission.
        since: Number of the step up to which its state is in sync.
        due: Number of the step for which it takes its next block; in sync like the state.
        periodic: It takes a block at every border of its own from now on; False: not before `due`.
    """

    state: RequestState
    rank: int
    since: int
    due: int
    periodic: bool


class LockstepGroup:
    """Requests that all generate one token in every step that they take part in, and take such steps only together.

    Only for a policy with `progress = "unused"` under a batch former with `lockstep`. Steps are counted once for all; a
    request's state holds its progress as of its last `sync`. Blocks are taken for all at once too: a request at the border
    of a block needs another one at every `block_tokens`-th step from then on, so it is enough to count the requests by the
    step of their next border. `num_steps` steps were taken by all, and the blocks for all steps of a number below
    `allocated_until` are taken.
    """

    def __init__(self, kv: KVCache) -> None:
        self._kv = kv
        self._size = kv.block_tokens
        #: Steps that the members have taken together.
        self.num_steps = 0
        #: Sum of the tokens that the members have in the cache.
        self.context_tokens = 0
        self.allocated_until = 0
        self._last_s = 0.0
        self._members: dict[str, _Member] = {}
        #: By step number modulo the size of a block: periodic members that take a block there.
        self._borders = [0] * self._size
        self._num_periodic = 0
        #: (due, running number, member) of those with more than a block to spare.
        self._later: list[tuple[int, int, _Member]] = []
        #: (number of the step after which max_tokens are there, running number, member).
        self._ends: list[tuple[int, int, _Member]] = []
        self._pushes = 0
        self._is_ordered = True
        self._in_sync = True
        self._states: list[RequestState] | None = []
        self._ids: tuple[str, ...] | None = ()

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._members

    def member(self, request_id: str) -> RequestState | None:
        """The request, not in sync; None if it is no member."""
        member = self._members.get(request_id)
        return None if member is None else member.state

    def states(self) -> list[RequestState]:
        """The members in order of admission, not in sync; not to be changed."""
        if self._states is None:
            self._sort()
            self._states = [member.state for member in self._members.values()]
        return self._states

    def ids(self) -> tuple[str, ...]:
        """Their ids, in the same order."""
        if self._ids is None:
            self._sort()
            self._ids = tuple(self._members)
        return self._ids

    def _sort(self) -> None:
        if not self._is_ordered:
            self._members = dict(sorted(self._members.items(), key=lambda item: item[1].rank))
            self._is_ordered = True

    def join(self, state: RequestState, rank: int) -> None:
        """A running request, which has computed all tokens before its next one, decodes from the members' next step on; `rank`
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
        left = state.request.max_tokens - state.num_output_tokens
        heappush(self._ends, (now + left, pushes, member))
        if len(self._ends) > 2 * len(members) + 64:
            self._ends = [entry for entry in self._ends if self._is_here(entry[2])]
            heapify(self._ends)
        self.context_tokens += state.num_computed_tokens
        self._states = self._ids = None

    def leave(self, state: RequestState) -> None:
        """A member stops to decode; its state is in sync then."""
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
        """Whether an entry of `_later` is the member's own and its latest."""
        return not member.periodic and member.due == due and self._is_here(member)

    def allocate_step(self, max_blocks: int) -> bool:
        """Takes the blocks for the next step; False (and nothing taken) if they are more than `max_blocks`."""
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
        """Blocks that the members have to take for all steps of a smaller number."""
        start, size, borders = self.allocated_until, self._size, self._borders
        if step <= start:
            return 0
        rounds, rest = divmod(step - start, size)
        blocks = rounds * self._num_periodic if rounds else 0
        first = start % size
        if rest == 1:
            blocks += borders[first]
        elif first + rest <= size:
            blocks += sum(borders[first : first + rest])
        else:
            blocks += sum(borders[first:]) + sum(borders[: first + rest - size])
        if self._later and self._later[0][0] < step:
            for due, _, member in self._later:
                if due < step and self._is_next(due, member):
                    blocks += (step - 1 - due) // size + 1
        return blocks

    def take_until(self, step: int) -> None:
        """Takes those blocks; they must be there."""
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
        """Every member has taken the block for its next step individually."""
        self.allocated_until = self.num_steps + 1

    def on_grow(self, state: RequestState) -> None:
        """A member in sync has taken blocks individually."""
        member = self._members[state.request_id]
        due = self.num_steps + state.kv_tokens - state.num_computed_tokens
        if member.periodic:
            assert (due - member.due) % self._size == 0
            if due - self.allocated_until >= self._size:  # else the border stays what it is
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
        """All members have taken so many steps, the last of which ended now; returns those that have generated max_tokens, in
        no particular order."""
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
        """Steps until the first member has max_tokens; `limit` if that is less."""
        ends = self._ends
        while ends and not self._is_here(ends[0][2]):
            heappop(ends)
        return min(limit, ends[0][0] - self.num_steps) if ends else limit

    def in_order(self, states: Iterable[RequestState]) -> list[RequestState]:
        """Members in order of admission."""
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
        steps = self.num_steps - member.since
        if steps:
            member.since = self.num_steps
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
        """Checks the sums, O(members); AssertionError names the one that does not hold."""
        self.sync_all()
        decoding = [s.request_id for s in running if s.num_computed_tokens >= s.prefill_target_tokens]
        assert list(self.ids()) == decoding, "the group is not the requests that decode"
        members = list(self._members.values())
        assert self.context_tokens == sum(member.state.num_computed_tokens for member in members)
        assert self._num_periodic == sum(self._borders) == sum(member.periodic for member in members)
        for member in members:
            assert member.due == self.num_steps + member.state.kv_tokens - member.state.num_computed_tokens
            assert member.due >= self.allocated_until
            assert not member.periodic or member.due - self.allocated_until < self._size
