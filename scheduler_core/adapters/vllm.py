"""`vllm serve MODEL --scheduler-cls scheduler_core.adapters.vllm.TailcastScheduler`: our order inside vLLM.

The class is made when it is asked for: this module imports without vLLM, as all of scheduler_core does. Settings:
`scheduler_core.adapters.settings`; how it works: `scheduler_core.adapters.vllm_scheduling`; for users: docs/vllm.md.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from scheduler_core.adapters.request_queue import PolicyQueue
from scheduler_core.adapters.vllm_scheduling import PolicyScheduling
from scheduler_core.adapters.vllm_versions import check_version
from scheduler_core.errors import MissingExtraError


@cache
def scheduler_class() -> type:
    """vLLM's AsyncScheduler with our order; a plain Scheduler would lose its throughput.

    Raises:
        MissingExtraError: There is no vLLM.
        InputError: The installed vLLM is of a version that nobody has tried.
    """
    try:
        import vllm
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        raise MissingExtraError("vllm", "vllm") from error
    check_version(vllm.__version__)
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.request_queue import RequestQueue

    RequestQueue.register(PolicyQueue)
    return type("TailcastScheduler", (PolicyScheduling, AsyncScheduler), {"__module__": __name__})


def __getattr__(name: str) -> Any:
    if name == "TailcastScheduler":
        return scheduler_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
