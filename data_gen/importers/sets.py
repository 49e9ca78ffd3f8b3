"""Public sets of sampled answers, each with its units and caps.

| kind | samples of a prompt and model | tokens | cap and end of an answer |
|---|---|---|---|
| castillo | 10 | the model's | 15,000; as long = cut |
| tot-gpt4 | 10 or 100 | cl100k_base, which is the model's | 1,000; `finished` |
| oasst | 1 to 3 for each sampling config | cl100k_base, not the model's | caps are in other units: null; `finished`, unknown where the report hides end marks |
| alpaca-eval | 1 | cl100k_base, not the model's | unknown |
| zeroeval | 1 for each variant | cl100k_base, not the model's | caps are in other units: null; unknown |
| alpaca-52k | 1 | cl100k_base, not the model's | unknown |
| alpaca-52k-vicuna | 1, greedy | the model's | unknown |

`castillo` also reads the original files, `preproc_DATASET_SPLIT_MODEL.json`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from data_gen.importers.batch import LENGTH, MAX_TOKENS, STOP, UNKNOWN, Batch, batches_of, whole_numbers
from data_gen.importers.logs import RowValues
from data_gen.importers.tabular import Part, parts
from data_gen.prompts import prompt_id_of
from data_gen.sources.rows import file_rows, file_suffix
from scheduler_core.errors import InputError

CASTILLO_CAP = 15_000
TOT_CAP = 1_000


def castillo(path: str | Path) -> Iterator[Batch]:
    """Ten lengths a row; an answer at or past the cap was cut there (some count one token more)."""
    if file_suffix(Path(path)) == ".json":
        yield from batches_of(_castillo_rows(Path(path)))
        return
    names = ("dataset", "model", "prompt_id", "prompt", "temperature", "top_p", "category")
    for part in parts(path, [*names, "prompt_tokens", "output_tokens"]):
        listed = _Listed(part, "output_tokens", Path(path).name)
        columns = {name: _text(listed.spread(name)) for name in names}
        columns["prompt_tokens"] = listed.spread("prompt_tokens")
        columns["output_tokens"], columns["finish_reason"] = _capped(listed.values, CASTILLO_CAP)
        yield listed.batch(
            columns | {"max_tokens": pa.repeat(pa.scalar(CASTILLO_CAP, pa.int64()), len(listed.rows))}
        )


def _castillo_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, raw in file_rows(path, "file"):
        where = f"{path.name} row {number}"
        row = RowValues(raw, where)
        model = row.text("model") or ""
        common = {
            "prompt_id": row.text("prompt_id"),
            "prompt": row.text("prompt_text"),
            "category": row.text("category", needed=False) or "",
            "dataset": row.text("dataset"),
            "model": model.replace("--", "/", 1),
            "temperature": row.number("temp"),
            "top_p": row.number("top_p"),
            "max_tokens": CASTILLO_CAP,
            "prompt_tokens": row.whole("input_size"),
        }
        lengths = raw.get("output_sizes")
        if not isinstance(lengths, list) or not all(
            type(length) is int and 0 <= length <= MAX_TOKENS for length in lengths
        ):
            raise InputError(f"{where} column output_sizes", lengths, "a list of whole numbers")
        for index, length in enumerate(lengths):
            ending = {"output_tokens": min(length, CASTILLO_CAP)}
            yield (
                number,
                common
                | ending
                | {
                    "sample_index": index,
                    "finish_reason": LENGTH if length >= CASTILLO_CAP else STOP,
                },
            )


def tot_gpt4(path: str | Path) -> Iterator[Batch]:
    """Tree-of-thought logs of GPT-4; `dataset` names the template around the task, so it is part of the prompt's id."""
    for part in parts(
        path, ["dataset", "model", "prompt_id", "prompt", "temperature", "top_p", "tokens", "finished"]
    ):
        listed = _Listed(part, "tokens", Path(path).name)
        columns = {
            name: _text(listed.spread(name))
            for name in ("dataset", "model", "prompt", "temperature", "top_p")
        }
        columns["prompt_id"] = pc.binary_join_element_wise(
            columns["dataset"], listed.spread("prompt_id"), "/"
        )
        columns["output_tokens"] = listed.values
        columns["finish_reason"] = listed.finished()
        yield listed.batch(
            columns | {"max_tokens": pa.repeat(pa.scalar(TOT_CAP, pa.int64()), len(listed.rows))}
        )


