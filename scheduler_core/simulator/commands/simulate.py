"""Entry point of the command `simulate`."""

import importlib
import sys
from collections.abc import Sequence

from scheduler_core.shell.command import chosen_command, command, entry_point

#: Name -> (configuration class in the module of that name, positional fields, description).
COMMANDS: dict[str, tuple[str, tuple[str, ...], str]] = {
    "run": ("RunConfig", (), "simulate one policy on a trace or workload; metrics, tables, a page"),
    "compare": ("CompareConfig", ("runs",), "compare results with the first one, with a verdict"),
    "workload": ("WorkloadConfig", (), "draw a trace from the description of a workload"),
    "sweep": (
        "SweepConfig",
        ("out",),
        "simulate policies x loads x settings x seeds, in parallel, resumable",
    ),
    "capacity": ("CapacityConfig", (), "find the highest load that meets targets"),
    "replicas": ("ReplicasConfig", (), "find the number of replicas that meets targets"),
    "tiers": ("TiersConfig", (), "find the number of tiers and the headroom of multi-tier Llumnix"),
    "calibrate": ("EngineCalibrationConfig", (), "measure a live engine and fit step times to it"),
}


@entry_point("simulate", extra="sim")
def main(args: Sequence[str] | None = None) -> int:
    """Entry point of the console script `simulate`; returns the exit code."""
    words = list(sys.argv[1:] if args is None else args)
    name = chosen_command("simulate", {name: text for name, (_, _, text) in COMMANDS.items()}, words)
    if name is None:
        return 0 if words else 2
    config, positionals, _ = COMMANDS[name]
    module = importlib.import_module(f"scheduler_core.simulator.commands.{name}")
    run = command(
        f"simulate {name}", getattr(module, config), module.run, positionals=positionals, extra="sim"
    )
    return run(words[1:])


if __name__ == "__main__":
    sys.exit(main())
