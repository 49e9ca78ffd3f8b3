"""Comparison of predictors: in distribution, for an unknown served model, and on held-out sources.

    python -m benchmarks.shipped_predictors --data DATA [--work FOLDER] [--markdown docs/evaluation.md] [NAME=ARTIFACT ...]

DATA is the folder of public sets that `python -m examples.pretrained` takes. The report prompts and the
held-out sources are those of the shipped predictors, which are compared with each other and with the named
artifacts. Kendall's tau is between predicted and mean log length, mean over served models. "of the ceiling"
is its ratio to the tau of another served model's lengths on the same prompts, mean over sources. CPU times
are medians over single prompts, with one thread.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from benchmarks.pages import put_section
from examples.pretrained.prepare import prepare
from examples.pretrained.unseen import SourceScores, score_sources
from examples.shell import Shell
from predictors.pretrained import FOLDERS
from predictors.runtime import open_runtime
from scheduler_core.report.page import markdown_table

HEADER = (
    "predictor",
    "in distribution: tau",
    "R2 of mu",
    "CRPS, tokens",
    "P50 / P90 / P99, %",
    "served model unknown: tau",
    "of the ceiling",
    "source left out: tau",
    "of the ceiling",
    "CRPS of ln tokens",
    "ms a prompt",
)
#: Prompts that are timed individually.
NUM_TIMED = 64


def of_ceiling(scores: Sequence[SourceScores], way: str) -> float:
    """Mean over sources of tau divided by the tau of another served model's lengths."""
    return float(np.mean([getattr(one, way) / one.ceiling for one in scores if one.ceiling]))


def milliseconds(artifact: Path, prompts: Sequence[str]) -> float:
    """Median CPU time of a prediction for one prompt, with one thread."""
    runtime = open_runtime(artifact, provider="cpu", threads_per_run=1)
    names = [runtime.artifact.manifest.served_models[0]]
    runtime.predict(prompts[:1], names)
    times = []
    for prompt in prompts:
        start = time.process_time()
        runtime.predict([prompt], names)
        times.append(time.process_time() - start)
    return 1e3 * float(np.median(times))


def main(args: Sequence[str] | None = None) -> None:
    """Evaluates all predictors and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("artifacts", nargs="*", help="additional artifacts, NAME=FOLDER")
    parser.add_argument("--data", type=Path, required=True, help="folder of the public sets")
    parser.add_argument("--work", type=Path, default=Path("out/shipped_predictors"), help="folder for files")
    parser.add_argument("--markdown", help="page whose table is replaced")
    options = parser.parse_args(args)
    files = prepare(options.data, options.work / "data")
    artifacts = {folder.name: folder for folder in FOLDERS.values()}
    artifacts |= {
        name: Path(folder) for name, _, folder in (item.partition("=") for item in options.artifacts)
    }
    first, *others = artifacts
    target = options.work / "evaluation.json"
    Shell(options.work / "logs").run("evaluate", [
        "evaluate", artifacts[first], "--data", files.report, "--json", target, "--overwrite", "true",
        *(word for name in others for word in ("--compare+", f"{name}={artifacts[name]}")), "--progress", "false",
    ])  # fmt: skip
    evaluation = json.loads(target.read_text(encoding="utf-8"))
    in_distribution = {first: evaluation["model"], **evaluation["compared"]}
    prompts = pd.read_parquet(files.report).prompt.drop_duplicates()
    timed = prompts.sample(min(NUM_TIMED, len(prompts)), random_state=0).tolist()
    lines = []
    for name, artifact in artifacts.items():
        report, *sources = score_sources(artifact, {"report": files.report, **files.set_aside})
        one = in_distribution[name]
        lines.append(
            (
                name,
                f"{report.named:.3f}",
                f"{one['mu']['r2']:.3f}",
                f"{one['crps_tokens']:.1f}",
                " / ".join(
                    f"{100 * one['coverage'][level]['estimate']:.1f}" for level in ("p50", "p90", "p99")
                ),
                f"{report.mean:.3f}",
                f"{of_ceiling([report], 'mean'):.2f}",
                f"{np.mean([source.unknown for source in sources]):.3f}",
                f"{of_ceiling(sources, 'unknown'):.2f}",
                f"{np.mean([source.crps_log[0] for source in sources]):.3f}",
                f"{milliseconds(artifact, timed):.2f}",
            )
        )
    text = markdown_table(HEADER, lines)
    print(text)
    if options.markdown is not None:
        put_section(options.markdown, "predictors side by side", text)


if __name__ == "__main__":
    main()
