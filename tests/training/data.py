"""Small data sets of answer lengths for tests."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from data_gen.samples import SCHEMA, write_samples

TOPICS = ["rivers", "code", "story", "essay", "list", "number"]
SERVED_MODELS = ("small", "middle", "large")


def assert_refused(
    main: Callable[[Sequence[str]], int], words: Sequence[object], message: str, folder: Path, capsys: Any
) -> None:
    """A command ends with 2 after a line with the message, without a traceback, and leaves `folder` as it was."""
    before = sorted(folder.rglob("*"))
    assert main([str(word) for word in words]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert message in lines[-1]
    assert not any("Traceback" in line for line in lines)
    assert sorted(folder.rglob("*")) == before


ROW = {
    "prompt_id": "p0", "prompt": "Hi", "category": "", "dataset": "", "model": "m", "temperature": 1.0, "top_p": 1.0,
    "seed": 0, "sample_index": 0, "max_tokens": 100, "prompt_tokens": 5, "output_tokens": 7, "finish_reason": "stop",
    "engine": "e", "engine_version": "1", "run_id": "r",
}  # fmt: skip


def sample_row(**values: Any) -> dict[str, Any]:
    """One sample of `samples/2`; columns that are not named are those of a finished output."""
    return ROW | values


def to_table(rows: Sequence[dict[str, Any]]) -> pa.Table:
    """Samples as an Arrow table with the documented schema."""
    return pa.Table.from_pylist(list(rows), schema=SCHEMA)


def prompts(count: int) -> list[tuple[str, float, float]]:
    """(prompt, mu, sigma) whose words decide the length: long essays, short lists."""
    made = []
    for index in range(count):
        size, sigma = [("short", 0.15), ("long", 0.4)][index % 2]
        topic = TOPICS[index % len(TOPICS)]
        mu = 3.0 + 1.5 * (size == "long") + 0.15 * TOPICS.index(topic)
        made.append((f"write a {size} {topic} of {index}", mu, sigma))
    return made


def write_sample_file(
    path: Path, *, num_prompts: int = 40, num_samples: int = 8, max_tokens: int = 400, seed: int = 0
) -> Path:
    """A `samples/2` file drawn from the log-t distribution, cut at `max_tokens`."""
    rng = np.random.default_rng(seed)
    rows = []
    for index, (prompt, mu, sigma) in enumerate(prompts(num_prompts)):
        for number, length in enumerate(np.ceil(np.exp(mu + sigma * rng.standard_t(3.5, num_samples)))):
            row = {"prompt_id": f"p{index:03d}", "prompt": prompt, "category": prompt.split()[3]}
            row |= {"sample_index": number, "max_tokens": max_tokens}
            row |= {"prompt_tokens": len(prompt), "seed": seed}
            row["finish_reason"] = "length" if length > max_tokens else "stop"
            rows.append(sample_row(**row, output_tokens=int(min(length, max_tokens))))
    write_samples(path, to_table(rows))
    return path


def write_lists(path: Path, lengths: list[list[float | None]], **columns: list[object]) -> Path:
    """A file of the list form, one row for each list."""
    rows = {
        "prompt_id": [f"p{row}" for row in range(len(lengths))],
        "model": ["m"] * len(lengths),
        "prompt": [f"write a list of {row}" for row in range(len(lengths))],
        "output_tokens": lengths,
    }
    pq.write_table(pa.table(rows | columns), path)
    return path


def lengths_of(groups) -> list[list[int]]:
    return [part.tolist() for part in np.split(groups.flat_lengths, groups.offsets[1:-1])]


def finished_of(groups) -> list[list[bool]]:
    """Which samples of each group are not censored."""
    return [part.tolist() for part in np.split(groups.flat_finished, groups.offsets[1:-1])]


def write_rows(
    path: Path,
    *,
    num_prompts: int = 30,
    num_samples: int = 4,
    models: tuple[str, ...] = SERVED_MODELS,
    seed: int = 0,
) -> Path:
    """A file of the list form: every served model answers every prompt; each is a half longer than the one before."""
    rng = np.random.default_rng(seed)
    rows = []
    for index, (prompt, mu, sigma) in enumerate(prompts(num_prompts)):
        for number, model in enumerate(models):
            drawn = np.ceil(np.exp(mu + 0.4 * number + sigma * rng.standard_t(3.5, num_samples)))
            row = {"prompt_id": f"p{index:03d}", "model": model, "prompt": prompt}
            row |= {"temperature": [0.0, 0.7, None][number % 3], "finished": (drawn <= 300).tolist()}
            rows.append(row | {"output_tokens": np.minimum(drawn, 300).astype(int).tolist()})
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def write_labels(path: Path, *, count: int = 40) -> Path:
    """A file of urgency labels that the words decide."""
    words = [(("write", "now")[row % 2], ("long", "short")[row % 3 > 0]) for row in range(count)]
    texts = [f"{verb} a {size} list of {row}" for row, (verb, size) in enumerate(words)]
    levels = [row % 2 * 3 + (row % 3 == 0) for row in range(count)]
    pq.write_table(pa.table({"text": texts, "level": levels}), path)
    return path