def oasst(path: str | Path) -> Iterator[Batch]:
    """Open-Assistant sampling reports; runs that never show an end mark are unknown throughout.

    `run_id` is the report and its sampling config: group by run_id, prompt_id and model for strict repeats.
    """
    marked: set[str] = set()
    for part in parts(path, ["run", "finished"]):
        ended = _Listed(part, "finished", Path(path).name)
        runs = ended.spread("run").filter(pc.fill_null(ended.values, False))
        marked.update(pc.unique(runs).to_pylist())
    names = [
        "dataset",
        "model",
        "prompt",
        "temperature",
        "top_p",
        "sampling_config",
        "run",
        "tokens",
        "finished",
    ]
    for part in parts(path, names):
        listed = _Listed(part, "tokens", Path(path).name)
        columns = {
            name: _text(listed.spread(name))
            for name in ("dataset", "model", "prompt", "temperature", "top_p")
        }
        run = listed.spread("run")
        columns["prompt_id"] = _ids(columns["prompt"])
        columns["run_id"] = pc.binary_join_element_wise(run, listed.spread("sampling_config"), "|")
        columns["output_tokens"] = listed.values
        known = pc.is_in(run, pa.array(sorted(marked), run.type))
        columns["finish_reason"] = pc.if_else(known, listed.finished(), UNKNOWN)
        yield listed.batch(columns, counted=False)


def alpaca_eval(path: str | Path) -> Iterator[Batch]:
    """One answer of each model to the AlpacaEval prompts."""
    for part in parts(path, ["prompt", "subset", "model", "n_tokens"]):
        prompts = _text(part.columns["prompt"])
        yield _single(
            part,
            Path(path).name,
            "n_tokens",
            prompt_id=_ids(prompts),
            prompt=prompts,
            category=_text(part.columns["subset"]),
            dataset=pa.repeat("alpaca_eval", len(part.rows)),
            model=_text(part.columns["model"]),
        )


def zeroeval(path: str | Path) -> Iterator[Batch]:
    """One answer of each model and variant of decoding to the ZeroEval tasks."""
    names = [
        "dataset",
        "prompt_id",
        "prompt",
        "full_prompt_tokens",
        "model",
        "variant",
        "temperature",
        "n_tokens",
    ]
    for part in parts(path, names):
        columns = {
            name: _text(part.columns[name])
            for name in ("dataset", "prompt_id", "prompt", "model", "temperature")
        }
        columns["prompt_tokens"] = part.columns["full_prompt_tokens"]
        yield _single(part, Path(path).name, "n_tokens", run_id=_text(part.columns["variant"]), **columns)


def alpaca_52k(path: str | Path) -> Iterator[Batch]:
    """The answers that Alpaca was trained on."""
    for part in parts(path, ["prompt", "prompt_tokens", "model", "n_tokens"]):
        prompts = _text(part.columns["prompt"])
        yield _single(
            part,
            Path(path).name,
            "n_tokens",
            prompt_id=_ids(prompts),
            prompt=prompts,
            prompt_tokens=part.columns["prompt_tokens"],
            dataset=pa.repeat("alpaca", len(part.rows)),
            model=_text(part.columns["model"]),
        )


