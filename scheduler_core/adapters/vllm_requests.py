"""A request of vLLM as the policies see it."""

from __future__ import annotations

from typing import Any

from scheduler_core.adapters.prediction_thread import Question
from scheduler_core.errors import InputError
from scheduler_core.request import Request

#: What a client may say about its request (OpenAI API: `vllm_xargs`) -> field of `Request`.
HINTS = {
    "tailcast_tier": "tier",
    "tailcast_tenant": "tenant",
    "tailcast_ttft_slo_s": "ttft_slo_s",
    "tailcast_tbt_slo_s": "tbt_slo_s",
    "tailcast_ttlt_slo_s": "ttlt_slo_s",
}


def as_request(request: Any, now: float) -> tuple[Request, list[str]]:
    """vLLM's request in our terms.

    A client's mistake must not stop an engine, so a hint of a wrong value is left out and named instead of raising.

    Args:
        request: A `vllm.v1.request.Request`.
        now: Its arrival, in seconds on the scheduler's clock.

    Returns:
        The request, and the names of the hints that were left out.
    """
    needed: dict[str, Any] = {
        "request_id": request.request_id,
        "arrival_s": now,
        "prompt_tokens": max(int(request.num_prompt_tokens), 1),
        "max_tokens": max(int(request.max_tokens), 1),
        "priority": int(request.priority),
    }
    wrong = []
    for hint, value in _hints(request).items():
        try:
            _check_type(hint, value)
            Request(**needed, **{HINTS[hint]: value})
        except (InputError, TypeError):
            wrong.append(hint)
        else:
            needed[HINTS[hint]] = value
    return Request(**needed), wrong


def as_question(request: Any, served_model: str) -> Question:
    """What is asked about vLLM's request."""
    parameters = request.sampling_params
    return Question(
        request.request_id,
        request.prompt_token_ids,
        max(int(request.max_tokens), 1),
        served_model,
        None if parameters is None else float(parameters.temperature),
    )


def _hints(request: Any) -> dict[str, Any]:
    extra = getattr(request.sampling_params, "extra_args", None) or {}
    return {name: extra[name] for name in HINTS if name in extra}


def _check_type(hint: str, value: Any) -> None:
    if hint == "tailcast_tenant":
        if not isinstance(value, str):
            raise InputError(hint, value, "text")
    elif isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(hint, value, "numbers")
