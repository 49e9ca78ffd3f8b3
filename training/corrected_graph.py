"""Corrections of predicted length distributions, inserted into the ONNX graph of an artifact."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx.parser
from numpy.typing import NDArray
from onnx import numpy_helper

from predictors.manifest import Conditions, Manifest
from training.corrections import Correction

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
