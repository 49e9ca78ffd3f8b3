"""Tiny artifacts whose numbers can be computed by hand, and a clock that is moved by hand."""

import contextlib
import dataclasses
import json
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import onnx
import onnx.parser
import pytest
from grpc_health.v1.health_pb2_grpc import HealthStub
from numpy.typing import NDArray
from onnx import numpy_helper
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from predictors.artifact import open_artifact, write_manifest
from predictors.heads import Predicted
from predictors.manifest import Conditions, EncoderCard, Manifest
from predictors.proto.open_inference_pb2_grpc import GRPCInferenceServiceStub
from predictors.proto.predictor_v1_pb2_grpc import PredictorStub
from predictors.runtime import open_runtime
from predictors.service.artifacts import Reopen
from predictors.service.batcher import BatchingSettings
from predictors.service.config import ServeConfig
from predictors.service.grpc_methods import SERVICE
from predictors.service.server import PredictionServer
from tests.scheduler_core.helpers import settle

WORDS = "name three rivers write a long essay about the sea nan crash last".split()  # noqa: SIM905
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
    graph = _graph(f"{MEAN}mu = Identity (first)", TOKENS, "float[batch] mu, float[batch] sigma")
    return _write(folder, graph, **fields)


def replace_artifact(folder: Path, name: str) -> None:
    """Moves the link `current` to a new version."""
    (folder / "next").symlink_to(write_artifact(folder / name, artifact_version=name))
    (folder / "next").replace(folder / "current")


