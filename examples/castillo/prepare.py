"""Data preparation for the CASTILLO predictors: files for training, calibration and evaluation from public data sets.

CASTILLO's validation part is split by prompt: 60 % for training, 15 % for early stopping and calibration, and 25 % for the
report only. Prompts of other sets with the same words as a report prompt are removed.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from data_gen.importers.config import ImportLengthsConfig
from data_gen.importers.import_lengths import import_lengths
from data_gen.splits import split_of, unit_hash
from scheduler_core.shell.files import atomic_file
from scheduler_core.shell.table_files import read_parquet

log = logging.getLogger(__name__)

SPLIT_SEED = 0
FRACTIONS = (0.6, 0.15, 0.25)
SPLIT_NAMES = {"train": "tune", "validation": "calibration", "test": "report"}


@dataclass(frozen=True, slots=True)
class TrainingSet:
    """An additional training set: name, file in the data folder, and options of `import-lengths log`."""

    name: str
    file: str
    columns: str
    model: str = ""
    dataset: str = ""


_COMMON = "dataset=dataset,model=model,prompt=prompt,temperature=temperature"
_ALPACA = "many_prompts/alpaca_52k.parquet"
#: See docs/importing.md.
TRAINING_SETS = (
    TrainingSet(
        "alpaca_eval",
        "multi_model/alpaca_eval.parquet",
        "prompt=prompt,category=subset,model=model,output_tokens=n_tokens",
        dataset="alpaca_eval",
    ),
    TrainingSet(
        "zeroeval",
        "multi_model/zeroeval.parquet",
        f"{_COMMON},prompt_id=prompt_id,prompt_tokens=full_prompt_tokens,output_tokens=n_tokens",
    ),
    TrainingSet(
        "oasst",
        "repeated_samples/oasst_sampling_reports.parquet",
        f"{_COMMON},top_p=top_p,output_tokens=tokens,finish_reason=finished",
    ),
    TrainingSet(
        "alpaca_52k",
        _ALPACA,
        "prompt=prompt,prompt_tokens=prompt_tokens,model=model,output_tokens=n_tokens",
        dataset="alpaca",
    ),
    TrainingSet(
        "alpaca_52k_vicuna",
        _ALPACA,
        "prompt=prompt,output_tokens=vicuna7b_len_t00",
        model="vicuna-7b",
        dataset="alpaca",
    ),
)


def prepare(data: Path, out: Path, *, alpaca_share: float) -> list[Path]:
    """Writes train_*.parquet, tune.parquet, calibration.parquet and report.parquet (samples/2).

    Args:
        data: Folder of the data sets, see the README of this example.
        out: Folder to write to; existing imported files are reused.
        alpaca_share: Fraction of the 52,000 Alpaca prompts to use, selected by a hash of the prompt, in (0, 1].

    Returns:
        The training files.
    """
    out.mkdir(parents=True, exist_ok=True)
    validation = _imported("castillo", data / "castillo_validation.parquet", out / "validation.parquet")
    split = _splits(validation)
    for name, file in SPLIT_NAMES.items():
        _write(validation.filter(pc.equal(split, name)), out / f"{file}.parquet")
    report = {_words(text) for text in _prompts(read_parquet(out / "report.parquet", "report"))}
    training = [out / "tune.parquet"]
    train = _imported("castillo", data / "castillo_train.parquet", out / "all_train.parquet")
    training.append(_without(train, report, out / "train_castillo.parquet"))
    for part in TRAINING_SETS:
        source = _usable_rows(part, data / part.file, out / f"raw_{part.name}.parquet")
        options = {"columns": part.columns, "model": part.model, "dataset": part.dataset}
        table = _imported("log", source, out / f"all_{part.name}.parquet", **options)
        if part.file == _ALPACA:
            table = _as_castillo(_fraction(table, alpaca_share), data / part.file)
        training.append(_without(table, report, out / f"train_{part.name}.parquet"))
    return training


def _imported(kind: str, file: Path, out: Path, **options: Any) -> pa.Table:
    if not out.exists():
        import_lengths(
            ImportLengthsConfig(kind=kind, file=str(file), out=str(out), unknown="stop", **options)
        )
    table = read_parquet(out, kind)
    return table.filter(pc.not_equal(table.column("finish_reason"), "error"))


def _usable_rows(part: TrainingSet, file: Path, out: Path) -> Path:
    """Returns a file that `log` can import: without rows that have no output, and with `finished` unset in runs that never set it."""
    table = read_parquet(file, part.name)
    if part.name == "alpaca_52k_vicuna":
        table = table.filter(pc.is_valid(table.column("vicuna7b_len_t00")))
    elif part.name == "oasst":
        rows = table.select(["run", "finished"]).to_pylist()
        complete_runs = {
            row["run"] for row in rows if row["finished"] is not None and True in row["finished"]
        }
        finished = [row["finished"] if row["run"] in complete_runs else None for row in rows]
        column = table.column_names.index("finished")
        table = table.set_column(column, "finished", pa.array(finished, table.schema.field("finished").type))
    else:
        return file
    _write(table, out)
    return out


def _splits(table: pa.Table) -> pa.Array:
    ids = table.column("prompt_id").to_pylist()
    split_of_id = {prompt_id: split_of(prompt_id, SPLIT_SEED, FRACTIONS) for prompt_id in set(ids)}
    return pa.array([split_of_id[prompt_id] for prompt_id in ids])


def _prompts(table: pa.Table) -> Iterable[str]:
    return [str(text) for text in pc.unique(table.column("prompt")).to_pylist()]


def _words(text: str) -> str:
    """Lower-case words of a prompt without punctuation, and without the heading "Input" that CASTILLO adds."""
    return " ".join(word for word in re.findall(r"\w+", text.lower()) if word != "input")


def _without(table: pa.Table, held_out: set[str], path: Path) -> Path:
    shared = {text for text in _prompts(table) if _words(text) in held_out}
    if shared:
        log.info("%s: %d prompts removed, which are also in the report", path.name, len(shared))
    mask = pa.array([text not in shared for text in table.column("prompt").to_pylist()])
    _write(table.filter(mask), path)
    return path


def _fraction(table: pa.Table, fraction: float) -> pa.Table:
    texts = table.column("prompt").to_pylist()
    return table.filter(pa.array([unit_hash(text) < fraction for text in texts]))


def _as_castillo(table: pa.Table, file: Path) -> pa.Table:
    """Joins Alpaca's instruction and input in the format of CASTILLO."""
    raw = read_parquet(file, "alpaca_52k")
    with_input = set(raw.filter(raw.column("has_input")).column("prompt").to_pylist())
    texts = [
        text.replace("\n\n", "\nInput: ", 1) if text in with_input else text
        for text in table.column("prompt").to_pylist()
    ]
    position = table.column_names.index("prompt")
    return table.set_column(
        position, table.schema.field("prompt"), pa.array(texts, table.schema.field("prompt").type)
    )


def _write(table: pa.Table, path: Path) -> None:
    with atomic_file(path) as temporary:
        pq.write_table(table, temporary, compression="zstd")
