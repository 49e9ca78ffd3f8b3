"""What our scheduler does differently from vLLM's: who waits where, and who must go.

vLLM forms the batches: running requests first, then waiting ones until budget, seats or memory end. It asks its waiting
queue who is next, and takes the last running request where memory runs out; both places are the policy's here.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from scheduler_core.adapters.displacement import Seats, victims_for
from scheduler_core.adapters.engine_metrics import process_metrics
from scheduler_core.adapters.live_order import LiveOrder
from scheduler_core.adapters.prediction_thread import PredictionThread
from scheduler_core.adapters.prompt_text import PromptReader
from scheduler_core.adapters.request_queue import PolicyQueue
from scheduler_core.adapters.settings import EngineSettings, read_settings
from scheduler_core.adapters.vllm_requests import as_question, as_request
from scheduler_core.errors import InputError
from scheduler_core.policies import make_policy
from scheduler_core.predictor import open_predictor

if TYPE_CHECKING:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler as _Base
else:
    _Base = object

logger = logging.getLogger("vllm.tailcast")  # below vLLM's logger, so that its handlers show it


class PolicyScheduling(_Base):  # type: ignore[misc]
    """To be mixed into vLLM's AsyncScheduler (0.32); takes and passes on its arguments.

    The clock is monotonic and starts for a request when it reaches the scheduler. A request never waits for its
    prediction: without one its key is that of an unknown length, and it is placed anew when the prediction comes.

    Raises:
        InputError: The settings are not allowed, or cannot be used with this engine.
    """

    # vLLM's own.
    policy: Any
    running: list[Any]
    waiting: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        config = kwargs["vllm_config"] if "vllm_config" in kwargs else args[0]
        settings = read_settings(_additional(config), os.environ)
        self._tailcast_thread = _predictions(settings, config)
        super().__init__(*args, **kwargs)
        self._tailcast_settings = settings
        self._tailcast_clock: Callable[[], float] = time.monotonic
        self._tailcast_order = LiveOrder(
            make_policy(settings.policy, settings.policy_parameters), config.scheduler_config.max_num_seqs
        )
        self._tailcast_step_began: float | None = None
        self.waiting = PolicyQueue(self._tailcast_order, self._tailcast_clock)
        # Where memory runs out vLLM's own policy "priority" would choose by the declared priority; else the last goes.
        self.policy = type(self.policy)("fcfs")
        self._tailcast_metrics = process_metrics()
        self._tailcast_metrics.started(settings.policy, settings.predictor, _engine_version())
        _report(settings)

    def add_request(self, request: Any) -> None:
        """A request arrives; whoever waits for it, nobody waits for its prediction."""
        if request.request_id not in self.requests:
            ours, wrong = as_request(request, self._tailcast_clock())
            for hint in wrong:
                self._tailcast_metrics.bad_hint(hint)
            self._tailcast_order.arrive(ours, ours.arrival_s)
            if self._tailcast_thread is None:
                self._tailcast_metrics.absent()
            else:
                self._tailcast_thread.submit(as_question(request, self._tailcast_settings.served_model))
        super().add_request(request)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """The next step, in the policy's order of this moment."""
        now = self._tailcast_clock()
        order = self._tailcast_order
        self._tailcast_deliver(now)
        if order.start_step(now):
            self._tailcast_metrics.rekeyed()
        if order.policy.preemptive:
            self._tailcast_displace(now)
        if self._tailcast_step_began is None:
            self._tailcast_step_began = now
        output = super().schedule(*args, **kwargs)
        self._tailcast_admit(output.num_scheduled_tokens, now)
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """A step is done: the policy learns of the work before requests leave, and of the step's end after."""
        now = self._tailcast_clock()
        sampled, rows = model_runner_output.sampled_token_ids, model_runner_output.req_id_to_index
        for request_id, num_tokens in scheduler_output.num_scheduled_tokens.items():
            request = self.requests.get(request_id)
            if request is None:
                continue
            row = rows.get(request_id)
            num_new = len(sampled[row]) if sampled and row is not None else 0
            self._tailcast_order.progress(
                request_id, num_tokens, request.num_computed_tokens, request.num_output_tokens + num_new, now
            )
        result = super().update_from_output(scheduler_output, model_runner_output)
        if self._tailcast_step_began is not None:
            self._tailcast_order.policy.on_step(now, now - self._tailcast_step_began)
        self._tailcast_step_began = now if self.running else None
        return result

    def shutdown(self) -> None:
        """Ends the predictor's thread, too."""
        if self._tailcast_thread is not None:
            self._tailcast_thread.close()
        super().shutdown()

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        """Called by vLLM, which then puts the request back into the queue: its state, and with it its score, is kept."""
        self._tailcast_order.preempt(request.request_id, self._tailcast_clock())
        super()._preempt_request(request, *args, **kwargs)

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """Called by vLLM once for each request that ends, in whatever state and for whatever reason."""
        state = self._tailcast_order.leave(request.request_id)
        if state is not None:
            if request.get_finished_reason() is not None and str(request.get_finished_reason()) == "stop":
                self._tailcast_metrics.finished(state, request.num_output_tokens)
            if self._tailcast_thread is not None:
                self._tailcast_thread.withdraw(request.request_id)
        return super()._free_request(request, *args, **kwargs)

    def _tailcast_deliver(self, now: float) -> None:
        if self._tailcast_thread is None:
            return
        for event in self._tailcast_thread.take():
            self._tailcast_metrics.predicted(event)
            self._tailcast_order.predict(event.request_id, event.prediction, now)
            if event.error is not None:
                logger.debug("no prediction for %s: %s", event.request_id, event.error)

    def _tailcast_admit(self, request_ids: Any, now: float) -> None:
        order, asks = self._tailcast_order, self._tailcast_thread is not None
        for request_id in request_ids if asks else ():
            state = order.states.get(request_id)
            if state is not None and state.first_scheduled_s is None and state.prediction is None:
                self._tailcast_metrics.admitted_unscored()
        order.schedule(request_ids, now)

    def _tailcast_displace(self, now: float) -> None:
        """Lets the first waiting request take a running one's place if the policy says so; one at most per step.

        Then the running requests are put in order, so that the one that vLLM takes where memory runs out, the last, is
        that of the largest eviction key.
        """
        order = self._tailcast_order
        running = {request.request_id: request for request in self.running}
        worst = order.worst_first(running, now)
        head = self.waiting.peek_request() if self.waiting and self.pause_state.name == "UNPAUSED" else None
        if head is not None and not self._is_blocked_waiting_status(head.status):
            for state in victims_for(order, worst, head, Seats.of(self), now):
                request = running[state.request_id]
                self.running.remove(request)
                self._preempt_request(request, now, drop_stale_output=self.requires_kv_delivery)
                # It must not look as if it ran on without a break, should it be admitted again in this very step.
                self.prev_step_scheduled_req_ids.discard(request.request_id)
                self._tailcast_metrics.displaced()
        still = {request.request_id for request in self.running}
        self.running = [
            running[state.request_id] for _, state in reversed(worst) if state.request_id in still
        ]


