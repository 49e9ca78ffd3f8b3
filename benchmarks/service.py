"""Compares prediction servers; see `python benchmarks/service.py --help` and benchmarks/serving/."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

if __name__ == "__main__":
    command = [sys.executable, "-m", "benchmarks.serving", *sys.argv[1:]]
    raise SystemExit(subprocess.run(command, cwd=Path(__file__).resolve().parents[1], check=False).returncode)
