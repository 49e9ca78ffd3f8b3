"""Builds the graphs of variants."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray

from export.passes.attention import fuse_attention
from export.passes.fp16 import to_half
from export.passes.graph import Feed, part, random_feed, session, shift_output
from export.passes.int8 import find_products, measure_ranges, quantize, quantize_tables, smooth
from scheduler_core.errors import TailcastError

#: Outputs in ln tokens. Rounding shifts their mean; the shift is measured on the calibration prompts, and removed.
LOCATIONS = ("mu", "quantiles")


def build_variant(
    path: Path,
    kind: str,
    calibration: Sequence[NDArray[np.int64]],
    *,
    max_length: int,
    vocabulary: int,
    seed: int,
) -> tuple[ir.Model, dict[str, int]]:
    """The graph of a variant and the number of rewrites by name; TailcastError if it cannot be built.

    `path` is the graph in single precision and `kind` fused, int8, fp16 or fp16-fused. `calibration` has the token ids
    of the prompts that calibrate int8; `seed` is the seed of random tokens."""
    model = simplified(path)
    feed = random_feed(model, 2, min(5, max_length), np.random.default_rng(seed), vocabulary)
    steps: dict[str, int] = {}
    if kind != "fp16":
        steps["attention_layers"] = fuse_attention(model, max_length=max_length, vocabulary=vocabulary)
        if kind.endswith("fused") and not steps["attention_layers"]:
            raise TailcastError("no attention layer of this graph can be fused into one operator")
    if kind == "fused":
        return model, steps
    products = find_products(model, feed)
    if not products:
        raise TailcastError("the graph has no matrix product of activations with weights")
    if kind == "int8":
        before = _location(model, calibration)
        for rewrite, name in ((smooth, "smoothed_tensors"), (quantize, "int8_products")):
            products = find_products(model, feed)
            feeds = (_feed_of(model, tokens) for tokens in calibration)
            ranges = measure_ranges(model, [product.source for product in products], feeds)
            steps[name] = rewrite(model, products, ranges)
        steps["int8_tables"] = quantize_tables(model)
        for name, after in _location(model, calibration).items():
            shift_output(model, name, before[name] - after)
            steps["shifted_outputs"] = steps.get("shifted_outputs", 0) + 1
    else:
        steps["half_nodes"] = to_half(model, products[-1].output, feed)
    return model, steps


def simplified(path: str | Path) -> ir.Model:
    """The graph of a file with folded constants and without duplicates (ONNX Runtime's basic level), in
    standard operators; TailcastError if ONNX Runtime rejects the file, or a node has a subgraph. `MatMul(x,
    Transpose(weight))` becomes a product with a constant weight, as the passes require."""
    import onnxruntime as ort

    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "basic.onnx"
        options: Any = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
        options.optimized_model_filepath = str(target)
        options.log_severity_level = 3
        try:
            ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # ONNX Runtime's exceptions share no base class
            raise TailcastError(f"ONNX Runtime cannot simplify {path}: {error}") from error
        message = onnx.load(target)
    # Shapes inferred before the simplification may contradict it.
    del message.graph.value_info[:]
    model = ir.from_proto(message)
    if list(model.graph.subgraphs()):
        raise TailcastError("a node has a subgraph (a loop or a branch), which the passes do not support")
    return model


def _location(model: ir.Model, calibration: Sequence[NDArray[np.int64]]) -> dict[str, float]:
    """Mean of each output in ln tokens over the calibration prompts, for an unknown served model and temperature."""
    outputs = {str(value.name): value for value in model.graph.outputs if value.name in LOCATIONS}
    if not outputs:
        return {}
    runner = session(part(model, outputs.values()))
    rows = [runner.run(None, dict(_feed_of(model, tokens))) for tokens in calibration]
    means = np.mean([[array.mean() for array in row] for row in rows], axis=0)
    return dict(zip(outputs, means.tolist(), strict=True))


def _feed_of(model: ir.Model, tokens: NDArray[np.int64]) -> Feed:
    """Inputs for one prompt, an unknown served model (0) and an unknown temperature (NaN)."""
    feed = random_feed(model, 1, len(tokens), np.random.default_rng(0), 1)
    if "temperature" in feed:
        feed["temperature"] = np.full_like(feed["temperature"], np.nan)
    return feed | {"input_ids": tokens[None].astype(np.int64)}
