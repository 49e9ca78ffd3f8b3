"""Hits, contexts and order of eviction on a stand-in for vLLM's block pool; test_vllm_sessions.py runs the real one."""

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_core.adapters.vllm_cache import OutputEnds, VllmCache
from scheduler_core.request import Request, RequestState

BLOCK = 4


class FullAttentionManager:
    block_size = BLOCK


@dataclass(eq=False)
class Block:
    block_id: int
    ref_cnt: int = 0
    block_hash: bytes | None = None
    is_null: bool = False


class FreeQueue:
    """vLLM's FreeKVCacheBlockQueue as a list."""

    def __init__(self, blocks: list[Block]) -> None:
        self.blocks = blocks

    def iter_blocks_after(self, cursor: None) -> Iterator[Block]:
        return iter(self.blocks)

    def remove(self, block: Block) -> None:
        self.blocks.remove(block)

    def append_n(self, blocks: list[Block]) -> None:
        self.blocks += blocks

    def prepend_n(self, blocks: list[Block]) -> None:
        self.blocks[:0] = blocks


class Pool:
    """vLLM's BlockPool and the requests that run, as far as the order of eviction is concerned."""

    hash_block_size = BLOCK

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [Block(number) for number in range(num_blocks)]
        self.free_block_queue = FreeQueue(list(self.blocks))
        self.cached: dict[bytes, Block] = {}
        self.held: dict[str, list[Block]] = {}

    def get_cached_block(self, value: bytes, groups: list[int]) -> list[Block] | None:
        block = self.cached.get(value)
        return None if block is None else [block]

    @property
    def cached_block_hash_to_block(self) -> Any:
        """vLLM's map: a block, or a dictionary of all with that content."""
        copies: dict[bytes, Any] = {}
        for block in self.blocks:
            if block.block_hash is not None:
                copies.setdefault(block.block_hash, {})[block.block_id] = block
        return SimpleNamespace(
            _cache={
                value: found if len(found) > 1 else next(iter(found.values()))
                for value, found in copies.items()
            }
        )

    def run(self, request: Any) -> int:
        """Gives a request its blocks; the number of those that were cached."""
        blocks: list[Block] = []
        for value in request.block_hashes:
            block = self.cached.get(value)
            if block is None:
                break
            if not block.ref_cnt:
                self.free_block_queue.remove(block)
            block.ref_cnt += 1
            blocks.append(block)
        num_hits = len(blocks)
        for value in request.block_hashes[num_hits:]:
            block = self.free_block_queue.blocks.pop(0)
            if block.block_hash is not None:
                del self.cached[block.block_hash[:-4]]
            block.block_hash, block.ref_cnt = value + bytes(4), 1
            self.cached[value] = block
            blocks.append(block)
        self.held[request.request_id] = blocks
        return num_hits

    def free(self, request: Any) -> None:
        for block in reversed(self.held.pop(request.request_id)):
            block.ref_cnt -= 1
            if not block.ref_cnt:
                self.free_block_queue.append_n([block])


@dataclass
class Prompt:
    """A request of vLLM whose whole blocks have these contents."""

    request_id: str
    blocks: str
    block_hashes: list[bytes] = field(init=False)

    def __post_init__(self) -> None:
        self.block_hashes = [self.blocks[: end + 1].encode() for end in range(len(self.blocks))]
        self.num_prompt_tokens = self.num_tokens = self.num_computed_tokens = len(self.blocks) * BLOCK + 1


Make = Callable[..., tuple[Pool, VllmCache]]


@pytest.fixture(scope="module")
def make() -> Iterator[Make]:
    name = "vllm.v1.core.single_type_kv_cache_manager"
    module = ModuleType(name)
    vars(module)["FullAttentionManager"] = FullAttentionManager
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, name, module)

        def build(num_blocks: int, values: dict[str, float] | None = None) -> tuple[Pool, VllmCache]:
            pool = Pool(num_blocks)
            manager = SimpleNamespace(
                block_pool=pool,
                enable_caching=True,
                coordinator=SimpleNamespace(single_type_managers=[FullAttentionManager()]),
                prefix_cache_lookup_enabled=lambda request: True,
            )
            retention = None if values is None else lambda session: values.get(session, 0.0)
            return pool, VllmCache(manager, num_blocks * BLOCK, 2048, retention)

        yield build


