"""Batch inference with a checkpoint of `train`, an artifact of `export-onnx` or a service of `serve-predictor`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from predictors.heads import Predicted
from predictors.manifest import MANIFEST, MODEL
from predictors.pretrained import predictor_folder
from scheduler_core.errors import InputError, TailcastError
from scheduler_core.prediction.predictions import DEFAULT_MAX_TOKENS, Prediction
from scheduler_core.prediction.predictor import SERVICES, PredictionRequest, PredictorAddress, addresses
from scheduler_core.prediction.prompt_text import PromptForm
from scheduler_core.prediction.service_access import NO_FILES, ServiceAccess
from scheduler_core.shell.progress import tracked

if TYPE_CHECKING:
    from predictors.modules.checkpoint import Checkpoint

Accelerator = Literal["auto", "cpu", "cuda"]
#: Degrees of freedom of fits for predictors without a fixed nu.
DEFAULT_NU = 3.5
#: Arrays of the length head.
LENGTH_ARRAYS = frozenset(("mu", "sigma", "nu", "sigma_within", "quantiles"))
#: Rows of a step of the progress bar of a service, and seconds for them.
_SERVICE_ROWS, _SERVICE_S = 256, 300.0
#: (prompts, served models, temperatures), each [G] -> predictions [G].
Predict = Callable[[Sequence[str], Sequence[str | None], Sequence[float | None]], Predicted]


@dataclass(frozen=True, slots=True)
class BatchPredictor:
    """A predictor loaded from a checkpoint or an artifact, or a service."""

    # For reports: kind ("checkpoint", "artifact" or "service"), nu, and the identity of the predictor.
    description: Mapping[str, Any]
    # Fixed degrees of freedom of the distributions; None if they are learned, or no distribution is predicted.
    nu: float | None
    predict: Predict
    has_length: bool
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
    """Options of batch inference; threads None: one for an artifact, torch's default for a checkpoint. `access`: for a
    service."""

    batch_size: int = 16
    threads: int | None = None
    progress: bool = True
    accelerator: Accelerator = "auto"
    access: ServiceAccess = NO_FILES

    def track(self, batches: Iterable[Any]) -> Iterable[Any]:
        """The batches, with a progress bar if that is on."""
        return tracked(batches, "predict", self.progress)


def open_batch_predictor(
    folder: str | Path, options: InferenceOptions, field: str = "predictor"
) -> BatchPredictor:
    """Opens an artifact, a checkpoint, a service (grpc://HOST:PORT, grpcs://HOST:PORT), or several with different heads, joined by "+", as in
    pretrained+urgency; "pretrained", "tiny" and "urgency" are the artifacts shipped with tailcast. InputError if the folder is
    neither, or is damaged."""
    if len(parts := addresses(str(folder))) > 1:
        return _joined([open_batch_predictor(part, options, field) for part in parts])
    if str(folder).partition("://")[0] in SERVICES and "://" in str(folder):
        return _open_service(str(folder), options)
    path = predictor_folder(folder)
    if (path / MANIFEST).is_file():
        return _open_artifact(path, options)
    if (path / "config.json").is_file():
        return _open_checkpoint(path, options)
    allowed = "pretrained, tiny, an artifact folder of export-onnx, a checkpoint folder of train, or grpc://HOST:PORT (grpcs:// with TLS)"
    raise InputError(field, str(path), allowed)


def _joined(parts: Sequence[BatchPredictor]) -> BatchPredictor:
    """The first predictor of lengths, or of anything, with the heads that only the others have. All read the same texts."""
    first, *others = sorted(parts, key=lambda part: not part.has_length)

    def predict(*columns: Any) -> Predicted:
        predicted = first.predict(*columns)
        for other in others:
            arrays = other.predict(*columns).arrays()
            if (
                predicted.mu is not None
            ):  # a length is of one part alone, whichever of its arrays the others have too
                arrays = {name: values for name, values in arrays.items() if name not in LENGTH_ARRAYS}
            predicted = Predicted(**arrays | predicted.arrays())
        return predicted if first.nu is None else replace(predicted, nu=first.nu)

    urgency, edges = (
        next((value for value in map(attrgetter(name), (first, *others)) if value), ())
        for name in ("urgency_levels", "bucket_edges")
    )
    return replace(first, predict=predict, urgency_levels=urgency, bucket_edges=edges)


def _open_service(address: str, options: InferenceOptions) -> BatchPredictor:
    from predictors.client import SyncPredictor
    from predictors.client.messages import prompt_form

    client = SyncPredictor.of(PredictorAddress.of(address), options.access)
    metadata = client.metadata()
    nu = metadata.nu if metadata.HasField("nu") else None

    def predict(
        prompts: Sequence[str], served_models: Sequence[str | None], temperatures: Sequence[float | None]
    ) -> Predicted:
        first, of_row = distinct(prompts, served_models, temperatures)
        requests = [
            PredictionRequest(
                "", prompts[row], DEFAULT_MAX_TOKENS, served_models[row] or "", temperatures[row]
            )
            for row in first.tolist()
        ]
        predictions: list[Prediction] = []
        for start in options.track(range(0, len(requests), _SERVICE_ROWS)):
            predictions += client.predict(requests[start : start + _SERVICE_ROWS], timeout_s=_SERVICE_S)
        missing = {str(part) for prediction in predictions for part in prediction.missing}
        if missing:
            raise TailcastError(f"predictor {address}: some predictions lack {'; '.join(sorted(missing))}")
        columns_of = {name: np.array(values)[of_row] for name, values in _arrays(predictions).items()}
        predicted = Predicted(**columns_of)
        return predicted if nu is None else replace(predicted, nu=nu)

    return BatchPredictor(
        description={
            "kind": "service",
            "nu": nu,
            "artifact_id": metadata.artifact_id,
            "artifact_version": metadata.artifact_version,
        },
        nu=nu,
        predict=predict,
        has_length="length" in metadata.heads,
        bucket_edges=tuple(metadata.bucket_edges),
        urgency_levels=tuple(metadata.urgency_levels) if "urgency" in metadata.heads else (),
        served_models=tuple(metadata.served_models) if metadata.conditioned_on_served_model else (),
        data={},
        form=prompt_form(metadata),
        folder=Path(address),
    )


def _arrays(predictions: Sequence[Prediction]) -> dict[str, list[Any]]:
    """Numbers of predictions by name, [N] each; those of missing heads are left out."""
    values: dict[str, list[Any]] = {
        "mu": [each.length and each.length.mu for each in predictions],
        "sigma": [each.length and each.length.sigma for each in predictions],
        "nu": [each.length and each.length.nu for each in predictions],
        "quantiles": [each.length and (each.length.quantiles or None) for each in predictions],
        "urgency": [each.urgency and each.urgency.probabilities for each in predictions],
        "bucket": [each.bucket and each.bucket.probabilities for each in predictions],
        "regression_tokens": [each.point and each.point.tokens for each in predictions],
        "rank": [each.rank and each.rank.score for each in predictions],
    }
    return {name: column for name, column in values.items() if None not in column}


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
        has_length="length" in manifest.heads,
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
        has_length=heads.length is not None,
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
