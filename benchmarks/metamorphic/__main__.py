"""Do predictors hear how much a request asks for? Pairs of requests that differ in one amount or one word.

    python -m benchmarks.metamorphic [NAME=ARTIFACT ...] [--served_model NAME] [--json FILE] [--markdown docs/evaluation.md]

Without arguments the predictors are pretrained, tiny, and out/smollm2/artifact if it exists. They get whole requests, as in the
proxy: system prompt, earlier turns and options, of which each reads what it was trained on. Columns, for each predictor: right:
pairs whose longer request has the larger predicted median, in %; ratio: median ratio of the two medians; x10: the same for
amounts, scaled to ten times the amount. "numbers that are no amounts" should have a ratio of 1, and counts for no total. It needs
no data and takes about a minute, nearly all of it for tailcast-smollm2.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.metamorphic.suite import CONTROLS, LANGUAGES, Pair, Scores, read_pairs, scores_of
from benchmarks.shared.command import Parser
from benchmarks.shared.pages import number_cell, put_section
from predictors.pretrained import PRETRAINED, TINY
from predictors.runtime import ArtifactRuntime, open_runtime
from scheduler_core.errors import InputError, unknown_name
from scheduler_core.prediction.api_request import read_request
from scheduler_core.prediction.predictions import DEFAULT_MAX_TOKENS
from scheduler_core.report.page import markdown_table
from scheduler_core.shell.files import atomic_file, writable_target

SMOLLM2 = Path("out/smollm2/artifact")
#: Name of a row -> predictor -> scores.
Table = dict[str, dict[str, Scores]]
Medians = Mapping[str, NDArray[np.float64]]


def predicted_medians(
    runtime: ArtifactRuntime, bodies: Sequence[Mapping[str, Any]], served_model: str | None = None
) -> NDArray[np.float64]:
    """Predicted median output of N requests, tokens [N], as one served model (None: unknown); InputError for a predictor that
    has no such model or no length head."""
    manifest = runtime.artifact.manifest
    if served_model is not None and served_model not in manifest.served_models:
        raise unknown_name("--served_model", served_model, manifest.served_models)
    requests = [read_request(body) for body in bodies]
    texts = [request.text(manifest.form) for request in requests]
    # One by one: the rounding of an int8 graph depends on the other prompts of a batch.
    rows = runtime.predict(texts, [served_model] * len(texts), batch_size=1).rows()
    medians = []
    for request, row in zip(requests, rows, strict=True):
        prediction = request.prediction(runtime.prediction(row), DEFAULT_MAX_TOKENS)
        if prediction is None or prediction.length is None:
            raise InputError(f"{manifest.artifact_id} has no length head")
        medians.append(float(prediction.length.distribution().ppf(0.5)))
    return np.array(medians)


def score_table(pairs: Sequence[Pair], medians: Medians, field: str) -> Table:
    """Scores for each predictor with medians [N, 2] of the N pairs: by a field of the pairs (kind or group), by language, and
    of all pairs but the controls."""
    rows: dict[str, list[int]] = {}
    for number, pair in enumerate(pairs):
        rows.setdefault(getattr(pair, field), []).append(number)
    ordered = [number for number, pair in enumerate(pairs) if pair.group != CONTROLS]
    for key, name in LANGUAGES.items():
        rows[name] = [number for number in ordered if pairs[number].language == key]
    rows["all"] = ordered
    return {
        label: {name: scores_of([pairs[each] for each in at], values[at]) for name, values in medians.items()}
        for label, at in rows.items()
        if at
    }


def markdown(table: Table) -> str:
    """A table with three columns for each predictor."""
    names = next(iter(table.values()))
    header = [f"{name}: {column}" for name in names for column in ("right, %", "ratio", "x10")]
    lines = []
    for label, by_name in table.items():
        cells = [str(next(iter(by_name.values())).num)]
        for scores in by_name.values():
            right = None if scores.right is None else 100 * scores.right
            cells += [
                number_cell(right, "{:.0f}"),
                f"{scores.ratio:.2f}",
                number_cell(scores.per_ten, "{:.2f}"),
            ]
        lines.append([label, *cells])
    return markdown_table(["pairs that differ in", "pairs", *header], lines)


def summary(pairs: Sequence[Pair], medians: Medians) -> str:
    """A table by group and language with two columns for each predictor, the second of which is x10 where there are amounts;
    12 rows, so without English, which has half of the pairs, and without controls."""
    lines = []
    for label, by_name in score_table(pairs, medians, "group").items():
        if label not in (CONTROLS, LANGUAGES["en"]):
            ratios = [each.ratio if each.per_ten is None else each.per_ten for each in by_name.values()]
            rights = [100 * (each.right or 0.0) for each in by_name.values()]
            cells = [(f"{right:.0f}", f"{ratio:.2f}") for right, ratio in zip(rights, ratios, strict=True)]
            lines.append([label, *(cell for both in cells for cell in both)])
    header = [f"{name}: {column}" for name in medians for column in ("right, %", "ratio")]
    return markdown_table(["pairs that differ in", *header], lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; 2 if an argument or file is invalid."""
    parser = Parser(__doc__)
    parser.add_argument("artifacts", nargs="*", help="artifacts instead of the default ones, NAME=FOLDER")
    parser.add_argument("--served_model", help="a served model of all predictors; default: unknown")
    parser.add_argument("--json", type=Path, help="file of the scores and of the medians of all pairs")
    parser.add_argument("--markdown", type=Path, help="page whose summary is replaced")
    options = parser.parse_args(arguments)
    pairs = read_pairs()
    try:
        bodies = [body for pair in pairs for body in (pair.short, pair.long)]
        medians = {
            name: predicted_medians(open_runtime(folder, provider="cpu"), bodies, options.served_model)
            for name, folder in _artifacts(options.artifacts).items()
        }
        medians = {name: values.reshape(-1, 2) for name, values in medians.items()}
        table = score_table(pairs, medians, "kind")
        print(markdown(table))
        if options.markdown is not None:
            put_section(options.markdown, "metamorphic", summary(pairs, medians))
        if options.json is not None:
            _write_json(options.json, table, pairs, medians)
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _artifacts(words: Sequence[str]) -> dict[str, str | Path]:
    """Artifacts by name."""
    if words:
        items = [word.partition("=") for word in words]
        for word, (name, _, folder) in zip(words, items, strict=True):
            if not (name and folder):
                raise InputError("artifacts", word, "NAME=FOLDER")
        return {name: folder for name, _, folder in items}
    artifacts: dict[str, str | Path] = {PRETRAINED: PRETRAINED, TINY: TINY}
    if SMOLLM2.is_dir():
        artifacts["smollm2"] = SMOLLM2
    else:
        print(f"without tailcast-smollm2: {SMOLLM2} is missing, make smollm2 creates it\n")
    return artifacts


def _write_json(file: Path, table: Table, pairs: Sequence[Pair], medians: Medians) -> None:
    """Writes the scores of all rows, and the pairs with their medians."""
    scores = {label: {name: asdict(each) for name, each in row.items()} for label, row in table.items()}
    rows = [
        asdict(pair) | {"medians": {name: values[number].tolist() for name, values in medians.items()}}
        for number, pair in enumerate(pairs)
    ]
    with atomic_file(writable_target(file, "json")) as temporary:
        text = json.dumps({"scores": scores, "pairs": rows}, ensure_ascii=False, indent=1)
        temporary.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
