"""The command `tailcast`: every command of the project as a sub-command, imported when it is called."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from scheduler_core.command import chosen_command, entry_point, imported

#: Name -> module and function, what it does. Those of [project.scripts] are the same functions.
COMMANDS: dict[str, tuple[str, str]] = {
    "predict": ("tailcast.cli_predict:main", "output lengths of a prompt, or of a file of prompts"),
    "serve": ("predictors.cli:main", "predictions over gRPC and HTTP (serve-predictor)"),
    "proxy": ("predictors.cli_proxy:main", "the OpenAI API in front of an engine (tailcast-proxy)"),
    "adapt": ("training.cli_adapt:main", "a better artifact from the logs of your own requests"),
    "simulate": ("scheduler_core.simulator.commands.simulate:main", "policies on a trace: run, sweep, ..."),
    "gen-samples": ("data_gen.cli_gen_samples:main", "repeated outputs of an LLM for prompts"),
    "import-lengths": ("data_gen.cli_import_lengths:main", "lengths from logs, traces and public data"),
    "import-urgency": ("data_gen.cli_import_urgency:main", "texts with urgency levels from public data"),
    "fit-dist": ("training.cli_fit_dist:main", "one length distribution for each prompt"),
    "train": ("training.cli_train:main", "a predictor of lengths or urgency"),
    "evaluate": ("training.evaluating.cli:main", "a predictor against held-out lengths and baselines"),
    "evaluate-urgency": ("training.urgency.cli:main", "an urgency predictor against labels"),
    "evaluate-stream": ("training.drift:main", "a stream of finished requests, for drift"),
    "calibrate": ("training.calibrating.cli:main", "a checkpoint, corrected on held-out data"),
    "export-onnx": ("export.cli:main", "an artifact from a checkpoint"),
    "export-variants": ("tailcast.cli_variants:main", "faster variants of an artifact, compared"),
    "package-artifact": ("export.cli_package:main", "a Triton or KServe package of an artifact"),
    "read-feedback": ("training.cli_read_feedback:main", "what the proxy has logged"),
}


@entry_point("tailcast", extra="predict")
def main(args: Sequence[str] | None = None) -> int:
    """Console script `tailcast`; returns the exit code."""
    words = list(sys.argv[1:] if args is None else args)
    if words == ["--version"]:
        from importlib import metadata

        sys.stdout.write(f"tailcast {metadata.version('tailcast')}\n")
        return 0
    name = chosen_command("tailcast", {name: text for name, (_, text) in COMMANDS.items()}, words)
    if name is None:
        return 0 if words else 2
    code: int = imported(COMMANDS[name][0])(words[1:])
    return code
