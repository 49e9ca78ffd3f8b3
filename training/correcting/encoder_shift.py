"""A shift of mu that is linear in the encoder features of a prompt, for one served model.

It makes predictions of several applications behind one name follow their lengths, which the eight coefficients of a
`Correction` cannot: they depend on the prediction alone. The weights are a MAP estimate of the same likelihood.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray

from data_gen.splits import unit_hash
from predictors.runtime import ArtifactRuntime
from scheduler_core.lengths.student_t import student_t_cdf, student_t_hazard
from scheduler_core.prediction.outcome import Outcome
from training.evaluating.split_runtime import load_graph, session_of

FloatArray = NDArray[np.float64]
FOLDS = 5
NUM_COMPONENTS = 64
#: Standard deviations of the normal priors, in log tokens: of the constant, and of the effect of each principal component of
#: the features, which are scaled to a joint variance of 1.
_PRIOR_CONSTANT, _PRIOR_COMPONENT = 2.0, 1.0
_STEPS = 50
#: Operators that multiply by weights, or quantize the input of an int8 product.
_PRODUCTS = frozenset(
    {"Gemm", "MatMul", "FusedGemm", "FusedMatMul", "DynamicQuantizeLinear", "DynamicQuantizeMatMul"}
)
_BATCH = 8


@dataclass(frozen=True, slots=True, eq=False)
class EncoderShift:
    """mu' = mu + constant + weights . h, with the features h [F] of the prompt; log tokens."""

    constant: float
    weights: FloatArray

    def moved(self, outcomes: Sequence[Outcome], features: FloatArray) -> list[Outcome]:
        """The outcomes [N] with shifted predictions; features [N, F]."""
        return _moved(outcomes, self.constant + features @ self.weights)


class FeatureRuntime:
    """Reads the input features of an artifact's heads.

    Attributes:
        tensor: Name of the features in the graph; None: no tensor of shape [batch, F] was found.
    """

    def __init__(self, runtime: ArtifactRuntime, threads: int) -> None:
        self._runtime, self._threads = runtime, threads
        self.tensor = self._find()

    def features(self, prompts: Sequence[str]) -> FloatArray:
        """Features of prompts [N, F]."""
        assert self.tensor is not None
        session = self._open([self.tensor])
        tokenized = [each.ids for each in self._runtime.tokenizer(list(prompts))]
        order = sorted(range(len(prompts)), key=lambda row: len(tokenized[row]))
        parts = [
            session.run([self.tensor], self._feed([tokenized[row] for row in order[start : start + _BATCH]]))[
                0
            ]
            for start in range(0, len(order), _BATCH)
        ]
        return np.concatenate(parts)[np.argsort(order)].astype(np.float64)

    def _find(self) -> str | None:
        """Name of the first tensor of shape [batch, F] that depends on the prompt and is multiplied by weights."""
        graph = load_graph(self._runtime).graph
        outer = {each.name for each in (*graph.input, *graph.initializer, *graph.output)}
        names = [node.input[0] for node in graph.node if node.op_type in _PRODUCTS]
        names = [name for name in dict.fromkeys(names) if name not in outer]
        if not names:
            return None
        feed = self._feed([np.array([token, token, 1]) for token in (2, 3, 5)])
        for name, value in zip(names, self._open(names).run(names, feed), strict=True):
            if (
                value.ndim == 2
                and len(value) == 3
                and value.dtype == np.float32
                and np.ptp(value, axis=0).any()
            ):
                return str(name)
        return None

    def _feed(self, prompts: Sequence[NDArray[np.int64]]) -> dict[str, NDArray[np.generic]]:
        model: list[str | None] = [*self._runtime.artifact.manifest.served_models, None][:1]
        return self._runtime.feed(prompts, model * len(prompts))

    def _open(self, tensors: list[str]) -> ort.InferenceSession:
        """A session of the whole graph that can also return these inner tensors."""
        model = load_graph(self._runtime)
        model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in tensors)
        return session_of(self._runtime, model, self._threads)


def fit_shift(
    outcomes: Sequence[Outcome], sigma: FloatArray, features: FloatArray
) -> tuple[EncoderShift, list[Outcome]]:
    """The shift that fits all outcomes [N], and the outcomes with shifts that were fitted without their prompts.

    `sigma` is the scale of the residuals, log tokens [N]: with as many weights as outcomes it cannot be fitted with them.
    """
    shifts = np.zeros(len(outcomes))
    fold = np.array([int(FOLDS * unit_hash(f"fold\x00{outcome.prompt}")) for outcome in outcomes])
    for number in np.unique(fold):
        rows = fold == number
        others = [outcome for outcome, is_out in zip(outcomes, rows, strict=True) if not is_out]
        part = _fit(others, sigma[~rows], features[~rows])
        shifts[rows] = part.constant + features[rows] @ part.weights
    return _fit(outcomes, sigma, features), _moved(outcomes, shifts)


def _fit(outcomes: Sequence[Outcome], sigma: FloatArray, features: FloatArray) -> EncoderShift:
    """Repeated scoring steps of the location (see `scheduler_core.prediction.linear_correction`) with principal components."""
    middle, size = features.mean(axis=0), features.std(axis=0)
    size = np.where(size < 1e-6, np.inf, size * np.sqrt(features.shape[1]))
    standardized = (features - middle) / size
    axes = np.linalg.svd(standardized, full_matrices=False)[2][:NUM_COMPONENTS]
    columns = np.column_stack([np.ones(len(features)), standardized @ axes.T])
    precision = np.full(columns.shape[1], _PRIOR_COMPONENT**-2.0)
    precision[0] = _PRIOR_CONSTANT**-2.0
    mu, nu = np.array([(each.mu, each.nu) for outcome in outcomes if (each := outcome.prediction)]).T
    gap = np.log([outcome.output_tokens for outcome in outcomes]) - mu
    censored = np.flatnonzero([not outcome.is_finished for outcome in outcomes]).tolist()
    effects = np.zeros(columns.shape[1])
    for _ in range(_STEPS):
        residual = (gap - columns @ effects) / sigma
        weight = (nu + 1) / (nu + residual**2)
        score = weight * residual
        for row in censored:
            score[row] = student_t_hazard(residual[row], nu[row])
            weight[row] = student_t_cdf(residual[row], nu[row])
        information = weight * (nu + 1) / (nu + 3) / sigma**2
        gradient = columns.T @ (score / sigma) - precision * effects
        step = np.linalg.solve((columns.T * information) @ columns + np.diag(precision), gradient)
        effects += step
        if np.abs(step).max() < 1e-4:
            break
    weights = effects[1:] @ axes / size
    return EncoderShift(float(effects[0] - weights @ middle), weights)


def _moved(outcomes: Sequence[Outcome], shifts: FloatArray) -> list[Outcome]:
    moved = []
    for outcome, shift in zip(outcomes, shifts.tolist(), strict=True):
        prediction = outcome.prediction
        assert prediction is not None
        mu = min(max(prediction.mu + shift, -50.0), 50.0)
        moved.append(replace(outcome, prediction=prediction.moved(mu, prediction.sigma)))
    return moved
