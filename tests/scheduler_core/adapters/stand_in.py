"""What the adapter uses of vLLM, in a few lines: a request, its queue's interface and a scheduler that calls back as vLLM's.

The real thing is run by test_vllm_engine.py; this is for what one wants to see step by step.
"""

from abc import ABCMeta, abstractmethod
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

#: The methods of vLLM 0.32's v1/core/sched/request_queue.py.
QUEUE_METHODS = [
    "add_request", "pop_request", "peek_request", "prepend_request", "prepend_requests", "remove_request",
    "remove_requests", "__bool__", "__len__", "__iter__",
]  # fmt: skip
RequestQueue = ABCMeta("RequestQueue", (), {name: abstractmethod(lambda _: None) for name in QUEUE_METHODS})


class SchedulingPolicy(Enum):
    FCFS = "fcfs"
    PRIORITY = "priority"


class OwnQueue:
    """vLLM's own queue: first come, first served, or the smallest (priority, arrival) first."""

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._is_fcfs = policy is SchedulingPolicy.FCFS
        self._requests: list[FakeRequest] = []

    def add_request(self, request: "FakeRequest") -> None:
        self._requests.append(request)
        if not self._is_fcfs:
            self._requests.sort(key=lambda each: (each.priority, each.arrival_time))

    def prepend_request(self, request: "FakeRequest") -> None:
        self._requests.insert(0, request)

    def prepend_requests(self, requests: Iterable["FakeRequest"]) -> None:
        for request in requests:
            self.prepend_request(request)

    def peek_request(self) -> "FakeRequest":
        return self._requests[0]

    def pop_request(self) -> "FakeRequest":
        return self._requests.pop(0)

    def remove_requests(self, requests: Iterable["FakeRequest"]) -> None:
        self._requests = [each for each in self._requests if each not in [*requests]]

    def __len__(self) -> int:
        return len(self._requests)


@dataclass(eq=False)
class FakeRequest:
    """A request of vLLM, as far as the adapter looks at it; `length` tokens end it."""

    request_id: str
    length: int
    priority: int = 0
    extra_args: dict[str, Any] | None = None
    num_prompt_tokens: int = 4
    max_tokens: int = 64
    status: str = "waiting"
    num_output_tokens: int = 0
    num_computed_tokens: int = 0
    prompt_token_ids: list[int] = field(init=False)
    sampling_params: SimpleNamespace = field(init=False)
    block_hashes: tuple[bytes, ...] = ()
    output_token_ids: tuple[int, ...] = ()
    arrival_time: float = 0.0
    num_output_placeholders: int = 0

    def __post_init__(self) -> None:
        self.prompt_token_ids = [self.length] * self.num_prompt_tokens
        self.sampling_params = SimpleNamespace(extra_args=self.extra_args, temperature=0.5)

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens

    @property
    def num_tokens_with_spec(self) -> int:
        return self.num_tokens

    def get_finished_reason(self) -> str:
        return "stop" if self.num_output_tokens >= self.length else "abort"


