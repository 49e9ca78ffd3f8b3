"""The prefix cache against a plain list of blocks, and in full simulations."""

import math
import random
from collections.abc import Iterator

import pytest

from scheduler_core.engine.kv_cache import KVCache
from scheduler_core.engine.prefix_cache import Hit, PrefixCache
from scheduler_core.request import RequestState, Segment
from tests.scheduler_core import helpers

BLOCK = 4


def state_of(name: str, content: tuple[Segment, ...], prompt: int, outputs: int = 0) -> RequestState:
    request = helpers.request(name, prompt=prompt, cap=1000, content=content)
    state = RequestState(request, order=0)
    state.num_output_tokens = outputs
    return state


def tokens_of(content: tuple[Segment, ...], prompt: int, num_tokens: int) -> Iterator[tuple[object, ...]]:
    """The first tokens of a prompt and its output, each with its own name, as far as others may share them."""
    covered = sum(segment.num_tokens for segment in content)
    path: tuple[object, ...] = ()
    produced = 0
    for index, (key, length) in enumerate(content):
        path = (*path, key)
        last = index == len(content) - 1
        grows = num_tokens if last and covered >= prompt else produced + length
        place = 0
        while produced < min(grows, num_tokens):
            yield (*path, place)
            place += 1
            produced += 1
        path = (*path, length)


class Blocks:
    """Blocks named by the tokens up to their end; evicted from the ends of streams, smallest value of their sessions first, then
    least recently used."""

    def __init__(self, num_blocks: int, values: dict[str, float]) -> None:
        self.num_blocks = num_blocks
        self.values = values
        self.sessions: dict[tuple[object, ...], str] = {}
        self.cached: dict[tuple[object, ...], int] = {}
        self.users: dict[str, set[tuple[object, ...]]] = {}
        self.private: dict[str, int] = {}
        self.use = 0

    def names(self, state: RequestState, num_tokens: int) -> list[tuple[object, ...]]:
        request = state.request
        tokens = tuple(tokens_of(request.content, request.prompt_tokens, num_tokens))
        return [tokens[:end] for end in range(BLOCK, len(tokens) + 1, BLOCK)]

    def hits(self, state: RequestState) -> list[tuple[object, ...]]:
        found = []
        for name in self.names(state, state.known_tokens - 1):
            if name not in self.cached:
                break
            found.append(name)
        return found

    def pinned(self) -> set[tuple[object, ...]]:
        return set().union(*self.users.values()) if self.users else set()

    def free(self) -> int:
        return self.num_blocks - len(self.pinned()) - sum(self.private.values())

    def make_room(self) -> None:
        while len(self.cached) + sum(self.private.values()) > self.num_blocks:
            inner = {name[: len(name) - BLOCK] for name in self.cached}
            ends = [name for name in self.cached if name not in self.pinned() and name not in inner]
            order = {name: (self.values[self.sessions[name]], self.cached[name]) for name in ends}
            assert len(set(order.values())) == len(order), "no ties"
            del self.cached[min(ends, key=order.__getitem__)]

    def admit(self, state: RequestState, num_blocks: int) -> None:
        hits = self.hits(state)
        self.users[state.request_id] = set(hits)
        self.private[state.request_id] = num_blocks - len(hits)
        self.make_room()

    def publish(self, state: RequestState, num_tokens: int) -> None:
        held = self.private[state.request_id] + len(self.users[state.request_id])
        names = self.names(state, num_tokens)
        for name in names:
            self.cached.setdefault(name, self.use + 1)
        self.users[state.request_id] |= set(names)
        self.private[state.request_id] = held - len(self.users[state.request_id])

    def release(self, name: str, session: str) -> None:
        self.use += 1
        for block in self.users.pop(name):
            self.cached[block] = self.use
            self.sessions[block] = session
        del self.private[name]


def random_content(rng: random.Random) -> tuple[tuple[Segment, ...], int]:
    """Segments of few streams, so that prompts often share, and the length of the prompt."""
    content = tuple(
        Segment(rng.choice("abc"), rng.choice((1, 3, 5, 8, 8, 13))) for _ in range(rng.randint(1, 3))
    )
    rest = rng.choice((0, 0, 0, 1, 6))
    return content, sum(item.num_tokens for item in content) + rest


