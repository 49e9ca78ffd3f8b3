"""The command `evaluate-urgency`: quality and safety of an urgency predictor."""

from __future__ import annotations

from scheduler_core.shell.command import command

main = command(
    "evaluate-urgency",
    "training.urgency.config:EvaluateUrgencyConfig",
    "training.urgency.evaluation:evaluate_urgency_command",
    positionals=("predictor",),
    extra="train,export",
)


if __name__ == "__main__":
    raise SystemExit(main())
