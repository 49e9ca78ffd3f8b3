"""The command `adapt`: correct an artifact from a log of finished requests."""

from __future__ import annotations

from scheduler_core.command import command

# Needs onnx and onnxruntime in addition to the extra `train`.
main = command(
    "adapt",
    "training.adapt:AdaptConfig",
    "training.adapt:adapt",
    positionals=("log",),
    extra="train,export",
)


if __name__ == "__main__":
    raise SystemExit(main())