@pytest.mark.parametrize("by_value", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_hits_and_evictions_are_those_of_single_blocks(seed: int, by_value: bool) -> None:
    rng = random.Random(seed)
    kv = KVCache(24, BLOCK, 0.0, prefixes=PrefixCache(BLOCK))
    values = dict.fromkeys("uvwxyz", 0.0)
    if by_value:
        assert kv.prefixes is not None
        kv.prefixes.retention = values.__getitem__
    blocks, running, compared = Blocks(24, values), dict[str, RequestState](), 0
    waiting = [state_of(f"w{at}", *random_content(rng)) for at in range(12)]
    hits: dict[str, Hit] = {}
    for number in range(400):
        if by_value:
            values[rng.choice("uvwxyz")] = rng.choice((-math.inf, 1.0, rng.random()))
        name = f"r{number}"
        if running and rng.random() < 0.55:
            name = rng.choice(list(running))
            state = running[name]
            capacity = kv.held_by(name) * BLOCK
            state.num_computed_tokens = rng.randint(
                state.num_computed_tokens, min(capacity, state.known_tokens)
            )
            kv.publish(state)
            blocks.publish(state, state.num_computed_tokens)
            if rng.random() < 0.6:
                session = rng.choice("uvwxyz")
                kv.release(name, session)
                blocks.release(name, session)
                del running[name]
        else:
            content, prompt = random_content(rng)
            state = state_of(name, content, prompt, rng.choice((0, 0, 0, 5)))
            hit = kv.find(state)
            assert hit.num_blocks == len(blocks.hits(state))
            assert hit.num_pinned == len(set(blocks.hits(state)) & blocks.pinned())
            compared += hit.num_blocks
            if kv.admit(name, state.known_tokens, waive_watermark=False, hit=hit):
                state.num_computed_tokens = hit.num_blocks * BLOCK
                blocks.admit(state, kv.held_by(name))
                running[name] = state
        assert kv.num_free_blocks == blocks.free()
        hits |= {state.request_id: kv.find(state) for state in kv.prefixes.take_changed(waiting)}
        for state in waiting:
            hit = kv.find(state)
            assert hits[state.request_id].num_blocks == hit.num_blocks, "it has changed"
        for name in running:
            before = kv.num_free_blocks
            alone = kv.freed_by(name)
            others = set().union(*(used for other, used in blocks.users.items() if other != name))
            assert alone == blocks.private[name] + len(blocks.users[name] - others), before
        kv.validate(set(running), set())
    assert compared > 100


def test_evicted_blocks_come_back_from_host_memory() -> None:
    """12 blocks of 4 tokens, and as many on the host: a and b take turns with 36 tokens each. What the other one has evicted is
    copied back; without the host it is computed again."""
    for host_blocks, copied, computed in ((12, {24, 28, 32}, False), (0, set(), True)):
        core = helpers.scheduler(
            "fcfs", max_num_seqs=1, max_num_batched_tokens=64, num_kv_blocks=12, kv_block_tokens=BLOCK,
            num_host_cache_blocks=host_blocks, kv_watermark=0.0,
        )  # fmt: skip
        given = [
            (
                helpers.request(
                    f"{name}{turn}", 10.0 * turn + at, prompt=36, cap=2, content=(Segment(name, 36),)
                ),
                2,
            )
            for turn in range(3)
            for at, name in ((0.0, "a"), (5.0, "b"))
        ]
        run = helpers.Drive(core, given)
        run.run()
        moved = {item.num_tokens for plan in run.plans for item in plan.swapped_in}
        assert moved <= copied
        assert bool(moved) is not computed
        later = sum(run.prefill_tokens[f"{name}{turn}"] for name in "ab" for turn in (1, 2))
        assert (later > 60) is computed
        core.validate()


def test_values_of_sessions_order_evictions_and_their_use_breaks_ties() -> None:
    cache = PrefixCache(BLOCK)
    kv = KVCache(9, BLOCK, 0.0, prefixes=cache)
    values = {"old": 5.0, "new": 1.0, "newer": 1.0}
    cache.retention = values.__getitem__
    for name in values:
        state = state_of(name, (Segment(name, 12),), 12)
        assert kv.admit(name, 12, waive_watermark=False, hit=kv.find(state))
        state.num_computed_tokens = 12
        kv.publish(state)
        kv.release(name, name)
    for size, hits in ((4, (3, 2, 3)), (12, (3, 0, 2)), (4, (3, 0, 1))):
        kv.admit(f"{size}{hits}", size, waive_watermark=False)
        assert tuple(kv.find(state_of(name, (Segment(name, 12),), 13)).num_blocks for name in values) == hits
    cache.clear()
    kv.validate({"4(3, 2, 3)", "12(3, 0, 2)", "4(3, 0, 1)"}, set())
