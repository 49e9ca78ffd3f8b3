"""Predictions for a served model that is not in the training data, by predictors trained without it.

    python -m benchmarks.predictors.leave_one_model_out DATA [--prompts 3000] [--work FOLDER] [--markdown benchmarks/results/leave_one_model_out.md]

DATA is the folder of public sets that `python -m examples.pretrained` takes. The training, tuning and report
prompts are CASTILLO's, as for the shipped predictors; training uses a random part of them. For each served
model, three predictors are trained without its rows, and then predict its rows of the report prompts:

- MiniLM, SmolLM2: a log-t head on frozen features of the encoder of tailcast-minilm and tailcast-smollm2
  before their training on lengths (all-MiniLM-L6-v2; layer 18 of SmolLM2-135M-Instruct).
- n-grams: the network of tailcast-tiny, trained on true lengths by likelihood, without a teacher.

Rows of the table, for each of them:

- left out: mean of mu over the known models; sigma^2 is the mean of sigma^2 plus the variance of mu. This is
  what the shipped predictors do (`Conditioning.unknown_is_mean`).
- name withheld: the same mean over the other models, by a predictor that was trained with its rows too. This
  is what `benchmarks.predictors.shipped` measures as "served model unknown".
- trained on it: with its rows, and the name as input.
- another served model's lengths: tau of its mean ln lengths on the same prompts, mean over the others.

No prediction is calibrated. Each (prompt, served model) has the same weight. There is one training seed; the
95 % intervals are over served models. Features and trained heads are cached in the work folder.
"""

from __future__ import annotations

import functools
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from scipy.special import stdtr

from benchmarks.predictors.frozen_heads import LogTMixture, Network, Rows, outputs_of, read_rows, train
from benchmarks.predictors.grid_scores import GRID, LEVELS, Array, mean_over, scores
from benchmarks.shared.command import Parser
from benchmarks.shared.pages import put_section
from benchmarks.shared.pooled import ENCODER, hidden_states
from examples.pretrained import tiny, tiny_network
from examples.pretrained.prepare import prepare
from predictors.tokenizer import PromptTokenizer
from scheduler_core.report.page import markdown_table
from scheduler_core.statistics import interval
from training.evaluating.scores import kendall_tau
from training.network.data import SampleLengths

log = logging.getLogger(__name__)
KIND, NU, LAYER = LogTMixture(), 3.5, 18
COLUMNS = ("tau", "crps_tokens", "crps_log", *(f"p{100 * level:g}" for level in LEVELS))
CEILING = "another served model's lengths"
SEED = 0
#: Passes of the n-gram network over the training prompts.
EPOCHS = 10
#: mu and sigma [2, M, R] of R rows of the report prompts as each of the M served models, by a predictor trained without one
#: of them (its number; 0: with all).
Trained = Callable[[int, Rows], Array]


@dataclass(frozen=True)
class Sets:
    """Rows of CASTILLO for training, for the choice of the epoch, and for the report."""

    train: Rows
    tune: Rows
    report: Rows

    def with_features(self, features: Mapping[str, Array]) -> Sets:
        """Replaces the features by others [P, F] of the same prompts, standardized on the training prompts."""
        mean, std = features["train"].mean(0), features["train"].std(0) + 1e-6
        parts = {
            name: replace(
                getattr(self, name),
                features=torch.tensor(np.clip((values - mean) / std, -8, 8), dtype=torch.float32),
            )
            for name, values in features.items()
        }
        return Sets(**parts)


def texts(rows: Rows) -> list[str]:
    """The P prompts in the order of their numbers."""
    return [str(text) for text in rows.table.groupby(rows.prompt.numpy()).prompt.first()]


def chosen(rows: Rows, keep: torch.Tensor) -> Rows:
    """A subset of the rows; the prompts are unchanged."""
    samples = SampleLengths(*(part[keep] for part in rows.samples))
    return replace(
        rows,
        prompt=rows.prompt[keep],
        model=rows.model[keep],
        temperature=rows.temperature[keep],
        samples=samples,
        weight=rows.weight[keep],
        table=rows.table[keep.numpy()],
    )


