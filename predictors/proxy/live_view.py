"""Contents of the live page of a proxy."""

from __future__ import annotations

import uuid
from dataclasses import replace

from predictors.hosting.live_page import MAX_LISTED, ListedRequest, LivePage, OrderTable, PromptQuery
from predictors.proxy.handler import RequestHandler
from predictors.proxy.order import EngineOrder, policy_name
from predictors.proxy.parsing import CHAT, parse_request
from scheduler_core.errors import TailcastError
from scheduler_core.prediction.correction import RequestContext
from scheduler_core.prediction.predictions import LengthPrediction
from scheduler_core.prediction.predictor import PredictionRequest
from scheduler_core.prediction.prompt_text import prompt_key
from scheduler_core.prediction.session import request_embedding
from scheduler_core.request import RequestState

#: Outcome of a `Forecast` -> why there is no prediction.
_REASONS = {
    "absent": "the proxy has no predictor (--predictor none)",
    "late": "the predictor did not respond within --deadline_s; try again",
    "refused": "the predictor refuses this prompt or served model",
    "no_text": "the prompt has no text",
}


def live_page(handler: RequestHandler) -> LivePage:
    """The page of a proxy, for its admin port."""
    config = handler.config
    hint = "Send requests through the proxy: their predicted and true lengths appear here."
    if config.predictor == "none":
        hint = "The proxy has no predictor (--predictor none): choose one to see its predictions here."
    elif not handler.recorder.is_on:
        hint = "Output lengths are not read: enable --online_calibration or --feedback."

    async def predict(query: PromptQuery) -> tuple[LengthPrediction, RequestContext]:
        return await _predicted(handler, query)

    def order() -> OrderTable:
        name, holds = policy_name(config), handler.queue is not None
        tables = [order_table(engine.order, name, holds=holds) for engine in handler.engines]
        table = OrderTable(
            policy=name,
            num_waiting=sum(each.num_waiting for each in tables),
            num_running=sum(each.num_running for each in tables),
            requests=[row for each in tables for row in each.requests][:MAX_LISTED],
        )
        return table if handler.sessions is None else replace(table, sessions=handler.sessions.counts())

    return LivePage(
        title="tailcast-proxy",
        ended=handler.recorder.ended,
        calibration=lambda: handler.recorder.calibration,
        predict=predict,
        order=order,
        hint=hint,
        shows_tenants=True,
    )


def order_table(order: EngineOrder, policy: str, *, holds: bool) -> OrderTable:
    """The live requests of an order. `holds`: the proxy has the queue, so that the first ones wait in the proxy."""
    now, first, running = order.clock(), order.first(MAX_LISTED), order.running()

    def listed(state: RequestState, position: int | None, text: str) -> ListedRequest:
        sent_s = state.first_scheduled_s
        return ListedRequest(
            position=position,
            request_id=state.request_id,
            state=text,
            prediction=state.prediction,
            waited_s=max((now if sent_s is None else sent_s) - state.request.arrival_s, 0.0),
            running_s=None if sent_s is None else now - sent_s,
            output_tokens=state.num_output_tokens,
            tenant=state.request.tenant,
        )

    text = "waiting" if holds else "sent"
    rows = [listed(state, position, text) for position, state in enumerate(first, 1)]
    rows += [listed(state, None, "running") for state in running[: MAX_LISTED - len(rows)]]
    num_waiting = order.num_live - order.num_running
    return OrderTable(policy=policy, num_waiting=num_waiting, num_running=order.num_running, requests=rows)


async def _predicted(handler: RequestHandler, query: PromptQuery) -> tuple[LengthPrediction, RequestContext]:
    """The predicted length of a chat with this prompt, and its context; TailcastError if there is none."""
    config = handler.config
    messages = [{"role": "system", "content": query.system}] if query.system else []
    messages.append({"role": "user", "content": query.prompt})
    parsed = parse_request({"model": query.model, "messages": messages}, CHAT)
    served = query.model if config.served_model is None else config.served_model
    request = PredictionRequest(
        uuid.uuid4().hex,
        parsed.prompt,
        config.default_max_tokens,
        served,
        messages=parsed.body.conversation,
    )
    forecast = await handler.forecaster.forecast(request)
    prediction = forecast.prediction
    if prediction is None:
        raise TailcastError(_REASONS.get(forecast.outcome, "the predictor has failed"))
    if prediction.length is None:
        raise TailcastError("the predictor has no length head")
    context = RequestContext(
        served_model=query.model,
        tenant=query.tenant,
        prompt_tokens=None if prediction.prompt_tokens is None else parsed.prompt_tokens(prediction),
        system_prompt=prompt_key(parsed.body.messages),
        embedding=request_embedding(prediction.embedding),
    )
    return prediction.length, context
