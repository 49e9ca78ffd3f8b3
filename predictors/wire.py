"""A prediction as fields of the service's response, and back."""

from __future__ import annotations

from typing import Any

import numpy as np

from predictors.proto import predictor_v1_pb2 as pb
from scheduler_core.errors import InputError
from scheduler_core.prediction.predictions import (
    BucketPrediction,
    Embedding,
    LengthPrediction,
    MissingPart,
    PointPrediction,
    Prediction,
    RankPrediction,
    UrgencyPrediction,
)

MAX_EMBEDDING = 4096


def response_fields(prediction: Prediction) -> dict[str, Any]:
    """Fields of a `PredictResponse` that `prediction_of` reads; those of missing heads are unset."""
    fields: dict[str, Any] = {}
    if (length := prediction.length) is not None:
        fields |= {"mu": length.mu, "sigma": length.sigma, "nu": length.nu, "quantiles": length.quantiles}
    if (urgency := prediction.urgency) is not None:
        fields["urgency"] = pb.Urgency(
            probabilities=urgency.probabilities,
            level=urgency.level,
            abstain=urgency.abstains,
            abstain_threshold=urgency.abstain_threshold,
        )
    if (bucket := prediction.bucket) is not None:
        fields["bucket_probabilities"] = bucket.probabilities
        fields["bucket_edges"] = bucket.edges
        fields["bucket"] = bucket.bucket
    if prediction.point is not None:
        fields["regression_tokens"] = prediction.point.tokens
    if prediction.rank is not None:
        fields["rank"] = prediction.rank.score
    if prediction.missing:
        fields["missing"] = [pb.MissingPart(part=part, reason=reason) for part, reason in prediction.missing]
    if prediction.embedding is not None:
        fields["embedding"] = prediction.embedding.astype("<f2").tobytes()
    return fields


def prediction_of(response: pb.PredictResponse) -> Prediction:
    """The prediction in a response; InputError for values out of range."""
    length = urgency = bucket = rank = point = None
    if response.HasField("mu"):
        artifact = (response.artifact_id, response.artifact_version)
        parameters = (response.mu, response.sigma, response.nu)
        length = LengthPrediction(*parameters, *artifact, tuple(response.quantiles))
    if response.HasField("urgency"):
        threshold = response.urgency.abstain_threshold
        urgency = UrgencyPrediction(
            tuple(response.urgency.probabilities),
            threshold if response.urgency.HasField("abstain_threshold") else None,
        )
    if response.bucket_probabilities:
        bucket = BucketPrediction(tuple(response.bucket_probabilities), tuple(response.bucket_edges))
    if response.HasField("rank"):
        rank = RankPrediction(response.rank)
    if response.HasField("regression_tokens"):
        point = PointPrediction(max(response.regression_tokens, 1.0))  # an output has at least one token
    return Prediction(
        length=length,
        urgency=urgency,
        bucket=bucket,
        rank=rank,
        point=point,
        prompt_tokens=None if response.truncated else response.prompt_tokens or None,
        prompt_chars=response.prompt_chars or None,
        embedding=_embedding(response.embedding),
        missing=tuple(MissingPart(each.part, each.reason) for each in response.missing),
    )


def _embedding(data: bytes) -> Embedding | None:
    if not data:
        return None
    if len(data) % 2 or len(data) > 2 * MAX_EMBEDDING:
        raise InputError("embedding", f"{len(data)} bytes", f"at most {MAX_EMBEDDING} numbers of 2 bytes")
    return np.frombuffer(data, "<f2").astype(np.float32)