def heads(sets: Sets, names: Sequence[str], cache: Path) -> Trained:
    """Heads on the features of `sets`; `cache` is the common beginning of the files with their weights."""

    def trained(left_out: int, rows: Rows) -> Array:
        file = cache.with_name(f"{cache.name}-{left_out}.pt")
        network = Network(KIND, sets.train.features.shape[1], names, SEED)
        if file.is_file():
            network.load_state_dict(torch.load(file, weights_only=True))
        else:
            others, tuning = (chosen(part, part.model != left_out) for part in (sets.train, sets.tune))
            network = train(KIND, others, tuning, names, SEED)
            torch.save(network.state_dict(), file)
        rows = replace(rows, features=sets.report.features)
        every = []
        for number in range(1, len(names) + 1):
            mu, sigma, *_ = KIND.parameters(
                outputs_of(network, replace(rows, model=torch.full_like(rows.model, number)))
            )
            every.append((mu[:, 0].numpy(), sigma[:, 0].numpy()))
        return np.array(every).swapaxes(0, 1)

    return trained


def n_grams(sets: Sets, names: Sequence[str], work: Path) -> Trained:
    """Networks of tailcast-tiny, trained on true lengths."""
    prompts = texts(sets.train)
    tiny.make_tokenizer(prompts).save(str(work / "n-grams.json"))
    tokenizer = PromptTokenizer(work / "n-grams.json", max_length=tiny.MAX_LENGTH, truncation_side="middle")
    tokens = [each.ids for each in tokenizer(prompts)]
    bags = tiny_network.bags_of([each.ids for each in tokenizer(texts(sets.report))])

    @functools.cache
    def outputs(left_out: int) -> torch.Tensor:
        known = chosen(sets.train, sets.train.model != left_out)
        order = torch.argsort(known.prompt, stable=True)
        data = tiny_network.Prompts(
            tokens=tokens,
            targets=None,
            row_prompt=known.prompt[order].numpy(),
            row_model=known.model[order].numpy() - 1,
            samples=SampleLengths(*(part[order] for part in known.samples)),
            weight=known.weight[order],
        )
        network = tiny_network.train(data, tokenizer.vocabulary_size, EPOCHS, SEED, num_models=len(names))
        with torch.no_grad():
            predicted: torch.Tensor = network(*bags)
        return predicted

    def trained(left_out: int, rows: Rows) -> Array:
        mu, log_sigma = outputs(left_out)[rows.prompt].double().permute(2, 1, 0)
        return np.stack([mu.numpy(), log_sigma.exp().numpy()])

    return trained


def scored(mu: Array, sigma: Array, rows: Rows) -> dict[str, float]:
    """Means over rows."""
    cdf = stdtr(NU, (GRID - mu[:, None]) / sigma[:, None])
    values = scores(cdf, rows.samples, np.arange(len(mu)))
    tau = kendall_tau(mu, values["mean_log"]) or 0.0
    return {"tau": tau} | {name: float(values[name].mean()) for name in COLUMNS[1:]}


def ceiling(report: Rows, number: int) -> dict[str, float]:
    """tau of other served models' mean lengths on the same prompts."""
    logs = mean_over(report.samples.present.numpy(), np.log(report.samples.tokens.numpy().astype(float)))
    table = pd.DataFrame({"prompt": report.prompt.numpy(), "model": report.model.numpy(), "log": logs})
    by_model = table.pivot_table("log", "prompt", "model")
    taus = []
    for other in by_model.columns.drop(number):
        both = by_model[[number, other]].dropna()
        taus.append(kendall_tau(both[number].to_numpy(), both[other].to_numpy()) or 0.0)
    return {"tau": float(np.mean(taus))}


