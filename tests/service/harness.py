"""Real servers and clients in processes of their own, and an artifact that costs CPU."""

import contextlib
import json
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
from onnx import numpy_helper

from benchmarks.shared.processes import ROOT, Process, free_port, running
from predictors.artifact import open_artifact, write_manifest
from predictors.client import ClientSettings, PredictorError, SyncPredictor
from predictors.manifest import MODEL
from scheduler_core.prediction.predictor import PredictionRequest
from tests.predictors.fakes import write_artifact


def write_costly_artifact(folder: Path, *, layers: int = 24, width: int = 512) -> Path:
    """The tiny artifact with the same answers, which cost milliseconds of matrix products: the model is the bottleneck.

    Args:
        folder: Where to.
        layers, width: Each token is multiplied `layers` times by a matrix of `width` squared.
    """
    manifest = open_artifact(write_artifact(folder)).manifest
    model = onnx.load(folder / MODEL)
    rng = np.random.default_rng(0)
    weights = {
        "widen": rng.normal(size=(2, width)).astype(np.float32),
        "square": (rng.normal(size=(width, width)) / np.sqrt(width)).astype(np.float32),
        "nothing": np.zeros((width, 1), dtype=np.float32),
        "nothing_of": np.array([1, 2], dtype=np.int64),
    }
    [identity] = [node for node in model.graph.node if list(node.output) == ["mu"]]
    identity.output[0] = "cheap_mu"
    nodes = ["layer_0 = MatMul (embedded, widen)"]
    for layer in range(layers):
        nodes.append(f"product_{layer} = MatMul (layer_{layer}, square)")
        nodes.append(f"layer_{layer + 1} = Tanh (product_{layer})")
    nodes.append(f"column = MatMul (layer_{layers}, nothing)")
    nodes.append("zero = ReduceSum <keepdims = 0> (column, nothing_of)")
    nodes.append("mu = Add (cheap_mu, zero)")
    model.graph.node.extend(map(onnx.parser.parse_node, nodes))
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in weights.items())
    onnx.save(model, folder / MODEL)
    write_manifest(folder, manifest)
    return folder


@dataclass(frozen=True, slots=True)
class Served:
    """A running server, and its ports of gRPC and HTTP."""

    process: Process
    port: int
    http_port: int

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def queue_length(self) -> float:
        """Requests inside, as the server itself tells."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.http_port}/metrics", timeout=20) as response:
            lines = response.read().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("tailcast_queue_length{"))

    def answers(self) -> bool:
        return one_answer(self.address)


def one_answer(address: str) -> bool:
    """Whether a server answers one prompt within some seconds."""
    with SyncPredictor(address, ClientSettings(timeout_s=5.0, max_attempts=1)) as client:
        try:
            return bool(client.predict([PredictionRequest("", "sea", 1)]))
        except PredictorError:
            return False


@contextlib.contextmanager
def served(artifact: Path, *options: str) -> Iterator[Served]:
    """`serve-predictor` as a process of its own, answering."""
    port, http_port = free_port(), free_port()
    command = [sys.executable, "-m", "predictors.commands.serve_predictor", str(artifact), "--provider=cpu"]
    command += [f"--port={port}", f"--http_port={http_port}", *options]
    environment = {"PYTHONPATH": str(ROOT)}
    with running(command, lambda: one_answer(f"127.0.0.1:{port}"), environment=environment) as process:
        yield Served(process, port, http_port)


def start_load(url: str, *options: str) -> subprocess.Popen[bytes]:
    """The load generator in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.service.load_generator", url, *options]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)


def load(url: str, *options: str, meanwhile: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Runs the load generator to its end, `meanwhile` twice a second; its report."""
    process = start_load(url, *options)
    output = None
    while output is None:
        meanwhile()
        with contextlib.suppress(subprocess.TimeoutExpired):
            output, _ = process.communicate(timeout=0.5)
    assert process.returncode == 0
    report: dict[str, Any] = json.loads(output)
    return report
