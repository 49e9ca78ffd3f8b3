"""The command `evaluate`: scores of a predictor on sampled or logged outputs."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from scheduler_core.command import entry_point, run_command
from scheduler_core.threads import wait_without_spinning

TYPE_CHECKING = False
if TYPE_CHECKING:
    from training.evaluating.config import EvaluateConfig


def _command(config: EvaluateConfig) -> None:
    wait_without_spinning()
    import transformers

    from training.evaluating.run import evaluate

    # The bar of loading weights, which takes a second.
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    evaluate(config)


@entry_point("evaluate", extra="train")
def main(args: Sequence[str] | None = None) -> int:
    """Entry point of `evaluate`."""
    from training.evaluating.config import EvaluateConfig

    return run_command(
        "evaluate", EvaluateConfig, _command, positionals=("predictor",), extra="train", args=args
    )


if __name__ == "__main__":
    sys.exit(main())