def markdown(results: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
    """Table with a row for each kind of prediction, mean over served models."""
    lines = []
    for way, ofs in results.items():
        cells = []
        for name in COLUMNS:
            if name not in ofs[0]:
                cells.append("-")
                continue
            mean = interval([one[name] for one in ofs])
            half = mean.high - mean.mean
            if name.startswith("p"):
                cells.append(f"{100 * mean.mean:.1f} ± {100 * half:.1f}")
            else:
                digits = 1 if name == "crps_tokens" else 3
                cells.append(f"{mean.mean:.{digits}f} ± {half:.{digits}f}")
        lines.append((way, *cells))
    header = ("prediction", "Kendall tau", "CRPS, tokens", "CRPS of ln tokens", "P50, %", "P90, %", "P99, %")
    return markdown_table(header, lines)


def measure(trained: Trained, report: Rows, names: Sequence[str]) -> dict[str, list[dict[str, float]]]:
    """Scores of each served model of the report prompts, for each row of the table."""
    results: dict[str, list[dict[str, float]]] = {"left out": [], "name withheld": [], "trained on it": []}
    for number in range(1, len(names) + 1):
        since, own = time.monotonic(), chosen(report, report.model == number)
        others = np.arange(len(names)) != number - 1
        for way, left_out in (("left out", number), ("name withheld", 0)):
            mu, sigma = trained(left_out, own)
            mean = mu[others].mean(0), np.sqrt((sigma[others] ** 2).mean(0) + mu[others].var(0))
            results[way].append(scored(*mean, own))
        results["trained on it"].append(scored(mu[number - 1], sigma[number - 1], own))
        log.info(
            "%s, %.0f s: %s",
            names[number - 1],
            time.monotonic() - since,
            json.dumps({way: round(of[-1]["tau"], 3) for way, of in results.items()}),
        )
    return results


def main(args: Sequence[str] | None = None) -> None:
    """Trains the heads that are missing in the work folder, and prints the table."""
    parser = Parser(__doc__)
    parser.add_argument("data", type=Path, help="folder of the public sets")
    parser.add_argument("--prompts", type=int, default=3_000, help="number of training prompts")
    parser.add_argument("--work", type=Path, default=Path("out/leave_one_model_out"), help="cached results")
    parser.add_argument("--markdown", help="page whose table is replaced")
    options = parser.parse_args(args)
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    files = prepare(options.data, options.work / "data")
    castillo = [file for file in files.training if file.stem.startswith("castillo")]
    table = pd.concat(map(pd.read_parquet, castillo))
    ids = np.random.default_rng(SEED).permutation(sorted(table.prompt_id.unique()))[: options.prompts]
    training = options.work / f"castillo-{options.prompts}.parquet"
    table[table.prompt_id.isin(ids)].to_parquet(training, index=False)
    names = sorted(table.model.unique())
    sets = Sets(
        *(
            read_rows({file: 1.0}, names, ENCODER, options.work)
            for file in (training, files.calibration, files.report)
        )
    )
    hidden = {
        name: hidden_states(LAYER, texts(getattr(sets, name)), options.work).astype(float)
        for name in ("train", "tune", "report")
    }
    predictors = {
        "MiniLM": heads(sets, names, options.work / f"minilm-{options.prompts}"),
        "SmolLM2": heads(sets.with_features(hidden), names, options.work / f"smollm2-{options.prompts}"),
        "n-grams": n_grams(sets, names, options.work),
    }
    results: dict[str, Sequence[Mapping[str, float]]] = {}
    for name, trained in predictors.items():
        log.info(name)
        results |= {f"{name}, {way}": of for way, of in measure(trained, sets.report, names).items()}
    results[CEILING] = [ceiling(sets.report, number + 1) for number in range(len(names))]
    text = f"{len(names)} served models, {len(ids):,} training prompts:\n\n{markdown(results)}"
    print(text)
    if options.markdown is not None:
        put_section(options.markdown, "left out model, heads", text)


if __name__ == "__main__":
    main()
