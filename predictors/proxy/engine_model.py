"""Model of an engine behind the proxy: what its prefix cache has, and what its work costs.

Requests hold memory of the core's KV cache from sending to end; what they leave is evicted least recently used first, as in
vLLM and SGLang. The engine reports how many tokens of a prompt it had cached. If these are fewer than in the model, the
engine has evicted the others, and hence all that was used before them, as for other clients or after a restart.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, replace
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from predictors.proxy.session_context import SYSTEM_KEY, content_of
from scheduler_core.adapters.live_order import UnknownEngine
from scheduler_core.engine.kv_cache import KVCache
from scheduler_core.engine.prefix_cache import PrefixCache
from scheduler_core.engine.step_costs import StepCosts
from scheduler_core.prediction.api_request import integer
from scheduler_core.request import Request, RequestState, Segment

#: Tokens of a block where the engine does not report them.
BLOCK_TOKENS = 16
#: Tokens of a step, which engines do not report: the default of vLLM and SGLang on large GPUs.
STEP_TOKENS = 8192
#: Contexts that are remembered; and streams in a cache of unknown size, of which the older half is then dropped.
MAX_CONTEXTS, MAX_STREAMS = 20_000, 80_000
#: Tokens that the engine reports may be this fraction of those in the model, whose tokens are estimates.
MIN_HIT = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """What is known of a request at its end.

    Attributes:
        ended_by: See `RequestState`.
        is_complete: Whether its response is complete.
        content, prompt_tokens: Its prompt, by the tokens that the engine reports; None: it reports none.
        cached_tokens: Those of the prompt that the engine had cached; None: it does not report them.
        ends_session: Whether it was the last one of its session, by what the client says.
    """

    ended_by: str = ""
    is_complete: bool = False
    content: tuple[Segment, ...] = ()
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    ends_session: bool = False


@dataclass(frozen=True, slots=True)
class CacheSize:
    """Tokens of an engine's KV cache and of one of its blocks."""

    num_tokens: int
    block_tokens: int = BLOCK_TOKENS


