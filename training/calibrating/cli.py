"""The command `calibrate`."""

from __future__ import annotations

from scheduler_core.command import command
from training.calibrating.config import CalibrateConfig
from training.progress import prepare_models


def _calibrate(config: CalibrateConfig) -> int:
    prepare_models()
    from training.calibrating.run import calibrate

    return 3 if calibrate(config)["is_worse"] else 0


main = command("calibrate", CalibrateConfig, _calibrate, positionals=("predictor",), extra="train")


if __name__ == "__main__":
    raise SystemExit(main())
