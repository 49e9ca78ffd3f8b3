"""Policies inside vLLM: `vllm serve MODEL --scheduler-cls scheduler_core.adapters.vllm.TailcastScheduler`.

vLLM forms the batches: running requests first, then waiting ones until budget, slots or memory are used up. The
policy orders the waiting queue and, if it evicts by key, the running requests, of which vLLM preempts the last one when
memory runs out. A policy for sessions also holds waiting requests back and orders the free blocks of the prefix cache.

`TailcastScheduler` is created at its first access, so that this module can be imported without vLLM. User guide:
docs/vllm.md.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

from scheduler_core.adapters.engine_metrics import process_metrics
from scheduler_core.adapters.live_batches import LiveBatches
from scheduler_core.adapters.live_calibration import FORCED_LENGTH, LiveCalibration
from scheduler_core.adapters.live_order import LiveOrder, declared_level
from scheduler_core.adapters.prediction_thread import PredictionThread, PromptDecoder
from scheduler_core.adapters.settings import EngineSettings, read_settings
from scheduler_core.adapters.vllm_batches import PlannedSteps
from scheduler_core.adapters.vllm_cache import OutputEnds, VllmCache
from scheduler_core.adapters.vllm_failures import FailSafe, guarded
from scheduler_core.adapters.vllm_queue import PlannedQueue, PolicyQueue
from scheduler_core.adapters.vllm_requests import forced_length, options_of, request_of
from scheduler_core.adapters.vllm_version import OVERRIDDEN, check_vllm
from scheduler_core.adapters.vllm_victims import Victims
from scheduler_core.errors import InputError
from scheduler_core.policies.base import Policy
from scheduler_core.prediction.correction import RequestContext
from scheduler_core.prediction.outcome import Outcome
from scheduler_core.prediction.predictions import LengthPrediction, Prediction, requested_prediction
from scheduler_core.prediction.predictor import (
    PredictionEvent,
    PredictionRequest,
    PredictionStatus,
    open_predictor,
)
from scheduler_core.request import Status

if TYPE_CHECKING:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler as _Base
else:
    _Base = object

logger = logging.getLogger("vllm.tailcast")  # below vLLM's logger, so that its handlers show it


class PolicyScheduling(FailSafe, PlannedSteps, Victims, _Base):  # type: ignore[misc]
    """Mixin for vLLM's AsyncScheduler (0.32) with the same arguments. `InputError` if the settings are
    invalid or not supported by this engine.

    The clock is monotonic; a request arrives when it reaches the scheduler. A request never waits for its prediction:
    until then its key is that of an unknown length, and the prediction reorders it.

    After the start no exception of policy, batch former, predictor or calibration reaches the engine, see `FailSafe`.
    """

    # Attributes of vLLM's scheduler.
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
        policy, former = settings.make_policy(), settings.make_former()
        #: What is vLLM's own again after a failure.
        self._tailcast_own = {name: getattr(self, name) for name in OVERRIDDEN}
        #: What the policy may read of the engine; None: nothing of it.
        self._tailcast_cache: VllmCache | None = None
        reads_engine = any(map(policy.reads, ("cached", "costs", "session")))
        if former is not None or policy.orders_retention or reads_engine:
            self._tailcast_cache = self._tailcast_make_cache(policy)
        tokenizer = _tokenizer(config) if policy.reads("session") else None
        self._tailcast_ends = None if tokenizer is None else OutputEnds(tokenizer)
        level = declared_level(policy)
        self._tailcast_order: LiveOrder
        #: The order, if a batch former plans the steps.
        self._tailcast_batches: LiveBatches | None = None
        if former is not None and self._tailcast_cache is not None:
            self._tailcast_order = self._tailcast_batches = self._tailcast_make_batches(
                config, policy, former, self._tailcast_cache, level
            )
        else:
            max_num_seqs = config.scheduler_config.max_num_seqs
            self._tailcast_order = LiveOrder(policy, max_num_seqs, level, self._tailcast_cache)
        #: Maximum numbers of prompt tokens in the step that is being planned, by request.
        self._tailcast_chunks: dict[str, int] = {}
        self._tailcast_step_start_s: float | None = None
        #: Whether policy or former use the progress of running requests beyond the first token and the end.
        self._tailcast_follows = policy.progress != "unused" or not (former is None or former.lockstep)
        #: Requests without an output token since their last admission.
        self._tailcast_prefills: set[str] = set()
        order, clock = self._tailcast_order, self._tailcast_clock
        if self._tailcast_batches is None:
            running = lambda: self.running  # noqa: E731
            self.waiting = PolicyQueue(order, clock, running, self._tailcast_admitted, self._tailcast_fail)
        else:
            self.waiting = PlannedQueue(
                order, clock, lambda each: self._is_blocked_waiting_status(each.status), self._tailcast_fail
            )
        # With "fcfs" vLLM preempts the last running request, see `_tailcast_sort_running`; with "priority" it would use
        # the declared priority under every policy.
        self.policy = type(self.policy)("fcfs")
        self._tailcast_metrics = process_metrics()
        self._tailcast_calibration: LiveCalibration | None = None
        if settings.online_calibration and settings.predictor is not None:
            gauges = self._tailcast_metrics.calibration
            self._tailcast_calibration = LiveCalibration(settings.calibration_file, gauges)
        #: Uncorrected predictions of live requests, with what online calibration uses of them.
        self._tailcast_predictions: dict[str, tuple[LengthPrediction | None, RequestContext]] = {}
        predictor = settings.predictor or "none"
        self._tailcast_metrics.info.labels(settings.policy, predictor, str(__version__)).set(1)
        _log_start(settings)

    def add_request(self, request: Any) -> None:
        """Adds an arriving request and queries its prediction."""
        if request.request_id not in self.requests:
            self._tailcast_arrive(request)
        super().add_request(request)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Plans the next step in the current order of the policy."""
        if self._tailcast_failed:
            self._tailcast_restore()
            return self._tailcast_execute(None, super().schedule, args, kwargs)
        now = self._tailcast_clock()
        self._tailcast_start_step(now)
        planned = self._tailcast_plan(now)
        if self._tailcast_failed:
            self._tailcast_restore()
        output = self._tailcast_execute(planned, super().schedule, args, kwargs)
        self._tailcast_end_planning(output, now)
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Ends a step: reports its tokens to the policy before finished requests leave, then its end."""
        now = self._tailcast_clock()
        prefills = self._tailcast_report(scheduler_output, model_runner_output, now) or ()
        result = super().update_from_output(scheduler_output, model_runner_output)
        self._tailcast_end_step(scheduler_output.num_scheduled_tokens, prefills, now)
        return result

    def shutdown(self) -> None:
        """Also ends the threads of predictor and calibration."""
        self._tailcast_close().join()
        super().shutdown()

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        """Called by vLLM, which then returns the request to the queue; its state and prediction are kept."""
        self._tailcast_preempt(request)
        super()._preempt_request(request, *args, **kwargs)

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """Called by vLLM once for each request that ends, in any state and for any reason."""
        self._tailcast_end(request)
        return super()._free_request(request, *args, **kwargs)

    def _try_schedule_encoder_inputs(
        self, request: Any, num_computed_tokens: int, num_new_tokens: int, *args: Any, **kwargs: Any
    ) -> Any:
        """Called by vLLM for a request with encoder inputs: only those of the planned tokens are computed in this step."""
        limit = self._tailcast_chunks.get(request.request_id, num_new_tokens)
        num_new_tokens = min(num_new_tokens, limit)
        return super()._try_schedule_encoder_inputs(
            request, num_computed_tokens, num_new_tokens, *args, **kwargs
        )

    @guarded
    def _tailcast_arrive(self, request: Any) -> None:
        ours, bad_hints = request_of(request, self._tailcast_clock(), self._tailcast_settings.tbt_slo_s)
        for hint in bad_hints:
            self._tailcast_metrics.bad_hints.labels(hint).inc()
        if self._tailcast_cache is not None:
            self._tailcast_cache.add(request)
            if not ours.session and self._tailcast_order.policy.reads("session"):
                session = self._tailcast_cache.continued_session(request, ours.tenant)
                ours = replace(ours, session=session)
        self._tailcast_order.arrive(ours, ours.arrival_s)
        if self._tailcast_thread is None:
            self._tailcast_metrics.predictions.labels(PredictionStatus.ABSENT.value).inc()
            return
        sampling, served_model = request.sampling_params, self._tailcast_settings.model
        temperature = None if sampling is None else float(sampling.temperature)
        query = PredictionRequest(ours.request_id, "", ours.max_tokens, served_model, temperature)
        try:
            self._tailcast_thread.submit(query, request.prompt_token_ids, lambda: options_of(request))
        except Exception as error:
            self._tailcast_part_failed("predictor", error)

    @guarded
    def _tailcast_start_step(self, now: float) -> None:
        """Applies predictions and updates the order before vLLM forms a step."""
        order = self._tailcast_order
        for event in self._tailcast_take_predictions():
            self._tailcast_metrics.observe_prediction(event)
            prediction = self._tailcast_corrected(event.request_id, event.prediction)
            order.predict(event.request_id, prediction, now)
            if event.error is not None:
                logger.debug("no prediction for %s: %s", event.request_id, event.error)
        if order.start_step(now):
            self._tailcast_metrics.rekeys.inc()
        if self._tailcast_batches is None and order.policy.evicts_by_key:
            self._tailcast_sort_running(now)
        elif self._tailcast_batches is None:
            self._tailcast_victim_last(now)
        if self._tailcast_step_start_s is None:
            self._tailcast_step_start_s = now
        if self._tailcast_cache is not None and order.policy.orders_retention:
            self._tailcast_cache.reserve(self._tailcast_next_blocks(self._tailcast_cache))

    def _tailcast_take_predictions(self) -> Iterable[PredictionEvent]:
        try:
            if self._tailcast_calibration is not None:
                self._tailcast_calibration.publish_if_due()
        except Exception as error:
            self._tailcast_part_failed("calibration", error)
        try:
            return () if self._tailcast_thread is None else self._tailcast_thread.take()
        except Exception as error:
            self._tailcast_part_failed("predictor", error)
            return ()

    @guarded
    def _tailcast_end_planning(self, output: Any, now: float) -> None:
        """Tells the policy what vLLM has admitted."""
        order, metrics = self._tailcast_order, self._tailcast_metrics
        self._tailcast_note_blocked(output.num_scheduled_tokens)
        new = [data.req_id for data in output.scheduled_new_reqs]
        for state in (order.states.get(name) for name in new if self._tailcast_thread is not None):
            if state is not None and state.first_scheduled_s is None and not state.has_prediction:
                metrics.unscored_admissions.inc()
        admitted = (*new, *output.scheduled_cached_reqs.resumed_req_ids)
        self._tailcast_prefills.update(admitted)
        if self._tailcast_cache is not None and self._tailcast_batches is None:
            for request_id in admitted:
                self._tailcast_admitted(self.requests[request_id], output.num_scheduled_tokens[request_id])
        order.schedule(admitted, now)
        self._tailcast_touch(output.num_scheduled_tokens)

    @guarded
    def _tailcast_report(self, scheduler_output: Any, model_runner_output: Any, now: float) -> list[str]:
        """Reports the tokens of a step; returns the requests whose prompts were processed in it."""
        scheduled = scheduler_output.num_scheduled_tokens
        sampled, rows = model_runner_output.sampled_token_ids, model_runner_output.req_id_to_index
        prefills = [request_id for request_id in self._tailcast_prefills if request_id in scheduled]
        if self._tailcast_batches is not None and scheduler_output.scheduled_spec_decode_tokens:
            # Some of them may be rejected.
            self._tailcast_touch(scheduled)
        requests, progress = self.requests, self._tailcast_order.progress
        for request_id in scheduled if self._tailcast_follows else prefills:
            request, row = requests.get(request_id), rows.get(request_id)
            num_new = len(sampled[row]) if sampled and row is not None else 0
            if request is not None:  # `_tailcast_progress`, inlined for speed
                num_output = request.num_output_tokens + num_new
                progress(request_id, scheduled[request_id], request.num_computed_tokens, num_output, now)
        self._tailcast_prefills.difference_update(
            [name for name in prefills if sampled and name in rows and sampled[rows[name]]]
        )
        return prefills

    @guarded
    def _tailcast_end_step(self, scheduled: Mapping[str, int], prefills: Sequence[str], now: float) -> None:
        policy, batches = self._tailcast_order.policy, self._tailcast_batches
        if self._tailcast_step_start_s is not None:
            step_s = now - self._tailcast_step_start_s
            if self._tailcast_cache is not None and policy.reads("costs"):
                num_tokens = sum(scheduled[request_id] for request_id in prefills)
                self._tailcast_cache.costs.observe(step_s, num_tokens, len(scheduled) - len(prefills))
            policy.on_step(now, step_s)
            if batches is not None:
                batches.end_step(step_s, scheduled, prefills)
        self._tailcast_step_start_s = now if self.running else None

    @guarded
    def _tailcast_preempt(self, request: Any) -> None:
        self._tailcast_stop(request)
        self._tailcast_order.preempt(request.request_id, self._tailcast_clock())

    @guarded
    def _tailcast_end(self, request: Any) -> None:
        """Removes a request that has ended."""
        self._tailcast_stop(request)
        is_complete = str(request.get_finished_reason()) == "stop"
        ended_by = ""
        if is_complete and self._tailcast_ends is not None:
            ended_by = self._tailcast_ends.of(request.output_token_ids)
        state = self._tailcast_order.leave(request.request_id, ended_by)
        if state is None:
            return
        if self._tailcast_cache is not None:
            self._tailcast_cache.end(request, state.request.session, state.request.tenant)
        if is_complete:
            self._tailcast_metrics.observe_length(state, request.num_output_tokens)
        if self._tailcast_thread is not None:
            self._tailcast_thread.withdraw(request.request_id)
        try:
            self._tailcast_calibrate(request)
        except Exception as error:
            self._tailcast_part_failed("calibration", error)

    def _tailcast_make_cache(self, policy: Policy) -> VllmCache:
        capacity_tokens = getattr(self.cache_config, "kv_cache_size_tokens", None)
        if capacity_tokens is None:
            capacity_tokens = (self.kv_cache_manager.block_pool.num_gpu_blocks - 1) * self.block_size
        # A connector may have its own position in the queue of free blocks.
        is_ordered = policy.orders_retention and self.connector is None
        retention = policy.retention_key if is_ordered else None
        return VllmCache(self.kv_cache_manager, capacity_tokens, self.max_num_scheduled_tokens, retention)

    def _tailcast_next_blocks(self, cache: VllmCache) -> int:
        """Upper bound of the blocks that the next step takes, unless vLLM skips the first waiting requests."""
        budget, num_requests = self.max_num_scheduled_tokens, len(self.running)
        num_tokens = sum(request.num_tokens - request.num_computed_tokens for request in self.running)
        if self.waiting:
            with closing(self._tailcast_order.waiting.ascending()) as waiting:
                for state in waiting:
                    if num_tokens >= budget or num_requests >= self.max_num_active_reqs:
                        break
                    cache.look_up([state])
                    num_tokens += state.uncached_tokens
                    num_requests += 1
        return int(min(num_tokens, budget)) // cache.block_size + num_requests

    def _tailcast_admitted(self, request: Any, num_scheduled_tokens: int = 0) -> None:
        """Tells the policy of an admission with what the prefix cache had; `num_scheduled_tokens`: those that already count as
        computed."""
        state = self._tailcast_order.states.get(request.request_id)
        if state is not None and state.status is Status.WAITING:
            state.cached_tokens = max(request.num_computed_tokens - num_scheduled_tokens, 0)
            state.num_computed_tokens = state.cached_tokens
            self._tailcast_order.schedule([request.request_id], self._tailcast_clock())

    def _tailcast_stop(self, request: Any) -> None:
        """Called before a request stops running; reports its progress if that is not done in every step."""
        self._tailcast_prefills.discard(request.request_id)
        state = self._tailcast_order.states.get(request.request_id)
        if state is not None and self._tailcast_cache is not None:
            self._tailcast_cache.stop(request, state.request.session)
        if not self._tailcast_follows:
            self._tailcast_progress(request, 0, 0, self._tailcast_clock())

    def _tailcast_progress(self, request: Any, num_tokens: int, num_new: int, now: float) -> None:
        computed, output = request.num_computed_tokens, request.num_output_tokens
        self._tailcast_order.progress(request.request_id, num_tokens, computed, output + num_new, now)

    def _tailcast_corrected(self, request_id: str, prediction: Prediction | None) -> Prediction | None:
        """The prediction of a request, corrected by online calibration."""
        request, calibration = self.requests.get(request_id), self._tailcast_calibration
        if request is None:
            return prediction
        if prediction is not None and calibration is not None:
            state = self._tailcast_order.states.get(request_id)
            context = RequestContext(
                served_model=self._tailcast_settings.model,
                tenant="" if state is None else state.request.tenant,
                prompt_tokens=int(request.num_prompt_tokens),
                embedding=prediction.embedding,
            )
            self._tailcast_predictions[request_id] = (prediction.length, context)
            try:
                prediction = calibration.correct(context, prediction)
            except Exception as error:
                self._tailcast_part_failed("calibration", error)
        min_tokens, ignores_eos = forced_length(request)
        limit = max(int(request.max_tokens), 1)
        return requested_prediction(
            prediction, max_tokens=limit, min_tokens=min_tokens, ignores_eos=ignores_eos
        )

    def _tailcast_calibrate(self, request: Any) -> None:
        """Updates online calibration with an ended request."""
        predicted = self._tailcast_predictions.pop(request.request_id, None)
        reason = str(request.get_finished_reason())
        calibration = self._tailcast_calibration
        if calibration is None or predicted is None or reason not in ("stop", "length", "abort"):
            return
        min_tokens, ignores_eos = forced_length(request)
        if ignores_eos or min_tokens > 1:
            calibration.skip("forced_length", FORCED_LENGTH)
            return
        length, context = predicted
        outcome = Outcome(
            request_id=request.request_id,
            prediction=length,
            prompt_tokens=int(request.num_prompt_tokens),
            output_tokens=int(request.num_output_tokens),
            finished=reason == "stop",
            max_tokens=int(request.max_tokens),
        )
        calibration.observe(context, outcome)


@cache
def scheduler_class() -> type:
    """The class `TailcastScheduler`, derived from vLLM's AsyncScheduler, which has a higher throughput than
    Scheduler. `MissingExtraError` if vLLM is not installed; `InputError` if its version is untested."""
    check_vllm()
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.request_queue import RequestQueue

    RequestQueue.register(PolicyQueue)
    return type("TailcastScheduler", (PolicyScheduling, AsyncScheduler), {"__module__": __name__})


def __getattr__(name: str) -> Any:
    if name == "TailcastScheduler":
        return scheduler_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _tokenizer(config: Any) -> Any:
    """The tokenizer of the served model; None with --skip-tokenizer-init."""
    from vllm.tokenizers import cached_tokenizer_from_config

    return cached_tokenizer_from_config(config.model_config)


def _prediction_thread(settings: EngineSettings, config: Any) -> PredictionThread | None:
    if settings.predictor is None:
        return None
    tokenizer = _tokenizer(config)
    if tokenizer is None:
        allowed = "unset with --skip-tokenizer-init: without a tokenizer there are no prompt texts"
        raise InputError("predictor", settings.predictor, allowed)
    decoder = PromptDecoder(tokenizer, whole=settings.prompt == "whole")
    return settings.start_thread(open_predictor(settings.predictor, access=settings), decoder)


def _log_start(settings: EngineSettings) -> None:
    logger.info("tailcast schedules requests: policy %s, predictor %s", settings.policy, settings.predictor)
    uses_predictions = settings.make_policy().inputs & {"length", "urgency", "bucket", "rank", "point"}
    if settings.predictor is None and uses_predictions:
        text = "policy %s uses predictions, but no predictor is set: all lengths are treated as unknown"
        logger.warning(text, settings.policy)
    if multiprocessing.parent_process() is not None and "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
        logger.warning(
            "tailcast metrics are missing from /metrics: set PROMETHEUS_MULTIPROC_DIR to an empty folder before start"
        )
