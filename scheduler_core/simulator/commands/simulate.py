"""Entry point of the command `simulate`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from scheduler_core.command import entry_point, run_command
from scheduler_core.errors import InputError

#: By name: module in this package, its configuration, fields given by position.
COMMANDS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "run": ("run", "RunConfig", ()),
    "compare": ("compare", "CompareConfig", ("a", "b")),
    "workload": ("workload", "WorkloadConfig", ()),
    "sweep": ("sweep", "SweepConfig", ("out",)),
    "capacity": ("capacity", "CapacityConfig", ()),
    "calibrate": ("calibrate", "EngineCalibrationConfig", ()),
}

USAGE = """usage: simulate COMMAND [OPTIONS]

Commands:
  run       simulate one scheduling policy on a trace or workload; metrics, tables, a page with figures, a timeline
  compare   two results side by side
  workload  draw a trace from the description of a workload
  sweep     policies x batch formers x routers x loads x seeds, in parallel, resumable
  capacity  the highest load that meets a target
  calibrate measure a live engine and fit step times to it

simulate COMMAND --help explains the options.
"""


@entry_point("simulate", extra="sim")
def main(args: Sequence[str] | None = None) -> int:
    """Entry point of the console script `simulate`; returns the exit code."""
    words = list(sys.argv[1:] if args is None else args)
    if not words or words[0] in ("-h", "--help"):
        (sys.stdout if words else sys.stderr).write(USAGE)
        return 0 if words else 2
    if words[0] not in COMMANDS:
        raise InputError("COMMAND", words[0], ", ".join(COMMANDS))
    name, config, positionals = COMMANDS[words[0]]
    command = importlib.import_module(f"scheduler_core.simulator.commands.{name}")
    return run_command(
        f"simulate {words[0]}",
        getattr(command, config),
        command.run,
        positionals=positionals,
        extra="sim",
        args=words[1:],
    )


if __name__ == "__main__":
    sys.exit(main())
