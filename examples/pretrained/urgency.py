"""`python -m examples.pretrained.urgency`: train, certify and install tailcast-urgency, from texts that are part of the package."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx_ir as ir
import pandas as pd
import torch
from numpy.typing import NDArray
from scipy.stats import kendalltau

from data_gen.urgency.labels import LabeledText, read_labels
from examples.pretrained import language_model
from examples.pretrained.minilm import write_encoder as write_minilm
from examples.pretrained.token_pairs import add_token_pairs, fitted
from examples.shell import Shell
from export.passes.graph import save
from export.variants.build import build_variant
from predictors.artifact import KIND, open_artifact, write_manifest
from predictors.manifest import MODEL, NORMALIZATION, TOKENIZER
from predictors.modules.checkpoint import TOKENIZER_CONFIG
from predictors.modules.encoder import load_encoder, load_tokenizer
from predictors.pretrained import FOLDERS, PRETRAINED, URGENCY, pin
from predictors.runtime import open_runtime
from scheduler_core.prediction.urgency import LEVELS, abstains, expected_cost_levels
from scheduler_core.shell.command import command
from scheduler_core.shell.files import RECORD, atomic_directory, shared_folder
from training.urgency.abstention import Predict
from training.urgency.evaluation import cell_of, open_urgency

NAME = "tailcast-urgency"
#: Encoder -> options of `train`.
RECIPES = {
    "minilm": Path(__file__).with_suffix(".yaml"),
    "smollm2": Path(__file__).with_name("urgency_smollm2.yaml"),
}
#: File -> sources and splits of its texts.
TEXTS = {
    "train": ("llm,quiet,extra", "train"),
    "validation": ("llm,quiet", "validation"),
    "all": ("llm,quiet,extra", "train,validation,test"),
}
#: Two copies of each training text with a claim of urgency, and one with a phrase that claims nothing.
PHRASES = ("--augment_claims", "2", "--augment_openers", "1")
#: Maximum number of tokens of a text whose states are standardized.
MAX_TOKENS = 256
#: Number of layers of MiniLM, of 6.
LAYERS = 3
#: Number of texts for the scale of a language model's states, and for the ranges of int8.
NUM_SCALE_TEXTS, NUM_INT8_TEXTS = 150, 128
#: Columns of the evaluation in the card.
SHOWN = ("accuracy", "recall 0", "critical under-triage", "jumps, scheduled", "answered")
#: Files of texts by others, in the folder of public data, with their priorities from least to most urgent.
OTHERS = {
    "support tickets": ("support_tickets", ("very_low", "low", "medium", "high", "critical")),
    "bug reports": ("seamonkey_bug_priority", ("P5", "P4", "P3", "P2", "P1")),
}
#: Maximum number of texts of each file.
NUM_OTHERS = 1000
#: Encoder -> architecture, for the card.
BUILT = {
    "minilm": f"The geometric mean of two predictions: by the first {LAYERS} layers of all-MiniLM-L6-v2 and a head with one hidden layer, trained together, int8; and by a logistic regression on tokens and pairs of neighboring tokens",
    "smollm2": f"A head with one hidden layer on the first {language_model.LAYERS} layers of SmolLM2-135M-Instruct, which are not trained; single precision",
}
CARD = """# tailcast-urgency

Predicts the urgency of a request to an LLM from its text: the probabilities of [five levels](../../docs/urgency.md), from emergency to background, and an abstention where they are too uncertain. {built}; texts up to {max_length} tokens, the middle of longer ones is dropped. {megabytes:.1f} MB. A prediction takes {milliseconds:.2f} ms of CPU time in the median over the test texts, and one of tailcast-minilm {other_milliseconds:.2f} ms on the same texts. Its name is `urgency`; `pretrained+urgency` predicts length and urgency.

**This is not a medical device.** Do not use it for decisions about the care of a person.

