"""The command `calibrate`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from scheduler_core.command import run_command
from scheduler_core.threads import wait_without_spinning
from training.calibrating.config import CalibrateConfig


def _command(config: CalibrateConfig) -> int:
    wait_without_spinning()
    import transformers

    from training.calibrating.run import calibrate

    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    return 3 if calibrate(config)["is_worse"] else 0


def main(args: Sequence[str] | None = None) -> int:
    """Entry point of `calibrate`."""
    return run_command(
        "calibrate", CalibrateConfig, _command, positionals=("predictor",), extra="train", args=args
    )


if __name__ == "__main__":
    sys.exit(main())
