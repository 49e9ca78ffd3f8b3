"""Conversion of vLLM's requests."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from scheduler_core.errors import InputError
from scheduler_core.prediction.api_request import read_request
from scheduler_core.prediction.prompt_text import OPTIONS, Message
from scheduler_core.request import Request

#: Request hints of a client (OpenAI API: `vllm_xargs`) -> field of `Request`.
HINTS = {
    "tailcast_tier": "tier",
    "tailcast_tenant": "tenant",
    "tailcast_session": "session",
    "tailcast_ttft_slo_s": "ttft_slo_s",
    "tailcast_tbt_slo_s": "tbt_slo_s",
    "tailcast_ttlt_slo_s": "ttlt_slo_s",
}


def request_of(
    request: Any, now: float, tbt_slo_s: Mapping[str, float] | None = None
) -> tuple[Request, list[str]]:
    """Converts a `vllm.v1.request.Request` that arrives now; also returns the names of hints with invalid values.

    `tbt_slo_s`: targets by tenant, for requests that have none.
    Invalid hints are ignored, because a client's mistake must not stop the engine. Without a hint, its session is the one
    that vLLM knows (member `session_id` of the body, or header X-Session-ID). Sessions of different tenants, or with different
    `cache_salt`, are different, and no client can name a session that has no name.
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
            if isinstance(value, bool) or isinstance(value, str) is not (name in ("tenant", "session")):
                raise TypeError(hint)
            Request(**values, **{name: value})
            values[name] = value
        except (InputError, TypeError):
            bad_hints.append(hint)
    if tbt_slo_s and "tbt_slo_s" not in values and (tenant := values.get("tenant", "")) in tbt_slo_s:
        values["tbt_slo_s"] = tbt_slo_s[tenant]
    if session := values.get("session") or getattr(request, "session_id", None):
        identity = (values.get("tenant", ""), getattr(request, "cache_salt", None), session)
        values["session"] = hashlib.blake2b(repr(identity).encode(), digest_size=12).hexdigest()
    return Request(**values), bad_hints


def options_of(request: Any) -> tuple[Message, ...]:
    """The options of a vLLM request that its sampling parameters have (not tools), as a message; none without options."""
    options = read_request(request.sampling_params).options
    return (Message(OPTIONS, options),) if options else ()


def forced_length(request: Any) -> tuple[int, bool]:
    """Minimum number of output tokens of a vLLM request, and whether it ignores EOS."""
    sampling = request.sampling_params
    return int(getattr(sampling, "min_tokens", 0) or 0), bool(getattr(sampling, "ignore_eos", False))
