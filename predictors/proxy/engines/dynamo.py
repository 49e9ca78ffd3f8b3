"""NVIDIA Dynamo: member `nvext.agent_hints` with `osl` (expected output length, u32) and `priority` (i32, the higher
number is the more important).

Members of `nvext` and, where they are kept, of `agent_hints` that the client has set stay, `osl` and `priority` among them.
Range: a signed integer of 32 bits. Seconds since 2026 in thousandths (policy `fcfs`, resolution 1000) leave it after 24
days: a lower resolution lasts longer. `tie` with its own ageing stays inside for decades.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from predictors.proxy.asked import CHAT, TEXT
from predictors.proxy.engines.base import ClientHints, Hint, Outlook
from predictors.proxy.engines.scale import PriorityScale
from scheduler_core.lengths import expected_and_cvar
from scheduler_core.request import RequestState

MAX_OSL = 2**32 - 1
CLIENT_HINTS = ClientHints(
    members=(("nvext", "agent_hints"),),
    priorities=(("nvext", "agent_hints", "priority"),),
    headers=("x-dynamo-request-priority", "x-dynamo-request-strict-priority"),
)


class Dynamo:
    """Hints for Dynamo.

    Args:
        resolution: Integers per unit of the policy's key.
    """

    endpoints = frozenset({CHAT, TEXT, "/v1/responses"})

    def __init__(self, resolution: float) -> None:
        self._scale = PriorityScale(sooner="higher", low=-(2**31), high=2**31 - 1, resolution=resolution)

    def hint(self, content: Mapping[str, Any], outlook: Outlook) -> Hint:
        """See `Engine.hint`."""
        extension = content.get("nvext")
        given = extension.get("agent_hints") if isinstance(extension, dict) else None
        if (extension is not None and not isinstance(extension, dict)) or (
            given is not None and not isinstance(given, dict)
        ):
            return Hint()  # the engine says what is wrong with it
        hints: dict[str, Any] = {"priority": self._scale.integer(outlook.key)}
        tokens = expected_tokens(outlook.state)
        if tokens is not None and tokens <= MAX_OSL:
            hints["osl"] = tokens
        return Hint(members={"nvext": {**(extension or {}), "agent_hints": hints | (given or {})}})


def expected_tokens(state: RequestState) -> int | None:
    """E[min(X, max_tokens)] as a whole number of at least 1; None without a predicted length."""
    length = state.prediction
    if length is None:
        return None
    mean, _ = expected_and_cvar(length.mu, length.sigma, length.nu, state.request.max_tokens, 0.9)
    return max(1, round(mean))