def turn(pool: Pool, cache: VllmCache, session: str, blocks: str) -> int:
    """A turn of a session from arrival to end; its hits."""
    request = Prompt(f"{session}:{blocks}", blocks)
    cache.add(request)
    cache.reserve(len(blocks))
    num_hits = pool.run(request)
    pool.free(request)
    cache.stop(request, session)
    cache.end(request, session)
    return num_hits


def hits(cache: VllmCache, blocks: str, guess: int = 0) -> int:
    """Blocks of a waiting prompt that are cached, found from a former number of them."""
    request = Prompt("waiting", blocks)
    cache.add(request)
    state = RequestState(
        Request(request_id="waiting", arrival_s=0.0, prompt_tokens=request.num_tokens, max_tokens=9), order=0
    )
    state.cached_tokens = guess * BLOCK
    cache.look_up([state])
    return state.cached_tokens // BLOCK


@given(num=st.integers(0, 9), guess=st.integers(0, 9))
def test_hits_from_any_former_number(make: Make, num: int, guess: int) -> None:
    pool, cache = make(20)
    if num:
        turn(pool, cache, "a", "abcdefghi"[:num])
    assert hits(cache, "abcdefghi", guess) == num
    assert hits(cache, "abcxefghi", guess) == min(num, 3)


def test_the_last_token_of_a_prompt_is_never_a_hit(make: Make) -> None:
    pool, cache = make(20)
    turn(pool, cache, "a", "abc")
    request = Prompt("waiting", "abc")
    request.num_tokens = 3 * BLOCK
    cache.add(request)
    state = RequestState(
        Request(request_id="waiting", arrival_s=0.0, prompt_tokens=12, max_tokens=9), order=0
    )
    cache.look_up([state])
    assert state.cached_tokens == 2 * BLOCK


def test_contexts_of_small_value_go_first_from_their_ends(make: Make) -> None:
    values = {"old": 2.0, "new": 1.0}
    pool, cache = make(10, values)
    turn(pool, cache, "old", "oabc")
    turn(pool, cache, "new", "nabc")
    turn(pool, cache, "x", "xyzw")
    assert (hits(cache, "oabc"), hits(cache, "nabc")) == (4, 2), (
        "least recently used would take the old one's"
    )
    assert (cache.resident_tokens("old"), cache.resident_tokens("new")) == (16, 8)
    values |= {"old": 0.5, "x": 3.0}
    turn(pool, cache, "y", "uv")
    assert (hits(cache, "oabc"), hits(cache, "nabc")) == (2, 2)


@pytest.mark.mend  # a copy was found behind blocks that had gone
def test_all_copies_of_a_block_go_with_it(make: Make) -> None:
    pool, cache = make(8, {"a": 1.0})
    turn(pool, cache, "a", "abcdef")
    pool.free_block_queue.blocks[1].block_hash = b"abcdef" + bytes(4)  # as if computed again
    cache.reserve(4)
    assert [block.block_hash for block in pool.free_block_queue.blocks[:4]] == [
        None,
        b"abcdef" + bytes(4),
        b"abcdef" + bytes(4),
        b"abcde" + bytes(4),
    ]


@pytest.mark.mend  # hashes of up to 4096 long contexts were kept whose blocks had gone, gigabytes of them
def test_hashes_of_blocks_that_have_gone_are_forgotten(make: Make) -> None:
    pool, cache = make(10)
    for number in range(200):
        turn(pool, cache, str(number), f"{chr(1000 + number)}bcdefg")
        assert len(cache._uses) <= 2 * len(pool.blocks)
    assert cache.resident_tokens("199") == 7 * BLOCK


def test_what_sessions_share_goes_with_the_last_one(make: Make) -> None:
    values = {"a": 1.0, "b": 2.0}
    pool, cache = make(8, values)
    turn(pool, cache, "b", "ssb")
    turn(pool, cache, "a", "ssaaa")
    assert turn(pool, cache, "c", "cdefg") == 0
    assert hits(cache, "ssb") == 3
    assert hits(cache, "ssaaa") == 2


