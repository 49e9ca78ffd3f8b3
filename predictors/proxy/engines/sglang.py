"""SGLang: member `priority` of chat and text completions, the higher number first.

Needs `--enable-priority-scheduling`, and `--schedule-low-priority-values-first` must be off, which is its default.
Range: a signed integer of 64 bits. SGLang lets a request displace running ones when its number is higher by more than
`--priority-scheduling-preemption-threshold` (10): with this proxy's fine numbers that is nearly always, so run it with
`--disable-priority-preemption`, or raise the threshold to what a preemption is worth in units of 1 / resolution.
Ageing: none of SGLang's own; it is in the key (see `aged.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from predictors.proxy.asked import CHAT, TEXT
from predictors.proxy.engines.base import ClientHints, Hint, Outlook
from predictors.proxy.engines.scale import PriorityScale

CLIENT_HINTS = ClientHints(
    members=(("priority",), ("parameters", "priority")),  # the second one: /vertex_generate
    priorities=(("priority",), ("parameters", "priority")),
    headers=("x-smg-priority", "x-smg-tenant-id"),  # of its gateway
)


class SgLang:
    """Hints for SGLang.

    Args:
        resolution: Integers per unit of the policy's key.
    """

    endpoints = frozenset({CHAT, TEXT, "/v1/responses", "/generate"})

    def __init__(self, resolution: float) -> None:
        self._scale = PriorityScale(sooner="higher", low=-(2**63), high=2**63 - 1, resolution=resolution)

    def hint(self, content: Mapping[str, Any], outlook: Outlook) -> Hint:
        """See `Engine.hint`."""
        return Hint(members={"priority": self._scale.integer(outlook.key)})
