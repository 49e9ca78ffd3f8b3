"""Comparison of predictors: in distribution, for an unknown served model, and on held-out sources.

    python -m benchmarks.predictors.shipped --data DATA [--work FOLDER] [--markdown docs/evaluation.md] [NAME=ARTIFACT ...]

DATA is the folder of public sets that `python -m examples.pretrained` takes. The report prompts and the
held-out sources are those of the shipped predictors, which are compared with each other and with the named
artifacts. Kendall's tau is between predicted and mean log length, mean over served models; "of the ceiling"
is its ratio to the tau of another served model's lengths on the same prompts, mean over sources. "tau of E"
is between expected and mean length. E and CVaR (mean of the longest tenth) are of min(length, 15,000
tokens); their ratios are predicted over observed. CPU times are medians over single prompts, with one thread.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from benchmarks.shared.command import Parser
from benchmarks.shared.pages import put_section
from examples.pretrained.prepare import CASTILLO_LIMIT, prepare
from examples.pretrained.unseen import SourceScores, score_sources
from examples.shell import Shell
from predictors.pretrained import FOLDERS, PRETRAINED, TINY
from predictors.runtime import open_runtime
from scheduler_core.lengths import LogQuantiles, LogT
from scheduler_core.report.page import markdown_table
from scheduler_core.statistics import kendall_tau
from training.evaluating.batch_predictor import InferenceOptions, open_batch_predictor

#: Prompts that are timed individually.
NUM_TIMED = 64
RISK = 0.9


def of_ceiling(scores: Sequence[SourceScores], way: str) -> float:
    """Mean over sources of tau divided by the tau of another served model's lengths."""
    return float(np.mean([getattr(one, way) / one.ceiling for one in scores if one.ceiling]))


def risk_scores(artifact: Path, table: pd.DataFrame) -> tuple[float, float, float]:
    """tau of E, and ratios of E and CVaR, over a table of (prompt, served model, temperature, output_tokens)."""
    predictor = open_batch_predictor(artifact, InferenceOptions(progress=False))
    temperatures = [None if math.isnan(value) else value for value in table.temperature]
    rows = predictor.predict(table.prompt.tolist(), table.model.tolist(), temperatures)
    length = LogT(rows.mu, rows.sigma, rows.nu) if rows.quantiles is None else LogQuantiles(rows.quantiles)
    expected, cvar = length.expected_and_cvar(RISK, CASTILLO_LIMIT)
    p90 = np.minimum(length.ppf(RISK), CASTILLO_LIMIT)
    lengths = [np.minimum(each, CASTILLO_LIMIT) for each in table.output_tokens]
    mean = np.array([each.mean() for each in lengths])
    # Fraction of the outputs of a row in its worst tenth, and their sum of tokens by the number of outputs.
    worst = np.array(
        [(np.mean(each > top), np.mean(each * (each > top))) for each, top in zip(lengths, p90, strict=True)]
    )
    groups = table.groupby("model").indices.values()
    tau = np.mean([kendall_tau(expected[at], mean[at]) or 0.0 for at in groups])
    return (
        float(tau),
        float(expected.sum() / mean.sum()),
        float((cvar * worst[:, 0]).sum() / worst[:, 1].sum()),
    )


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
    parser = Parser(__doc__)
    parser.add_argument("artifacts", nargs="*", help="additional artifacts, NAME=FOLDER")
    parser.add_argument("--data", type=Path, required=True, help="folder of the public sets")
    parser.add_argument("--work", type=Path, default=Path("out/shipped_predictors"), help="folder for files")
    parser.add_argument("--markdown", help="page whose table is replaced")
    options = parser.parse_args(args)
    files = prepare(options.data, options.work / "data")
    artifacts = {FOLDERS[name].name: FOLDERS[name] for name in (PRETRAINED, TINY)}
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
    table = pd.read_parquet(files.report)
    prompts = table.prompt.drop_duplicates()
    timed = prompts.sample(min(NUM_TIMED, len(prompts)), random_state=0).tolist()
    lines = []
    for name, artifact in artifacts.items():
        report, *sources = score_sources(artifact, {"report": files.report, **files.set_aside})
        one = in_distribution[name]
        levels = (100 * one["coverage"][level]["estimate"] for level in ("p50", "p90", "p99"))
        tau_of_e, expected, cvar = risk_scores(artifact, table)
        cells = {
            "predictor": name,
            "in distribution: tau": f"{report.named:.3f}",
            "R2 of mu": f"{one['mu']['r2']:.3f}",
            "CRPS, tokens": f"{one['crps_tokens']:.1f}",
            "P50 / P90 / P99, %": " / ".join(f"{value:.1f}" for value in levels),
            "tau of E": f"{tau_of_e:.3f}",
            "E, ratio": f"{expected:.3f}",
            "CVaR, ratio": f"{cvar:.3f}",
            "served model unknown: tau": f"{report.mean:.3f}",
            "of the ceiling": f"{of_ceiling([report], 'mean'):.2f}",
            "source left out: tau": f"{np.mean([source.unknown for source in sources]):.3f}",
            "of its ceiling": f"{of_ceiling(sources, 'unknown'):.2f}",
            "CRPS of ln tokens": f"{np.mean([source.crps_log[0] for source in sources]):.3f}",
            "ms a prompt": f"{milliseconds(artifact, timed):.2f}",
        }
        lines.append(list(cells.values()))
    text = markdown_table(list(cells), lines)
    print(text)
    if options.markdown is not None:
        put_section(options.markdown, "predictors side by side", text)


if __name__ == "__main__":
    main()
