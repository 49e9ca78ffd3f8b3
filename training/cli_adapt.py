"""The command `adapt`: a better artifact out of a log of finished requests."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from scheduler_core.command import entry_point, run_command

TYPE_CHECKING = False
if TYPE_CHECKING:
    from training.adapt import AdaptConfig

#: What it needs beside `train`: onnx and onnxruntime.
_EXTRA = "train,export"


def _command(config: AdaptConfig) -> int:
    from training.adapt import adapt

    return adapt(config)


@entry_point("adapt", extra=_EXTRA)
def main(args: Sequence[str] | None = None) -> int:
    """Entry point of `adapt`."""
    from training.adapt import AdaptConfig

    return run_command("adapt", AdaptConfig, _command, positionals=("log",), extra=_EXTRA, args=args)


if __name__ == "__main__":
    sys.exit(main())
