"""The regression on tokens and pairs of tokens in the graph of an urgency predictor."""

from __future__ import annotations

import numpy as np
import onnx.parser
import onnxruntime
from scipy.special import softmax

from examples.pretrained import token_pairs

#: A graph that returns the same probabilities for each text, the last one 0.
GRAPH = """
<ir_version: 9, opset_import: ["" : 20]>
urgency (int64[batch, seq] input_ids, int64[batch, seq] attention_mask) => (float[batch, 5] urgency)
<float[1, 5] constant = {0.4, 0.3, 0.2, 0.1, 0.0}>
{
  shape = Shape <start = 0, end = 1> (input_ids)
  one = Constant <value = int64[1] {1}> ()
  both = Concat <axis = 0> (shape, one)
  urgency = Expand (constant, both)
}
"""
TEXTS = [np.array(text) for text in ([2, 7, 8, 3], [2, 8, 7, 3], [2, 9, 3], [2, 70_000, 7, 8, 8, 8, 3])]


def test_the_graph_returns_the_geometric_mean_with_the_regression() -> None:
    weights, bias = token_pairs.fitted(TEXTS * 5, [0, 1, 2, 4] * 5, [1.0, 1.0, 2.0, 1.0] * 5)
    rng = np.random.default_rng(0)
    weights, bias = np.c_[weights, weights[:, :1]], rng.normal(size=5).astype(np.float32)
    model = onnx.parser.parse_model(GRAPH)
    token_pairs.add_token_pairs(model, weights, bias)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    length = max(map(len, TEXTS)) + 2  # padding counts for nothing
    ids, mask = np.full((len(TEXTS), length), 5), np.zeros((len(TEXTS), length), dtype=np.int64)
    for row, text in enumerate(TEXTS):
        ids[row, : len(text)], mask[row, : len(text)] = text, 1
    [urgency] = session.run(["urgency"], {"input_ids": ids, "attention_mask": mask})

    regression = softmax(token_pairs.token_features(TEXTS) @ weights + bias, axis=1)
    encoder = np.maximum([[0.4, 0.3, 0.2, 0.1, 0.0]], token_pairs.SMALLEST)
    expected = np.sqrt(regression * encoder)
    np.testing.assert_allclose(urgency, expected / expected.sum(axis=1, keepdims=True), rtol=1e-4)
    assert (urgency > 0).all()


def test_pairs_tell_the_order_of_tokens() -> None:
    weights, bias = token_pairs.fitted(TEXTS * 5, [0, 1, 2, 4] * 5, [1.0] * 20)
    assert weights.shape == (token_pairs.BUCKETS, 4)
    predicted = (token_pairs.token_features(TEXTS) @ weights + bias).argmax(axis=1)
    assert predicted.tolist() == [0, 1, 2, 3]
