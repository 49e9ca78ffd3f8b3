"""The command `train-lexical`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from scheduler_core.command import entry_point, run_command
from scheduler_core.errors import MissingExtraError
from training.evaluating.cli import one_list

TYPE_CHECKING = False
if TYPE_CHECKING:
    from training.lexical.config import TrainLexicalConfig


def _command(config: TrainLexicalConfig) -> None:
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import sklearn  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(error.name or "scikit-learn", "train") from error
    from training.lexical.train import train_lexical

    train_lexical(config)


@entry_point("train-lexical", extra="train")
def main(args: Sequence[str] | None = None) -> int:
    """Entry point of `train-lexical`."""
    from training.lexical.config import TrainLexicalConfig

    words = one_list(list(sys.argv[1:] if args is None else args), "--data")
    return run_command("train-lexical", TrainLexicalConfig, _command, extra="train", args=words)


if __name__ == "__main__":
    sys.exit(main())
