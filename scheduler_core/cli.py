"""The command `simulate`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from scheduler_core.command import entry_point, run_command
from scheduler_core.errors import InputError

#: By name: module, its configuration, fields given by position.
COMMANDS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "run": ("scheduler_core.simulate.run", "RunConfig", ()),
    "compare": ("scheduler_core.simulate.compare", "CompareConfig", ("a", "b")),
    "workload": ("scheduler_core.simulate.workload", "WorkloadConfig", ()),
    "sweep": ("scheduler_core.simulate.sweep", "SweepConfig", ("out",)),
    "capacity": ("scheduler_core.simulate.capacity", "CapacityConfig", ()),
    "calibrate": ("scheduler_core.simulate.calibrate", "CalibrateCommand", ()),
    "search": ("scheduler_core.simulate.search", "SearchConfig", ("out",)),
}

USAGE = """usage: simulate COMMAND [OPTIONS]

Commands:
  run       simulate one scheduling policy on a trace or workload; metrics, tables, a page with figures, a timeline
  compare   two results side by side
  workload  draw a trace from the description of a workload
  sweep     policies x batch formers x routers x loads x seeds, in parallel, resumable
  capacity  the highest load that meets a target
  search    the best settings of a deployment for a target
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
    import importlib

    module, config, positionals = COMMANDS[words[0]]
    command = importlib.import_module(module)
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
