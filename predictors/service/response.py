"""From the pipeline's prediction to the messages of the interface."""

from __future__ import annotations

from collections.abc import Sequence

from predictors.artifact import Manifest
from predictors.proto import predictor_v1_pb2 as pb
from predictors.service.capped import capped_length
from predictors.service.pipeline import Prediction


def predict_response(
    request: pb.PredictRequest, prediction: Prediction, manifest: Manifest
) -> pb.PredictResponse:
    """The answer to a request that was found right."""
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
        regression_tokens=found.regression_tokens,
        rank=found.rank,
        sigma_within=found.sigma_within,
    )
    if manifest.conditioning is not None:
        response.served_model_known = manifest.served_model_number(request.served_model) > 0
    if found.urgency is not None:
        response.urgency.CopyFrom(urgency(found.urgency, manifest.abstain_threshold))
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


def urgency(probabilities: Sequence[float], abstain_threshold: float | None) -> pb.Urgency:
    """The likeliest level (the more urgent one of two equally likely ones), and whether it is likely enough.

    Args:
        probabilities: Of the levels, the most urgent first.
        abstain_threshold: Lowest probability of the likeliest level that counts as an answer; None: any; 1: none, even
            one that rounding made certain.
    """
    highest = max(probabilities)
    abstain = abstain_threshold is not None and (highest < abstain_threshold or abstain_threshold >= 1)
    return pb.Urgency(
        probabilities=probabilities,
        level=list(probabilities).index(highest),
        abstain=abstain,
    )
