"""A tiny artifact whose numbers can be computed by hand, and a clock that is moved by hand."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import json
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from predictors.artifact import Manifest, content_version, hash_files, write_manifest
from predictors.runtime import open_runtime
from predictors.service.grouping import BatchingSettings
from predictors.service.pipeline import Runtime
from predictors.service.server import PredictionServer, ServerSettings

WORDS = ("name", "three", "rivers", "write", "a", "long", "essay", "about", "the", "sea", "nan", "crash")
VOCAB = {token: number for number, token in enumerate(("[PAD]", "[CLS]", "[SEP]", "[UNK]", *WORDS))}
NU = 3.5


def embeddings() -> NDArray[np.float32]:
    """One row (mu, softplus^-1 of sigma) per token; "nan" gives NaN, "crash" lies outside the table."""
    table = np.stack([4 + np.arange(len(VOCAB) - 1) * 0.1, np.linspace(-1, 1, len(VOCAB) - 1)], axis=1)
    table[VOCAB["nan"]] = np.nan
    return table.astype(np.float32)


def expected(prompt: str, max_length: int = 16) -> tuple[float, float]:
    """mu and sigma of the tiny model, by numpy."""
    ids = [VOCAB.get(word, VOCAB["[UNK]"]) for word in prompt.split()][: max_length - 2]
    mean = embeddings()[[VOCAB["[CLS]"], *ids, VOCAB["[SEP]"]]].mean(axis=0, dtype=np.float64)
    return float(mean[0]), float(np.log1p(np.exp(mean[1])))


def write_artifact(folder: Path, **changes: Any) -> Path:
    """Writes a valid artifact; `changes` replace fields of its manifest."""
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save(_graph(), folder / "model.onnx")
    tokenizer = Tokenizer(models.WordLevel(VOCAB, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", VOCAB["[CLS]"]), ("[SEP]", VOCAB["[SEP]"])]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "normalization.json").write_text(json.dumps({"mu_mean": 0.0}), encoding="utf-8")
    files = hash_files(folder)
    fields: dict[str, Any] = {
        "artifact_id": "tiny",
        "artifact_version": content_version(files),
        "created": "2026-01-02T03:04:05+00:00",
        "nu": NU,
        "max_length": 16,
        "truncation_side": "right",
        "pad_token_id": VOCAB["[PAD]"],
        "files": files,
        "served_models": ("tiny-llm",),
    }
    write_manifest(folder, Manifest(**(fields | changes)))
    return folder


def _graph() -> onnx.ModelProto:
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["embedded"]),
        helper.make_node("Cast", ["attention_mask"], ["mask"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["mask", "last"], ["weights"]),
        helper.make_node("Mul", ["embedded", "weights"], ["weighted"]),
        helper.make_node("ReduceSum", ["weighted", "one"], ["total"], keepdims=0),
        helper.make_node("ReduceSum", ["weights", "one"], ["count"], keepdims=0),
        helper.make_node("Div", ["total", "count"], ["mean"]),
        helper.make_node("Gather", ["mean", "first_column"], ["mu"], axis=1),
        helper.make_node("Gather", ["mean", "second_column"], ["raw"], axis=1),
        helper.make_node("Softplus", ["raw"], ["sigma"]),
    ]
    constants = {
        "table": embeddings(),
        "last": np.array([2]),
        "one": np.array([1]),
        "first_column": np.array(0),
        "second_column": np.array(1),
    }
    tokens, numbers = ["batch", "seq"], ["batch"]
    graph = helper.make_graph(
        nodes,
        "tiny",
        [
            helper.make_tensor_value_info(name, TensorProto.INT64, tokens)
            for name in ("input_ids", "attention_mask")
        ],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, numbers) for name in ("mu", "sigma")],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


class ManualClock:
    """Stands still until `advance`."""

    def __init__(self) -> None:
        self._now = 0.0
        self._numbers = itertools.count()
        self._calls: list[tuple[float, int, Callable[[], None]]] = []
        self._cancelled: set[int] = set()

    def now(self) -> float:
        return self._now

    def call_at(self, when: float, callback: Callable[[], None]) -> ManualTimer:
        number = next(self._numbers)
        heapq.heappush(self._calls, (when, number, callback))
        return ManualTimer(self._cancelled, number)

    @property
    def num_timers(self) -> int:
        return sum(number not in self._cancelled for _, number, _ in self._calls)

    async def advance(self, seconds: float) -> None:
        """Moves time on, makes the calls that are due, and lets the loop settle."""
        until = self._now + seconds
        while self._calls and self._calls[0][0] <= until:
            self._now, number, callback = heapq.heappop(self._calls)
            if number not in self._cancelled:
                callback()
        self._now = until
        await settle()


class ManualTimer:
    def __init__(self, cancelled: set[int], number: int) -> None:
        self._cancelled = cancelled
        self._number = number

    def cancel(self) -> None:
        self._cancelled.add(self._number)


async def settle() -> None:
    """Lets every task that can run do so until it waits."""
    for _ in range(20):
        await asyncio.sleep(0)


class GatedRuntime:
    """The real runtime behind a gate: batches wait until it is opened; the first `num_failures` batches fail."""

    def __init__(self, folder: Path, *, is_open: bool = True, num_failures: int = 0) -> None:
        self._runtime = open_runtime(folder, provider="cpu")
        self.artifact = self._runtime.artifact
        self.tokenizer = self._runtime.tokenizer
        self.provider = self._runtime.provider
        self.gate = threading.Event()
        if is_open:
            self.gate.set()
        self.num_failures = num_failures
        self.batches: list[int] = []

    def warm_up(self) -> None:
        self._runtime.warm_up()

    def run(self, prompts: Sequence[NDArray[np.int64]]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        if not self.gate.wait(timeout=30):
            raise TimeoutError("the test never opened the gate")
        self.batches.append(len(prompts))
        if self.num_failures:
            self.num_failures -= 1
            raise RuntimeError("injected failure")
        return self._runtime.run(prompts)


@contextlib.asynccontextmanager
async def running_server(
    runtime: Runtime, *, batching: BatchingSettings | None = None, **settings: Any
) -> AsyncIterator[tuple[PredictionServer, str]]:
    """A server on a free loopback port, and its address."""
    server = PredictionServer(
        runtime, batching or BatchingSettings.cpu(num_workers=2), ServerSettings(**settings)
    )
    port = await server.start()
    try:
        yield server, f"127.0.0.1:{port}"
    finally:
        await server.stop()


async def until(condition: Callable[[], bool]) -> None:
    """Lets the loop run until `condition` holds; pytest's own limit is the only time-out needed."""
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0)
