"""From the pipeline's prediction to the messages of the interface."""

from __future__ import annotations

from collections.abc import Sequence

from predictors.artifact import Manifest
from predictors.proto import predictor_v1_pb2 as pb
from predictors.service.capped import capped_length
from predictors.service.pipeline import Prediction
from scheduler_core.errors import InputError, TailcastError
from scheduler_core.urgency import effective_level


def predict_response(
    request: pb.PredictRequest, prediction: Prediction, manifest: Manifest, *, knows_model: bool
) -> pb.PredictResponse:
    """The answer to a request that was found right.

    Args:
        request: What was asked.
        prediction: What was found.
        manifest: Of the artifact that predicted.
        knows_model: Whether the artifact was trained on answers of the request's served_model.

    Raises:
        TailcastError: The model's urgency is no distribution.
    """
    found = prediction.found
    response = pb.PredictResponse(
        request_id=request.request_id,
        mu=found.mu,
        sigma=found.sigma,
        nu=found.nu,
        artifact_id=manifest.artifact_id,
        artifact_version=manifest.artifact_version,
        prompt_tokens=prediction.prompt_tokens,
        truncated=prediction.truncated,
        durations=pb.Durations(
            tokenise_ns=round(prediction.tokenise_s * 1e9),
            queue_ns=round(prediction.queue_s * 1e9),
            inference_ns=round(prediction.inference_s * 1e9),
            batch_size=prediction.batch_size,
        ),
        bucket_probabilities=found.bucket,
        bucket=None if found.bucket is None else most_likely(found.bucket),
        regression_tokens=found.regression_tokens,
        rank=found.rank,
        sigma_within=found.sigma_within,
        cached=prediction.cached,
    )
    if manifest.conditioning is not None:
        response.served_model_known = knows_model
    if found.urgency is not None:
        declared = request.declared_tier if request.HasField("declared_tier") else None
        response.urgency.CopyFrom(urgency(found.urgency, manifest.abstain_threshold, declared))
    if request.HasField("max_tokens") and found.mu is not None:
        assert found.sigma is not None and found.nu is not None  # noqa: PT018
        numbers = capped_length(
            found.mu,
            found.sigma,
            found.nu,
            max_tokens=request.max_tokens,
            cvar_level=request.cvar_level if request.HasField("cvar_level") else None,
            levels=request.quantile_levels,
        )
        response.capped.CopyFrom(numbers)
    return response


def urgency(
    probabilities: Sequence[float], abstain_threshold: float | None, declared_tier: int | None = None
) -> pb.Urgency:
    """The likeliest level (the more urgent one of two equally likely ones), and whether it is likely enough.

    Args:
        probabilities: Of the levels, the most urgent first.
        abstain_threshold: The manifest's: lowest probability of the likeliest level that counts as an answer; None:
            any; 1: none, even one that rounding made certain.
        declared_tier: The tier that the client declared; with it the level to schedule at is told.

    Raises:
        TailcastError: The probabilities are no distribution.
    """
    threshold = scheduling_threshold(abstain_threshold)
    highest = max(probabilities)
    message = pb.Urgency(
        probabilities=probabilities,
        level=most_likely(probabilities),
        abstain=threshold is None or highest < threshold,
    )
    if declared_tier is not None:
        try:
            message.effective_level = int(effective_level(probabilities, declared_tier, threshold))
        except InputError as error:
            raise TailcastError(f"the model gave urgency = {list(probabilities)}: {error}") from error
    return message


def scheduling_threshold(abstain_threshold: float | None) -> float | None:
    """The manifest's threshold in the words of `scheduler_core.urgency`, where None means always to abstain.

    In the manifest None means always to answer, and 1 never to.
    """
    if abstain_threshold is None:
        return 0.0
    return None if abstain_threshold >= 1 else abstain_threshold


def most_likely(probabilities: Sequence[float]) -> int:
    """Position of the highest probability, the first of equal ones."""
    return max(range(len(probabilities)), key=probabilities.__getitem__)
