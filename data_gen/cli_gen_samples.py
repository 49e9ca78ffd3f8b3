"""The command `gen-samples`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from scheduler_core.command import entry_point, run_command


@entry_point("gen-samples", extra="gen")
def main(args: Sequence[str] | None = None) -> int:
    """Entry point of `gen-samples`."""
    from data_gen.gen_samples import GenSamplesConfig, gen_samples

    return run_command(
        "gen-samples", GenSamplesConfig, gen_samples, positionals=("prompts",), extra="gen", args=args
    )


if __name__ == "__main__":
    sys.exit(main())
