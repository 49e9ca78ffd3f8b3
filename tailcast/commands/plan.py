"""Command `tailcast plan`: the cheapest GPUs, replicas and settings that meet targets, from a log of requests."""

from __future__ import annotations

import logging
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from scheduler_core.prediction.service_access import ACCESS_FILES
from scheduler_core.shell.command import command
from scheduler_core.simulator.planning.config import PlanConfig

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PlanCommandConfig(PlanConfig):
    """Find the cheapest GPUs, number of replicas and settings that meet targets, from a log of your requests.

    The last lines list what was left out, and what may mislead. The exit code is 3 if the recommendation is not reliable, for example
    because the log is too short, or if more than half of the log was left out.
    """

    INPUTS = ("log", "model", "step_time_parameters", "predictor", *ACCESS_FILES)
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
    from scheduler_core.shell.command import CHECK_FAILED, report_left_out
    from scheduler_core.shell.files import writable_target, write_json
    from scheduler_core.shell.progress import progress_bar
    from tailcast.planning import plan_log

    for name in ("json", "report"):
        if getattr(config, name) is not None:
            writable_target(getattr(config, name), name)
    bar = progress_bar(None, "run", enabled=None, desc="planning")
    with tempfile.TemporaryDirectory() as scratch, bar:
        folder = Path(config.cells or scratch)
        result = plan_log(config.log, config, Path(scratch), folder, bar.update, bar.set_description_str)
    if config.json is not None:
        write_json(config.json, result.content)
    if config.report is not None:
        result.write_page(config.report)
    sys.stdout.write(f"{result}\n")
    for warning in result.warnings:
        log.warning(warning)
    code = report_left_out(result.left_out, result.num_rows)
    return CHECK_FAILED if result.unreliable else code


main = command("tailcast plan", PlanCommandConfig, _plan, positionals=("log",), extra="sim")
