"""Graphs of the variants, and artifact folders with them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from export.passes.attention import fuse_attention
from export.passes.fp16 import last_of, to_half
from export.passes.graph import Feed, GraphView, random_feed
from export.passes.int8 import (
    Product,
    Range,
    find_products,
    measure_ranges,
    quantize,
    quantize_tables,
    smooth,
    token_states,
)
from export.passes.simplify import keep_residuals_apart, simplified
from predictors.artifact import MODEL, Artifact, Manifest, Precision, write_manifest
from predictors.tokenizer import PromptTokenizer
from scheduler_core.errors import InputError, TailcastError
from scheduler_core.files import write_json

PRECISION: dict[str, Precision] = {"fused": "fp32", "int8": "int8", "fp16": "fp16", "fp16-fused": "fp16"}


@dataclass(frozen=True, slots=True)
class VariantGraph:
    """A graph and the number of its rewrites by kind."""

    model: onnx.ModelProto
    steps: dict[str, int]


class VariantBuilder:
    """Makes the graphs of variants of one graph in single precision.

    Args:
        path: The graph, as export-onnx writes it.
        max_length: Maximum number of tokens of a row.
        calibration: Token ids of prompts that calibrate int8, each [tokens].
        seed: Of random tokens.
    """

    def __init__(
        self, path: Path, max_length: int, calibration: Sequence[NDArray[np.int64]], *, seed: int = 0
    ) -> None:
        self._path = path
        self._max_length = max_length
        self._tokens = calibration
        self._seed = seed

    @classmethod
    def of(cls, artifact: Artifact, calibration: Sequence[str], *, seed: int = 0) -> VariantBuilder:
        """For an artifact and texts that calibrate.

        Raises:
            InputError: The artifact is a variant itself.
        """
        manifest = artifact.manifest
        if manifest.precision != "fp32" or manifest.variant:
            raise InputError(
                "artifact", str(artifact.path), "an artifact as export-onnx writes it, no variant"
            )
        tokenizer = PromptTokenizer(
            artifact.tokenizer_path,
            max_length=manifest.max_length,
            truncation_side=manifest.truncation_side,
        )
        tokens = [prompt.ids for prompt in tokenizer(list(calibration))]
        return cls(artifact.model_path, manifest.max_length, tokens, seed=seed)

    def build(self, kind: str) -> VariantGraph:
        """The graph of a variant.

        Args:
            kind: One of `export.variants.config.KINDS`.

        Raises:
            TailcastError: The graph does not allow it.
        """
        model = simplified(self._path)
        steps: dict[str, int] = {}
        if kind != "fp16":
            steps["attention_layers"] = fuse_attention(
                model, max_length=self._max_length, vocabulary=self._vocabulary(model)
            )
            steps["residuals"] = keep_residuals_apart(model)
            if kind.endswith("fused") and not steps["attention_layers"]:
                raise TailcastError("no attention of this graph can be put into one operator")
        if kind == "int8":
            steps |= self._quantize(model)
        if kind.startswith("fp16"):
            states = self._products(model)
            if not states:
                raise TailcastError("the graph has no product of states with weights")
            last = last_of(model, [product.output for product in states])
            steps["half_nodes"] = to_half(model, last, self._feed(model))
        return VariantGraph(model, steps)

    def _quantize(self, model: onnx.ModelProto) -> dict[str, int]:
        graph, products, ranges = self._measured(model)
        smoothed = smooth(graph, products, ranges)
        graph, products, ranges = self._measured(model)
        return {
            "smoothed_tensors": smoothed,
            "int8_products": quantize(graph, products, ranges),
            "int8_tables": quantize_tables(graph),
        }

    def _measured(self, model: onnx.ModelProto) -> tuple[GraphView, list[Product], dict[str, Range]]:
        products = self._products(model)
        if not products:
            raise TailcastError("the graph has no product of states with weights")
        feeds = (feed_of(model, tokens) for tokens in self._tokens)
        ranges = measure_ranges(model, [product.source for product in products], feeds)
        return GraphView(model), find_products(GraphView(model), self._rows(model)), dict(ranges)

    def _products(self, model: onnx.ModelProto) -> list[Product]:
        return find_products(GraphView(model), self._rows(model))

    def _rows(self, model: onnx.ModelProto) -> Callable[[str], bool]:
        return token_states(model, self._feed(model))

    def _feed(self, model: onnx.ModelProto) -> Feed:
        rng = np.random.default_rng(self._seed)
        return random_feed(model, 2, min(5, self._max_length), rng, self._vocabulary(model))

    def _vocabulary(self, model: onnx.ModelProto) -> int:
        """Number of rows of the embedding table of token ids."""
        graph = GraphView(model)
        names, sizes = ["input_ids"], []
        while names:
            for node in graph.consumers(names.pop()):
                if node.op_type == "Gather":
                    sizes.append((graph.constant_shape(node.input[0]) or (0,))[0])
                elif node.op_type in ("Cast", "Clip", "Identity", "Reshape"):
                    names.append(node.output[0])
        if not sizes or min(sizes) < 1:
            raise TailcastError("the graph has no embedding table of token ids")
        return min(sizes)


def feed_of(model: onnx.ModelProto, tokens: NDArray[np.int64]) -> Feed:
    """Inputs for one prompt; other inputs than tokens are zero, because the encoder does not see them."""
    feed = random_feed(model, 1, len(tokens), np.random.default_rng(0), 1)
    return feed | {"input_ids": tokens[None].astype(np.int64)}


def write_variant(
    artifact: Artifact,
    model: onnx.ModelProto,
    folder: Path,
    *,
    name: str,
    precision: Precision,
    run: Mapping[str, Any],
) -> Manifest:
    """Writes an artifact folder with another graph; all other files are those of `artifact`, without its signature.

    Args:
        artifact: Origin of the variant.
        model: Its graph.
        folder: A new folder.
        name: Of the variant.
        precision: Of its weights and activations.
        run: Content of run.json.

    Returns:
        The manifest; its `variant` names the origin.
    """
    folder.mkdir(parents=True)
    for file in artifact.manifest.files:
        if not file.startswith(MODEL) and file != "run.json":
            shutil.copyfile(artifact.path / file, folder / file)
    onnx.save(model, folder / MODEL)
    write_json(folder / "run.json", dict(run))
    changes = {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "precision": precision,
        "variant": {"name": name, "made_from": artifact.manifest.artifact_version},
        "parity": {},
    }
    return write_manifest(folder, artifact.manifest.model_copy(update=changes))


def add_result(folder: Path, manifest: Manifest, result: Mapping[str, Any]) -> Manifest:
    """Adds the result of a variant to its manifest."""
    return write_manifest(folder, manifest.model_copy(update={"variant": {**manifest.variant, **result}}))


def model_bytes(folder: Path) -> int:
    """Bytes of the graph with its weights."""
    return sum(file.stat().st_size for file in folder.iterdir() if file.name.startswith(MODEL))
