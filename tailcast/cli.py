"""Command `tailcast`: all commands of the project as subcommands, which are imported lazily."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from scheduler_core.shell.command import chosen_command, entry_point, imported

#: Name -> (module and function, description); [project.scripts] has the same functions.
COMMANDS: dict[str, tuple[str, str]] = {
    "predict": ("tailcast.commands.predict:main", "predict output lengths of a prompt or a file of prompts"),
    "plan": (
        "tailcast.commands.plan:main",
        "find the cheapest GPUs and settings that meet targets, from a log",
    ),
    "serve": (
        "predictors.commands.serve_predictor:main",
        "serve predictions over gRPC and HTTP (serve-predictor)",
    ),
    "proxy": (
        "predictors.commands.tailcast_proxy:main",
        "run a proxy in front of an engine (tailcast-proxy)",
    ),
    "adapt": ("training.commands.adapt:main", "adapt an artifact to the logs of your requests"),
    "simulate": ("scheduler_core.simulator.commands.simulate:main", "simulate policies: run, sweep, ..."),
    "gen-samples": ("data_gen.commands.gen_samples:main", "sample outputs of an LLM for prompts"),
    "import-lengths": (
        "data_gen.commands.import_lengths:main",
        "import lengths from logs, traces, public data",
    ),
    "import-urgency": ("data_gen.commands.import_urgency:main", "import texts with urgency from public data"),
    "fit-dist": ("training.commands.fit_dist:main", "fit a length distribution per prompt"),
    "train": ("training.commands.train:main", "train a predictor of lengths or urgency"),
    "evaluate": ("training.commands.evaluate:main", "evaluate a predictor on held-out lengths"),
    "evaluate-urgency": (
        "training.commands.evaluate_urgency:main",
        "evaluate an urgency predictor on labels",
    ),
    "evaluate-stream": ("training.commands.evaluate_stream:main", "detect drift in finished requests"),
    "calibrate": ("training.commands.calibrate:main", "calibrate a checkpoint on held-out data"),
    "export-onnx": ("export.commands.export_onnx:main", "export a checkpoint as an artifact"),
    "export-variants": (
        "tailcast.commands.export_variants:main",
        "build and compare faster variants of an artifact",
    ),
    "package-artifact": ("export.commands.package_artifact:main", "package an artifact for Triton or KServe"),
    "read-feedback": ("training.commands.read_feedback:main", "read the feedback log of the proxy"),
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
