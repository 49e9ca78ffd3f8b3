"""llm-d: headers for its router, which orders by objective, fairness and SLOs and takes no priority number.

| header | value |
|---|---|
| x-llm-d-slo-ttft-ms, x-llm-d-slo-tpot-ms | the targets of the request's level of urgency, where the operator has set them |
| x-llm-d-inference-objective | name of the InferenceObjective of that level, where the operator has set it |
| x-llm-d-inference-fairness-id | the tenant, where one is known |

The router has no header for an expected length yet. Its priorities are those of the InferenceObjective resources, where
the higher number is the more important; here only their names are told, so no sign has to be turned. Headers that the
client has set stay where they are kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from predictors.proxy.engines.base import ClientHints, Hint, Outlook
from scheduler_core.effective_urgency import effective_urgency
from scheduler_core.errors import InputError
from scheduler_core.urgency import LEVELS

TTFT, TPOT = "x-llm-d-slo-ttft-ms", "x-llm-d-slo-tpot-ms"
OBJECTIVE, FAIRNESS = "x-llm-d-inference-objective", "x-llm-d-inference-fairness-id"
# The second and third are the names that its router had before.
CLIENT_HINTS = ClientHints(headers=("x-llm-d-", "x-gateway-inference-", "x-slo-"))


@dataclass(frozen=True, slots=True, kw_only=True)
class LlmDLevels:
    """What each level of urgency asks for, the most urgent first; empty: nothing is told.

    Attributes:
        slo_ttft_ms: Targets of the time to the first token in milliseconds.
        slo_tpot_ms: Targets of the time per output token in milliseconds.
        objectives: Names of InferenceObjective resources.

    Raises:
        InputError: A list has neither no nor one entry per level, or an entry is outside its range.
    """

    slo_ttft_ms: tuple[int, ...] = ()
    slo_tpot_ms: tuple[int, ...] = ()
    objectives: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("slo_ttft_ms", "slo_tpot_ms", "objectives"):
            values = getattr(self, name)
            if len(values) not in (0, len(LEVELS)):
                raise InputError(name, values, f"no entry, or {len(LEVELS)}: one for each level of urgency")
        for name in ("slo_ttft_ms", "slo_tpot_ms"):
            for value in getattr(self, name):
                if value < 1:
                    raise InputError(name, value, "whole milliseconds >= 1")
        for value in self.objectives:
            if not value.isascii() or not value.isprintable() or not value.strip():
                raise InputError("objectives", value, "names of printable ASCII characters")


class LlmD:
    """Hints for llm-d.

    Args:
        levels: What each level of urgency asks for.
    """

    endpoints = None

    def __init__(self, levels: LlmDLevels) -> None:
        self._levels = levels

    def hint(self, content: Mapping[str, Any], outlook: Outlook) -> Hint:
        """See `Engine.hint`."""
        levels, headers = self._levels, dict[str, str]()
        level = effective_urgency(outlook.state)
        if levels.slo_ttft_ms:
            headers[TTFT] = str(levels.slo_ttft_ms[level])
        if levels.slo_tpot_ms:
            headers[TPOT] = str(levels.slo_tpot_ms[level])
        if levels.objectives:
            headers[OBJECTIVE] = levels.objectives[level]
        if outlook.state.request.tenant:
            headers[FAIRNESS] = outlook.state.request.tenant
        return Hint(headers=headers)
