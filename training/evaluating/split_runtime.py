"""An artifact whose encoder runs once per prompt, and whose heads run once per served model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import ArrayLike, NDArray

from predictors.heads import Predicted
from predictors.runtime import CPU, ArtifactRuntime
from scheduler_core.shell.progress import tracked

#: Inputs of the heads; all other inputs are those of the encoder.
_CONDITIONS = ("served_model", "temperature")

Arrays = dict[str, NDArray[Any]]


class SplitRuntime:
    """Runs an artifact that is conditioned on the served model, with its encoder once per distinct prompt.

    Predictions are those of `ArtifactRuntime.predict`.
    """

    def __init__(self, runtime: ArtifactRuntime, threads: int = 1) -> None:
        self._runtime, self._threads = runtime, threads
        graph = load_graph(runtime).graph
        dependent: set[str] = set(_CONDITIONS)
        self._head_nodes = []
        for node in graph.node:
            # The shape of an input is independent of its values, and the encoder may read the batch size from it.
            is_shape = node.op_type == "Shape" and node.input[0] in _CONDITIONS
            if not is_shape and dependent.intersection(_inputs(node)):
                dependent.update(node.output)
                self._head_nodes.append(node)
        self._constants = {tensor.name: tensor for tensor in graph.initializer}
        self._used = dict.fromkeys(name for node in self._head_nodes for name in _inputs(node) if name)
        inner = [name for name in self._used if name not in dependent and name not in self._constants]
        inputs = {each.name for each in graph.input}
        self._inputs = [name for name in inner if name in inputs]  # of encoder and heads
        self._states = [name for name in inner if name not in inputs]  # from the encoder to the heads
        self._of_prompt = [each.name for each in graph.output if each.name not in dependent]
        self._of_row = [each for each in graph.output if each.name in dependent]
        self._encoder_outputs = [*dict.fromkeys([*self._states, *self._of_prompt])]
        encoder = load_graph(runtime)
        del encoder.graph.output[:]
        encoder.graph.output.extend(onnx.ValueInfoProto(name=name) for name in self._encoder_outputs)
        self._encoder = session_of(runtime, encoder, threads)
        self._heads: ort.InferenceSession | None = None

    def predict(
        self,
        prompts: Sequence[str],
        served_models: Sequence[str | None],
        temperatures: Sequence[float | None],
        *,
        batch_size: int = 8,
        progress: bool = True,
    ) -> Predicted:
        """Predicts N rows; arguments [N] are as in `ArtifactRuntime.predict`."""
        number: dict[str, int] = {}
        of_row = [number.setdefault(text, len(number)) for text in prompts]
        rows: list[list[int]] = [[] for _ in number]
        for row, prompt in enumerate(of_row):
            rows[prompt].append(row)
        tokenized = [each.ids for each in self._runtime.tokenizer(list(number))]
        order = sorted(range(len(rows)), key=lambda prompt: len(tokenized[prompt]))
        done: list[int] = []
        parts: list[Arrays] = []
        for start in tracked(range(0, len(order), batch_size), "predict", progress):
            batch = order[start : start + batch_size]
            states: Arrays | None = None
            # Encoder and heads have the same batch size: round k has the k-th row of each prompt, or else its last one.
            for k in range(max(len(rows[prompt]) for prompt in batch)):
                chosen = [rows[prompt][min(k, len(rows[prompt]) - 1)] for prompt in batch]
                feed = self._runtime.feed(
                    [tokenized[prompt] for prompt in batch],
                    [served_models[row] for row in chosen],
                    [temperatures[row] for row in chosen],
                )
                if states is None:
                    values = self._encoder.run(self._encoder_outputs, feed)
                    states = dict(zip(self._encoder_outputs, values, strict=True))
                outputs = self._run_heads(states, feed)
                new = [at for at, prompt in enumerate(batch) if k < len(rows[prompt])]
                done += [chosen[at] for at in new]
                parts.append({name: values[new] for name, values in outputs.items()})
        if not parts:
            return self._runtime.predict([], [], [])
        position = np.argsort(done)
        arrays = {
            name: np.concatenate([part[name] for part in parts])[position].astype(np.float64)
            for name in parts[0]
        }
        return Predicted.of(arrays, nu=self._runtime.artifact.manifest.nu)

    def predict_as(
        self,
        prompts: Sequence[str],
        names: Sequence[str],
        temperatures: ArrayLike = np.nan,
        *,
        progress: bool = False,
    ) -> dict[str, Predicted]:
        """Predicts P prompts for each of M named served models. `temperatures` are broadcast to [M, P]; NaN: unknown."""
        shape = (len(names), len(prompts))
        rows = self.predict(
            [*prompts] * len(names),
            np.repeat(np.array(names, dtype=object), len(prompts)).tolist(),
            np.broadcast_to(np.asarray(temperatures, dtype=np.float64), shape).ravel().tolist(),
            progress=progress,
        )
        arrays = {key: values.reshape(*shape, *values.shape[1:]) for key, values in rows.arrays().items()}
        return {
            name: Predicted(**{key: values[number] for key, values in arrays.items()})
            for number, name in enumerate(names)
        }

    def _run_heads(self, states: Arrays, feed: Arrays) -> Arrays:
        of_prompt = {name: states[name] for name in self._of_prompt}
        if not self._of_row:  # such as an artifact of urgency alone
            return of_prompt
        inputs = {name: states[name] for name in self._states}
        inputs |= {name: feed[name] for name in self._inputs}
        inputs |= {name: feed[name] for name in _CONDITIONS if name in self._used}
        if self._heads is None:
            self._heads = self._open_heads(inputs)
        names = [each.name for each in self._of_row]
        outputs = dict(zip(names, self._heads.run(names, inputs), strict=True))
        return outputs | of_prompt

    def _open_heads(self, inputs: Arrays) -> ort.InferenceSession:
        model = load_graph(self._runtime)
        model.graph.CopyFrom(
            onnx.helper.make_graph(
                self._head_nodes,
                "heads",
                [_value_info(name, value) for name, value in inputs.items()],
                self._of_row,
                [self._constants[name] for name in self._used if name in self._constants],
            )
        )
        return session_of(self._runtime, model, self._threads)


def load_graph(runtime: ArtifactRuntime) -> onnx.ModelProto:
    """The graph of an artifact, without weights in other files."""
    return onnx.load(runtime.artifact.graph, load_external_data=False)


def session_of(runtime: ArtifactRuntime, model: onnx.ModelProto, threads: int) -> ort.InferenceSession:
    """A session of a graph with the weights and the execution provider of an artifact."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    options.add_session_config_entry(
        "session.model_external_initializers_file_folder_path", str(runtime.artifact.graph.parent)
    )
    providers = [*dict.fromkeys([runtime.provider, CPU])]
    return ort.InferenceSession(model.SerializeToString(), options, providers=providers)


def _inputs(node: onnx.NodeProto) -> list[str]:
    """Names of all inputs of a node, including those of nested graphs."""
    inner = [graph for attribute in node.attribute for graph in (attribute.g, *attribute.graphs)]
    return [*node.input, *(name for graph in inner for each in graph.node for name in _inputs(each))]


def _value_info(name: str, value: NDArray[Any]) -> onnx.ValueInfoProto:
    kind = onnx.helper.np_dtype_to_tensor_dtype(value.dtype)
    return onnx.helper.make_tensor_value_info(name, kind, [None] * value.ndim)
