"""The command `adapt`: a better artifact out of a log of finished requests."""

from __future__ import annotations

from scheduler_core.command import command

# Beside `train` it needs onnx and onnxruntime.
main = command(
    "adapt",
    "training.adapt:AdaptConfig",
    "training.adapt:adapt",
    positionals=("log",),
    extra="train,export",
)


if __name__ == "__main__":
    raise SystemExit(main())
