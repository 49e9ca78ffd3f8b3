"""Batch inference with a checkpoint of `train` or an artifact of `export-onnx`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from predictors.heads import Predicted
from predictors.manifest import MANIFEST, MODEL
from predictors.pretrained import predictor_folder
from scheduler_core.errors import InputError
from scheduler_core.prediction.prompt_text import PromptForm
from scheduler_core.shell.progress import tracked

if TYPE_CHECKING:
    from predictors.modules.checkpoint import Checkpoint

Accelerator = Literal["auto", "cpu", "cuda"]
#: Degrees of freedom of fits for predictors without a fixed nu.
DEFAULT_NU = 3.5
#: (prompts, served models, temperatures), each [G] -> predictions [G].
Predict = Callable[[Sequence[str], Sequence[str | None], Sequence[float | None]], Predicted]


@dataclass(frozen=True, slots=True)
class BatchPredictor:
    """A predictor loaded from a checkpoint or an artifact."""

    # For reports: kind ("checkpoint" or "artifact"), nu, and the identity of the predictor.
    description: Mapping[str, Any]
    # Fixed degrees of freedom of the distributions; None if they are learned, or no distribution is predicted.
    nu: float | None
    predict: Predict
    bucket_edges: tuple[float, ...]  # edges of the bucket head, in tokens
    urgency_levels: tuple[str, ...]  # names of the urgency levels, the most urgent first; empty: no such head
    served_models: tuple[str, ...]  # known served models; empty: not conditioned on the served model
    data: Mapping[str, Any]  # training data: name, SHA-256, split, baselines
    form: PromptForm  # what is read of a row with messages
    folder: Path

    @property
    def fit_nu(self) -> float:
        """Degrees of freedom of the fits that predicted parameters are compared with."""
        return DEFAULT_NU if self.nu is None else self.nu


@dataclass(frozen=True, slots=True)
class InferenceOptions:
    """Options of batch inference; threads None: one for an artifact, torch's default for a checkpoint."""

    batch_size: int = 16
    threads: int | None = None
    progress: bool = True
    accelerator: Accelerator = "auto"

    def track(self, batches: Iterable[Any]) -> Iterable[Any]:
        """The batches, with a progress bar if that is on."""
        return tracked(batches, "predict", self.progress)


def open_batch_predictor(
    folder: str | Path, options: InferenceOptions, field: str = "predictor"
) -> BatchPredictor:
    """Opens an artifact or a checkpoint; "pretrained" and "tiny" are the artifacts shipped with tailcast. InputError if
    the folder is neither, or is damaged."""
    path = predictor_folder(folder)
    if (path / MANIFEST).is_file():
        return _open_artifact(path, options)
    if (path / "config.json").is_file():
        return _open_checkpoint(path, options)
    allowed = "pretrained, tiny, an artifact folder of export-onnx or a checkpoint folder of train"
    raise InputError(field, str(path), allowed)


def _open_artifact(folder: Path, options: InferenceOptions) -> BatchPredictor:
    from predictors.runtime import open_runtime

    threads = options.threads or 1
    runtime = open_runtime(folder, provider=options.accelerator, threads_per_run=threads)
    manifest = runtime.artifact.manifest
    conditioned = manifest.conditioning is not None
    predict_distinct: Callable[..., Predicted] = partial(runtime.predict, track=options.track)
    if conditioned and MODEL in manifest.files:
        from training.evaluating.split_runtime import SplitRuntime

        predict_distinct = partial(SplitRuntime(runtime, threads).predict, progress=options.progress)

    def predict(
        prompts: Sequence[str], served_models: Sequence[str | None], temperatures: Sequence[float | None]
    ) -> Predicted:
        columns = (prompts, served_models, temperatures) if conditioned else (prompts,)
        first, of_row = distinct(*columns)
        rows = [[column[row] for row in first.tolist()] for column in columns]
        predicted = predict_distinct(*rows, batch_size=options.batch_size)
        values: dict[str, Any] = {name: value[of_row] for name, value in predicted.arrays().items()}
        if manifest.nu is not None and "mu" in values:
            values["nu"] = manifest.nu
        return Predicted(**values)

    return BatchPredictor(
        description={
            "kind": "artifact",
            "nu": manifest.nu,
            "artifact_id": manifest.artifact_id,
            "artifact_version": manifest.artifact_version,
        },
        nu=manifest.nu,
        predict=predict,
        bucket_edges=manifest.bucket_edges,
        urgency_levels=manifest.urgency_levels if "urgency" in manifest.heads else (),
        served_models=manifest.served_models if conditioned else (),
        data=manifest.training_data,
        form=manifest.form,
        folder=folder,
    )


def _open_checkpoint(folder: Path, options: InferenceOptions) -> BatchPredictor:
    import torch

    from predictors.modules.checkpoint import load_checkpoint
    from training.network.inference import pick_device

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    checkpoint = load_checkpoint(folder)
    checkpoint.model.to(pick_device(options.accelerator))
    config, heads = checkpoint.config, checkpoint.config.heads
    data = checkpoint.training_info.get("data", {})
    nu = None if heads.length is None or heads.length.learn_nu else heads.length.nu
    name = {"folder": folder.resolve().name, "encoder": config.encoder}
    return BatchPredictor(
        description={"kind": "checkpoint", "nu": nu, **name},
        nu=nu,
        predict=partial(predict_rows, checkpoint, options=options),
        bucket_edges=() if heads.bucket is None else heads.bucket.edges,
        urgency_levels=() if heads.urgency is None else heads.urgency.levels,
        served_models=() if config.conditioning is None else config.conditioning.served_models,
        data=data if isinstance(data, dict) else {},
        form=config.form,
        folder=folder,
    )


def predict_rows(
    checkpoint: Checkpoint,
    prompts: Sequence[str],
    served_models: Sequence[str | None],
    temperatures: Sequence[float | None],
    options: InferenceOptions,
) -> Predicted:
    """Predicts G rows with a checkpoint, on the device of its model."""
    from training.network.inference import predict_prompts

    outputs = predict_prompts(
        checkpoint.model,
        checkpoint.tokenizer,
        prompts,
        served_models,
        temperatures,
        batch_size=options.batch_size,
        track=options.track,
    )
    length = checkpoint.config.heads.length
    values: dict[str, Any] = {} if length is None else {"nu": length.nu}
    return Predicted(**values | outputs)


def distinct(*columns: Sequence[Any]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """First row of each distinct combination of values [D], and the index of each row's combination [G]."""
    numbers: dict[tuple[Any, ...], int] = {}
    of_row = [numbers.setdefault(values, len(numbers)) for values in zip(*columns, strict=True)]
    _, first = np.unique(of_row, return_index=True)
    return first, np.array(of_row, dtype=np.intp)
