"""Urgency prediction: one ordinal head per labeled set, trained separately or jointly, on one frozen encoder.

    python -m benchmarks.urgency.scales DATA [--encoder ARTIFACT_OR_ENCODER] [--seeds 3] [--work FOLDER]

DATA holds support_tickets.parquet and seamonkey_bug_priority.parquet. Each set keeps its own scale and its
own split (60/20/20 by a hash of the text; the rubric's texts have a fixed one), so that no label is mapped to
that of another set. A head is a hidden layer of 256 with cumulative logits and ascending thresholds
("ordinal") or a score for each level ("free"). For the rubric there is also a shared hidden layer with a head
for each set; the weight of the other sets is chosen by the validation loss.

Scores are of the test split, means over the seeds, which also change the split where it is not fixed:

- AUC: of P(most urgent level) as a classifier of the most urgent level.
- answered: fraction of texts at or above the abstain threshold, which is certified on the validation split
  (`evaluate-urgency`): with probability 0.9, at most 10 % of these texts are decided too low. "claims too":
  also, at most 5 % of the rubric's texts are scheduled higher because of a claim of urgency. "right": at most
  10 % of these texts are decided wrong. The number of seeds with such a threshold is in brackets.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import cohen_kappa_score, roc_auc_score
from sklearn.pipeline import make_pipeline
from torch import Tensor, nn

from benchmarks.shared.command import Parser
from benchmarks.shared.pooled import ENCODER, pooled
from data_gen.splits import SPLITS, split_of, unit_hash
from data_gen.urgency.seed_set import (
    ClaimPair,
    read_claims,
    read_openers,
    read_pairs,
    seed_labels,
    with_phrases,
)
from predictors.heads import Tower
from predictors.modules.heads import UrgencyHead, level_probabilities
from scheduler_core.prediction.urgency import LEVELS, expected_cost_levels
from scheduler_core.report.page import markdown_table
from training.network.losses import ordinal_cross_entropy
from training.urgency.abstention import ClaimRows, choose_threshold

WIDTH, DROPOUT, EPOCHS, BATCH, RATE, DECAY = 256, 0.5, 12, 64, 1e-3, 0.05
#: Fractions of the splits of a public set, by a hash of the text.
MAX_TEXTS = 2_500
#: Candidate weights of the other sets in joint training.
WEIGHTS = (0.1, 0.3, 1.0)


@dataclass(frozen=True)
class Texts:
    """A labeled set.

    Attributes:
        levels: Names of its levels, the most urgent first.
        texts: Distinct texts [N].
        level: Level of each text [N].
        split: Fixed split of each text [N]; empty: by a hash of seed and text.
        copies: Additional training texts and their levels.
        pairs: Texts without and with a claim of urgency.
    """

    levels: tuple[str, ...]
    texts: list[str]
    level: NDArray[np.int64]
    split: list[str] = field(default_factory=list)
    copies: list[tuple[str, int]] = field(default_factory=list)
    pairs: list[ClaimPair] = field(default_factory=list)

    @property
    def all_texts(self) -> list[str]:
        """The texts, the copies, and the pairs, first without and then with the claim."""
        pairs = [text for pair in self.pairs for text in (pair.text, pair.claimed_text)]
        return [*self.texts, *(text for text, _ in self.copies), *pairs]

    def splits(self, seed: int) -> NDArray[Any]:
        """Split of each text [N]."""
        return np.array(self.split or [split_of(text, seed) for text in self.texts])


def read_sets(data: Path) -> dict[str, Texts]:
    """The rubric's texts with copies that add a claim of urgency or neutral words, and the public sets."""
    seed = [label for part in ("llm", "quiet") for label in seed_labels(part)]
    rng = np.random.default_rng(0)
    copies = with_phrases(seed, read_claims(), 1, rng, claimed=True) + with_phrases(
        seed, read_openers(), 1, rng, claimed=False
    )
    tickets = pd.read_parquet(data / "support_tickets.parquet").drop_duplicates("text")
    tickets["text"] = tickets.text.str.replace("\\n", "\n")
    bugs = pd.read_parquet(data / "seamonkey_bug_priority.parquet").drop_duplicates("text")
    bugs["label"] = bugs.label.replace({"P1": "P1-2", "P2": "P1-2"})
    five = tickets.file.str.contains("german_normalized_50_5_2")
    return {
        "rubric": Texts(
            LEVELS,
            [label.text for label in seed],
            np.array([label.level for label in seed]),
            [label.split for label in seed],
            [(copy.text, copy.level) for copy in copies],
            read_pairs(),
        ),
        "tickets, 3 levels": _public(tickets[~five], ("high", "medium", "low")),
        "tickets, 5 levels": _public(tickets[five], ("critical", "high", "medium", "low", "very_low")),
        "bugs": _public(bugs, ("P1-2", "P3", "P4", "P5")),
    }


def _public(table: pd.DataFrame, levels: tuple[str, ...]) -> Texts:
    table = table.iloc[np.argsort(table.text.map(unit_hash).to_numpy())[:MAX_TEXTS]]
    return Texts(levels, table.text.tolist(), table.label.map(levels.index).to_numpy(np.int64))


