"""The command `evaluate`: how good a predictor is on given data."""

from __future__ import annotations

from collections.abc import Sequence

from scheduler_core.command import run_command
from scheduler_core.errors import MissingExtraError
from scheduler_core.threads import wait_without_spinning
from training.evaluate_config import EvaluateConfig


def _command(config: EvaluateConfig) -> None:
    wait_without_spinning()
    try:
        import pyarrow  # noqa: F401
        import scipy  # noqa: F401
        import transformers
    except ImportError as error:
        raise MissingExtraError(error.name or "transformers", "train") from error
    from training.evaluate import evaluate

    # The bar of weights being loaded, which takes a second.
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    evaluate(config)


def main(args: Sequence[str] | None = None) -> int:
    """Entry point of `evaluate`."""
    return run_command(
        "evaluate", EvaluateConfig, _command, positionals=("predictor",), extra="train", args=args
    )
