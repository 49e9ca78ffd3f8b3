"""Command `export-onnx`: exports a checkpoint as a verified artifact."""

from __future__ import annotations

from scheduler_core.shell.command import command

main = command(
    "export-onnx",
    "export.exporter:ExportConfig",
    "export.exporter:export_onnx",
    positionals=("checkpoint",),
    extra="export",
)


if __name__ == "__main__":
    raise SystemExit(main())