class Scales(nn.Module):
    """A hidden layer on standardized features, and cumulative logits for each set."""

    def __init__(self, features: Tensor, sets: Mapping[str, Texts], odds: str) -> None:
        super().__init__()
        self.mean, self.std = features.mean(0), features.std(0) + 1e-6
        self.hidden = nn.Sequential(nn.Linear(features.shape[1], WIDTH), nn.GELU(), nn.Dropout(DROPOUT))
        self.heads = nn.ModuleDict(
            {
                name: UrgencyHead(Tower((), ()), one.levels, odds).build(WIDTH, 0, None)
                for name, one in sets.items()
            }
        )

    def forward(self, features: Tensor, name: str) -> Tensor:
        """Logits of P(level > k) [B, K-1]."""
        return self.heads[name](self.hidden((features - self.mean) / self.std))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Examples:
    """Features and levels of one set by split; `claims` has features without and with the claim, by split."""

    features: dict[str, Tensor]
    level: dict[str, Tensor]
    texts: dict[str, list[str]]
    pairs: list[ClaimPair]
    claims: Tensor


def examples(one: Texts, features: Tensor, seed: int) -> Examples:
    """Builds the splits of a set; copies belong to the training split."""
    split, count, copies = one.splits(seed), len(one.texts), len(one.copies)
    at = {name: np.flatnonzero(split == name) for name in SPLITS}
    level = np.concatenate([one.level, np.array([level for _, level in one.copies], dtype=np.int64)])
    at["train"] = np.concatenate([at["train"], np.arange(count, count + copies)])
    everything = one.all_texts
    return Examples(
        {name: features[rows] for name, rows in at.items()},
        {name: torch.from_numpy(level[rows]) for name, rows in at.items()},
        {name: [everything[row] for row in rows] for name, rows in at.items()},
        one.pairs,
        features[count + copies :],
    )


def train(
    sets: Mapping[str, Texts],
    data: Mapping[str, Examples],
    weights: Mapping[str, float],
    odds: str,
    seed: int,
    watched: str,
) -> Scales:
    """Trains a network and returns the epoch with the lowest validation loss of the set `watched`."""
    torch.manual_seed(seed)
    network = Scales(
        torch.cat([data[name].features["train"] for name in weights]),
        {name: sets[name] for name in weights},
        odds,
    )
    # Thresholds start close to each other and need a high learning rate.
    groups: list[dict[str, Any]] = [
        {"params": network.hidden.parameters()},
        {"params": network.heads.parameters(), "lr": 10 * RATE},
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE, weight_decay=DECAY)
    best, state = math.inf, {}
    for _ in range(EPOCHS):
        network.train()
        batches = [
            (name, at)
            for name in weights
            for at in torch.split(torch.randperm(len(data[name].level["train"])), BATCH)
        ]
        for number in torch.randperm(len(batches)):
            name, at = batches[number]
            logits = network(data[name].features["train"][at], name)
            loss = weights[name] * ordinal_cross_entropy(logits, data[name].level["train"][at]).mean()
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        score = validation_loss(network, data[watched], watched)
        if score < best:
            best, state = score, {key: value.clone() for key, value in network.state_dict().items()}
    network.load_state_dict(state)
    return network.eval()


def validation_loss(network: Scales, data: Examples, name: str) -> float:
    """Validation loss of one set."""
    network.eval()
    with torch.no_grad():
        return float(
            ordinal_cross_entropy(network(data.features["validation"], name), data.level["validation"]).mean()
        )


Rows = NDArray[np.float64]


def probabilities(network: Scales, features: Tensor, name: str) -> Rows:
    """Probabilities of the levels [N, K]."""
    with torch.no_grad():
        rows = level_probabilities(network(features, name)).double().numpy()
    return np.asarray(rows / rows.sum(axis=1, keepdims=True))


def bag_of_words(one: Texts, data: Examples) -> Any:
    """Maps texts to probabilities: logistic regression on TF-IDF, the baseline of `evaluate-urgency`."""
    model = make_pipeline(
        TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, token_pattern=r"(?u)\w+|!+|\?+"),
        LogisticRegression(C=10.0, max_iter=2000),
    ).fit(data.texts["train"], data.level["train"].numpy())

    def predict(texts: list[str]) -> Rows:
        rows = np.zeros((len(texts), len(one.levels)))
        rows[:, model.classes_] = model.predict_proba(texts)
        return rows

    return predict