class AsyncScheduler:
    """A scheduler with seats, no memory, and the calls among its own methods that vLLM's makes."""

    requires_kv_delivery = False
    pause_state = SimpleNamespace(name="UNPAUSED")

    def __init__(self, *, vllm_config: Any) -> None:
        self.max_num_active_reqs = vllm_config.scheduler_config.max_num_seqs
        self.num_waiting_for_streaming_input = 0
        self.policy = SchedulingPolicy(vllm_config.scheduler_config.policy)
        self.requests: dict[str, FakeRequest] = {}
        self.running: list[FakeRequest] = []
        self.waiting: Any = deque()
        self.prev_step_scheduled_req_ids: set[str] = set()
        self.kv_cache_config = SimpleNamespace(kv_cache_groups=[None])
        self.block_size = 16
        self.is_shut_down = False
        self.cache_config = SimpleNamespace(kv_cache_size_tokens=16_000)
        self.connector = None
        self.scheduler_reserve_full_isl = True
        self.num_lookahead_tokens = 0
        self.max_num_scheduled_tokens = 4096
        self.kv_cache_manager = SimpleNamespace(
            block_pool=SimpleNamespace(get_num_free_blocks=lambda: 1000, hash_block_size=self.block_size),
            coordinator=SimpleNamespace(single_type_managers=()),
            enable_caching=False,
            prefix_cache_lookup_enabled=lambda request: False,
            get_blocks=lambda request_id: SimpleNamespace(blocks=([None],)),
        )

    @staticmethod
    def _is_blocked_waiting_status(status: str) -> bool:
        return status == "blocked"

    def _request_blocks_can_be_freed(self, request: FakeRequest) -> bool:
        return True

    def add_request(self, request: FakeRequest) -> None:
        self.waiting.add_request(request)
        self.requests[request.request_id] = request

    def _reserve_prefill_lookahead(self, request: FakeRequest, num_computed: int, num_new: int) -> int:
        return num_new

    def schedule(self, throttle_prefills: bool = False) -> Any:
        scheduled = {request.request_id: 1 for request in self.running}
        new: list[SimpleNamespace] = []
        resumed: set[str] = set()
        skipped: deque[FakeRequest] = deque()
        while self.waiting and len(self.running) < self.max_num_active_reqs:
            request = self.waiting.peek_request()
            if request.status == "blocked":
                skipped.appendleft(self.waiting.pop_request())
                continue
            assert self.waiting.pop_request() is request
            self.running.append(request)
            if request.status == "preempted":
                resumed.add(request.request_id)
            else:
                new.append(SimpleNamespace(req_id=request.request_id))
            request.status = "running"
            scheduled[request.request_id] = request.num_tokens
        self.waiting.prepend_requests(skipped)
        self.prev_step_scheduled_req_ids = set(scheduled)
        for request_id in scheduled:
            self.requests[request_id].num_computed_tokens = self.requests[request_id].num_tokens
        cached = SimpleNamespace(resumed_req_ids=resumed)
        requests = {"scheduled_new_reqs": new, "scheduled_cached_reqs": cached}
        return SimpleNamespace(num_scheduled_tokens=scheduled, **requests)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> list[str]:
        finished = []
        for request_id in scheduler_output.num_scheduled_tokens:
            request = self.requests.get(request_id)
            if request is None or request.status != "running":
                continue
            request.num_output_tokens += 1
            if request.num_output_tokens >= request.length:
                self.running.remove(request)
                self._free_request(request)
                finished.append(request_id)
        return finished

    def finish_requests(self, request_id: str) -> None:
        request = self.requests[request_id]
        if request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove_requests([request])
        self._free_request(request)

    def _preempt_request(
        self, request: FakeRequest, timestamp: float, drop_stale_output: bool = False
    ) -> None:
        assert request not in self.running
        request.status = "preempted"
        request.num_computed_tokens = 0
        self.waiting.prepend_request(request)

    def _free_request(self, request: FakeRequest, delay_free_blocks: bool = False) -> None:
        del self.requests[request.request_id]

    def shutdown(self) -> None:
        self.is_shut_down = True


class Tokenizer:
    """Ids are words w<id>; a chat template puts a word before and one behind the message."""

    all_special_tokens = ("<s>", "<tool_call>")
    all_special_ids = (0, 7)

    def get_added_vocab(self) -> dict[str, int]:
        return {}

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return " ".join(f"w{number}" for number in ids)

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> str:
        return "".join(f"w1 {message['content']}" for message in messages) + " w2"


def modules(version: str = "0.32.0") -> dict[str, ModuleType]:
    """Modules by name, to be put into sys.modules."""
    sched = "vllm.v1.core.sched"
    members: dict[str, dict[str, Any]] = {
        "vllm": {"__version__": version},
        **{name: {} for name in ("vllm.v1", "vllm.v1.core", sched)},
        f"{sched}.async_scheduler": {"AsyncScheduler": AsyncScheduler},
        f"{sched}.request_queue": {"RequestQueue": RequestQueue, "create_request_queue": OwnQueue},
        "vllm.v1.core.single_type_kv_cache_manager": {"FullAttentionManager": object},
        "vllm.tokenizers": {"cached_tokenizer_from_config": lambda config: config.tokenizer},
    }
    stand_ins = {name: ModuleType(name) for name in members}
    for name, module in stand_ins.items():
        vars(module).update(members[name])
    return stand_ins


def vllm_config(tailcast: Any, *, max_num_seqs: int = 2, policy: str = "fcfs", tokenizer: Any = None) -> Any:
    """A VllmConfig, as far as the adapter looks at it."""
    return SimpleNamespace(
        additional_config={} if tailcast is None else {"tailcast": tailcast},
        scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs, policy=policy),
        model_config=SimpleNamespace(tokenizer=tokenizer or Tokenizer()),
    )


def run_step(scheduler: Any) -> tuple[dict[str, int], list[str]]:
    """One step: (tokens scheduled by id, ids that finished)."""
    output = scheduler.schedule()
    ids = list(output.num_scheduled_tokens)
    numbers = {name: number for number, name in enumerate(ids)}
    result = SimpleNamespace(sampled_token_ids=[[0] for _ in ids], req_id_to_index=numbers)
    return output.num_scheduled_tokens, scheduler.update_from_output(output, result)
