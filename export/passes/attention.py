"""Attention of a graph, verified on numbers, as one operator.

What the exporters write as a dozen nodes per layer (projections split into heads, scores, mask, softmax, context, heads
joined) becomes one `MultiHeadAttention` of ONNX Runtime, which needs no copies between them. Relative positions as DeBERTa
has them are added by `disentangled`.

A softmax is taken for attention if its surroundings can be read as softmax(scale q k^T + positions + mask) v; whether
that reading is right is then checked by calculating it in numpy on a random batch and comparing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto

from export.passes.disentangled import PositionTerm, RelativeBias, Scale, position_tables, product_of
from export.passes.graph import MICROSOFT, GraphView, probe, random_feed

Array = NDArray[Any]
LAYOUT = ("Reshape", "Transpose", "Identity", "Squeeze", "Unsqueeze", "Flatten")
#: What is added to a score to forbid it: no probability is left, and half precision can hold it.
BLOCKED = -1e4
#: Differences of probabilities and of context (relative) that still count as equal.
TOLERANCE = 1e-4


@dataclass(slots=True)
class Reading:
    """How the surroundings of one softmax read.

    Attributes:
        softmax: The node.
        query, key, value: Projections [B, S, H D] that the heads are cut from.
        context: The tensor [B, S, H D] that joins the heads.
        scales: Factors on query times key.
        positions: Terms of relative positions.
        mask: Tensor that is added or, with `keep`, chosen by.
        keep: The mask is boolean: True = keep.
    """

    softmax: NodeProto
    query: str = ""
    key: str = ""
    value: str = ""
    context: str = ""
    scales: list[Scale] = field(default_factory=list)
    positions: list[PositionTerm] = field(default_factory=list)
    mask: str = ""
    keep: bool = False

    def tensors(self) -> list[str]:
        """All that has to be looked at to prove the reading."""
        names = [self.query, self.key, self.value, self.context, self.mask, self.softmax.output[0]]
        names += [scale.name for scale in self.scales]
        names += [scale.name for term in self.positions for scale in term.scales]
        return [name for name in names if name]


def fuse_attention(model: onnx.ModelProto, *, max_length: int, vocabulary: int) -> int:
    """Puts every attention that can be proved into one operator.

    Args:
        model: A simplified graph; it is changed.
        max_length: Most tokens the graph reads.
        vocabulary: Number of token ids.

    Returns:
        Number of attention layers that were rewritten; 0 leaves the graph as it was.
    """
    graph = GraphView(model)
    softmaxes = [node for node in graph.nodes if node.op_type == "Softmax"]
    readings = [reading for node in softmaxes if (reading := read_attention(graph, node)) is not None]
    if not readings:
        return 0
    rng = np.random.default_rng(0)
    feed = random_feed(model, 2, min(7, max_length), rng, vocabulary)
    values = probe(model, [name for reading in readings for name in reading.tensors()], feed)
    terms = [term for reading in readings for term in reading.positions]
    tables = position_tables(model, terms, max_length, rng, vocabulary) if terms else {}
    done = 0
    key_mask = ""
    relative = RelativeBias(graph, max_length)
    for reading in readings:
        try:
            proof = _prove(reading, values, feed["attention_mask"].astype(bool), tables, max_length)
        except ValueError:
            proof = None
        if proof is not None:
            key_mask = key_mask or graph.add("Cast", ["attention_mask"], to=TensorProto.INT32)
            _rewrite(graph, reading, proof, key_mask, relative)
            done += 1
    if done:
        graph.finish()
    return done


def read_attention(graph: GraphView, softmax: NodeProto) -> Reading | None:
    """What the surroundings of a softmax say; None if they cannot be attention."""
    reading = Reading(softmax)
    if not _read_scores(graph, softmax.input[0], reading, [], swapped=False) or not reading.query:
        return None
    name = softmax.output[0]
    while True:
        node = _only_reader(graph, name, ("Shape", "IsNaN"))
        if node is None:
            return None
        if node.op_type == "MatMul" and node.input[0] == name:
            break
        if node.op_type not in (*LAYOUT, "Where"):
            return None
        name = node.output[0]
    reading.value, scales = _walk_back(graph, node.input[1])
    if scales:
        return None
    name = node.output[0]
    while (reader := _only_reader(graph, name, ("Shape",))) is not None and reader.op_type in LAYOUT:
        name = reader.output[0]
    reading.context = name
    return reading


def _read_scores(
    graph: GraphView, name: str, reading: Reading, scales: Sequence[Scale], *, swapped: bool
) -> bool:
    """Reads the sum in front of a softmax, term by term."""
    node = graph.producer(name)
    if node is None:
        return False
    if node.op_type == "Add":
        return all(_read_scores(graph, part, reading, scales, swapped=swapped) for part in node.input)
    if node.op_type == "Where" and not reading.mask and _makes_products(graph, node.input[1]):
        reading.mask, reading.keep = node.input[0], True
        return _read_scores(graph, node.input[1], reading, scales, swapped=swapped)
    if node.op_type in ("Mul", "Div") and _makes_products(graph, node.input[0]):
        scale = Scale(node.input[1], node.op_type == "Div")
        return _read_scores(graph, node.input[0], reading, [*scales, scale], swapped=swapped)
    if node.op_type in ("Reshape", "Identity"):
        return _read_scores(graph, node.input[0], reading, scales, swapped=swapped)
    if node.op_type == "Transpose" and _makes_products(graph, node.input[0]):
        return _read_scores(graph, node.input[0], reading, scales, swapped=not swapped)
    if node.op_type == "MatMul" and not reading.query and not swapped:
        reading.query, more = _walk_back(graph, node.input[0])
        reading.key, most = _walk_back(graph, node.input[1])
        reading.scales = [*scales, *more, *most]
        return True
    if node.op_type == "GatherElements":
        product = graph.producer(node.input[0])
        if product is None or product.op_type != "MatMul":
            return False
        source, more = _walk_back(graph, product.input[0])
        reading.positions.append(
            PositionTerm(source, product.input[1], node.input[1], (*scales, *more), by_key=swapped)
        )
        return True
    if not reading.mask and not swapped and not scales:
        reading.mask = name
        return True
    return False


def _makes_products(graph: GraphView, name: str) -> bool:
    """Whether a tensor is made from a product of two computed matrices, by sums, factors and new layouts alone."""
    node = graph.producer(name)
    if node is None:
        return False
    if node.op_type in ("MatMul", "GatherElements"):
        return not (graph.is_constant(node.input[0]) or graph.is_constant(node.input[1]))
    if node.op_type == "Add":
        return any(_makes_products(graph, part) for part in node.input)
    if node.op_type in (*LAYOUT, "Mul", "Div"):
        return _makes_products(graph, node.input[0])
    if node.op_type == "Where":
        return _makes_products(graph, node.input[1])
    return False


def _walk_back(graph: GraphView, name: str) -> tuple[str, list[Scale]]:
    """Where a tensor comes from before new layouts and factors; the factors."""
    scales: list[Scale] = []
    while (node := graph.producer(name)) is not None:
        if node.op_type in LAYOUT:
            name = node.input[0]
        elif node.op_type in ("Mul", "Div") and _feeds_layout(graph, node.input[0]):
            scales.append(Scale(node.input[1], node.op_type == "Div"))
            name = node.input[0]
        else:
            break
    return name, scales


def _feeds_layout(graph: GraphView, name: str) -> bool:
    node = graph.producer(name)
    return node is not None and node.op_type in (*LAYOUT, "Add", "MatMul", "Gemm", "Mul", "Div")


def _only_reader(graph: GraphView, name: str, ignored: Sequence[str]) -> NodeProto | None:
    readers = [node for node in graph.consumers(name) if node.op_type not in ignored]
    return readers[0] if len(readers) == 1 else None


#: Of a reading that is right: number of heads, factor on query times key, whether a token sees only those before it, and
#: for each term of positions keys or queries by distance [H, D, 2 P], scaled.
Proof = tuple[int, float, bool, list[Array]]


def _prove(
    reading: Reading, values: Mapping[str, Array], tokens: Array, tables: Mapping[str, Array], max_length: int
) -> Proof | None:
    """Calculates the attention in numpy from the reading and compares; None if it differs.

    Raises:
        ValueError: Shapes do not fit each other.
    """
    batch, seq = tokens.shape
    probabilities = values[reading.softmax.output[0]]
    probabilities = probabilities.reshape(batch, -1, seq, seq)
    num_heads = probabilities.shape[1]
    query, key, value = (
        values[name].reshape(batch, seq, num_heads, -1).swapaxes(1, 2)
        for name in (reading.query, reading.key, reading.value)
    )
    scale, causal = product_of(reading.scales, values), _mask_kind(reading, values, tokens)
    if scale is None or causal is None:
        return None
    scores = scale * query @ key.swapaxes(-1, -2)
    scaled_tables = []
    for term in reading.positions:
        factor = product_of(term.scales, values)
        if factor is None or term.key not in tables or term.source not in (reading.query, reading.key):
            return None
        if (term.source == reading.key) != term.by_key and reading.query != reading.key:
            return None
        table = tables[term.key] * np.float32(factor)
        distance = np.arange(seq)[:, None] - np.arange(seq)
        raw = (key if term.by_key else query) @ table
        one = np.take_along_axis(
            raw, np.broadcast_to(max_length - distance, (batch, num_heads, seq, seq)), axis=-1
        )
        scores = scores + (one.swapaxes(-1, -2) if term.by_key else one)
        scaled_tables.append(table)
    visible = tokens[:, None, None, :] & (np.tri(seq, dtype=bool) if causal else True)
    scores = np.where(visible, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    context = (weights @ value).swapaxes(1, 2).reshape(batch, seq, -1)[tokens]
    expected = values[reading.context].reshape(batch, seq, -1)[tokens]
    error = np.abs(weights - probabilities).swapaxes(1, 2)[tokens].max()
    error = max(error, np.abs(context - expected).max() / (np.abs(expected).max() + 1e-6))
    return (num_heads, scale, causal, scaled_tables) if error <= TOLERANCE else None


def _mask_kind(reading: Reading, values: Mapping[str, Array], tokens: Array) -> bool | None:
    """False if a token sees all tokens of its row, True if all up to itself, None for any other mask."""
    if not reading.mask:
        return None
    batch, seq = tokens.shape
    mask = values[reading.mask]
    mask = np.broadcast_to(mask, (batch, *mask.shape[1:-2], seq, seq)) if mask.ndim > 2 else mask[None]
    if not reading.keep and (mask[mask > BLOCKED] != 0).any():
        return None
    visible = (mask if reading.keep else mask > BLOCKED).astype(bool)
    visible = np.broadcast_to(visible, (batch, *mask.shape[1:])).reshape(batch, -1, seq, seq)
    for causal in (False, True):
        expected = tokens[:, None, None, :] & (np.tri(seq, dtype=bool) if causal else True)
        expected = np.broadcast_to(expected, (batch, visible.shape[1], seq, seq))
        if (visible == expected).swapaxes(1, 2)[tokens].all():
            return causal
    return None


def _rewrite(graph: GraphView, reading: Reading, proof: Proof, key_mask: str, relative: RelativeBias) -> None:
    num_heads, scale, causal, tables = proof
    bias = ""
    if reading.positions:
        bias = relative.add(reading.query, reading.key, reading.positions, tables, num_heads)
    fused = graph.add(
        "MultiHeadAttention",
        [reading.query, reading.key, reading.value, "", key_mask, bias],
        domain=MICROSOFT,
        num_heads=num_heads,
        scale=scale,
        mask_filter_value=BLOCKED,
        **({"unidirectional": 1} if causal else {}),
    )
    graph.replace_uses(reading.context, fused)