def _additional(config: Any) -> dict[str, Any]:
    found = config.additional_config
    return found if isinstance(found, dict) else {}


def _predictions(settings: EngineSettings, config: Any) -> PredictionThread | None:
    """The thread that asks the predictor; None without one."""
    if settings.predictor is None:
        return None
    from vllm.tokenizers import cached_tokenizer_from_config

    tokenizer = cached_tokenizer_from_config(config.model_config)
    if tokenizer is None:
        raise InputError(
            "predictor", settings.predictor, "unset with --skip-tokenizer-init: prompts are only ids here"
        )
    return PredictionThread(
        open_predictor(settings.predictor),
        PromptReader(tokenizer, whole=settings.prompt == "whole"),
        max_in_flight=settings.max_in_flight,
        max_batch=settings.max_batch,
        timeout_s=settings.timeout_s,
    )


def _engine_version() -> str:
    import vllm

    return str(vllm.__version__)


def _report(settings: EngineSettings) -> None:
    logger.info("tailcast orders the requests: policy %s, predictor %s", settings.policy, settings.predictor)
    if settings.predictor is None and settings.wants_predictions:
        logger.warning(
            "policy %s uses predictions and there is no predictor: every length is taken for unknown",
            settings.policy,
        )
    alone = multiprocessing.parent_process() is not None and "PROMETHEUS_MULTIPROC_DIR" not in os.environ
    if alone:
        logger.warning(
            "metrics of tailcast are not on /metrics: set PROMETHEUS_MULTIPROC_DIR to an empty folder before the start"
        )
