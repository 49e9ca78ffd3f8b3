"""Command `export-onnx`: checkpoint in, verified artifact out."""

from __future__ import annotations

from collections.abc import Sequence

from scheduler_core.command import entry_point, run_command


@entry_point("export-onnx", extra="export")
def main(args: Sequence[str] | None = None) -> int:
    """Console script `export-onnx`; returns the exit code."""
    from export.exporter import ExportConfig, export_onnx

    def run(config: ExportConfig) -> None:
        export_onnx(config)

    return run_command(
        "export-onnx", ExportConfig, run, positionals=("checkpoint",), extra="export", args=args
    )


if __name__ == "__main__":
    raise SystemExit(main())
