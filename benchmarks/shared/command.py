"""Command lines of the benchmarks."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from typing import Any


class Parser(argparse.ArgumentParser):
    """Shows the docstring of a module as its help; an option `--a_b` can also be written `--a-b`."""

    def __init__(self, doc: str | None) -> None:
        super().__init__(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """As in argparse."""
        words = sys.argv[1:] if args is None else args
        words = [
            re.sub("^--[a-z_-]+", lambda name: "--" + name[0][2:].replace("-", "_"), word) for word in words
        ]
        return super().parse_known_args(words, namespace)
