"""Run in an environment with tailcast and numpy alone: every module of scheduler_core must import there."""

import importlib
import pkgutil
import sys
from importlib import metadata

import scheduler_core


def main() -> None:
    installed = {distribution.metadata["Name"].lower() for distribution in metadata.distributions()}
    unexpected = installed - {"tailcast", "numpy", "pip", "setuptools"}
    if unexpected:
        sys.exit(
            f"this check needs an environment with numpy alone, but found: {', '.join(sorted(unexpected))}"
        )
    names = [module.name for module in pkgutil.walk_packages(scheduler_core.__path__, "scheduler_core.")]
    for name in ["scheduler_core", *names]:
        importlib.import_module(name)
    sys.stdout.write(
        f"{len(names) + 1} modules of scheduler_core import with numpy {metadata.version('numpy')} alone\n"
    )


if __name__ == "__main__":
    main()
