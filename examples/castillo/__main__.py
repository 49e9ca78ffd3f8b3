"""`python -m examples.castillo`: train and evaluate larger predictors on public output lengths."""

from __future__ import annotations

import logging
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from scheduler_core.errors import InputError
from scheduler_core.shell.command import command
from scheduler_core.shell.files import shared_folder


@dataclass(frozen=True, kw_only=True)
class CastilloConfig:
    """Train, calibrate, export and evaluate predictors on CASTILLO and further public data sets."""

    INPUTS = ("data",)
    OUTPUTS = ("markdown",)

    data: str
    """Folder with castillo_train.parquet, castillo_validation.parquet, multi_model/, many_prompts/ and repeated_samples/."""
    out: str = "out/castillo"
    """Folder for all results; a step is skipped if its result exists."""
    alpaca_share: float = 0.5
    """Fraction of the 52,000 Alpaca prompts to train on, selected by a hash of the prompt; they take most of the training time."""
    epochs: int | None = None
    """Number of epochs of stage 1 in the first run of MiniLM; unset: as in the YAML file of minilm-cpu."""
    markdown: str = "out/castillo/evaluation.md"
    """Markdown file to write the table to."""

    def __post_init__(self) -> None:
        if not 0 < self.alpaca_share <= 1:
            raise InputError("alpaca_share", self.alpaca_share, "a number above 0, at most 1")


def castillo(config: CastilloConfig) -> None:
    """Runs all unfinished steps; each prints one line."""
    from examples.castillo.steps import Castillo
    from examples.shell import Shell

    out = shared_folder(config.out, "castillo")
    logging.getLogger("data_gen").setLevel(logging.WARNING)
    start = time.monotonic()
    sys.stdout.write(f"tailcast on CASTILLO, logs in {out / 'logs'}\n")
    Castillo(Shell(out / "logs"), Path(config.data), out, config.alpaca_share, config.epochs).run(
        config.markdown
    )
    sys.stdout.write(f"done in {time.monotonic() - start:.0f} s\n")


main = command("castillo", CastilloConfig, castillo, extra="dev")


if __name__ == "__main__":
    sys.exit(main())