def read_manifest(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    return content


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


ENCODER = EncoderCard(architecture="bag", source="fake", num_parameters=32, num_layers=None, width=2)
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
    outputs = ", ".join(OF_HEAD[head] for head in fields["heads"])
    return _write(folder, _graph(MEAN + ALL_HEADS, f"{TOKENS}, {CONDITIONS}", outputs), **fields)


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


def _write(folder: Path, model: onnx.ModelProto, **changes: Any) -> Path:
    """`artifact_version` among the changes is put before the version."""
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save(model, folder / "model.onnx")
    tokenizer = Tokenizer(models.WordLevel(VOCAB, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", VOCAB["[CLS]"]), ("[SEP]", VOCAB["[SEP]"])]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "normalization.json").write_text(json.dumps({"mu_mean": 0.0}), encoding="utf-8")
    fields: dict[str, Any] = {"artifact_id": "tiny", "created": "2026-01-02T03:04:05+00:00"}
    fields |= {"max_length": 16, "truncation_side": "right", "pad_token_id": VOCAB["[PAD]"]}
    fields |= {"encoder": ENCODER} | changes
    prefix = fields.pop("artifact_version", None)
    write_manifest(folder, Manifest.model_construct(**fields), version_prefix=prefix)
    return folder


# In ONNX's text format: the mean embedding, and its two columns.
MEAN = """
crashes = Equal (input_ids, crash)
rows = Where (crashes, outside, input_ids)
embedded = Gather (table, rows)
mask = Cast <to = 1> (attention_mask)
weights = Unsqueeze (mask, last)
weighted = Mul (embedded, weights)
total = ReduceSum <keepdims = 0> (weighted, one)
count = ReduceSum <keepdims = 0> (weights, one)
mean = Div (total, count)
first = Gather <axis = 1> (mean, first_column)
second = Gather <axis = 1> (mean, second_column)
sigma = Softplus (second)
"""
ALL_HEADS = """
number = Cast <to = 1> (served_model)
unknown = IsNaN (temperature)
filled = Where (unknown, zero, temperature)
mu = Sum (first, number, filled)
nu = Add (number, two)
three = Pad (mean, pads)
urgency = Softmax <axis = 1> (three)
bucket = Softmax <axis = 1> (mean)
regression_tokens = Exp (mu)
rank = Identity (mu)
"""
#: Their outputs.
OF_HEAD = {
    "length": "float[batch] mu, float[batch] sigma, float[batch] nu",
    "urgency": "float[batch, 3] urgency",
    "bucket": "float[batch, 2] bucket",
    "regression": "float[batch] regression_tokens",
    "rank": "float[batch] rank",
}
TOKENS = "int64[batch, seq] input_ids, int64[batch, seq] attention_mask"
CONDITIONS = "int64[batch] served_model, float[batch] temperature"
CONSTANTS: dict[str, Any] = {
    "table": embeddings(),
    "crash": np.array(VOCAB["crash"]),
    "outside": np.array(len(VOCAB)),
    "last": np.array([2]),
    "one": np.array([1]),
    "first_column": np.array(0),
    "second_column": np.array(1),
    "zero": np.float32(0),
    "two": np.float32(2),
    "pads": np.array([0, 0, 0, 1]),  # one column of zeros on the right
}


def _graph(nodes: str, inputs: str, outputs: str) -> onnx.ModelProto:
    text = f'<ir_version: 9, opset_import: ["" : 18]> tiny ({inputs}) => ({outputs}) {{{nodes}}}'
    model = onnx.parser.parse_model(text)
    used = {name for node in model.graph.node for name in node.input}
    tensors = {name: numpy_helper.from_array(np.asarray(value), name) for name, value in CONSTANTS.items()}
    model.graph.initializer.extend(tensor for name, tensor in tensors.items() if name in used)
    return model


@dataclasses.dataclass(eq=False)
class ManualTimer:
    """A call at a second of a `ManualClock`."""

    when: float
    callback: Callable[[], None]
    timers: list["ManualTimer"]

    def cancel(self) -> None:
        if self in self.timers:
            self.timers.remove(self)


class ManualClock:
    """Stands still until `advance`."""

    def __init__(self) -> None:
        self._now = 0.0
        self.timers: list[ManualTimer] = []  # that have neither been called nor cancelled

    def now(self) -> float:
        return self._now

    def call_at(self, when: float, callback: Callable[[], None]) -> ManualTimer:
        self.timers.append(ManualTimer(when, callback, self.timers))
        return self.timers[-1]

    async def advance(self, seconds: float) -> None:
        """Moves time on, makes the calls that are due, and lets the loop settle."""
        until = self._now + seconds
        while due := [timer for timer in self.timers if timer.when <= until]:
            timer = min(due, key=lambda timer: timer.when)
            self.timers.remove(timer)
            self._now = max(self._now, timer.when)
            timer.callback()
        self._now = until
        await settle()


class GatedRuntime:
    """The real runtime behind a gate: batches wait until it is opened; the first `num_failures` batches fail."""

    def __init__(self, folder: Path, *, is_open: bool = True, num_failures: int = 0) -> None:
        self._runtime = open_runtime(folder, provider="cpu")
        self.artifact = self._runtime.artifact
        self.tokenizer = self._runtime.tokenizer
        self.provider = self._runtime.provider
        self.prediction = self._runtime.prediction
        self.gate = threading.Event()
        if is_open:
            self.gate.set()
        self.num_failures = num_failures
        self.batches: list[int] = []

    def warm_up(self) -> None:
        self._runtime.warm_up()

    def run(self, prompts: Sequence[NDArray[Any]], *conditions: Any) -> Predicted:
        if not self.gate.wait(timeout=30):
            raise TimeoutError("the test never opened the gate")
        self.batches.append(len(prompts))
        if self.num_failures:
            self.num_failures -= 1
            raise RuntimeError("injected failure")
        return self._runtime.run(prompts, *conditions)


def serve_config(**options: Any) -> ServeConfig:
    """Options of a server that takes a free port; its artifacts are loaded elsewhere."""
    fields: dict[str, Any] = {"artifact": "loaded elsewhere", "port": 0} | options
    return ServeConfig(**fields)


@contextlib.asynccontextmanager
async def running_server(
    runtime: Any,
    *,
    batching: BatchingSettings | None = None,
    reopen: Reopen | None = None,
    joined: Mapping[str, Sequence[str]] | None = None,
    num_listeners: int = 4,
    **options: Any,
) -> AsyncIterator[tuple[PredictionServer, str]]:
    """A server on a free loopback port, and its address; `options` are fields of ServeConfig."""
    runtimes = runtime if isinstance(runtime, Sequence) else [runtime]
    batching, config = batching or BatchingSettings.cpu(num_workers=2), serve_config(**options)
    server = PredictionServer(
        runtimes, batching, config, reopen=reopen, joined=joined, num_listeners=num_listeners
    )
    try:
        port = await server.start()
        yield server, f"127.0.0.1:{port}"
    finally:
        await server.stop()


@contextlib.asynccontextmanager
async def server_and_stub(runtime: Any, **options: Any) -> AsyncIterator[tuple[PredictionServer, Any]]:
    """A running server, and a stub of all its services over a channel of its own."""
    async with (
        running_server(runtime, **options) as (server, address),
        grpc.aio.insecure_channel(address) as channel,
    ):
        yield server, Stub(channel)


class Stub(PredictorStub, GRPCInferenceServiceStub, HealthStub):  # type: ignore[misc]
    """The methods of the predictor, of the Open Inference Protocol and of health."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        for kind in Stub.__bases__:
            kind.__init__(self, channel)
        self.channel = channel

    def call(self, method: str, data: bytes) -> Any:
        """A call of one of the predictor's methods with these bytes."""
        return self.channel.unary_unary(f"/{SERVICE}/{method}")(data)  # type: ignore[call-arg]


async def failure(call: Any) -> grpc.aio.AioRpcError:
    """The error that a call ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


async def status(call: Any) -> tuple[grpc.StatusCode, str]:
    """Code and message of the error that a call ends with."""
    error = await failure(call)
    return error.code(), error.details() or ""