def alpaca_52k_vicuna(path: str | Path) -> Iterator[Batch]:
    """Lengths of Vicuna-7B's greedy answers to some of the same prompts."""
    for part in parts(path, ["prompt", "vicuna7b_len_t00"]):
        kept = pc.is_valid(part.columns["vicuna7b_len_t00"])
        rows = part.rows[kept.to_numpy(zero_copy_only=False)]
        answered = Part({name: column.filter(kept) for name, column in part.columns.items()}, rows)
        prompts = _text(answered.columns["prompt"])
        yield _single(
            answered,
            Path(path).name,
            "vicuna7b_len_t00",
            prompt_id=_ids(prompts),
            prompt=prompts,
            dataset=pa.repeat("alpaca", len(rows)),
            model=pa.repeat("vicuna-7b", len(rows)),
            temperature=pa.repeat(0.0, len(rows)),
        )


class _Listed:
    """Rows with a list column, spread to one row for each element."""

    def __init__(self, part: Part, column: str, name: str) -> None:
        self._part = part
        self._name = name
        lists = part.columns[column]
        self._parents = pc.list_parent_indices(lists)
        self.values = pc.list_flatten(lists)
        parents = np.asarray(self._parents.to_numpy())
        self.rows: NDArray[np.int64] = part.rows[parents]
        sizes = np.asarray(pc.fill_null(pc.list_value_length(lists), 0).to_numpy())
        starts = np.cumsum(sizes) - sizes
        self._index = np.arange(len(parents)) - starts[parents]

    def spread(self, column: str) -> pa.Array:
        """A column's value for each element."""
        return self._part.columns[column].take(self._parents)

    def finished(self) -> pa.Array:
        """How each answer ended, from the column `finished`: lists as long as this one, or null."""
        lists = self._part.columns["finished"]
        same = pc.equal(pc.list_value_length(lists), pc.list_value_length(self._part.columns["tokens"]))
        wrong = pc.index(same, False).as_py()
        if wrong >= 0:
            raise InputError(
                f"{self._name} row {self._part.rows[wrong]} column finished",
                lists[wrong].as_py(),
                "one for each answer",
            )
        # A null list stands for nulls; as a list of the right size it keeps the elements aligned.
        filled = [
            value if value is not None else [None] * len(tokens)
            for value, tokens in zip(lists.to_pylist(), self._part.columns["tokens"].to_pylist(), strict=True)
        ]
        flags = pa.array([flag for value in filled for flag in value], pa.bool_())
        return pc.if_else(pc.is_null(flags), UNKNOWN, pc.if_else(flags, STOP, LENGTH))

    def batch(self, columns: dict[str, pa.Array], *, counted: bool = True) -> Batch:
        """The batch; `counted`: the position in the list is the sample index."""
        columns["output_tokens"] = whole_numbers(
            columns["output_tokens"], self.rows, "output_tokens", self._name
        )
        if "prompt_tokens" in columns:
            columns["prompt_tokens"] = whole_numbers(
                columns["prompt_tokens"], self.rows, "prompt_tokens", self._name
            )
        if counted:
            columns["sample_index"] = pa.array(self._index, pa.int64())
        return Batch(columns, self.rows)


def _single(part: Part, name: str, length: str, **columns: pa.Array) -> Batch:
    """One answer a row, its end unknown."""
    columns["output_tokens"] = whole_numbers(part.columns[length], part.rows, length, name)
    if "prompt_tokens" in columns:
        columns["prompt_tokens"] = whole_numbers(columns["prompt_tokens"], part.rows, "prompt_tokens", name)
    return Batch(columns, part.rows)


def _capped(lengths: pa.Array, cap: int) -> tuple[pa.Array, pa.Array]:
    return pc.min_element_wise(lengths, cap), pc.if_else(pc.greater_equal(lengths, cap), LENGTH, STOP)


def _text(column: pa.Array) -> pa.Array:
    """Text as string; single-precision numbers as the decimal number they were written as."""
    if pa.types.is_large_string(column.type):
        return column.cast(pa.string())
    if pa.types.is_floating(column.type):
        return pc.round(column.cast(pa.float64()), 6)
    return column


def _ids(prompts: pa.Array) -> pa.Array:
    known: dict[str, str] = {}
    return pa.array(
        [known.get(text) or known.setdefault(text, prompt_id_of(text)) for text in prompts.to_pylist()],
        pa.string(),
    )
