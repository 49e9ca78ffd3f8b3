"""Command `export-onnx`: checkpoint in, verified artifact out."""

from __future__ import annotations

from collections.abc import Sequence

from export.exporter import ExportConfig, export_onnx
from scheduler_core.command import run_command


def main(args: Sequence[str] | None = None) -> int:
    """Console script `export-onnx`; returns the exit code."""
    return run_command(
        "export-onnx", ExportConfig, _run, positionals=("checkpoint",), extra="export", args=args
    )


def _run(config: ExportConfig) -> int:
    export_onnx(config)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
