"""Command `tailcast plan`: the cheapest GPUs, replicas and settings that meet targets, from a log of requests."""

from __future__ import annotations

import logging
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from scheduler_core.shell.command import command
from scheduler_core.simulator.planning.config import PlanConfig

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PlanCommandConfig(PlanConfig):
    """Find the cheapest GPUs, number of replicas and settings that meet targets, from a log of your requests.

    The last lines list what was left out, and what may mislead. The exit code is 3 if the recommendation is not reliable, for example
    because the log is too short, or if more than half of the log was left out.
    """

    INPUTS = ("log", "model", "step_time_parameters", "predictor")
    OUTPUTS = ("json", "report", "cells")

    log: str
    """Log of requests: a trace of the simulator, or any file that `import-lengths auto` recognizes, such as OpenAI responses,
    Langfuse, OpenTelemetry, LiteLLM, vllm bench serve, Mooncake, recorded agent sessions, the proxy's feedback."""
    json: str | None = None
    """Path of the result."""
    report: str | None = None
    """Path of a page with plots (HTML)."""
    overwrite: bool = False
    """Replace existing output files."""
    cells: str | None = None
    """Folder for results of simulations, to resume an interrupted plan. Unset: a temporary folder."""


def _plan(config: PlanCommandConfig) -> int:
    from scheduler_core.shell.command import CHECK_FAILED
    from scheduler_core.shell.files import writable_target, write_json
    from scheduler_core.shell.progress import progress_bar
    from scheduler_core.simulator.planning.page import write_plan_page
    from scheduler_core.simulator.planning.plan import lines_of, make_plan
    from scheduler_core.simulator.planning.simulations import Simulations, read_log
    from scheduler_core.simulator.sweep import CellStore
    from scheduler_core.simulator.trace import write_trace
    from tailcast.request_log import read_requests

    for name in ("json", "report"):
        if getattr(config, name) is not None:
            writable_target(getattr(config, name), name)
    with tempfile.TemporaryDirectory() as scratch:
        requests = read_requests(config.log, config, Path(scratch))
        folder = Path(config.cells or scratch)
        store = CellStore(folder / "cells")
        path = folder / f"log-{requests.trace.fingerprint()[:12]}.parquet"
        write_trace(requests.trace, path)
        read_log.cache_clear()  # the same log may have other predictions now
        bar = progress_bar(None, "run", enabled=None, desc="planning")
        with bar, Simulations(store, config.num_workers, bar.update) as simulations:
            content = make_plan(config, read_log(str(path)), str(path), simulations, bar.set_description_str)
    content["log"]["source"] = Path(config.log).name
    if config.json is not None:
        write_json(config.json, content)
    if config.report is not None:
        write_plan_page(content, config.targets, config.report)
    sys.stdout.write("\n".join(lines_of(content)) + "\n")
    for warning in (*content["warnings"].values(), *requests.warnings):
        log.warning(warning)
    code = requests.report(content["log"]["num_refused"])
    return CHECK_FAILED if content["unreliable"] else code


main = command("tailcast plan", PlanCommandConfig, _plan, positionals=("log",), extra="sim")