def test_blocks_of_no_context_go_before_contexts(make: Make) -> None:
    """The beginning of a compacted context, requests without a session."""
    pool, cache = make(10, {"a": 1.0})
    turn(pool, cache, "a", "abcd")
    turn(pool, cache, "", "none")
    turn(pool, cache, "a", "ay")
    turn(pool, cache, "b", "12345")
    assert hits(cache, "ay") == 2


@given(
    st.lists(
        st.tuples(st.sampled_from("abcd"), st.integers(1, 6), st.booleans(), st.integers(0, 3)), max_size=40
    )
)
def test_no_block_is_lost(make: Make, turns: list[tuple[str, int, bool, int]]) -> None:
    values: dict[str, float] = {}
    pool, cache = make(14, values)
    running: Prompt | None = None
    for number, (session, num, is_shared, value) in enumerate(turns):
        values[session] = value
        blocks = ("s" if is_shared else session) + session * num
        turn(pool, cache, session, blocks)
        if running is not None:
            pool.free(running)
            cache.stop(running, "a")
            cache.end(running, "a")
            running = None
        elif number % 3 == 0:
            running = Prompt(f"long{number}", f"a{number % 10}")
            cache.add(running)
            cache.reserve(2)
            pool.run(running)
        free = pool.free_block_queue.blocks
        held = [] if running is None else pool.held[running.request_id]
        assert sorted(block.block_id for block in (*free, *held)) == list(range(14))
        in_contexts: dict[bytes, int] = {}
        for context in cache._contexts.values():
            for digest in context:
                in_contexts[digest] = in_contexts.get(digest, 0) + 1
        assert cache._uses == in_contexts


def test_a_prompt_continues_the_session_whose_prompt_it_begins_with(make: Make) -> None:
    pool, cache = make(50)

    def session(name: str, blocks: str, tenant: str = "") -> str:
        request = Prompt(name, blocks)
        cache.add(request)
        found = cache.continued_session(request, tenant)
        pool.run(request)
        pool.free(request)
        cache.stop(request, found)
        cache.end(request, found, tenant)
        return found

    first = session("1", "sysab")
    other = session("2", "sysxy")
    assert first != other
    assert session("3", "sysabcd") == first
    assert session("4", "sysxyz") == other
    assert session("5", "sysabcde") == first
    # A block more than a prompt that ended, but of another session; then of two.
    assert session("6", "sysabq") not in (first, other), "each prompt is continued once"
    names: Iterable[str] = [session("7", "sys"), session("8", "sys")]
    assert session("9", "sysnew") not in names, "the prompts of two sessions ended so"
    theirs = session("10", "other", "a")
    assert session("11", "otherx") != theirs, "of another tenant"
    assert session("12", "otherx", "a") == theirs


class Vocabulary:
    """A tokenizer of which only the special and added tokens are known."""

    def __init__(self, *tokens: str) -> None:
        self.all_special_tokens = ["<s>", *tokens[:1]]
        self.all_special_ids = [0, *range(100, 100 + len(tokens[:1]))]
        self.added = {token: 101 + number for number, token in enumerate(tokens[1:])}

    def get_added_vocab(self) -> dict[str, int]:
        return self.added


@pytest.mark.parametrize(
    "token",
    [
        "<tool_call>",
        "[TOOL_CALLS]",
        "<|call|>",
        "<｜tool▁calls▁begin｜>",
        "<|python_tag|>",
        "<start_function_call>",
    ],
)
def test_how_outputs_end_by_their_tokens(token: str) -> None:
    for number, tokens in ((100, (token,)), (101, ("<|eot|>", token))):
        ends = OutputEnds(Vocabulary(*tokens))
        assert ends.of([5, 0]) == "", "before the first call it may be a model that calls tools in plain text"
        assert ends.of([5, number, 7, 0]) == "tool_use"
        assert ends.of([5, 0]) == "end_turn"
    plain = OutputEnds(Vocabulary("<tool_response>", "[AVAILABLE_TOOLS]"))
    assert {plain.of([number, 0]) for number in (5, 100, 101)} == {""}
