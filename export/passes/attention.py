"""Attention of a graph, verified on numbers, as one operator.

What the exporters write as a dozen nodes per layer (projections split into heads, scores, mask, softmax, context, heads
joined) becomes one `MultiHeadAttention` of ONNX Runtime, which needs no copies between them. Relative positions as DeBERTa
has them are added by `disentangled`.

A softmax is taken for attention if its surroundings can be read as softmax(scale q k^T + positions + mask) v; whether
that reading is right is then checked by calculating it in numpy on a random batch and comparing.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto

from export.passes.disentangled import PositionTerm, RelativeBias, position_tables
from export.passes.graph import MICROSOFT, GraphView, probe, random_feed

logger = logging.getLogger(__name__)

Array = NDArray[Any]
LAYOUT = ("Reshape", "Transpose", "Identity", "Squeeze", "Unsqueeze", "Flatten")
#: What is added to a score to forbid it: no probability is left, and half precision can hold it.
BLOCKED = -1e4
#: Differences of probabilities and of context (relative) that still count as equal.
TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True)
class Scale:
    """A scalar factor in the graph: a tensor, which divides or multiplies."""

    name: str
    divides: bool

    def value(self, values: Mapping[str, Array]) -> float | None:
        """The factor; None if the tensor is no scalar."""
        tensor = values[self.name]
        if tensor.size != 1:
            return None
        return 1 / float(tensor.reshape(())) if self.divides else float(tensor.reshape(()))


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
        names = [self.query, self.key, self.value, self.context, self.softmax.output[0]]
        names += [scale.name for scale in self.scales]
        names += [self.mask] if self.mask else []
        for term in self.positions:
            names += [term.table, term.index, *(scale.name for scale in term.scales)]
        return names


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
    readings = [
        reading
        for node in graph.nodes
        if node.op_type == "Softmax" and (reading := read_attention(graph, node)) is not None
    ]
    if not readings:
        return 0
    rng = np.random.default_rng(0)
    feed = random_feed(model, 2, min(7, max_length), rng, vocabulary)
    values = probe(model, [name for reading in readings for name in reading.tensors()], feed)
    tables: dict[str, Array] = {}
    if any(reading.positions for reading in readings):
        tables = position_tables(
            model, [term for r in readings for term in r.positions], max_length, rng, vocabulary
        )
    done = 0
    key_mask = ""
    relative = RelativeBias(graph, max_length)
    for reading in readings:
        proof = _prove(reading, values, feed["attention_mask"].astype(bool), tables, max_length)
        if proof is None:
            logger.debug("no attention that can be rewritten at %s", reading.softmax.output[0])
            continue
        if not key_mask:
            key_mask = graph.add("Cast", ["attention_mask"], to=TensorProto.INT32)
        _rewrite(graph, reading, proof, key_mask, relative)
        done += 1
    if done:
        graph.finish()
    return done


def read_attention(graph: GraphView, softmax: NodeProto) -> Reading | None:
    """What the surroundings of a softmax say; None if they cannot be attention."""
    reading = Reading(softmax)
    if not _read_scores(graph, softmax.input[0], reading, [], swapped=False):
        return None
    if not (reading.query and reading.key):
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
    if _is_masked_product(graph, node) and not reading.mask:
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


def _is_masked_product(graph: GraphView, node: NodeProto) -> bool:
    """Whether a node puts a very negative number where a score is forbidden."""
    if node.op_type != "Where" or not _makes_products(graph, node.input[1]):
        return False
    value = graph.constant(node.input[2])
    return value is not None and value.size == 1 and float(value.reshape(())) < BLOCKED


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


@dataclass(frozen=True, slots=True)
class Proof:
    """What was measured of a reading that is right.

    Attributes:
        num_heads: Heads.
        scale: Factor on query times key.
        causal: A token sees only those before it.
        tables: For each term of positions, keys or queries by distance [H, D, 2 P], scaled.
    """

    num_heads: int
    scale: float
    causal: bool
    tables: tuple[Array, ...]


def _prove(
    reading: Reading, values: Mapping[str, Array], tokens: Array, tables: Mapping[str, Array], max_length: int
) -> Proof | None:
    """Calculates the attention in numpy from the reading and compares; None if it differs."""
    batch, seq = tokens.shape
    probabilities = values[reading.softmax.output[0]]
    parts = [values[name] for name in (reading.query, reading.key, reading.value, reading.context)]
    if any(part.ndim != 3 or part.shape[:2] != (batch, seq) for part in parts) or probabilities.size % (
        batch * seq * seq
    ):
        return None
    num_heads = probabilities.size // (batch * seq * seq)
    if any(part.shape[2] % num_heads for part in parts):
        return None
    query, key, value = (_heads(part, num_heads) for part in parts[:3])
    factors = [scale.value(values) for scale in reading.scales]
    causal = _mask_kind(reading, values, tokens)
    if None in factors or causal is None:
        return None
    scale = float(np.prod([factor for factor in factors if factor is not None]))
    scores = scale * query @ key.swapaxes(-1, -2)
    scaled_tables = []
    for term in reading.positions:
        factors = [factor.value(values) for factor in term.scales]
        if None in factors or term.key not in tables or term.source not in (reading.query, reading.key):
            return None
        if (term.source == reading.key) != term.by_key and reading.query != reading.key:
            return None
        table = tables[term.key] * np.float32(np.prod([factor for factor in factors if factor is not None]))
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
    probabilities = probabilities.reshape(batch, num_heads, seq, seq)
    context = (weights @ value).swapaxes(1, 2).reshape(batch, seq, -1)
    error = np.abs(weights - probabilities).swapaxes(1, 2)[tokens].max()
    magnitude = np.abs(parts[3][tokens]).max() + 1e-6
    error = max(error, np.abs(context - parts[3])[tokens].max() / magnitude)
    if not error <= TOLERANCE:
        return None
    return Proof(num_heads, scale, causal, tuple(scaled_tables))


def _heads(values: Array, num_heads: int) -> Array:
    batch, seq, width = values.shape
    return values.reshape(batch, seq, num_heads, width // num_heads).swapaxes(1, 2)


def _mask_kind(reading: Reading, values: Mapping[str, Array], tokens: Array) -> bool | None:
    """False if a token sees all tokens of its row, True if all up to itself, None for any other mask."""
    batch, seq = tokens.shape
    if not reading.mask:
        return None
    mask = values[reading.mask]
    if mask.ndim < 2 or mask.shape[-1] != seq or mask.shape[-2] not in (1, seq):
        return None
    try:
        mask = np.broadcast_to(mask, (batch, *mask.shape[1:-2], seq, seq)) if mask.ndim > 2 else mask[None]
        visible = (mask if reading.keep else mask > BLOCKED).astype(bool).reshape(batch, -1, seq, seq)
    except ValueError:
        return None
    if not reading.keep and (mask[mask > BLOCKED] != 0).any():
        return None
    for causal in (False, True):
        expected = tokens[:, None, None, :] & (np.tri(seq, dtype=bool) if causal else True)
        expected = np.broadcast_to(expected, (batch, visible.shape[1], seq, seq))
        if (visible == expected).swapaxes(1, 2)[tokens].all():
            return causal
    return None


def _rewrite(graph: GraphView, reading: Reading, proof: Proof, key_mask: str, relative: RelativeBias) -> None:
    bias = ""
    if reading.positions:
        bias = relative.add(reading.query, reading.key, reading.positions, proof.tables, proof.num_heads)
    attributes: dict[str, Any] = {
        "num_heads": proof.num_heads,
        "scale": proof.scale,
        "mask_filter_value": BLOCKED,
    }
    if proof.causal:
        attributes["unidirectional"] = 1
    fused = graph.add(
        "MultiHeadAttention",
        [reading.query, reading.key, reading.value, "", key_mask, bias],
        domain=MICROSOFT,
        **attributes,
    )
    graph.replace_uses(reading.context, fused)


def attention_layers(model: onnx.ModelProto) -> int:
    """Number of attention operators in a graph."""
    return sum(node.op_type == "MultiHeadAttention" for node in model.graph.node)
