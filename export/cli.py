"""Command `export-onnx`: checkpoint in, verified artifact out."""

from __future__ import annotations

from collections.abc import Sequence

from scheduler_core.command import entry_point, run_command

TYPE_CHECKING = False
if TYPE_CHECKING:
    from export.exporter import ExportConfig


@entry_point("export-onnx", extra="export")
def main(args: Sequence[str] | None = None) -> int:
    """Console script `export-onnx`; returns the exit code."""
    from export.exporter import ExportConfig

    return run_command(
        "export-onnx", ExportConfig, _run, positionals=("checkpoint",), extra="export", args=args
    )


def _run(config: ExportConfig) -> None:
    from export.exporter import export_onnx

    export_onnx(config)


if __name__ == "__main__":
    raise SystemExit(main())