Created by `make urgency` (examples/pretrained). Licence: Apache-2.0. Data: {num_train:,} [labeled texts](../../docs/urgency.md#the-texts-data_genurgencyseed) that were written for this project, each also with claims of urgency and with greetings. They reflect few authors' ideas of traffic, and no real users. Many training texts were written after a look at errors on the validation split, so what is certified on it, below, may be a little optimistic; none was written after a look at the test split.

## On held-out texts

The test split: {num_texts} texts and {num_pairs} pairs of a text with and without a claim of urgency.

| predictor | accuracy | emergencies found | critical under-triage | a claim raises the scheduled level | texts predicted above the threshold |
|---|---:|---:|---:|---:|---:|
{scores}
The predictor abstains if the highest probability is below {threshold:.2f}: then the declared tier counts. With probability 0.9, on texts like the validation texts, at most 10 % of the predicted texts are decided too low, and at most 5 % of claimed texts are scheduled higher than without the claim. Measured on the test split: {failures:.1f} % of the predicted texts are decided too low. Of calmly worded emergencies, {quiet:.0f} % are decided as level 0 or 1.

By language of the test texts:

| language | texts | accuracy | predicted above the threshold |
|---|---:|---:|---:|
{languages}
{others}"""


@dataclass(frozen=True, kw_only=True)
class UrgencyRecipeConfig:
    """Train, certify, export and install the urgency predictor that is shipped with tailcast."""

    INPUTS = ("data",)

    data: str | None = None
    """Folder with urgency/support_tickets.parquet and urgency/seamonkey_bug_priority.parquet, for the evaluation in the card; unset: without it."""
    encoder: Literal["minilm", "smollm2"] = "minilm"
    """minilm: the artifact `urgency`; smollm2: a head on 18 layers of a language model, slower."""
    out: str = "out/urgency"
    """Folder for all results, in a folder of the encoder's name; finished steps are kept."""
    compare: tuple[str, ...] = ()
    """Further predictors to evaluate, NAME=PREDICTOR as in `evaluate-urgency --compare`."""
    train_options: tuple[str, ...] = ()
    """Additional options of `train`, such as --stage2.epochs=8; they override the recipe."""
    install: bool = True
    """Replace the artifact in predictors/pretrained (minilm only)."""


def urgency(config: UrgencyRecipeConfig) -> None:
    """Creates the artifact in `out`, and installs it with its card.

    Raises:
        StepFailedError: A step fails; in particular, a claim of urgency raises the scheduled level of too many texts.
    """
    out = shared_folder(config.out, "urgency") / config.encoder
    out.mkdir(exist_ok=True)
    shell = Shell(out / "logs")
    texts = {name: out / f"{name}.parquet" for name in TEXTS}
    for name, file in texts.items():
        if not file.is_file():
            sources, splits = TEXTS[name]
            phrases = PHRASES if name == "train" else ()
            shell.run("texts", ["import-urgency", file, "--sources", sources, "--splits", splits, *phrases])
    plain = [label.text for label in read_labels(texts["train"]) if not label.claimed]
    if not (out / "encoder").is_dir():
        if config.encoder == "minilm":
            write_first_layers(out / "encoder", plain)
        else:
            language_model.write_encoder(out / "encoder", plain[:NUM_SCALE_TEXTS])
    if not (out / "checkpoint").is_dir():
        shell.run("train", [
            "train", "--config", RECIPES[config.encoder], "--encoder", out / "encoder", "--urgency_data", texts["train"],
            "--urgency_validation", texts["validation"], "--out", out / "checkpoint", "--progress", "false",
            *config.train_options,
        ])  # fmt: skip
    artifact = out / "float32"
    if not artifact.is_dir():
        shell.run("export", [
            "export-onnx", out / "checkpoint", "--out", artifact, "--artifact_id", NAME, "--license", "Apache-2.0",
        ])  # fmt: skip
    if config.encoder == "minilm":
        if not (out / "int8").is_dir():
            write_int8(artifact, out / "int8", plain[:NUM_INT8_TEXTS], read_labels(texts["train"]))
        artifact = out / "int8"
    evaluation = out / "evaluation.json"
    shell.run("evaluate", [
        "evaluate-urgency", artifact, "--data", texts["all"], "--json", evaluation,
        "--name", NAME, "--overwrite", "true",
        *(word for one in config.compare for word in ("--compare+", one)),
    ])  # fmt: skip
    content = json.loads(evaluation.read_text(encoding="utf-8"))
    manifest = open_artifact(artifact).manifest
    threshold = content["abstention"]["threshold"]
    if manifest.abstain_threshold != threshold:
        write_manifest(artifact, manifest.model_copy(update={"abstain_threshold": threshold}))
    (out / "URGENCY.md").write_text(card(artifact, content, texts["all"], config), encoding="utf-8")
    if config.install and config.encoder == "minilm":
        target = FOLDERS[URGENCY]
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(artifact, target, ignore=shutil.ignore_patterns(RECORD))
        shutil.copy(out / "URGENCY.md", target.parent)
        pin(target)
    sys.stdout.write(f"{artifact}: {', '.join(f'{name} {cell_of(name, content)}' for name in SHOWN)}\n")


def write_first_layers(folder: Path, texts: Sequence[str]) -> None:
    """Writes an encoder folder for `train`: the first `LAYERS` layers of all-MiniLM-L6-v2, with line breaks as tokens, and
    with a last norm that gives the mean over a text's tokens mean 0 and standard deviation 1 over the texts."""
    with tempfile.TemporaryDirectory() as temporary, atomic_directory(folder, "encoder") as target:
        source = Path(temporary) / "encoder"
        write_minilm(source, None)
        encoder: Any = load_encoder(str(source))
        del encoder.encoder.layer[LAYERS:]
        encoder.config.num_hidden_layers = LAYERS
        standardize(encoder, load_tokenizer(str(source)), texts)
        encoder.save_pretrained(str(target))
        for name in (TOKENIZER, TOKENIZER_CONFIG):
            shutil.copyfile(source / name, target / name)


def standardize(encoder: Any, tokenizer: Any, texts: Sequence[str]) -> None:
    """Standardizes the mean state of a text in the last norm of a BERT encoder."""
    with torch.inference_mode():
        ids = [tokenizer(text, truncation=True, max_length=MAX_TOKENS, return_tensors="pt") for text in texts]
        means = torch.stack([encoder(**each).last_hidden_state[0].mean(dim=0) for each in ids])
    mean, std = means.mean(dim=0), means.std(dim=0)
    norm = encoder.encoder.layer[-1].output.LayerNorm
    norm.weight.data /= std
    norm.bias.data = (norm.bias.data - mean) / std


def write_int8(artifact: Path, out: Path, texts: Sequence[str], train: Sequence[LabeledText]) -> None:
    """Writes the artifact that ships: the int8 variant of `artifact`, whose ranges are those of `texts`, joined with a
    regression on tokens that is fitted to `train` (`token_pairs`)."""
    runtime = open_runtime(artifact, provider="cpu")
    tokens = [prompt.ids for prompt in runtime.tokenizer(texts)]
    limits = {"max_length": runtime.tokenizer.max_length, "vocabulary": runtime.tokenizer.vocabulary_size}
    graph, steps = build_variant(artifact / MODEL, "int8", tokens, **limits, seed=0)
    ids = [prompt.ids for prompt in runtime.tokenizer([label.text for label in train])]
    weights, bias = fitted(ids, [label.level for label in train], [label.weight for label in train])
    joined = ir.to_proto(graph)
    add_token_pairs(joined, weights, bias)
    manifest = runtime.artifact.manifest
    variant = {"name": "int8", "made_from": manifest.artifact_version, "steps": {**steps, "token_pairs": 1}}
    encoder = manifest.encoder.model_copy(update={"source": f"all-MiniLM-L6-v2, {LAYERS} layers"})
    with atomic_directory(out, KIND) as folder:
        for name in (TOKENIZER, NORMALIZATION):
            shutil.copyfile(artifact / name, folder / name)
        save(ir.from_proto(joined), folder / MODEL)
        changes = {"precision": "int8", "variant": variant, "encoder": encoder, "parity": {}}
        write_manifest(folder, manifest.model_copy(update=changes))


def card(artifact: Path, evaluation: Mapping[str, Any], texts: Path, config: UrgencyRecipeConfig) -> str:
    """The card of an artifact whose threshold is that of the evaluation."""
    labels = read_labels(texts)
    test = [label for label in labels if label.split == "test"]
    predict = open_urgency(artifact, accelerator="cpu")
    times = median_times([artifact, FOLDERS[PRETRAINED]], [label.text for label in test])
    manifest = open_artifact(artifact).manifest
    rows = {NAME: evaluation, **{f"{one['name']}": one for one in evaluation["compared"]}}
    rows |= {name.replace("_", " "): one for name, one in evaluation["baselines"].items()}
    return CARD.format(
        built=BUILT[config.encoder],
        max_length=manifest.max_length,
        megabytes=sum(file.stat().st_size for file in artifact.iterdir()) / 1e6,
        milliseconds=times[0],
        other_milliseconds=times[1],
        num_train=sum(label.split == "train" for label in labels),
        num_texts=evaluation["num_texts"],
        num_pairs=evaluation["adversarial"]["num_pairs"],
        scores="".join(
            f"| {name} | {' | '.join(cell_of(column, row) for column in SHOWN)} |\n"
            for name, row in rows.items()
        ),
        threshold=manifest.abstain_threshold,
        failures=100 * (evaluation["abstention"]["failures"]["value"] or 0.0),
        quiet=100 * evaluation["quiet_emergencies_found"]["value"],
        languages=language_rows(test, predict, manifest.abstain_threshold),
        others=""
        if config.data is None
        else other_texts(Path(config.data) / "urgency", predict, manifest.abstain_threshold),
    )


def language_rows(test: Sequence[LabeledText], predict: Predict, threshold: float | None) -> str:
    """Rows of a table, one for each language with at least 20 texts, and one for the others."""
    probabilities = predict([label.text for label in test])
    right = probabilities.argmax(axis=1) == np.array([label.level for label in test])
    counts = pd.Series([label.language for label in test]).value_counts()
    names = np.array([label.language if counts[label.language] >= 20 else "others" for label in test])
    rows = ""
    for name in [*(each for each in counts.index if counts[each] >= 20), "others"]:
        of_name = names == name
        answered = ~abstains(probabilities[of_name], threshold)
        rows += f"| {name} | {of_name.sum()} | {right[of_name].mean():.0%} | {answered.mean():.0%} |\n"
    return rows


def other_texts(folder: Path, predict: Predict, threshold: float | None) -> str:
    """Section on texts of others, whose priorities are not the levels: rank correlation with the expected level."""
    rows = ""
    for name, (file, priorities) in OTHERS.items():
        table = pd.read_parquet(folder / f"{file}.parquet")
        table = table.sample(min(NUM_OTHERS, len(table)), random_state=0)
        probabilities = predict(list(table.text))
        expected = -probabilities @ np.arange(len(LEVELS))
        tau = kendalltau(expected, [priorities.index(label) for label in table.label]).statistic
        answered = ~abstains(probabilities, threshold)
        levels = _levels(probabilities, answered)
        rows += f"| {name} | {len(table):,} | {tau:.2f} | {answered.mean():.0%} | {levels} |\n"
    return (
        "\n## On texts of others\n\nTheir priorities are those of a queue of people's work, not the levels above, so only "
        "the order can be compared (Kendall's tau with the expected level; 0: none). Decided levels are those of the "
        "predicted texts.\n\n| texts | number | tau | predicted above the threshold | decided levels |\n|---|---:|---:|---:|---|\n"
        + rows
    )


def _levels(probabilities: NDArray[np.float64], answered: NDArray[np.bool_]) -> str:
    if not answered.any():
        return "-"
    counts = np.bincount(expected_cost_levels(probabilities[answered]), minlength=len(LEVELS))
    return ", ".join(f"{name} {count / counts.sum():.0%}" for name, count in zip(LEVELS, counts, strict=True))


def median_times(artifacts: Sequence[Path], texts: Sequence[str]) -> list[float]:
    """Median CPU time in milliseconds of predicting one text, by artifact; the artifacts take turns."""
    runtimes = [open_runtime(folder, provider="cpu") for folder in artifacts]
    times = np.zeros((len(texts), len(runtimes)))
    for row, text in enumerate([*texts[:20], *texts]):  # the first ones warm up
        for column, runtime in enumerate(runtimes):
            start = time.process_time()
            runtime.predict([text])
            times[row - 20, column] = 1000 * (time.process_time() - start)
    return [float(value) for value in np.median(times, axis=0)]


main = command("urgency", UrgencyRecipeConfig, urgency, extra="dev")


if __name__ == "__main__":
    sys.exit(main())