def scores(
    one: Texts, data: Examples, rows: Mapping[str, Rows], claims: tuple[Rows, Rows] | None
) -> dict[str, float]:
    """Scores of the test split (see the module docstring); thresholds are chosen on `rows["validation"]`."""
    true, test = data.level["test"].numpy(), rows["test"]
    top = test.argmax(axis=1)
    result = {
        "texts": float(len(true)),
        "accuracy": float((top == true).mean()),
        "majority": float(np.bincount(true).max() / len(true)),
        "kappa": float(cohen_kappa_score(true, top, labels=range(len(one.levels)), weights="quadratic")),
        "auc": float(roc_auc_score(true == 0, test[:, 0])) if 0 < (true == 0).sum() < len(true) else math.nan,
    }
    decided = expected_cost_levels(test)
    checks: dict[str, dict[str, Any]] = {"answered": {}, "right": {"risk": "wrong"}}
    if claims is not None:
        at = [number for number, pair in enumerate(data.pairs) if pair.split == "validation"]
        tiers = np.array([data.pairs[number].level_number for number in at])
        checks["claims too"] = {"claims": ClaimRows(plain=claims[0][at], claimed=claims[1][at], tiers=tiers)}
    for name, kwargs in checks.items():
        chosen = choose_threshold(rows["validation"], data.level["validation"].numpy(), **kwargs)
        is_in = chosen.answered(test)
        result[name] = float(is_in.mean())
        result[f"{name}, certified"] = float(chosen.threshold < 1)
        result[f"{name}, too low"] = _mean(decided[is_in] > true[is_in])
    return result


def _mean(values: NDArray[np.bool_]) -> float:
    return float(values.mean()) if len(values) else math.nan


def measure(
    sets: Mapping[str, Texts], features: Mapping[str, Tensor], seed: int
) -> dict[str, dict[str, dict[str, float]]]:
    """Scores by set and head."""
    data = {name: examples(one, features[name], seed) for name, one in sets.items()}
    results: dict[str, dict[str, dict[str, float]]] = {}
    for name, one in sets.items():
        networks = {
            odds: train(sets, data, {name: 1.0}, kind, seed, name)
            for odds, kind in (("ordinal", "proportional"), ("free", "free"))
        }
        if name == "rubric":
            others = [key for key in sets if key != name]
            tried = [
                train(sets, data, {name: 1.0} | dict.fromkeys(others, weight), "proportional", seed, name)
                for weight in WEIGHTS
            ]
            best = min(tried, key=lambda network: validation_loss(network, data[name], name))
            networks["ordinal, all sets"] = best
        results[name] = {}
        for title, network in networks.items():
            predict = partial(probabilities, network, name=name)
            rows: dict[str, Rows] = {split: predict(data[name].features[split]) for split in SPLITS}
            claims = (
                (predict(data[name].claims[::2]), predict(data[name].claims[1::2])) if one.pairs else None
            )
            results[name][title] = scores(one, data[name], rows, claims)
        words = bag_of_words(one, data[name])
        rows = {split: words(data[name].texts[split]) for split in SPLITS}
        pairs = one.pairs
        claims = (
            (words([pair.text for pair in pairs]), words([pair.claimed_text for pair in pairs]))
            if pairs
            else None
        )
        results[name]["bag of words"] = scores(one, data[name], rows, claims)
    return results


def percent(values: Sequence[float]) -> str:
    """Mean over the seeds with a value, in percent."""
    known = [value for value in values if not math.isnan(value)]
    return f"{100 * np.mean(known):.0f} %" if known else "-"


def markdown(results: Mapping[str, Mapping[str, Sequence[Mapping[str, float]]]]) -> str:
    """A row for each set and head."""
    rows = []
    for name, heads in results.items():
        for title, runs in heads.items():

            def cell(key: str, runs: Sequence[Mapping[str, float]] = runs) -> str:
                if key not in runs[0]:
                    return "-"
                count = sum(run[f"{key}, certified"] for run in runs)
                return f"{percent([run[key] for run in runs])} ({count:.0f})"

            mean = {key: float(np.nanmean([run[key] for run in runs])) for key in ("texts", "kappa", "auc")}
            cells = [
                f"{mean['texts']:.0f}",
                *(percent([run[key] for run in runs]) for key in ("majority", "accuracy")),
            ]
            cells += [f"{mean['kappa']:.2f}", f"{mean['auc']:.2f}", cell("answered")]
            cells += [percent([run["answered, too low"] for run in runs]), cell("claims too"), cell("right")]
            rows.append((name, title, *cells))
    header = "set|head|test texts|majority|accuracy|kappa|AUC|answered|of these too low|claims too|right"
    return markdown_table(header.split("|"), rows) + "\n"


def main(args: Sequence[str] | None = None) -> int:
    """Trains all heads and prints the tables."""
    parser = Parser(__doc__)
    parser.add_argument("data", type=Path, help="folder of the public sets of urgency")
    parser.add_argument("--encoder", default=ENCODER, help="encoder that no head was trained on")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--work", type=Path, default=Path("out/urgency_scales"), help="cached features")
    options = parser.parse_args(args)
    torch.set_num_threads(1)
    sets = read_sets(options.data)
    features = {
        name: torch.from_numpy(pooled(options.encoder, one.all_texts, options.work))
        for name, one in sets.items()
    }
    results: dict[str, dict[str, list[dict[str, float]]]] = {}
    for seed in range(options.seeds):
        for name, heads in measure(sets, features, seed).items():
            for title, one in heads.items():
                results.setdefault(name, {}).setdefault(title, []).append(one)
    sys.stdout.write(markdown(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
