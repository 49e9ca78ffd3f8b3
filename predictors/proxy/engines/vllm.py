"""vLLM: member `priority` of chat and text completions, the lower number first, then arrival.

Range: a signed integer of 64 bits. vLLM refuses any number but 0 unless it runs with `--scheduling-policy priority`.
Ageing: vLLM has none; it is in the key (see `aged.py`), which grows with the time of arrival.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from predictors.proxy.asked import CHAT, TEXT
from predictors.proxy.engines.base import ClientHints, Hint, Outlook
from predictors.proxy.engines.scale import PriorityScale

CLIENT_HINTS = ClientHints(members=(("priority",),), priorities=(("priority",),))


class Vllm:
    """Hints for vLLM.

    Args:
        resolution: Integers per unit of the policy's key.
    """

    endpoints = frozenset(
        {CHAT, TEXT, "/v1/responses", "/v1/chat/completions/batch", "/inference/v1/generate"}
    )

    def __init__(self, resolution: float) -> None:
        self._scale = PriorityScale(sooner="lower", low=-(2**63), high=2**63 - 1, resolution=resolution)

    def hint(self, content: Mapping[str, Any], outlook: Outlook) -> Hint:
        """See `Engine.hint`."""
        return Hint(members={"priority": self._scale.integer(outlook.key)})
