"""Tiny artifacts whose numbers can be computed by hand, and a clock that is moved by hand."""

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

import grpc
import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from predictors.artifact import Conditions, EncoderCard, Manifest, open_artifact, write_manifest
from predictors.proto.predictor_v1_pb2_grpc import PredictorStub
from predictors.runtime import Predicted, open_runtime
from predictors.service.artifacts import Reopen
from predictors.service.batcher import BatchingSettings
from predictors.service.metrics import ServiceMetrics
from predictors.service.pipeline import Runtime
from predictors.service.server import PredictionServer, ServerSettings
from predictors.service.tracing import Tracing

WORDS = (
    "name",
    "three",
    "rivers",
    "write",
    "a",
    "long",
    "essay",
    "about",
    "the",
    "sea",
    "nan",
    "crash",
    "last",
)
VOCAB = {token: number for number, token in enumerate(("[PAD]", "[CLS]", "[SEP]", "[UNK]", *WORDS))}
NU = 3.5


def embeddings() -> NDArray[np.float32]:
    """One row (mu, softplus^-1 of sigma) per token; "nan" gives NaN, "crash" has a row that the graph never finds."""
    num_words = VOCAB["crash"]
    table = np.zeros((len(VOCAB), 2))
    table[:num_words] = np.stack([4 + np.arange(num_words) * 0.1, np.linspace(-1, 1, num_words)], axis=1)
    table[VOCAB["nan"]] = np.nan
    return table.astype(np.float32)


def mean_embedding(prompt: str, max_length: int = 16) -> tuple[float, float]:
    """Mean row of `embeddings` over the prompt's tokens, by numpy."""
    ids = [VOCAB.get(word, VOCAB["[UNK]"]) for word in prompt.split()][: max_length - 2]
    mean = embeddings()[[VOCAB["[CLS]"], *ids, VOCAB["[SEP]"]]].mean(axis=0, dtype=np.float64)
    return float(mean[0]), float(mean[1])


def expected(prompt: str, max_length: int = 16) -> tuple[float, float]:
    """mu and sigma of the tiny model, by numpy."""
    first, second = mean_embedding(prompt, max_length)
    return first, float(np.log1p(np.exp(second)))


def write_artifact(folder: Path, **changes: Any) -> Path:
    """Writes a valid artifact that predicts mu and sigma; `changes` replace fields of its manifest."""
    fields = {"heads": ("length",), "nu": NU, "served_models": ("tiny-llm",)} | changes
    return _write(folder, _graph(), **fields)


def without_numbers(folder: Path) -> Path:
    """Changes an artifact of this file so that all it predicts is NaN; it stays a valid one."""
    manifest = open_artifact(folder).manifest
    model = onnx.load(folder / "model.onnx")
    [table] = [tensor for tensor in model.graph.initializer if tensor.name == "table"]
    table.CopyFrom(numpy_helper.from_array(np.full_like(embeddings(), np.nan), "table"))
    onnx.save(model, folder / "model.onnx")
    write_manifest(folder, manifest)
    return folder


def version_prefix(version: str) -> str:
    """What was put before a version; see `write_manifest`."""
    return version.rpartition("+")[0]


SERVED_MODELS = ("tiny-llm", "huge-llm")
RICH: dict[str, Any] = {
    "heads": ("length", "urgency", "bucket", "regression", "rank"),
    "served_models": SERVED_MODELS,
    "conditioning": Conditions(unknown_models=True, temperature=True),
    "urgency_levels": ("now", "soon", "late"),
    "abstain_threshold": 0.9,
    "bucket_edges": (100.0,),
}


def write_rich_artifact(folder: Path, **changes: Any) -> Path:
    """Writes an artifact with all heads, or those in `changes`, that sees served model and temperature.

    Its numbers: `expected_rich`.
    """
    fields = RICH | changes
    of_heads = {"urgency": ("urgency_levels", "abstain_threshold"), "bucket": ("bucket_edges",)}
    for head, names in of_heads.items():
        if head not in fields["heads"]:
            fields = {name: value for name, value in fields.items() if name not in names}
    return _write(folder, _rich_graph(fields["heads"]), **fields)


