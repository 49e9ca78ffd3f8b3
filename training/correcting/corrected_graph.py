"""ONNX graphs of artifacts: insertion of corrections, and access to the encoder features that the heads use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import numpy_helper

from predictors.manifest import Conditions, Manifest
from predictors.runtime import ArtifactRuntime
from training.correcting.corrections import Correction, Requests
from training.evaluating.split_runtime import Arrays, load_graph, session_of
from training.progress import tracked

#: Operators that multiply by weights, or quantize the input of an int8 product.
_PRODUCTS = frozenset(
    {"Gemm", "MatMul", "FusedGemm", "FusedMatMul", "DynamicQuantizeLinear", "DynamicQuantizeMatMul"}
)
_BATCH = 8


class FeatureRuntime:
    """Runs an artifact and also returns the input features of its heads.

    Attributes:
        tensor: Name of the features in the graph; None: no tensor of shape [batch, F] was found.
    """

    def __init__(self, runtime: ArtifactRuntime, threads: int) -> None:
        self._runtime, self._threads = runtime, threads
        self.tensor = self._features()
        self._session = self._open([] if self.tensor is None else [self.tensor])

    def predict(
        self, requests: Requests, served_models: NDArray[np.object_], *, progress: bool = True
    ) -> Requests:
        """Adds predictions and features to the requests, predicted for the given served models [N]."""
        manifest = self._runtime.artifact.manifest
        names = ["mu", "sigma"]
        names += ["nu"] if manifest.nu is None else []
        names += ["quantiles"] if manifest.quantile_levels else []
        names += [] if self.tensor is None else [self.tensor]
        tokenized = self._runtime.tokenizer(list(requests.prompts))
        num_tokens = np.array([each.num_tokens for each in tokenized], dtype=np.float64)
        order = np.argsort(num_tokens, kind="stable")
        parts = []
        for start in tracked(range(0, len(order), _BATCH), "predict", progress):
            rows = order[start : start + _BATCH]
            feed = self._runtime.feed(
                [tokenized[row].ids for row in rows],
                list(served_models[rows]),
                list(requests.temperatures[rows]),
            )
            parts.append(self._session.run(names, feed))
        position = np.argsort(order)
        outputs = {
            "features" if name == self.tensor else name: np.concatenate(values)[position].astype(np.float64)
            for name, values in zip(names, zip(*parts, strict=True), strict=True)
        }
        nothing = np.zeros((len(requests), 0))
        columns: Arrays = {"features": nothing, "quantiles": nothing, "num_tokens": num_tokens}
        columns["nu"] = np.full(len(requests), manifest.nu or 0.0)
        return replace(requests, **columns | outputs)

    def _features(self) -> str | None:
        """Name of the first tensor of shape [batch, F] that depends on the prompt and is multiplied by weights."""
        graph = load_graph(self._runtime).graph
        outer = {each.name for each in (*graph.input, *graph.initializer, *graph.output)}
        names = [node.input[0] for node in graph.node if node.op_type in _PRODUCTS]
        names = [name for name in dict.fromkeys(names) if name not in outer]
        if not names:
            return None
        model: list[str | None] = [*self._runtime.artifact.manifest.served_models, None][:1]
        prompts = [np.array([token, token, 1]) for token in (2, 3, 5)]
        feed = self._runtime.feed(prompts, model * 3)
        for name, value in zip(names, self._open(names).run(names, feed), strict=True):
            is_table = value.ndim == 2 and len(value) == len(prompts) and value.dtype == np.float32
            if is_table and np.ptp(value, axis=0).any():
                return str(name)
        return None

    def _open(self, tensors: list[str]) -> ort.InferenceSession:
        """A session of the whole graph that can also return these inner tensors."""
        model = load_graph(self._runtime)
        model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in tensors)
        return session_of(self._runtime, model, self._threads)


_NODES = """
mask = Cast <to = 1> (attention_mask)
num_tokens = ReduceSum <keepdims = 0> (mask, last_axis)
log_tokens = Log (num_tokens)
shift = Gather (shifts, served_model)
mu_slope = Gather (mu_slopes, served_model)
sigma_slope = Gather (sigma_slopes, served_model)
tokens_slope = Gather (tokens_slopes, served_model)
scale = Gather (scales, served_model)
by_mu = Mul (mu_slope, base_mu)
by_sigma = Mul (sigma_slope, base_sigma)
by_tokens = Mul (tokens_slope, log_tokens)
change = Sum (shift, by_mu, by_sigma, by_tokens)
power = Gather (powers, served_model)
to_power = Pow (base_sigma, power)
sigma = Mul (scale, to_power)
"""
#: Appended for artifacts with quantiles; bit-identical for served models without a correction.
_QUANTILES = """
factor = Div (sigma, base_sigma)
scaled_mu = Mul (factor, base_mu)
offset = Sub (mu, scaled_mu)
factors = Unsqueeze (factor, last_axis)
offsets = Unsqueeze (offset, last_axis)
scaled = Mul (factors, base_quantiles)
quantiles = Add (scaled, offsets)
"""
_WITHOUT_FEATURES = "mu = Add (base_mu, change)"
_WITH_FEATURES = """
row_weights = Gather (weights, served_model)
weighted = Mul (row_weights, features)
by_features = ReduceSum <keepdims = 0> (weighted, last_axis)
mu = Sum (base_mu, change, by_features)
"""


def with_corrections(
    model: onnx.ModelProto, manifest: Manifest, corrections: Mapping[str, Correction], features: str | None
) -> Manifest:
    """Inserts corrections into a graph, in place; predictions for all other served models stay bit-identical.

    Args:
        model, manifest: Graph and manifest of an artifact with a length head.
        corrections: Served model -> correction; may include new served models.
        features: Name of the tensor that the corrections' weights apply to.

    Returns:
        The manifest of the new graph; `files` and `artifact_version` are not updated yet.
    """
    old = manifest.conditioning
    names = tuple(dict.fromkeys((*manifest.served_models, *corrections)))
    accepts_unknown = manifest.accepts_unknown_models or (old is None and len(names) > 1)
    rows = ["", *names]
    # A graph without served models has number 0 for every model.
    base = {name: 0 if old is None else number for number, name in enumerate(("", *manifest.served_models))}
    table = [corrections.get(name, Correction(name)) for name in rows]
    base_rows = [base[each.base] for each in table]
    graph = model.graph
    prefix = f"corrected_{sum(node.name.startswith('corrected_') for node in graph.node)}_"
    if old is None:
        shape = onnx.helper.make_tensor_value_info("served_model", onnx.TensorProto.INT64, ["batch"])
        graph.input.insert(2, shape)
    else:
        _rename(graph, {"served_model": f"{prefix}base_model"}, inputs_only=True)
        lookup = onnx.helper.make_node(
            "Gather", [f"{prefix}base_rows", "served_model"], [f"{prefix}base_model"], f"{prefix}base_model"
        )
        graph.node.insert(0, lookup)
        graph.initializer.append(
            numpy_helper.from_array(np.array(base_rows, dtype=np.int64), f"{prefix}base_rows")
        )
    outputs = ("mu", "sigma", *(["quantiles"] if manifest.quantile_levels else []))
    _rename(graph, {name: f"{prefix}base_{name}" for name in outputs})
    terms = np.array([each.terms for each in table], dtype=np.float32)
    tensors: dict[str, NDArray[Any]] = {
        "last_axis": np.array([1], dtype=np.int64),
        "shifts": terms[:, 0],
        "mu_slopes": terms[:, 1],
        "sigma_slopes": terms[:, 2],
        "tokens_slopes": terms[:, 3],
        "powers": np.array([each.power for each in table], dtype=np.float32),
        "scales": np.array([each.scale for each in table], dtype=np.float32),
    }
    nodes = _NODES + _WITHOUT_FEATURES
    if width := max(len(each.weights) for each in table):
        nodes = _NODES + _WITH_FEATURES
        rows_of_weights = [each.weights if len(each.weights) else np.zeros(width) for each in table]
        tensors["weights"] = np.array(rows_of_weights, dtype=np.float32)
    nodes += _QUANTILES if manifest.quantile_levels else ""
    graph.initializer.extend(
        numpy_helper.from_array(np.ascontiguousarray(values), prefix + name)
        for name, values in tensors.items()
    )
    names_in_graph = {name: name for name in ("attention_mask", "served_model", *outputs)}
    names_in_graph |= {"features": features or ""}
    added = onnx.parser.parse_graph(f"corrections () => () {{{nodes}}}").node
    for node in added:
        node.input[:] = [names_in_graph.get(name, prefix + name) for name in node.input]
        node.output[:] = [names_in_graph.get(name, prefix + name) for name in node.output]
        node.name = prefix + node.output[0]
    graph.node.extend(added)
    onnx.checker.check_model(model)
    has_temperature = old is not None and old.temperature
    calibration = {
        name: tuple(values[number] for number in base_rows) for name, values in manifest.calibration.items()
    }
    changes = {
        "served_models": names,
        "conditioning": Conditions(unknown_models=accepts_unknown, temperature=has_temperature),
        "calibration": calibration,
    }
    return manifest.model_copy(update=changes)


def _rename(graph: onnx.GraphProto, names: Mapping[str, str], *, inputs_only: bool = False) -> None:
    """Renames values in all nodes, including nested graphs; inputs and outputs of the graph keep their names."""
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        if not inputs_only:
            node.output[:] = [names.get(name, name) for name in node.output]
        for attribute in node.attribute:
            for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                _rename(inner, names, inputs_only=inputs_only)
