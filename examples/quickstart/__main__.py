"""`make quickstart`: from sampled outputs of a real LLM to a scheduler that uses served predictions."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from typing import Literal

from scheduler_core.shell.command import command
from scheduler_core.shell.files import shared_folder


@dataclass(frozen=True, kw_only=True)
class QuickstartConfig:
    """Sample a real LLM, fit, train, export, serve and schedule; then write a report."""

    size: Literal["full", "tiny"] = "full"
    """full: the complete quickstart; tiny: the same steps with a few prompts, for the tests."""
    out: str = "out/quickstart"
    """Folder for all results: a new or empty one, or that of an earlier quickstart, which is overwritten."""


def quickstart(config: QuickstartConfig) -> None:
    """Runs all steps; each prints one line when it is finished."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from examples.quickstart.report import write_report
    from examples.quickstart.sizes import SIZES
    from examples.quickstart.steps import Quickstart
    from examples.shell import Shell

    out = shared_folder(config.out, "quickstart")
    start = time.monotonic()
    sys.stdout.write(f"tailcast quickstart ({config.size}), logs in {out / 'logs'}\n")
    shell = Shell(out / "logs")
    work = Quickstart(shell, out, SIZES[config.size])
    work.run()
    since = time.monotonic()
    report = write_report(out, shell.records)
    shell.finished("h", "report", "", since, str(report))
    sys.stdout.write(f"done in {time.monotonic() - start:.0f} s\n")


main = command("quickstart", QuickstartConfig, quickstart, extra="dev")


if __name__ == "__main__":
    sys.exit(main())