def expected_rich(prompt: str, number: int = 0, temperature: float = 0.0) -> dict[str, Any]:
    """Predictions of the rich model, by numpy; `number` is that of the served model."""
    first, second = mean_embedding(prompt)
    urgency, bucket = np.exp([first, second, 0.0]), np.exp([first, second])
    mu = first + number + temperature
    return {
        "mu": mu,
        "sigma": np.log1p(np.exp(second)),
        "nu": 2.0 + number,
        "urgency": urgency / urgency.sum(),
        "bucket": bucket / bucket.sum(),
        "regression_tokens": np.exp(mu),
        "rank": mu,
    }


def _finish(folder: Path, fields: dict[str, Any]) -> Path:
    """`artifact_version` among the fields is put before the version."""
    prefix = fields.pop("artifact_version", None)
    write_manifest(folder, Manifest.draft(**fields), version_prefix=prefix)
    return folder


def _write(folder: Path, model: onnx.ModelProto, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save(model, folder / "model.onnx")
    tokenizer = Tokenizer(models.WordLevel(VOCAB, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", VOCAB["[CLS]"]), ("[SEP]", VOCAB["[SEP]"])]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "normalization.json").write_text(json.dumps({"mu_mean": 0.0}), encoding="utf-8")
    fields: dict[str, Any] = {
        "artifact_id": "tiny",
        "created": "2026-01-02T03:04:05+00:00",
        "encoder": EncoderCard(
            architecture="bag", source="fake", num_parameters=32, num_layers=None, width=2
        ),
        "max_length": 16,
        "truncation_side": "right",
        "pad_token_id": VOCAB["[PAD]"],
    }
    return _finish(folder, fields | changes)


# The mean embedding, and its two columns.
MEAN = [
    helper.make_node("Equal", ["input_ids", "crash"], ["crashes"]),
    helper.make_node("Where", ["crashes", "outside", "input_ids"], ["rows"]),
    helper.make_node("Gather", ["table", "rows"], ["embedded"]),
    helper.make_node("Cast", ["attention_mask"], ["mask"], to=TensorProto.FLOAT),
    helper.make_node("Unsqueeze", ["mask", "last"], ["weights"]),
    helper.make_node("Mul", ["embedded", "weights"], ["weighted"]),
    helper.make_node("ReduceSum", ["weighted", "one"], ["total"], keepdims=0),
    helper.make_node("ReduceSum", ["weights", "one"], ["count"], keepdims=0),
    helper.make_node("Div", ["total", "count"], ["mean"]),
    helper.make_node("Gather", ["mean", "first_column"], ["first"], axis=1),
    helper.make_node("Gather", ["mean", "second_column"], ["second"], axis=1),
    helper.make_node("Softplus", ["second"], ["sigma"]),
]


def _constants() -> dict[str, Any]:
    return {
        "table": embeddings(),
        "crash": np.array(VOCAB["crash"]),
        "outside": np.array(len(VOCAB)),
        "last": np.array([2]),
        "one": np.array([1]),
        "first_column": np.array(0),
        "second_column": np.array(1),
    }


def _token_inputs() -> list[onnx.ValueInfoProto]:
    return [
        helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", "seq"])
        for name in ("input_ids", "attention_mask")
    ]


def _graph() -> onnx.ModelProto:
    nodes = [*MEAN, helper.make_node("Identity", ["first"], ["mu"])]
    return _model(nodes, _constants(), _token_inputs(), {"mu": None, "sigma": None})


def _rich_graph(heads: Sequence[str]) -> onnx.ModelProto:
    nodes = [
        *MEAN,
        helper.make_node("Cast", ["served_model"], ["number"], to=TensorProto.FLOAT),
        helper.make_node("IsNaN", ["temperature"], ["unknown"]),
        helper.make_node("Where", ["unknown", "zero", "temperature"], ["filled"]),
        helper.make_node("Sum", ["first", "number", "filled"], ["mu"]),
        helper.make_node("Add", ["number", "two"], ["nu"]),
        helper.make_node("Pad", ["mean", "pads"], ["three"]),
        helper.make_node("Softmax", ["three"], ["urgency"], axis=1),
        helper.make_node("Softmax", ["mean"], ["bucket"], axis=1),
        helper.make_node("Exp", ["mu"], ["regression_tokens"]),
        helper.make_node("Identity", ["mu"], ["rank"]),
    ]
    constants = _constants() | {
        "zero": np.float32(0),
        "two": np.float32(2),
        "pads": np.array([0, 0, 0, 1]),  # one column of zeros on the right
    }
    inputs = [
        *_token_inputs(),
        helper.make_tensor_value_info("served_model", TensorProto.INT64, ["batch"]),
        helper.make_tensor_value_info("temperature", TensorProto.FLOAT, ["batch"]),
    ]
    of_head: dict[str, dict[str, int | None]] = {
        "length": {"mu": None, "sigma": None, "nu": None},
        "urgency": {"urgency": 3},
        "bucket": {"bucket": 2},
        "regression": {"regression_tokens": None},
        "rank": {"rank": None},
    }
    outputs = {name: width for head in heads for name, width in of_head[head].items()}
    return _model(nodes, constants, inputs, outputs)


def _model(
    nodes: Sequence[onnx.NodeProto],
    constants: dict[str, Any],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: dict[str, int | None],
) -> onnx.ModelProto:
    """A graph whose outputs are [batch], or [batch, width] where a width stands."""
    graph = helper.make_graph(
        nodes,
        "tiny",
        inputs,
        [
            helper.make_tensor_value_info(
                name, TensorProto.FLOAT, ["batch"] if width is None else ["batch", width]
            )
            for name, width in outputs.items()
        ],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
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

    def run(
        self,
        prompts: Sequence[NDArray[Any]],
        served_models: Sequence[str | None] | None = None,
        temperatures: Sequence[float | None] | None = None,
    ) -> Predicted:
        if not self.gate.wait(timeout=30):
            raise TimeoutError("the test never opened the gate")
        self.batches.append(len(prompts))
        if self.num_failures:
            self.num_failures -= 1
            raise RuntimeError("injected failure")
        return self._runtime.run(prompts, served_models, temperatures)


@contextlib.asynccontextmanager
async def running_server(
    runtime: Runtime | Sequence[Runtime],
    *,
    batching: BatchingSettings | None = None,
    reopen: Reopen | None = None,
    metrics: ServiceMetrics | None = None,
    tracing: Tracing | None = None,
    **settings: Any,
) -> AsyncIterator[tuple[PredictionServer, str]]:
    """A server on a free loopback port, and its address."""
    server = PredictionServer(
        runtime,
        batching or BatchingSettings.cpu(num_workers=2),
        ServerSettings(**settings),
        reopen=reopen,
        metrics=metrics,
        tracing=tracing,
    )
    try:
        port = await server.start()
        yield server, f"127.0.0.1:{port}"
    finally:
        await server.stop()


@contextlib.asynccontextmanager
async def server_and_stub(
    runtime: Runtime | Sequence[Runtime], **options: Any
) -> AsyncIterator[tuple[PredictionServer, Any]]:
    """A running server, and a stub of the predictor over a channel of its own."""
    async with (
        running_server(runtime, **options) as (server, address),
        grpc.aio.insecure_channel(address) as channel,
    ):
        yield server, PredictorStub(channel)  # type: ignore[no-untyped-call]


async def until(condition: Callable[[], bool]) -> None:
    """Lets the loop run until `condition` holds; pytest's own limit is the only time-out needed."""
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0)
