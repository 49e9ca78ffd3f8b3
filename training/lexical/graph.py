"""Both ensembles as one ONNX graph: features, served model and temperature in, mu and sigma out."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from predictors.modules import Calibration
from scheduler_core.errors import InputError, MissingExtraError
from training.lexical.ensemble import tree_ensemble_attributes
from training.lexical.table import UNKNOWN_TEMPERATURE
from training.lexical.trees import LexicalTrees

SIGMA_FLOOR = 1e-6
_OPSET, _ML_OPSET, _IR_VERSION = 17, 3, 8


def build_graph(trees: LexicalTrees, num_features: int) -> Any:
    """The ONNX model.

    Inputs: features float32 [batch, num_features], served_model int64 [batch] (0 = unknown), temperature float32 [batch]
    (NaN = unknown). Outputs: mu, sigma float32 [batch], log tokens.

    Raises:
        MissingExtraError: onnx is not installed.
    """
    try:
        from onnx import TensorProto, checker, helper, numpy_helper
    except ImportError as error:
        raise MissingExtraError(error.name or "onnx", "export") from error
    nodes = _inputs(helper)
    identity = Calibration.identity(len(trees.effects.names))
    initializers = [
        *_tables(identity),
        numpy_helper.from_array(trees.effects.table.astype(np.float32), "effects"),
        numpy_helper.from_array(np.array(UNKNOWN_TEMPERATURE, dtype=np.float32), "unknown_temperature"),
        numpy_helper.from_array(np.array([1], dtype=np.int64), "axis"),
        numpy_helper.from_array(np.array([-1], dtype=np.int64), "flat"),
        numpy_helper.from_array(np.array(trees.log_scale, dtype=np.float32), "log_scale"),
        numpy_helper.from_array(np.array(SIGMA_FLOOR, dtype=np.float32), "sigma_floor"),
    ]
    for name, ensemble in (("tree_mu", trees.mu), ("tree_log_sigma", trees.log_sigma)):
        attributes = tree_ensemble_attributes(ensemble)
        nodes += [
            helper.make_node(
                "TreeEnsembleRegressor", ["inputs"], [f"{name}_column"], domain="ai.onnx.ml", **attributes
            ),
            helper.make_node("Reshape", [f"{name}_column", "flat"], [name]),
        ]
    nodes += [
        helper.make_node("Add", ["tree_log_sigma", "log_scale"], ["scaled_log_sigma"]),
        helper.make_node("Exp", ["scaled_log_sigma"], ["free_sigma"]),
        helper.make_node("Max", ["free_sigma", "sigma_floor"], ["tree_sigma"]),
        *_calibration(helper),
    ]
    floats, integers = TensorProto.FLOAT, TensorProto.INT64
    model = helper.make_model(
        helper.make_graph(
            nodes,
            "lexical",
            [
                helper.make_tensor_value_info("features", floats, ["batch", num_features]),
                helper.make_tensor_value_info("served_model", integers, ["batch"]),
                helper.make_tensor_value_info("temperature", floats, ["batch"]),
            ],
            [helper.make_tensor_value_info(name, floats, ["batch"]) for name in ("mu", "sigma")],
            initializers,
        ),
        opset_imports=[helper.make_opsetid("", _OPSET), helper.make_opsetid("ai.onnx.ml", _ML_OPSET)],
        ir_version=_IR_VERSION,
        producer_name="tailcast",
    )
    checker.check_model(model)
    return model


def with_calibration(model: bytes, calibration: Calibration) -> bytes:
    """The graph with another calibration; all else stays.

    Args:
        model: What `build_graph` gave, as bytes.
        calibration: For as many served models as the graph tells apart.

    Raises:
        InputError: The graph has no tables for it, or they are for another number of served models.
        MissingExtraError: onnx is not installed.
    """
    try:
        import onnx
    except ImportError as error:
        raise MissingExtraError(error.name or "onnx", "export") from error
    graph = onnx.load_from_string(model)
    held = {tensor.name: tensor for tensor in graph.graph.initializer}
    for table in _tables(calibration):
        if table.name not in held:
            raise InputError("model.onnx, tables", sorted(held), f"also {table.name}: train it again")
        if list(held[table.name].dims) != list(table.dims):
            raise InputError(f"model.onnx, {table.name}", list(table.dims), str(list(held[table.name].dims)))
        held[table.name].CopyFrom(table)
    return bytes(graph.SerializeToString())


def _tables(calibration: Calibration) -> list[Any]:
    """`Calibration` as initializers, by number of the served model."""
    from onnx import numpy_helper

    return [
        numpy_helper.from_array(np.array(getattr(calibration, name), dtype=np.float32), name)
        for name in ("mu_shift", "sigma_scale")
    ]


def _calibration(helper: Any) -> list[Any]:
    """mu = tree_mu + mu_shift[m] tree_sigma, sigma = tree_sigma sigma_scale[m], as `Calibration` has it."""
    return [
        helper.make_node("Gather", ["mu_shift", "served_model"], ["shift_of_rows"], axis=0),
        helper.make_node("Mul", ["shift_of_rows", "tree_sigma"], ["moved_by"]),
        helper.make_node("Add", ["tree_mu", "moved_by"], ["mu"]),
        helper.make_node("Gather", ["sigma_scale", "served_model"], ["scale_of_rows"], axis=0),
        helper.make_node("Mul", ["tree_sigma", "scale_of_rows"], ["sigma"]),
    ]


def _inputs(helper: Any) -> list[Any]:
    """Nodes that put features, the served model's effects and the temperature side by side."""
    return [
        helper.make_node("Gather", ["effects", "served_model"], ["effects_of_rows"], axis=0),
        helper.make_node("IsNaN", ["temperature"], ["is_unknown"]),
        helper.make_node(
            "Where", ["is_unknown", "unknown_temperature", "temperature"], ["known_temperature"]
        ),
        helper.make_node("Unsqueeze", ["known_temperature", "axis"], ["temperature_column"]),
        helper.make_node("Concat", ["features", "effects_of_rows", "temperature_column"], ["inputs"], axis=1),
    ]


def largest_difference(
    model: Any,
    trees: LexicalTrees,
    features: NDArray[np.float32],
    numbers: NDArray[np.intp],
    temperatures: NDArray[np.float32],
) -> dict[str, float]:
    """Largest absolute difference between the graph and scikit-learn, for mu and for ln sigma.

    Args:
        model: What `build_graph` gave.
        trees: What it was made of.
        features: [N, F].
        numbers: Of served models [N].
        temperatures: NaN = unknown [N].
    """
    import onnxruntime as ort

    options: Any = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    mu, sigma = session.run(
        ["mu", "sigma"],
        {"features": features, "served_model": numbers.astype(np.int64), "temperature": temperatures},
    )
    known = np.where(np.isnan(temperatures), np.float32(UNKNOWN_TEMPERATURE), temperatures)
    inputs = np.concatenate([features, trees.effects.table[numbers], known[:, None]], axis=1).astype(
        np.float32
    )
    true_mu = trees.mu.predict(inputs)
    true_log_sigma = np.maximum(trees.log_sigma.predict(inputs) + trees.log_scale, np.log(SIGMA_FLOOR))
    return {
        "mu": float(np.abs(mu - true_mu).max()),
        "log_sigma": float(np.abs(np.log(sigma.astype(np.float64)) - true_log_sigma).max()),
    }