class EngineModel:
    """The prefix cache of one engine (see `LiveEngine`). `size` None: unknown, so that only what was used long ago is evicted."""

    step_tokens = STEP_TOKENS
    has_host_tier = evicts_by_policy = False

    def __init__(self, size: CacheSize | None = None) -> None:
        self.costs = StepCosts(is_measured=False)
        self.size = size
        self._kv, self._prefixes = self._empty()
        #: Requests in the engine, and those of them that wait there for memory, in the order of sending.
        self._running: dict[str, RequestState] = {}
        self._waiting: dict[str, RequestState] = {}
        #: Tokens that the engine should report as cached, and the number of the context that has them.
        self._expected: dict[str, tuple[int, int]] = {}
        #: Prompt tokens that are being computed, by request; those of all requests with memory so far, and those of them that
        #: were computed; both as of the sending of each request.
        self._computing: dict[str, int] = {}
        self._num_prompt_tokens = self._num_computed_tokens = 0
        self._sent_at: dict[str, tuple[int, int]] = {}
        #: Ended requests with their running numbers, by the last segment of their prompts; the latest one last.
        self._ended: OrderedDict[str, tuple[int, RequestState]] = OrderedDict()
        self._num_ended = 0
        #: Last segment of the latest request of a session.
        self._latest: OrderedDict[str, str] = OrderedDict()

    @property
    def capacity_tokens(self) -> int:
        """Tokens of the KV cache, see `EngineView`."""
        return UnknownEngine.capacity_tokens if self.size is None else self._kv.capacity_tokens

    @property
    def num_resident_tokens(self) -> int:
        """Tokens in the cache, of running and of ended requests."""
        kv = self._kv
        return (kv.num_blocks - kv.num_free_blocks + self._prefixes.num_unused) * kv.block_tokens

    def resident_tokens(self, session: str) -> int:
        """Tokens of the context of a session, as of its last request, that are in the cache; 0 if it is unknown."""
        ended = self._ended.get(self._latest.get(session, ""))
        return 0 if ended is None else self._num_found(ended[1]) * self._kv.block_tokens

    def look_up(self, states: Iterable[RequestState]) -> None:
        """Updates `cached_tokens` of waiting requests."""
        for state in states:
            state.cached_tokens = self._kv.find(state).num_blocks * self._kv.block_tokens

    def look_up_again(self, waiting: Iterable[RequestState]) -> None:
        """Updates `cached_tokens` of all waiting requests, of which only some find more or fewer tokens than before."""
        self.look_up(self._prefixes.take_changed(waiting))

    def send(self, state: RequestState) -> None:
        """Handles a request that is sent to the engine."""
        self.look_up([state])
        self._running[state.request_id] = state
        self._sent_at[state.request_id] = self._num_prompt_tokens, self._num_computed_tokens
        self._waiting[state.request_id] = state
        self._place_waiting()

    def compute(self, state: RequestState) -> None:
        """Handles tokens that the engine has processed, up to `num_computed_tokens` of a request."""
        if state.request_id in self._waiting:
            self._place(state)  # the engine has found memory for it
        if state.num_output_tokens:
            self._count_prompt(state.request_id)
        if self._kv.held_by(state.request_id):
            self._kv.grow(state.request_id, state.num_computed_tokens)
            if state.num_output_tokens <= 1:
                self._publish(state, state.num_computed_tokens)

    def end(self, state: RequestState, end: End) -> None:
        """Handles a request that has left the engine; does nothing if it was not sent."""
        name, request = state.request_id, state.request
        if self._running.pop(name, None) is None:
            return
        if name in self._waiting and end.is_complete:
            self._place(state)
        self._waiting.pop(name, None)
        if end.is_complete:
            self._count_prompt(name)
        self._computing.pop(name, None)
        sent_at, (expected, number) = self._sent_at.pop(name), self._expected.pop(name, (0, 0))
        if end.is_complete:
            # Where the engine had more of it than the model, as after a restart of the proxy, that was not computed.
            num_spared = max((end.cached_tokens or 0) - state.cached_tokens, 0)
            self._measure(state, sent_at, num_spared)
        if end.is_complete or state.first_token_s is not None:
            if end.prompt_tokens is not None and end.content[:-1] == request.content[:-1]:
                state.request = replace(request, prompt_tokens=end.prompt_tokens, content=end.content)
            num_computed = state.known_tokens - 1
            if self._kv.held_by(name):
                self._kv.grow(name, num_computed)
                self._publish(state, num_computed)
                self._remember(state)
        self._kv.release(name, request.session)
        if end.cached_tokens is not None and end.cached_tokens < MIN_HIT * expected - self._kv.block_tokens:
            self._evict_before(number)
        self._place_waiting()

    def state(self) -> dict[str, Any]:
        """Contexts of which the cache has something, the latest one last, and its size; JSON content."""
        states = [state for _, state in self._ended.values() if self._num_found(state)]
        return {
            "size": None if self.size is None else astuple(self.size),
            "contexts": [
                (
                    each.request.session,
                    each.request.content,
                    each.request.prompt_tokens,
                    each.num_output_tokens,
                )
                for each in states
            ],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores a `state`; raises an error if it is none."""
        self.clear(None if state["size"] is None else CacheSize(*map(int, state["size"])))
        for number, (session, content, prompt_tokens, output_tokens) in enumerate(state["contexts"]):
            request = Request(
                request_id=f"restored-{number}",
                arrival_s=0.0,
                prompt_tokens=prompt_tokens,
                max_tokens=max(output_tokens, 1),
                session=session,
                content=content_of(content),
            )
            ended = RequestState(request, order=0)
            ended.num_output_tokens = output_tokens
            self.send(ended)
            self.end(ended, End(is_complete=True))

    def clear(self, size: CacheSize | None) -> None:
        """Empties the cache, because the engine was restarted or its size has become known."""
        self.size = size
        self._kv, self._prefixes = self._empty()
        self._ended.clear()
        self._expected.clear()
        self._waiting = dict(self._running)
        self._place_waiting()

    def _count_prompt(self, name: str) -> None:
        """Counts the prompt of a request as computed, when it has an output token or has ended."""
        self._num_computed_tokens += self._computing.pop(name, 0)

    def _measure(self, state: RequestState, sent_at: tuple[int, int], num_spared: int) -> None:
        """Adds the steps of an ended request to the costs: one for each of its tokens, which together process prompts: in a
        stream those that have had an output token since it was sent, because engines compute prompts one after the other; else,
        as this is not known, those that were sent since."""
        start_s, end_s, num = state.first_scheduled_s, state.last_token_s, state.num_output_tokens
        if start_s is None or end_s is None or not num:
            return
        is_stream = state.first_token_s is not None and state.first_token_s < end_s
        num_tokens = self._num_computed_tokens if is_stream else self._num_prompt_tokens
        prefill_tokens = max(num_tokens - sent_at[is_stream] - num_spared, 0)
        self.costs.observe((end_s - start_s) / num, prefill_tokens / num, len(self._running) + 1)

    def _empty(self) -> tuple[KVCache, PrefixCache]:
        size = self.size or CacheSize(2**40)
        num_blocks = max(size.num_tokens // size.block_tokens, 1)
        prefixes = PrefixCache(size.block_tokens)
        return KVCache(num_blocks, size.block_tokens, 0.0, prefixes=prefixes), prefixes

    def _place_waiting(self) -> None:
        """Gives the requests that wait in the engine memory, as far as there is some for the first of them."""
        while self._waiting and self._place(next(iter(self._waiting.values()))):
            pass

    def _place(self, state: RequestState) -> bool:
        """Gives a waiting request memory, and looks up what is cached of it; False if there is too little."""
        name, hit = state.request_id, self._kv.find(state)
        if not self._kv.admit(name, state.known_tokens, waive_watermark=True, hit=hit):
            return False
        del self._waiting[name]
        state.cached_tokens = hit.num_blocks * self._kv.block_tokens
        self._computing[name] = num_tokens = state.request.prompt_tokens - state.cached_tokens
        self._num_prompt_tokens += num_tokens
        for key, _ in reversed(state.request.content):
            if (ended := self._ended.get(key)) is not None:
                # The engine may not find the output again, such as a reasoning that is no part of the next prompt.
                self._expected[name] = (min(state.cached_tokens, ended[1].request.prompt_tokens), ended[0])
                break
        return True

    def _publish(self, state: RequestState, num_tokens: int) -> None:
        """Lets other requests find the computed tokens of a request that have memory."""
        num_held = self._kv.held_by(state.request_id) * self._kv.block_tokens
        state.num_computed_tokens = min(num_tokens, num_held)
        self._kv.publish(state)

    def _remember(self, state: RequestState) -> None:
        """Keeps an ended request as the context of its session."""
        request = state.request
        if not request.content:
            return
        key = request.content[-1].key
        self._num_ended += 1
        self._ended[key] = (self._num_ended, state)
        self._ended.move_to_end(key)
        if request.session:
            self._latest[request.session] = key
            self._latest.move_to_end(request.session)
        for contexts in (self._ended, self._latest):
            if len(contexts) > MAX_CONTEXTS:
                contexts.popitem(last=False)
        if self.size is None and len(self._prefixes) > MAX_STREAMS:
            self._prefixes.evict(self._prefixes.num_unused // 2)

    def _num_found(self, state: RequestState) -> int:
        """Blocks of an ended request that are in the cache."""
        request = state.request
        hit = self._prefixes.find(request.content, request.prompt_tokens, state.num_computed_tokens)
        return hit.num_blocks

    def _evict_before(self, number: int) -> None:
        """Evicts what was last used before an ended request."""
        num_blocks = 0
        while self._ended:
            key, (ended_number, state) = next(iter(self._ended.items()))
            if ended_number >= number:
                break
            first = state.request.content[0]
            num_shared = first.num_tokens if first.key.startswith(SYSTEM_KEY) else 0
            num_blocks += max(self._num_found(state) - num_shared // self._kv.block_tokens, 0)
            del self._ended[key]
        self._prefixes.evict(min(num_blocks, self._prefixes.num_unused))


def read_cache_size(metrics: str) -> CacheSize | None:
    """The size of the KV cache from an engine's /metrics; None if they do not have it.

    vLLM: the labels of `vllm:cache_config_info`: `num_gpu_blocks` x `block_size`, of all of its data-parallel ranks, or
    `kv_cache_size_tokens` of each rank, which is less where layers share blocks. SGLang: `sglang:max_total_num_tokens` of
    each data-parallel rank, and `sglang:page_size`. (vLLM 0.32, v1/metrics/loggers.py and config/cache.py; SGLang's
    metrics_collector.py.)
    """
    names = ("vllm:cache_config_info", "sglang:max_total_num_tokens", "sglang:page_size")
    lines = [line for line in metrics.splitlines() if line.startswith(names)]
    ranks: dict[str, int] = {}
    block_tokens = BLOCK_TOKENS
    try:
        families = list(text_string_to_metric_families("\n".join(lines) + "\n"))
    except ValueError:
        return None
    for sample in (sample for family in families for sample in family.samples):
        labels = sample.labels
        if sample.name == "vllm:cache_config_info":
            rank_tokens, num_blocks = (
                integer(labels.get("kv_cache_size_tokens")),
                integer(labels.get("num_gpu_blocks")),
            )
            block_tokens = integer(labels.get("block_size")) or block_tokens
            if rank_tokens:
                ranks[labels.get("engine", "")] = rank_tokens
            elif num_blocks:
                ranks = {"": num_blocks * block_tokens}
        elif sample.name == "sglang:page_size":
            block_tokens = int(sample.value) or block_tokens
        elif sample.value >= 1:
            ranks[labels.get("dp_rank", "")] = int(sample.value)
    return CacheSize(sum(ranks.values()), block_tokens) if ranks else None
