"""The command `train`: a predictor of output lengths or urgency from prompts and samples."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from scheduler_core.command import entry_point, run_command
from scheduler_core.threads import wait_without_spinning

TYPE_CHECKING = False
if TYPE_CHECKING:
    from training.config import TrainConfig


def _command(config: TrainConfig) -> None:
    wait_without_spinning()
    import transformers

    from training.train import train

    # The bar of weights being loaded, which takes a second.
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    train(config)


@entry_point("train", extra="train")
def main(args: Sequence[str] | None = None) -> int:
    """Entry point of `train`."""
    from training.config import TrainConfig

    return run_command("train", TrainConfig, _command, extra="train", args=args)


if __name__ == "__main__":
    sys.exit(main())
