"""DeBERTa's relative positions without copies of tables and without gathering.

A layer adds q_i . K[b(i - j)] and k_j . Q[b(j - i)] to the score of tokens i and j, where b puts distances into buckets and K
and Q, projections of the position embeddings, depend on weights alone. An exported graph repeats K and Q for each prompt,
multiplies with all buckets and gathers one number per pair of tokens. Here the tables are stored by distance, so that at S
tokens only the 2 S columns around distance 0 are read, and the numbers of row i lie in a row, shifted by i: which a flat
view of the rows, one element shorter, puts in place.

Source: He et al., DeBERTa: Decoding-enhanced BERT with Disentangled Attention, ICLR 2021, equation 4; the flat view is the
"relative shift" of Dai et al., Transformer-XL, ACL 2019, appendix B.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from export.passes.graph import GraphView, probe, random_feed

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Scale:
    """A scalar factor in the graph: a tensor, which divides or multiplies."""

    name: str
    divides: bool


def product_of(scales: Sequence[Scale], values: Mapping[str, Array]) -> float | None:
    """Product of some factors, by values of tensors; None if one is no scalar."""
    factors = [values[scale.name] for scale in scales]
    if any(factor.size != 1 for factor in factors):
        return None
    exponents = (-1 if scale.divides else 1 for scale in scales)
    return math.prod(float(f.reshape(())) ** e for f, e in zip(factors, exponents, strict=True))


@dataclass(frozen=True, slots=True)
class PositionTerm:
    """A term of relative positions in a score.

    Attributes:
        source: Queries or keys [B, S, H D].
        table: What they are multiplied with, [B H, D, buckets] or [B, H, D, buckets].
        index: Bucket of each pair of tokens, in the shape of the scores.
        scales: Factors on the product.
        by_key: Rows are keys and columns queries; the term is transposed before it is added.
    """

    source: str
    table: str
    index: str
    scales: tuple[Scale, ...]
    by_key: bool

    @property
    def key(self) -> str:
        """Names the table with the order its columns are read in."""
        return f"{self.table}|{self.index}"


def position_tables(
    model: onnx.ModelProto,
    terms: Sequence[PositionTerm],
    max_length: int,
    rng: np.random.Generator,
    vocabulary: int,
) -> dict[str, Array]:
    """Tables of terms by distance.

    Args:
        model: The graph.
        terms: Terms whose tables do not depend on the prompt and whose buckets depend on the distance alone; others are
            left out.
        max_length: Most tokens P the graph reads.
        rng, vocabulary: For random prompts.

    Returns:
        `PositionTerm.key` -> [H, D, 2 P]; column c is for the distance (row less column) P - c.
    """
    names = [name for term in terms for name in (term.table, term.index)]
    longest = probe(model, names, random_feed(model, 1, max_length, rng, vocabulary))
    shorter = probe(model, names, random_feed(model, 1, max(1, max_length // 3), rng, vocabulary))
    distances = np.clip(max_length - np.arange(2 * max_length), 1 - max_length, max_length - 1)
    tables: dict[str, Array] = {}
    for term in terms:
        table, index = longest[term.table], longest[term.index].reshape(-1, max_length, max_length)
        by_distance = np.concatenate([index[0, 0, :0:-1], index[0, :, 0]])
        is_fixed = np.array_equal(table, shorter[term.table])
        if is_fixed and _agrees(by_distance, index) and _agrees(by_distance, shorter[term.index]):
            heads = table.reshape(-1, *table.shape[-2:])
            columns = by_distance[distances + max_length - 1]
            tables[term.key] = np.ascontiguousarray(heads[:, :, columns].astype(np.float32))
    return tables


def _agrees(line: Array, index: Array) -> bool:
    """Whether buckets [.., S, S] are those by distance from 1 - S to S - 1 in the middle of `line`."""
    size = index.shape[-1]
    middle = len(line) // 2
    distance = np.arange(size)[:, None] - np.arange(size)
    return bool((index.reshape(-1, size, size) == line[middle + distance]).all())


class RelativeBias:
    """Adds the nodes that calculate terms of relative positions; what depends on S alone is calculated once for all layers.

    Args:
        graph: The graph.
        max_length: Most tokens P that it reads.
    """

    def __init__(self, graph: GraphView, max_length: int) -> None:
        self._graph = graph
        self._max_length = max_length
        self._sizes: dict[str, str] = {}

    def add(
        self, query: str, key: str, terms: Sequence[PositionTerm], tables: Sequence[Array], num_heads: int
    ) -> str:
        """Adds nodes for the sum of some terms; returns the name of the bias [B, H, S, S].

        Args:
            query, key: Projections [B, S, H D].
            terms: The terms, at least one.
            tables: Table of each term by distance [H, D, 2 P], scaled.
            num_heads: Heads H.
        """
        graph = self._graph
        if not self._sizes:
            self._sizes = self._add_sizes()
        sizes = self._sizes
        parts = []
        for term, table in zip(terms, tables, strict=True):
            stored = graph.add_constant("positions_by_distance", table)
            columns = graph.add("Slice", [stored, sizes["first"], sizes["last"], sizes["two"]])
            shape = graph.add_constant("heads", np.array([0, 0, num_heads, -1], dtype=np.int64))
            split = graph.add("Reshape", [key if term.by_key else query, shape])
            heads = graph.add("Transpose", [split], perm=[0, 2, 1, 3])
            raw = graph.add("MatMul", [heads, columns])
            # Column j of row i is number 2 S i + j - i + S = (2 S - 1) i + j + S of the flat view.
            flat = graph.add("Reshape", [raw, sizes["flat"]])
            inside = graph.add("Slice", [flat, sizes["seq"], sizes["end"], sizes["two"]])
            rows = graph.add("Reshape", [inside, sizes["rows"]])
            part = graph.add("Slice", [rows, sizes["zero"], sizes["seq"], sizes["three"]])
            parts.append(graph.add("Transpose", [part], perm=[0, 1, 3, 2]) if term.by_key else part)
        return parts[0] if len(parts) == 1 else graph.add("Sum", parts)

    def _add_sizes(self) -> dict[str, str]:
        """Names of shapes and bounds at S tokens."""
        graph = self._graph

        def constant(*values: int) -> str:
            return graph.add_constant("size", np.array(values, dtype=np.int64))

        two, one, longest, keep = constant(2), constant(1), constant(self._max_length), constant(0, 0)
        seq = graph.add("Slice", [graph.add("Shape", ["input_ids"]), one, two])
        length = graph.add("Sub", [graph.add("Add", [seq, seq]), one])
        return {
            "zero": constant(0),
            "two": two,
            "three": constant(3),
            "seq": seq,
            "first": graph.add("Sub", [longest, seq]),
            "last": graph.add("Add", [longest, seq]),
            # S + S (2 S - 1)
            "end": graph.add("Add", [seq, graph.add("Mul", [seq, length])]),
            "flat": graph.add("Concat", [keep, constant(-1)], axis=0),
            "rows": graph.add("Concat", [keep, seq, length], axis=0),
        }
