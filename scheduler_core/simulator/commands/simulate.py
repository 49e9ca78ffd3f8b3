"""Entry point of the command `simulate`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from scheduler_core.command import entry_point, run_command
from scheduler_core.errors import InputError

#: By name: its configuration in the module of that name, fields given by position, what it does.
COMMANDS: dict[str, tuple[str, tuple[str, ...], str]] = {
    "run": ("RunConfig", (), "simulate one policy on a trace or workload; metrics, tables, a page"),
    "compare": ("CompareConfig", ("a", "b"), "two results side by side"),
    "workload": ("WorkloadConfig", (), "draw a trace from the description of a workload"),
    "sweep": ("SweepConfig", ("out",), "policies x loads x settings x seeds, in parallel, resumable"),
    "capacity": ("CapacityConfig", (), "the highest load that meets a target"),
    "calibrate": ("EngineCalibrationConfig", (), "measure a live engine and fit step times to it"),
}


@entry_point("simulate", extra="sim")
def main(args: Sequence[str] | None = None) -> int:
    """Entry point of the console script `simulate`; returns the exit code."""
    words = list(sys.argv[1:] if args is None else args)
    if not words or words[0] in ("-h", "--help"):
        lines = [f"  {name:<10}{text}" for name, (_, _, text) in COMMANDS.items()]
        usage = "\n".join(["usage: simulate COMMAND [OPTIONS]", "", "Commands:", *lines, "", ""])
        (sys.stdout if words else sys.stderr).write(f"{usage}simulate COMMAND --help explains the options.\n")
        return 0 if words else 2
    if words[0] not in COMMANDS:
        raise InputError("COMMAND", words[0], ", ".join(COMMANDS))
    config, positionals, _ = COMMANDS[words[0]]
    command = importlib.import_module(f"scheduler_core.simulator.commands.{words[0]}")
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
