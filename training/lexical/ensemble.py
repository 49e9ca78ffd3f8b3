"""A scikit-learn HistGradientBoostingRegressor as one TreeEnsembleRegressor node of ONNX.

Written out here, because skl2onnx 1.20 fails on these models with onnx 1.23 (it passes booleans as integers) and rounds
no threshold down: trees compare float32 inputs with float64 thresholds, x <= t, and that is x <= the largest float32
that is at most t.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def tree_ensemble_attributes(model: Any) -> dict[str, Any]:
    """Attributes of the node (ai.onnx.ml, TreeEnsembleRegressor) that predicts what the model does.

    Args:
        model: Fitted, on numerical inputs, squared error (the raw prediction is the prediction).
    """
    trees = [stage[0].nodes for stage in model._predictors]
    sizes = [len(nodes) for nodes in trees]
    nodes = np.concatenate(trees)
    is_leaf = nodes["is_leaf"].astype(bool)
    tree_of = np.repeat(np.arange(len(trees)), sizes)
    number = np.concatenate([np.arange(size) for size in sizes])
    branch = np.where(is_leaf, 0, 1)
    return {
        "n_targets": 1,
        "aggregate_function": "SUM",
        "post_transform": "NONE",
        "base_values": [float(np.ravel(model._baseline_prediction)[0])],
        "nodes_treeids": tree_of.tolist(),
        "nodes_nodeids": number.tolist(),
        "nodes_featureids": (nodes["feature_idx"] * branch).tolist(),
        "nodes_modes": ["LEAF" if leaf else "BRANCH_LEQ" for leaf in is_leaf.tolist()],
        "nodes_values": np.where(is_leaf, 0.0, float32_floor(nodes["num_threshold"])).tolist(),
        "nodes_truenodeids": (nodes["left"] * branch).astype(np.int64).tolist(),
        "nodes_falsenodeids": (nodes["right"] * branch).astype(np.int64).tolist(),
        "nodes_missing_value_tracks_true": (nodes["missing_go_to_left"] * branch).astype(np.int64).tolist(),
        "target_treeids": tree_of[is_leaf].tolist(),
        "target_nodeids": number[is_leaf].tolist(),
        "target_ids": np.zeros(int(is_leaf.sum()), dtype=np.int64).tolist(),
        "target_weights": nodes["value"][is_leaf].tolist(),
    }


def float32_floor(values: NDArray[np.float64]) -> NDArray[np.float32]:
    """The largest float32 that is at most each value."""
    near = values.astype(np.float32)
    lower = np.nextafter(near, np.float32(-np.inf))
    return np.where(near.astype(np.float64) > values, lower, near)
