"""The command `evaluate`: how good a predictor is on given data; `evaluate --stream`: whether it still is."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from scheduler_core.command import entry_point, run_command
from scheduler_core.errors import MissingExtraError
from scheduler_core.threads import wait_without_spinning

TYPE_CHECKING = False
if TYPE_CHECKING:
    from training.evaluating.config import EvaluateConfig


def _command(config: EvaluateConfig) -> None:
    wait_without_spinning()
    try:
        import pyarrow  # noqa: F401
        import scipy  # noqa: F401
        import transformers
    except ImportError as error:
        raise MissingExtraError(error.name or "transformers", "train") from error
    from training.evaluating.run import evaluate

    # The bar of weights being loaded, which takes a second.
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    evaluate(config)


@entry_point("evaluate", extra="train")
def main(args: Sequence[str] | None = None) -> int:
    """Entry point of `evaluate`."""
    words = list(sys.argv[1:] if args is None else args)
    if any(word == "--stream" or word.startswith("--stream=") for word in words):
        from training.drift.cli import main as stream

        return stream(words)
    from training.evaluating.config import EvaluateConfig

    return run_command(
        "evaluate",
        EvaluateConfig,
        _command,
        positionals=("predictor",),
        extra="train",
        args=one_list(words, "--beside"),
    )


def one_list(words: Sequence[str], option: str) -> list[str]:
    """The command line with an option that was given several times given once, with the list of its values."""
    values: list[str] = []
    rest: list[str] = []
    at = 0
    while at < len(words):
        word = words[at]
        if word == option and at + 1 < len(words):
            values.append(words[at + 1])
            at += 1
        elif word.startswith(option + "="):
            values.append(word[len(option) + 1 :])
        else:
            rest.append(word)
        at += 1
    if len(values) == 1 and values[0].startswith("["):
        return [*rest, option, values[0]]
    import json

    return [*rest, option, json.dumps(values)] if values else rest


if __name__ == "__main__":
    sys.exit(main())
