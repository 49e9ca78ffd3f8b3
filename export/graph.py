"""A torch predictor as one ONNX graph: token ids in, mu and sigma in natural units out."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from predictors.artifact import INPUTS, OUTPUTS
from scheduler_core.errors import MissingExtraError, TailcastError

if TYPE_CHECKING:
    import onnx

    from predictors.modules import LengthPredictor

logger = logging.getLogger(__name__)

MAX_BATCH = 4096
# A protobuf file holds at most 2 GiB; larger weights go into model.onnx.data beside it.
MAX_INLINE_BYTES = 1_900_000_000
EXPORT_LOGGERS = ("torch.onnx", "torch.export", "torch._dynamo", "onnxscript", "onnx_ir")


def export_graph(model: LengthPredictor, path: Path, *, legacy_exporter: bool = False) -> None:
    """Writes `model`, de-normalisation and sigma floor included, as an ONNX file with free batch and sequence.

    Args:
        model: Predictor in eval mode on the CPU.
        path: File to write; weights beyond 1.9 GB go to a second file beside it.
        legacy_exporter: Use torch's TorchScript exporter: faster, a larger graph.

    Raises:
        TailcastError: torch cannot export this encoder.
        MissingExtraError: onnx or onnxscript is not installed.
    """
    try:
        import onnx
        import onnxscript
    except ImportError as error:
        raise MissingExtraError(error.name or "onnx", "export") from error
    del onnxscript
    num_bytes = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    is_large = num_bytes > MAX_INLINE_BYTES
    try:
        with _quiet():
            _torch_export(model, path, legacy_exporter=legacy_exporter, external_data=is_large)
    except Exception as error:  # the exporters raise whatever the failing layer raises
        lines = str(error).strip().splitlines() or [type(error).__name__]
        other = "the default exporter" if legacy_exporter else "--legacy_exporter true"
        raise TailcastError(f"torch cannot export this model: {lines[0]}; {other} may") from error
    graph = onnx.load(path, load_external_data=False)
    _strip(graph)
    onnx.save(graph, path)
    onnx.checker.check_model(str(path))


def _torch_export(model: LengthPredictor, path: Path, *, legacy_exporter: bool, external_data: bool) -> None:
    import torch

    seq = min(16, model.config.max_length)
    ids = torch.ones((2, seq), dtype=torch.int64)
    mask = torch.ones((2, seq), dtype=torch.int64)
    mask[1, seq // 2 :] = 0
    names: dict[str, Any] = {
        "input_names": [tensor.name for tensor in INPUTS],
        "output_names": [tensor.name for tensor in OUTPUTS],
    }
    if legacy_exporter:
        axes: dict[str, Any] = {tensor.name: dict(enumerate(tensor.shape)) for tensor in (*INPUTS, *OUTPUTS)}
        with torch.no_grad(), _expm1_known_to_the_legacy_exporter():
            torch.onnx.export(
                model, (ids, mask), path, dynamo=False, dynamic_axes=axes, verbose=False, **names
            )
        return
    batch = torch.export.Dim("batch", min=1, max=MAX_BATCH)
    length = torch.export.Dim("seq", min=1, max=model.config.max_length)
    shapes = {tensor.name: {0: batch, 1: length} for tensor in INPUTS}
    torch.onnx.export(
        model,
        (ids, mask),
        path,
        dynamo=True,
        dynamic_shapes=shapes,
        external_data=external_data,
        verbose=False,
        **names,
    )


@contextlib.contextmanager
def _expm1_known_to_the_legacy_exporter() -> Iterator[None]:
    """The inverse of log(1 + sigma), which torch's older exporter lacks: expm1(x) = 2 sinh(x/2) exp(x/2)."""
    import torch

    onnx_exporter: Any = torch.onnx  # the two functions are documented, but not in its __all__

    def expm1(g: Any, x: Any) -> Any:
        half = g.op("Mul", x, g.op("Constant", value_t=torch.tensor(0.5)))
        product = g.op("Mul", g.op("Sinh", half), g.op("Exp", half))
        return g.op("Mul", product, g.op("Constant", value_t=torch.tensor(2.0)))

    onnx_exporter.register_custom_op_symbolic("aten::expm1", expm1, 9)
    try:
        yield
    finally:
        onnx_exporter.unregister_custom_op_symbolic("aten::expm1", 9)


def _strip(graph: onnx.ModelProto) -> None:
    """Removes what the exporters write for debugging: source paths of this machine, stack traces."""
    for part in (graph, graph.graph, *graph.graph.node, *graph.functions):
        part.doc_string = ""
        if hasattr(part, "metadata_props"):
            del part.metadata_props[:]
    for function in graph.functions:
        for node in function.node:
            node.doc_string = ""
            del node.metadata_props[:]
    for value in (*graph.graph.input, *graph.graph.output, *graph.graph.value_info, *graph.graph.initializer):
        value.doc_string = ""
        del value.metadata_props[:]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Turns the exporters' warnings into debug records and drops what they print."""
    levels = {name: logging.getLogger(name).level for name in EXPORT_LOGGERS}
    for name in EXPORT_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("always")
            yield
        for warning in caught:
            logger.debug("exporter warned: %s", warning.message)
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
