"""A logistic regression on tokens and pairs of neighboring tokens in the ONNX graph of an urgency predictor. It errs on other
texts than the encoder does; the graph returns the geometric mean of both."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
from numpy.typing import NDArray
from scipy import sparse
from sklearn.linear_model import LogisticRegression

from training.correcting.corrected_graph import add_nodes, rename_values

#: Tokens and pairs are hashed to so many rows of weights, a pair (a, b) to `(MULTIPLIER a + b) % BUCKETS`.
BUCKETS, MULTIPLIER = 65_536, 31_393
#: Probabilities of the encoder below this are raised to it: its levels can have the probability 0.
SMALLEST = 1e-6
#: Inverse strength of the L2 regularization.
INVERSE_STRENGTH = 1.0
#: Begins the names of the regression's values in the graph.
PREFIX = "pairs_"

_NODES = """
first = Slice (input_ids, zero, minus_one, one)
second = Slice (input_ids, one, end, one)
of_first = Mul (first, multiplier)
pair = Add (of_first, second)
pair_bucket = Mod (pair, buckets)
token_bucket = Mod (input_ids, buckets)
mask = Cast <to = 1> (attention_mask)
second_mask = Slice (mask, one, end, one)
mask_column = Unsqueeze (mask, minus_one)
second_column = Unsqueeze (second_mask, minus_one)
token_weights = Gather (weights, token_bucket)
pair_weights = Gather (weights, pair_bucket)
known_tokens = Mul (token_weights, mask_column)
known_pairs = Mul (pair_weights, second_column)
token_sum = ReduceSum <keepdims = 0> (known_tokens, one)
pair_sum = ReduceSum <keepdims = 0> (known_pairs, one)
num_tokens = ReduceSum (mask, one)
num_pairs = ReduceSum (second_mask, one)
sum = Add (token_sum, pair_sum)
number = Add (num_tokens, num_pairs)
root = Sqrt (number)
mean = Div (sum, root)
logits = Add (mean, bias)
log_regression = LogSoftmax <axis = 1> (logits)
positive = Max (base, smallest)
log_encoder = Log (positive)
log_product = Add (log_regression, log_encoder)
log_mean = Mul (log_product, half)
urgency = Softmax <axis = 1> (log_mean)
"""


def token_features(texts: Sequence[NDArray[np.int64]]) -> sparse.csr_matrix:
    """Counts of hashed tokens and pairs of each of N texts, divided by the root of their number [N, `BUCKETS`].

    Args:
        texts: Token numbers of each text.
    """
    buckets = []
    for text in texts:
        ids = np.asarray(text, dtype=np.int64)
        buckets.append(np.concatenate([ids % BUCKETS, (MULTIPLIER * ids[:-1] + ids[1:]) % BUCKETS]))
    rows = np.repeat(np.arange(len(texts)), [len(each) for each in buckets])
    counts = sparse.csr_matrix(
        (np.ones(len(rows)), (rows, np.concatenate(buckets))), shape=(len(texts), BUCKETS)
    )
    return sparse.csr_matrix(sparse.diags([len(each) ** -0.5 for each in buckets]) @ counts)


def fitted(
    texts: Sequence[NDArray[np.int64]], levels: Sequence[int], weights: Sequence[float]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Fits the regression, with features weighted by the inverse document frequency.

    Args:
        texts: Token numbers of each text.
        levels, weights: Level and weight in the loss of each text.

    Returns:
        Weights [`BUCKETS`, L] and bias [L] of L levels.
    """
    features = token_features(texts)
    num_texts = np.asarray((features > 0).sum(axis=0)).ravel()
    frequency = 1 + np.log((1 + len(texts)) / (1 + num_texts))
    regression = LogisticRegression(C=INVERSE_STRENGTH, max_iter=1_000)
    regression.fit(features @ sparse.diags(frequency), levels, sample_weight=weights)
    table = regression.coef_.T * frequency[:, None]
    return table.astype(np.float32), regression.intercept_.astype(np.float32)


def add_token_pairs(model: onnx.ModelProto, weights: NDArray[np.float32], bias: NDArray[np.float32]) -> None:
    """Inserts the regression into a graph with the output `urgency` [N, L], in place.

    Args:
        weights, bias: As of `fitted`.
    """
    tensors = {
        "zero": np.array([0]),
        "one": np.array([1]),
        "minus_one": np.array([-1]),
        "end": np.array([np.iinfo(np.int64).max]),
        "multiplier": np.array(MULTIPLIER),
        "buckets": np.array(BUCKETS),
        "smallest": np.array(SMALLEST, dtype=np.float32),
        "half": np.array(0.5, dtype=np.float32),
        "weights": weights,
        "bias": bias,
    }
    rename_values(model.graph, {"urgency": f"{PREFIX}base"})
    names_in_graph = {name: name for name in ("input_ids", "attention_mask", "urgency")}
    add_nodes(model.graph, _NODES, tensors, names_in_graph, PREFIX)
    onnx.checker.check_model(model)
