"""Export of a torch predictor as one ONNX graph: token ids and conditions to the outputs of all heads."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from predictors.manifest import Manifest
from scheduler_core.errors import TailcastError, first_line

if TYPE_CHECKING:
    from torch import Tensor, nn

    from predictors.modules.predictor import PromptPredictor

MAX_BATCH = 4096
# A protobuf file holds at most 2 GiB; larger weights go into the separate file model.onnx.data.
MAX_INLINE_BYTES = 1_900_000_000


def export_graph(
    model: PromptPredictor, manifest: Manifest, path: Path, *, legacy_exporter: bool = False
) -> None:
    """Exports `model` (in eval mode, on the CPU) to an ONNX file with dynamic batch and sequence axes, or
    raises TailcastError. The graph includes de-normalization, the floor of sigma and calibration; the
    manifest names its inputs and outputs. Weights above 1.9 GB go to a second file."""
    import onnx
    import onnx_ir as ir
    import onnxscript  # noqa: F401  (torch reports that it is missing only in the middle of the export)
    from onnx_ir.passes.common import ClearMetadataAndDocStringPass, RemoveUnusedOpsetsPass

    from export.passes.graph import save

    try:
        with _quiet():
            _torch_export(model, manifest, path, legacy_exporter=legacy_exporter)
    except OSError:
        raise
    except Exception as error:  # the exporters pass on the exceptions of the failing layer
        other = "the default exporter" if legacy_exporter else "--legacy_exporter true"
        text = f"torch cannot export this model: {first_line(error)}; {other} may"
        raise TailcastError(text) from error
    # Remove source paths and stack traces of this machine, and operator sets that are not used.
    clean = ir.passes.Sequential(ClearMetadataAndDocStringPass(), RemoveUnusedOpsetsPass())
    save(clean(ir.load(path)).model, path)
    onnx.checker.check_model(str(path))


def _torch_export(model: PromptPredictor, manifest: Manifest, path: Path, *, legacy_exporter: bool) -> None:
    import torch

    inputs, outputs = ([tensor.name for tensor in tensors] for tensors in (manifest.inputs, manifest.outputs))
    options: dict[str, Any] = {"input_names": inputs, "output_names": outputs, "verbose": False}
    graph, example = _in_order(model, inputs, outputs), _example(model, manifest)
    if legacy_exporter:
        axes: dict[str, Any] = {
            tensor.name: {axis: name for axis, name in enumerate(tensor.shape) if isinstance(name, str)}
            for tensor in (*manifest.inputs, *manifest.outputs)
        }
        with torch.no_grad(), _legacy_expm1():
            torch.onnx.export(graph, example, path, dynamo=False, dynamic_axes=axes, **options)
        return
    sizes = {
        "batch": torch.export.Dim("batch", min=1, max=MAX_BATCH),
        "seq": torch.export.Dim("seq", min=1, max=model.config.max_length),
    }
    shapes = [
        {axis: sizes[name] for axis, name in enumerate(tensor.shape) if isinstance(name, str)}
        for tensor in manifest.inputs
    ]
    num_bytes = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    options |= {"dynamic_shapes": (tuple(shapes),), "external_data": num_bytes > MAX_INLINE_BYTES}
    torch.onnx.export(graph, example, path, dynamo=True, **options)


def _in_order(model: PromptPredictor, inputs: Sequence[str], outputs: Sequence[str]) -> nn.Module:
    """Wraps the model with positional inputs and outputs: the exporters do not keep the order of a dict."""
    import torch

    class InOrder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
            predicted = self.model(**dict(zip(inputs, tensors, strict=True)))
            return tuple(predicted[name] for name in outputs)

    return InOrder().eval()


def _example(model: PromptPredictor, manifest: Manifest) -> tuple[Tensor, ...]:
    """Example inputs with two rows; the second one is padded and has an unknown temperature."""
    import torch

    seq = min(16, model.config.max_length)
    mask = torch.ones((2, seq), dtype=torch.int64)
    mask[1, seq // 2 :] = 0
    values = {
        "input_ids": torch.ones((2, seq), dtype=torch.int64),
        "attention_mask": mask,
        "served_model": torch.tensor([1, 0]),
        "temperature": torch.tensor([1.0, float("nan")]),
    }
    return tuple(values[tensor.name] for tensor in manifest.inputs)


@contextlib.contextmanager
def _legacy_expm1() -> Iterator[None]:
    """Registers expm1, which torch's older exporter does not support, as expm1(x) = 2 sinh(x/2) exp(x/2)."""
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


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppresses the exporters' warnings and their output on stdout."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
