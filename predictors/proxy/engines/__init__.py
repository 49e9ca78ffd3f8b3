"""What each engine understands, one file for each, and the list of their names.

| engine | file | told | sooner is |
|---|---|---|---|
| vllm | `vllm.py` | body: `priority` | the lower number |
| sglang | `sglang.py` | body: `priority` | the higher number |
| dynamo | `dynamo.py` | body: `nvext.agent_hints` (`osl`, `priority`) | the higher number |
| llm-d | `llm_d.py` | headers: SLOs, fairness id, objective | |
| none | | nothing: the proxy holds the queue | |
"""

from __future__ import annotations

from predictors.proxy.engines import dynamo, llm_d, sglang, vllm
from predictors.proxy.engines.base import ClientHints, Engine, Hint, Outlook
from predictors.proxy.engines.dynamo import Dynamo
from predictors.proxy.engines.llm_d import LlmD, LlmDLevels
from predictors.proxy.engines.scale import PriorityScale
from predictors.proxy.engines.sglang import SgLang
from predictors.proxy.engines.vllm import Vllm
from scheduler_core.errors import InputError

ENGINES = ("vllm", "sglang", "dynamo", "llm-d", "none")
_HINTS = (vllm.CLIENT_HINTS, sglang.CLIENT_HINTS, dynamo.CLIENT_HINTS, llm_d.CLIENT_HINTS)
#: Of all engines, whichever is used: behind a gateway of one kind there are engines of another.
CLIENT_HINTS = ClientHints(
    members=tuple({path: None for hints in _HINTS for path in hints.members}),
    priorities=tuple({path: None for hints in _HINTS for path in hints.priorities}),
    headers=tuple(name for hints in _HINTS for name in hints.headers),
)


def make_engine(name: str, resolution: float, levels: LlmDLevels) -> Engine | None:
    """The hints of an engine; None for `none`.

    Args:
        name: One of `ENGINES`.
        resolution: Integers per unit of the policy's key.
        levels: Of llm-d: what each level of urgency asks for.

    Raises:
        InputError: The name is unknown, or `resolution` is not a finite number above 0.
    """
    if name not in ENGINES:
        raise InputError("engine", name, ", ".join(ENGINES))
    if name == "none":
        return None
    engines: dict[str, Engine] = {
        "vllm": Vllm(resolution),
        "sglang": SgLang(resolution),
        "dynamo": Dynamo(resolution),
        "llm-d": LlmD(levels),
    }
    return engines[name]


__all__ = [
    "CLIENT_HINTS",
    "ENGINES",
    "ClientHints",
    "Engine",
    "Hint",
    "LlmDLevels",
    "Outlook",
    "PriorityScale",
    "make_engine",
]
