"""Insertion of corrections into the ONNX graph of an artifact, so that users of the bare file get corrected lengths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import onnx
import onnx.parser
from numpy.typing import NDArray
from onnx import numpy_helper

from predictors.manifest import Conditions, Manifest
from scheduler_core.prediction.linear_correction import CENTERS, MAX_FEATURE, Coefficients
from training.correcting.encoder_shift import EncoderShift


@dataclass(frozen=True, slots=True)
class Adaptation:
    """The correction of one served model: of the predictions for `base` (empty: the unknown model), first by the shift."""

    base: str
    coefficients: Coefficients
    shift: EncoderShift | None = None

    def to_json(self) -> dict[str, Any]:
        """JSON content, without the weights of the shift."""
        return {"base": self.base, **asdict(self.coefficients), "uses_features": self.shift is not None}


#: The formulas of `scheduler_core.prediction.linear_correction`; bit-identical for served models with zero coefficients.
_NODES = """
mask = Cast <to = 1> (attention_mask)
num_tokens = ReduceSum <keepdims = 0> (mask, last_axis)
log_tokens = Log (num_tokens)
log_sigma = Log (base_sigma)
mu_column = Unsqueeze (moved_mu, last_axis)
sigma_column = Unsqueeze (log_sigma, last_axis)
tokens_column = Unsqueeze (log_tokens, last_axis)
columns = Concat <axis = 1> (mu_column, sigma_column, tokens_column)
centered = Sub (columns, centers)
features = Clip (centered, low, high)
location = Gather (locations, served_model)
by_location = Mul (location, features)
slope = ReduceSum <keepdims = 0> (by_location, last_axis)
shift = Gather (shifts, served_model)
change = Add (shift, slope)
plain_mu = Add (moved_mu, change)
mu = Clip (plain_mu, lowest_mu, highest_mu)
log_scale = Gather (log_scales, served_model)
by_log_scale = Mul (log_scale, features)
log_slope = ReduceSum <keepdims = 0> (by_log_scale, last_axis)
log_factor = Gather (log_factors, served_model)
log_change = Add (log_factor, log_slope)
factor = Exp (log_change)
plain_sigma = Mul (base_sigma, factor)
sigma = Clip (plain_sigma, lowest_sigma, highest_sigma)
"""
_WITHOUT_FEATURES = "moved_mu = Identity (base_mu)"
_WITH_FEATURES = """
row_weights = Gather (weights, served_model)
weighted = Mul (row_weights, encoder_features)
by_features = ReduceSum <keepdims = 0> (weighted, last_axis)
constant = Gather (constants, served_model)
moved_mu = Sum (base_mu, constant, by_features)
"""
#: Appended for artifacts with quantiles, which move with mu and sigma.
_QUANTILES = """
ratio = Div (sigma, base_sigma)
scaled_mu = Mul (ratio, base_mu)
offset = Sub (mu, scaled_mu)
factors = Unsqueeze (ratio, last_axis)
offsets = Unsqueeze (offset, last_axis)
scaled = Mul (factors, base_quantiles)
quantiles = Add (scaled, offsets)
"""


def with_corrections(
    model: onnx.ModelProto,
    manifest: Manifest,
    adaptations: Mapping[str, Adaptation],
    features: str | None,
) -> Manifest:
    """Inserts corrections into a graph, in place; predictions for all other served models stay bit-identical.

    Args:
        model, manifest: Graph and manifest of an artifact with a length head.
        adaptations: Served model -> correction; may include new served models.
        features: Name of the tensor that the weights of the shifts apply to.

    Returns:
        The manifest of the new graph; `files` and `artifact_version` are not updated yet.
    """
    old = manifest.conditioning
    names = tuple(dict.fromkeys((*manifest.served_models, *adaptations)))
    accepts_unknown = manifest.accepts_unknown_models or (old is None and len(names) > 1)
    rows = ["", *names]
    # A graph without served models has number 0 for every model.
    number_of = {
        name: 0 if old is None else number for number, name in enumerate(("", *manifest.served_models))
    }
    table = [adaptations.get(name, Adaptation(name, Coefficients())) for name in rows]
    base_rows = [number_of[each.base] for each in table]
    graph = model.graph
    prefix = f"corrected_{sum(node.name.startswith('corrected_') for node in graph.node)}_"
    if old is None:
        shape = onnx.helper.make_tensor_value_info("served_model", onnx.TensorProto.INT64, ["batch"])
        graph.input.insert(2, shape)
    else:
        rename_values(graph, {"served_model": f"{prefix}base_model"}, inputs_only=True)
        lookup = onnx.helper.make_node(
            "Gather", [f"{prefix}base_rows", "served_model"], [f"{prefix}base_model"], f"{prefix}base_model"
        )
        graph.node.insert(0, lookup)
        graph.initializer.append(
            numpy_helper.from_array(np.array(base_rows, dtype=np.int64), f"{prefix}base_rows")
        )
    outputs = ("mu", "sigma", *(["quantiles"] if manifest.quantile_levels else []))
    rename_values(graph, {name: f"{prefix}base_{name}" for name in outputs})
    location, log_scale = (
        np.array([getattr(each.coefficients, name) for each in table], dtype=np.float32)
        for name in ("location", "log_scale")
    )
    tensors: dict[str, NDArray[Any]] = {
        "last_axis": np.array([1], dtype=np.int64),
        "centers": np.array(CENTERS, dtype=np.float32),
        "low": np.array(-MAX_FEATURE, dtype=np.float32),
        "high": np.array(MAX_FEATURE, dtype=np.float32),
        "lowest_mu": np.array(-50.0, dtype=np.float32),
        "highest_mu": np.array(50.0, dtype=np.float32),
        "lowest_sigma": np.array(np.exp(-20.0), dtype=np.float32),
        "highest_sigma": np.array(np.exp(3.9), dtype=np.float32),
        "shifts": location[:, 0],
        "locations": location[:, 1:],
        "log_factors": log_scale[:, 0],
        "log_scales": log_scale[:, 1:],
    }
    first = _WITHOUT_FEATURES
    if shifts := [each.shift for each in table if each.shift is not None]:
        first = _WITH_FEATURES
        no_shift = EncoderShift(0.0, np.zeros_like(shifts[0].weights))
        tensors["constants"] = np.array(
            [(each.shift or no_shift).constant for each in table], dtype=np.float32
        )
        tensors["weights"] = np.array([(each.shift or no_shift).weights for each in table], dtype=np.float32)
    nodes = first + _NODES + (_QUANTILES if manifest.quantile_levels else "")
    names_in_graph = {name: name for name in ("attention_mask", "served_model", *outputs)}
    names_in_graph["encoder_features"] = features or ""
    add_nodes(graph, nodes, tensors, names_in_graph, prefix)
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


def add_nodes(
    graph: onnx.GraphProto,
    nodes: str,
    tensors: Mapping[str, NDArray[Any]],
    names_in_graph: Mapping[str, str],
    prefix: str,
) -> None:
    """Appends nodes to a graph, in place.

    Args:
        nodes: Nodes in the text format of ONNX, one a line.
        tensors: Values of their constants.
        names_in_graph: Name in `nodes` -> value that the graph has, or output of the graph.
        prefix: Begins all other names, and the names of the nodes.
    """
    graph.initializer.extend(
        numpy_helper.from_array(np.ascontiguousarray(values), prefix + name)
        for name, values in tensors.items()
    )
    added = onnx.parser.parse_graph(f"added () => () {{{nodes}}}").node
    for node in added:
        node.input[:] = [names_in_graph.get(name, prefix + name) for name in node.input]
        node.output[:] = [names_in_graph.get(name, prefix + name) for name in node.output]
        node.name = prefix + node.output[0]
    graph.node.extend(added)


def rename_values(graph: onnx.GraphProto, names: Mapping[str, str], *, inputs_only: bool = False) -> None:
    """Renames values in all nodes, including nested graphs; inputs and outputs of the graph keep their names."""
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        if not inputs_only:
            node.output[:] = [names.get(name, name) for name in node.output]
        for attribute in node.attribute:
            for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                rename_values(inner, names, inputs_only=inputs_only)
