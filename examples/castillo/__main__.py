"""`python -m examples.castillo`: the predictors of the evaluation table, from public lengths to docs/evaluation.md."""

from __future__ import annotations

import logging
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from scheduler_core.command import command
from scheduler_core.errors import InputError
from scheduler_core.files import shared_folder


@dataclass(frozen=True, kw_only=True)
class CastilloConfig:
    """Train, calibrate, export and judge the predictors on CASTILLO and the public sets beside it."""

    INPUTS = ("data",)
    OUTPUTS = ("markdown",)

    data: str
    """Folder with castillo_train.parquet, castillo_validation.parquet, multi_model/, many_prompts/ and repeated_samples/."""
    out: str = "out/castillo"
    """Folder for everything that is made; a step whose result is there is left out."""
    alpaca_share: float = 0.5
    """Share of the 52,000 Alpaca prompts to train on, by a hash of the prompt: most of the time goes into them."""
    epochs: int | None = None
    """First passes over all parameters of MiniLM, if they differ from the YAML file of minilm-cpu."""
    markdown: str = "docs/evaluation.md"
    """Where the table is written."""

    def __post_init__(self) -> None:
        if not 0 < self.alpaca_share <= 1:
            raise InputError("alpaca_share", self.alpaca_share, "a number above 0, at most 1")


def castillo(config: CastilloConfig) -> None:
    """Runs all steps that have not been done; each prints one line."""
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
