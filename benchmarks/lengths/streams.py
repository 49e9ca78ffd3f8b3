"""Streams of requests with their output lengths, from public data.

An application is one data set, or one family of puzzles, answered by one served model. Only data that no shipped
predictor was trained on are used for the streams of several applications, each prompt once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from examples.pretrained.prepare import CHOICE, FAMILIES, SET_ASIDE, SOURCES, family_part
from scheduler_core.errors import InputError

#: Fewest prompts of an application, and of one that is a stream by itself; longest stream of one application.
MIN_PROMPTS, MIN_ALONE, MAX_ALONE = 20, 100, 1_500
#: Applications of the stream "M", and served models of each application of "M32".
NUM_APPLICATIONS, MODELS_OF_APPLICATION = 24, 3
#: Requests before the first one of a flood, requests of a flood, and the output length of its copies.
FLOOD_START, FLOOD_SIZE, FLOOD_TOKENS = 500, 1_500, 8_000
#: Requests before and after a served model is replaced.
SWAP_AFTER = 1_200


@dataclass(frozen=True, slots=True)
class Request:
    """What a predictor knows before the output.

    Attributes:
        prompt: The prompt, without the system prompt.
        application: Data set or family; for scores only.
        served_model, tenant: Names; empty if all requests have the same one.
        thinks: Whether the served model is a reasoning model; stands for the flag of the API.
        max_tokens: The limit of the request; None if unknown.
    """

    prompt: str
    application: str = ""
    served_model: str = ""
    tenant: str = ""
    thinks: bool = False
    max_tokens: int | None = None


Stream = list[tuple[Request, int]]


@dataclass(frozen=True, slots=True)
class Application:
    """Table of one data set (prompt, model, tokens, thinks, max_tokens), and its models with enough prompts."""

    name: str
    rows: pd.DataFrame
    models: tuple[str, ...]

    def requests(self, models: Sequence[str], rng: np.random.Generator) -> Stream:
        """One request for each prompt: a random output of one of the models."""
        rows = self.rows[self.rows.model.isin(models)].sample(frac=1, random_state=rng)
        return [
            (
                Request(row.prompt, self.name, row.model, thinks=row.thinks, max_tokens=row.max_tokens),
                row.tokens,
            )
            for row in rows.drop_duplicates("prompt").itertuples()
        ]


class Streams:
    """Builds the streams. `data` is the folder of the public data sets; InputError if a file is missing."""

    def __init__(self, data: Path) -> None:
        self._data = data

    @cached_property
    def applications(self) -> list[Application]:
        """Those that no shipped predictor was trained on, in the order of their names."""
        tables = [self._table(name) for name in (*CHOICE, *SET_ASIDE)]
        puzzles = self._table(FAMILIES)
        tables.append(puzzles[family_part(puzzles.application) != ""])
        return _applications(pd.concat(tables), MIN_PROMPTS)

    def mixed(self, seed: int, num_applications: int | None = None, num_models: int = 0) -> Stream:
        """Requests of several applications in random order.

        Args:
            seed: Of the choice of applications, models and order.
            num_applications: Number of applications; all sources but only some families. None: all.
            num_models: Served models of each application; 0: one, all with the same name.
        """
        rng = np.random.default_rng(seed)
        stream: Stream = []
        for application in self._chosen(num_applications, rng):
            names = rng.choice(
                application.models, min(num_models or 1, len(application.models)), replace=False
            )
            stream += application.requests(names.tolist(), rng)
        return _shuffled(stream if num_models else _of_one_name(stream), rng)

    def homogeneous(self, seed: int = 0) -> dict[str, Stream]:
        """A stream of each application with enough prompts, also of those that the predictors were trained on."""
        names = [
            *CHOICE,
            *SET_ASIDE,
            *(Path(each.file).name for each in SOURCES if each.file.startswith("more/")),
        ]
        tables = pd.concat([*map(self._table, names), self._castillo("castillo_validation")])
        streams = {}
        for application in _applications(tables, MIN_ALONE):
            rng = np.random.default_rng(seed)
            requests = application.requests([rng.choice(application.models)], rng)
            streams[application.name] = _of_one_name(requests)[:MAX_ALONE]
        return streams

    def flooded(self, seed: int, flood: str, tenants: bool) -> Stream:
        """The stream "M" and, mixed with the requests after the first `FLOOD_START`, those of a tenant "flood".

        Args:
            seed: As in `mixed`.
            flood: "template" (one short odd prompt with a number), "copies" (prompts of the others with outputs of
                `FLOOD_TOKENS`), or "none".
            tenants: Whether requests name their tenants.
        """
        stream = self.mixed(seed, NUM_APPLICATIONS)
        rng = np.random.default_rng(1_000 + seed)
        if tenants:
            stream = [(replace(request, tenant="users"), tokens) for request, tokens in stream]
        tenant = "flood" if tenants else ""
        odd: Stream = []
        for number in range(FLOOD_SIZE if flood != "none" else 0):
            prompt, tokens = f"zx {rng.integers(1_000_000)} qv ok?", int(np.exp(rng.normal(3, 0.3))) + 1
            if flood == "copies":
                prompt, tokens = stream[number % len(stream)][0].prompt, FLOOD_TOKENS
            odd.append((Request(prompt, "flood", tenant=tenant), tokens))
        return stream[:FLOOD_START] + _shuffled(stream[FLOOD_START:] + odd, rng)

    def swapped(self, seed: int, swap: bool) -> Stream:
        """The stream "M", whose served models are replaced after `SWAP_AFTER` requests by those with the longest
        outputs; without `swap` these serve all of it."""
        rng = np.random.default_rng(100 + seed)
        old, new = [], []
        for application in self._chosen(NUM_APPLICATIONS, rng):
            medians = application.rows.groupby("model").tokens.median()[list(application.models)]
            models = medians.sort_values().index
            by_prompt: list[dict[str, tuple[Request, int]]] = [
                {row[0].prompt: row for row in application.requests([model], rng)}
                for model in (models[len(models) // 4], models[-1])
            ]
            for prompt in by_prompt[0].keys() if len(models) > 1 else ():
                if prompt not in by_prompt[1]:
                    continue
                old.append(by_prompt[0][prompt])
                new.append(by_prompt[1][prompt])
        old, new = _of_one_name(old), _of_one_name(new)
        order = rng.permutation(len(old))
        return [
            (old if swap and number < SWAP_AFTER else new)[row] for number, row in enumerate(order.tolist())
        ]

    def training(self) -> tuple[list[str], NDArray[np.float64]]:
        """Prompts [N] and ln lengths [N, 10] of CASTILLO's training part, one row for each prompt and served model."""
        table = self._read(self._data / "castillo_train.parquet")
        return table.prompt.tolist(), np.log(np.maximum(np.stack(table.output_tokens), 1))

    def _chosen(self, number: int | None, rng: np.random.Generator) -> list[Application]:
        if number is None or number >= len(self.applications):
            return self.applications
        families = [each for each in self.applications if each.name.startswith(FAMILIES)]
        others = [each for each in self.applications if not each.name.startswith(FAMILIES)]
        rows = rng.choice(len(families), max(number - len(others), 0), replace=False)
        return others + [families[row] for row in sorted(rows.tolist())]

    def _castillo(self, name: str) -> pd.DataFrame:
        table = self._read(self._data / f"{name}.parquet")
        tokens = table.output_tokens.map(lambda lengths: int(lengths[0]))
        application = "castillo/" + table.dataset
        return table.assign(application=application, tokens=tokens, thinks=False, max_tokens=None)[_COLUMNS]

    def _table(self, name: str) -> pd.DataFrame:
        """Complete outputs of a source; `tokens` includes those of the reasoning."""
        table = self._read(self._data / f"more/{name}.parquet")
        table = table[~table.hidden_reasoning.fillna(False).astype(bool)]
        columns = ("api_tokens", "n_tokens_reasoning", "finished", "max_tokens")
        table = table.assign(**{column: np.nan for column in columns if column not in table})
        reasoning = table.n_tokens_reasoning.fillna(0)
        tokens = table.api_tokens.where(table.api_tokens > 0, table.n_tokens + reasoning)
        thinks = (reasoning > 0).groupby(table.model).transform("mean") >= 0.5
        application = name + "/" + (table.family if "family" in table else table.dataset)
        table = table.assign(application=application, tokens=tokens.astype(int), thinks=thinks)
        limits = [None if np.isnan(limit) else int(limit) for limit in table.max_tokens.astype(float)]
        table = table.assign(max_tokens=pd.Series(limits, table.index, dtype=object))
        return table[(table.tokens > 0) & (table.finished != False)][_COLUMNS]  # noqa: E712

    @staticmethod
    def _read(file: Path) -> pd.DataFrame:
        if not file.is_file():
            raise InputError("DATA", str(file), "a folder with the public data sets")
        return pd.read_parquet(file)


_COLUMNS = ["application", "prompt", "model", "tokens", "thinks", "max_tokens"]


def _applications(table: pd.DataFrame, min_prompts: int) -> list[Application]:
    applications = []
    for name, rows in table.groupby("application", sort=True):
        counts = rows.groupby("model").prompt.nunique()
        models = tuple(counts.index[counts >= min_prompts])
        if models:
            applications.append(Application(str(name), rows, models))
    return applications


def _of_one_name(stream: Stream) -> Stream:
    return [(replace(request, served_model=""), tokens) for request, tokens in stream]


def _shuffled(stream: Stream, rng: np.random.Generator) -> Stream:
    return [stream[row] for row in rng.permutation(len(stream)).tolist()]


#: Streams of several applications by name, given a seed.
MIXED: dict[str, Callable[[Streams, int], Stream]] = {
    "M": lambda streams, seed: streams.mixed(seed, NUM_APPLICATIONS),
    "M32": lambda streams, seed: streams.mixed(seed, NUM_APPLICATIONS, MODELS_OF_APPLICATION),
    "L": lambda streams, seed: streams.mixed(seed),
}
