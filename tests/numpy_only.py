"""Run in an environment with tailcast and numpy alone: every module of scheduler_core, and names of tailcast, import there."""

import importlib
import pkgutil
import sys
from importlib import metadata

import scheduler_core
import tailcast
from tailcast.cli import main as main_of_tailcast


def main() -> None:
    installed = {distribution.metadata["Name"].lower() for distribution in metadata.distributions()}
    unexpected = installed - {"tailcast", "numpy", "pip", "setuptools"}
    if unexpected:
        sys.exit(f"this check needs an environment with numpy alone, but found: {sorted(unexpected)}")
    names = [module.name for module in pkgutil.walk_packages(scheduler_core.__path__, "scheduler_core.")]
    for name in ["scheduler_core", *names]:
        importlib.import_module(name)
    for name in ("LogT", "OutputLength", "Scheduler", "read_trace", "simulate"):
        getattr(tailcast, name)
    if main_of_tailcast(["--help"]) != 0 or main_of_tailcast(["predict", "x"]) != 2:
        sys.exit("the command tailcast neither lists its sub-commands nor names the missing extra")
    version = metadata.version("numpy")
    sys.stdout.write(f"{len(names) + 1} modules of scheduler_core import with numpy {version} alone\n")


if __name__ == "__main__":
    main()
