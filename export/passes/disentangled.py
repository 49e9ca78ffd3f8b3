"""DeBERTa's relative positions without copies of tables and without gathering.

A layer adds q_i . K[b(i - j)] and k_j . Q[b(j - i)] to the score of tokens i and j. b maps distances to
buckets. K and Q are projections of the position embeddings and depend only on weights. An exported graph
repeats K and Q for each prompt, multiplies with all buckets and gathers one number per pair of tokens. Here
the tables are stored by distance, so that at S tokens only the 2 S columns around distance 0 are used. The
numbers of row i are then consecutive but shifted by i; a flat view with rows one element shorter removes the
shift.

Source: He et al., DeBERTa: Decoding-enhanced BERT with Disentangled Attention, ICLR 2021, equation 4; the flat view is the
"relative shift" of Dai et al., Transformer-XL, ACL 2019, appendix B.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from export.passes.graph import Array, add, add_constant, probe, random_feed


@dataclass(frozen=True, slots=True)
class Scale:
    """A scalar tensor of the graph that divides or multiplies."""

    value: ir.Value
    divides: bool


def product_of(scales: Sequence[Scale], values: Mapping[ir.Value, Array]) -> float | None:
    """Product of the scales, computed from the values of the tensors; None if one is not a scalar."""
    factors = [values[scale.value] for scale in scales]
    if any(factor.size != 1 for factor in factors):
        return None
    exponents = (-1 if scale.divides else 1 for scale in scales)
    return math.prod(float(f.reshape(())) ** e for f, e in zip(factors, exponents, strict=True))


@dataclass(frozen=True, slots=True)
class PositionTerm:
    """A term of relative positions in a score.

    Attributes:
        source: Queries or keys [B, S, H D].
        table: Second factor of the product with them, [B H, D, buckets] or [B, H, D, buckets].
        index: Bucket of each pair of tokens, in the shape of the scores.
        scales: Factors on the product.
        by_key: Rows are keys and columns queries; the term is transposed before it is added.
    """

    source: ir.Value
    table: ir.Value
    index: ir.Value
    scales: tuple[Scale, ...]
    by_key: bool


def position_tables(
    model: ir.Model, terms: Sequence[PositionTerm], max_length: int, rng: np.random.Generator, vocabulary: int
) -> dict[PositionTerm, Array]:
    """Table of each term by distance [H, D, 2 P], where P = `max_length` is the maximum number of tokens.
    Column c is for the distance (row - column) P - c. Terms are omitted if their tables depend on the prompt,
    or their buckets depend on anything but the distance."""
    values = [value for term in terms for value in (term.table, term.index)]
    longest = probe(model, values, random_feed(model, 1, max_length, rng, vocabulary))
    shorter = probe(model, values, random_feed(model, 1, max(1, max_length // 3), rng, vocabulary))
    distances = np.clip(max_length - np.arange(2 * max_length), 1 - max_length, max_length - 1)
    tables: dict[PositionTerm, Array] = {}
    for term in terms:
        table, index = longest[term.table], longest[term.index].reshape(-1, max_length, max_length)
        by_distance = np.concatenate([index[0, 0, :0:-1], index[0, :, 0]])
        is_fixed = np.array_equal(table, shorter[term.table])
        if is_fixed and _agrees(by_distance, index) and _agrees(by_distance, shorter[term.index]):
            heads = table.reshape(-1, *table.shape[-2:])
            tables[term] = heads[:, :, by_distance[distances + max_length - 1]].astype(np.float32)
    return tables


def _agrees(line: Array, index: Array) -> bool:
    """Whether buckets [.., S, S] equal the middle of `line`, which has the bucket of each distance."""
    size = index.shape[-1]
    middle = len(line) // 2
    distance = np.arange(size)[:, None] - np.arange(size)
    return bool((index.reshape(-1, size, size) == line[middle + distance]).all())


class RelativeBias:
    """Adds nodes that compute relative position terms; all layers share the tensors that depend only on S."""

    def __init__(self, graph: ir.Graph, max_length: int) -> None:
        self._graph = graph
        self._max_length = max_length
        self._sizes: dict[str, ir.Value] = {}

    def add(
        self,
        query: ir.Value,
        key: ir.Value,
        terms: Sequence[PositionTerm],
        tables: Sequence[Array],
        num_heads: int,
    ) -> ir.Value:
        """Adds nodes for the sum of one or more terms, and returns this bias [B, H, S, S]. `query` and `key`
        are projections [B, S, H D]; `tables` has the scaled table by distance [H, D, 2 P] of each term."""
        graph = self._graph
        sizes = self._sizes = self._sizes or self._add_sizes()
        parts = []
        for term, table in zip(terms, tables, strict=True):
            by_distance = add_constant(graph, "positions_by_distance", table)
            columns = add(graph, "Slice", by_distance, sizes["first"], sizes["last"], sizes["two"])
            shape = add_constant(graph, "heads", np.array([0, 0, num_heads, -1], dtype=np.int64))
            split = add(graph, "Reshape", key if term.by_key else query, shape)
            raw = add(graph, "MatMul", add(graph, "Transpose", split, perm=[0, 2, 1, 3]), columns)
            # Column j of row i is number 2 S i + j - i + S = (2 S - 1) i + j + S of the flat view.
            flat = add(graph, "Reshape", raw, sizes["flat"])
            inside = add(graph, "Slice", flat, sizes["seq"], sizes["end"], sizes["two"])
            rows = add(graph, "Reshape", inside, sizes["rows"])
            part = add(graph, "Slice", rows, sizes["zero"], sizes["seq"], sizes["three"])
            parts.append(add(graph, "Transpose", part, perm=[0, 1, 3, 2]) if term.by_key else part)
        return parts[0] if len(parts) == 1 else add(graph, "Sum", *parts)

    def _add_sizes(self) -> dict[str, ir.Value]:
        """Shapes and bounds at S tokens."""
        graph = self._graph

        def constant(*values: int) -> ir.Value:
            return add_constant(graph, "size", np.array(values, dtype=np.int64))

        two, one, longest, keep = constant(2), constant(1), constant(self._max_length), constant(0, 0)
        [tokens] = [value for value in graph.inputs if value.name == "input_ids"]
        seq = add(graph, "Slice", add(graph, "Shape", tokens), one, two)
        length = add(graph, "Sub", add(graph, "Add", seq, seq), one)
        return {
            "zero": constant(0),
            "two": two,
            "three": constant(3),
            "seq": seq,
            "first": add(graph, "Sub", longest, seq),
            "last": add(graph, "Add", longest, seq),
            # S + S (2 S - 1)
            "end": add(graph, "Add", seq, add(graph, "Mul", seq, length)),
            "flat": add(graph, "Concat", keep, constant(-1), axis=0),
            "rows": add(graph, "Concat", keep, seq, length, axis=0),
        }
