"""Memory of ended requests: a prediction is moved to the lengths of the most similar past requests.

Kernel regression on the residuals of the predictor. Past request j has a unit embedding e_j, a length y_j in ln tokens, and
the prediction mu_j. For a request with embedding e and the prediction ln X = mu + sigma T,

    s_j = e . e_j - 0.3 [other served model] - 0.3 [other system prompt],    w_j = v_j exp((s_j - 1) / 0.15),

and over the `NUM_NEIGHBORS` largest s_j, with W = sum of w_j,

    mu'      = mu + sum of w_j clip(y_j + b (mu - mu_j) - mu, +-4) / (W + 0.5),
    sigma'^2 = sigma^2 (1 + sum of w_j psi_j) / (1 + W),    psi_j = (nu + 1) z_j^2 / (nu + z_j^2),

z_j = (y_j - mu'_j) / sigma_j being the residual of request j when it ended. So without similar requests the prediction
is unchanged. b in [0, 1] is how much of a predicted difference between similar requests is real: the regression, for each
served model, of y - mean of y_j on mu - mean of mu_j with forgetting and a prior of 1.

A censored output (truncated or aborted) is longer than its x tokens. Its y_j is the expectation of ln X given that, and v_j
the fraction F(x) of lengths that it excludes; v_j = 1 for complete outputs.

`python -m benchmarks.lengths` compares it with other online predictors.
"""

import json
import math
import threading
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scheduler_core.lengths.student_t import student_t_cdf, student_t_hazard
from scheduler_core.prediction.predictions import Embedding, LengthPrediction

#: Number of requests that a prediction uses, and width of the kernel.
NUM_NEIGHBORS, WIDTH = 10, 0.15
#: Subtracted from the similarity to a request of another served model, and of another system prompt.
OTHER_MODEL = OTHER_SYSTEM_PROMPT = 0.3
#: Weight of the prediction itself in mu', and largest shift in ln tokens.
CAUTION, MAX_SHIFT = 0.5, 4.0
#: Of the regression for b: weight of the prior, forgetting factor, and largest difference of lengths in ln tokens.
PRIOR, DECAY, MAX_DIFFERENCE = 4.0, 0.998, 3.0
#: A censored output that excludes a smaller fraction of lengths is not kept.
MIN_WEIGHT = 0.05
#: Entries of a served model that are kept when it has changed.
KEPT_AT_CHANGE = 50
#: Entries of the first arrays; they grow by doubling.
_FIRST_SIZE = 64
_COLUMNS = ("log_length", "mu", "weight", "psi")


@dataclass(frozen=True, slots=True)
class Neighbor:
    """A past request: its similarity s (1: same embedding), weight w, output tokens (of a censored one its expectation), the
    median that had been predicted in tokens, served model, and id (empty if it had none)."""

    similarity: float
    weight: float
    output_tokens: float
    predicted_tokens: float
    served_model: str
    request_id: str


@dataclass(frozen=True, slots=True)
class Shift:
    """A moved prediction; `weight` is W, the weight of the past requests in it; `means` are those of y and of mu over them,
    None without past requests."""

    prediction: LengthPrediction
    weight: float
    means: tuple[float, float] | None = None


class Memory:
    """The latest `capacity` ended requests of one tenant. One thread may observe while others predict.

    Embeddings [D] are unit vectors; one of another dimension than before starts an empty memory.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._lock = threading.Lock()
        self._names: dict[str, int] = {}
        #: Sums D R and D D of the regression for b, for each served model.
        self._slopes: dict[str, tuple[float, float]] = {}
        #: Whether all entries have the same served model and system prompt.
        self._one_key = True
        self._allocate(0, 0)

    def __len__(self) -> int:
        return min(self._num_observed, self.capacity)

    def shift(
        self,
        embedding: Embedding,
        served_model: str,
        system_prompt: int,
        prediction: LengthPrediction,
        *,
        observes: bool = False,
    ) -> Shift:
        """The prediction moved to the most similar past requests of any served model. `observes`: called by the thread that
        observes, which needs no lock to read; threads that predict then wait for its writes only."""
        with nullcontext() if observes else self._lock:
            nearest = self._nearest(embedding, served_model, system_prompt)
            if nearest is None:
                return Shift(prediction, 0.0)
            index, weights, _ = nearest
            log_length, mu, psi = (self._columns[name, index] for name in (0, 1, 3))
        total = float(weights.sum())
        means = (float(weights @ log_length) / total, float(weights @ mu) / total) if total > 1e-9 else None
        slope = self.slope(served_model)
        residuals = log_length + slope * (prediction.mu - mu) - prediction.mu
        residuals = np.minimum(np.maximum(residuals, -MAX_SHIFT), MAX_SHIFT)
        moved = prediction.mu + float(weights @ residuals) / (total + CAUTION)
        growth = math.sqrt((1.0 + float(weights @ psi)) / (1.0 + total))
        sigma = min(max(prediction.sigma * growth, 1e-9), 50.0)
        return Shift(prediction.moved(min(max(moved, -50.0), 50.0), sigma), total, means)

    def observe(
        self,
        embedding: Embedding,
        served_model: str,
        system_prompt: int,
        prediction: LengthPrediction,
        shift: Shift,
        output_tokens: int,
        *,
        finished: bool,
        request_id: str = "",
    ) -> None:
        """Adds an ended request with its prediction as made, and `shift` of it just now."""
        log_length, sigma, nu = math.log(output_tokens), prediction.sigma, prediction.nu
        z = (log_length - shift.prediction.mu) / sigma
        weight = 1.0
        if not finished:
            weight = student_t_cdf(z, nu)
            if weight < MIN_WEIGHT:
                return
            mean_above = student_t_hazard(z, nu) * (nu + z * z) / max(nu - 1.0, 0.5)
            z = min(max(mean_above, z), z + MAX_SHIFT / sigma)
            log_length = shift.prediction.mu + sigma * z
        psi = (nu + 1.0) * z * z / (nu + z * z)
        if shift.means is not None:
            self._learn_slope(served_model, shift.means, shift.weight, prediction.mu, log_length)
        with self._lock:
            if len(embedding) != self._embeddings.shape[1]:
                self._allocate(min(_FIRST_SIZE, self.capacity), len(embedding))
            elif self._num_observed == len(self._embeddings) < self.capacity:
                self._resize(min(2 * len(self._embeddings), self.capacity))
            row = self._num_observed % len(self._embeddings)
            self._embeddings[row] = embedding
            self._columns[:, row] = log_length, prediction.mu, weight, psi
            self._keys[:, row] = self._number(served_model), system_prompt
            self._request_ids[row] = request_id
            self._num_observed += 1
            self._one_key = self._one_key and bool((self._keys[:, row] == self._keys[:, 0]).all())

    def neighbors(self, embedding: Embedding, served_model: str, system_prompt: int) -> list[Neighbor]:
        """The most similar past requests, the nearest first."""
        with self._lock:
            nearest = self._nearest(embedding, served_model, system_prompt)
            if nearest is None:
                return []
            index, weights, similarities = nearest
            names = list(self._names)
            rows = zip(
                similarities.tolist(),
                weights.tolist(),
                np.exp(self._columns[:2, index]).T.tolist(),
                [names[number] for number in self._keys[0, index].tolist()],
                [self._request_ids[row] for row in index.tolist()],
                strict=True,
            )
        neighbors = [Neighbor(similarity, weight, *lengths, *of) for similarity, weight, lengths, *of in rows]
        return sorted(neighbors, key=lambda neighbor: -neighbor.similarity)

    def slope(self, served_model: str) -> float:
        """b of a served model."""
        of_differences, of_squares = self._slopes.get(served_model, (0.0, 0.0))
        return min(max((PRIOR + of_differences) / (PRIOR + of_squares), 0.0), 1.0)

    def forget(self, served_model: str) -> bool:
        """Drops all but the newest entries of a served model if they predict each other better than the older entries do;
        returns whether they do, so that the model has changed."""
        number = self._names.get(served_model)
        if number is None:
            return False
        with self._lock:
            order = self._order()
            own = self._keys[0, order] == number
            newest = np.flatnonzero(own)[-KEPT_AT_CHANGE:]
            old = order[: newest[0]] if len(newest) else order[:0]
            if not len(old) or self._mean_error(order[newest], old) <= self._mean_error(order[newest], None):
                return False
            own[newest] = False
            self._keep(order[~own])
            self._slopes.pop(served_model, None)
        return True

    def _mean_error(self, rows: NDArray[np.intp], others: NDArray[np.intp] | None) -> float:
        """Mean |y - mu'| of entries, mu' being from the entries `others`, or (None) from the rest of them."""
        similarities = self._embeddings[rows] @ self._embeddings[rows if others is None else others].T
        if others is None:
            np.fill_diagonal(similarities, -np.inf)
            others = rows
        index = np.argsort(-similarities, axis=1)[:, :NUM_NEIGHBORS]
        weights = np.exp((np.take_along_axis(similarities, index, 1) - 1.0) / WIDTH)
        weights = weights * self._columns[2, others[index]]
        log_length, mu = self._columns[:2, rows, None]
        residuals = self._columns[0, others[index]] - mu
        shift = (weights * residuals.clip(-MAX_SHIFT, MAX_SHIFT)).sum(1) / (weights.sum(1) + CAUTION)
        return float(np.abs(log_length[:, 0] - mu[:, 0] - shift).mean())

    def drop(self, served_model: str) -> None:
        """Forgets the slope of a served model that is no longer corrected; its entries remain."""
        self._slopes.pop(served_model, None)

    def state(self) -> dict[str, Any]:
        """Entries from the oldest to the newest: arrays, of which `request_ids` is JSON in UTF-8, and JSON content."""
        with self._lock:
            order = self._order()
            request_ids = [self._request_ids[row] for row in order.tolist()]
            state = {
                "embeddings": self._embeddings[order].astype(np.float16),
                "columns": self._columns[:, order].astype(np.float32),
                "keys": self._keys[:, order],
                "served_models": list(self._names),
                "slopes": {name: list(sums) for name, sums in self._slopes.items()},
            }
        return state | {"request_ids": np.frombuffer(json.dumps(request_ids).encode(), np.uint8)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores a `state`, at most its newest `capacity` entries. Raises an error if it is invalid."""
        embeddings = np.asarray(state["embeddings"], np.float32)[-self.capacity :]
        columns = np.asarray(state["columns"], np.float64)[:, -self.capacity :]
        num = len(embeddings)
        keys = np.asarray(state["keys"], np.int64)[:, -self.capacity :]
        names = list(state["served_models"])
        ids = json.loads(np.asarray(state["request_ids"], np.uint8).tobytes())[-self.capacity :]
        if embeddings.ndim != 2 or columns.shape != (len(_COLUMNS), num) or keys.shape != (2, num):
            raise ValueError("embeddings, columns, keys")
        if len(ids) != num or not all(isinstance(text, str) for text in (*names, *ids)):
            raise ValueError("served_models, request_ids")
        if len(set(names)) != len(names) or not ((keys[0] >= 0) & (keys[0] < len(names))).all():
            raise ValueError("served_models, keys")
        log_length, mu, weight, psi = columns
        valid = np.isfinite(embeddings).all() and np.isfinite(columns).all()
        norms = np.linalg.norm(embeddings, axis=1)
        in_range = (abs(log_length) <= 150).all() and (abs(mu) <= 50).all() and (psi >= 0).all()
        if not (valid and in_range and (norms < 1.01).all() and ((weight > 0) & (weight <= 1)).all()):
            raise ValueError("embeddings, columns")
        slopes = {str(name): (float(one), float(two)) for name, (one, two) in state["slopes"].items()}
        if not all(math.isfinite(one) and 0 <= two < math.inf for one, two in slopes.values()):
            raise ValueError("slopes")
        with self._lock:
            self._allocate(max(num, 1), embeddings.shape[1])
            self._embeddings[:num], self._columns[:, :num] = embeddings, columns
            self._names.update({name: number for number, name in enumerate(names)})
            self._keys[:, :num] = keys
            self._request_ids[:num] = ids
            self._num_observed = num
            self._one_key = bool((self._keys[:, :num] == self._keys[:, :1]).all())
            self._slopes = slopes

    def _nearest(
        self, embedding: Embedding, served_model: str, system_prompt: int
    ) -> tuple[NDArray[np.intp], NDArray[np.float64], NDArray[np.float32]] | None:
        """Rows, weights and similarities of the nearest entries; None if there are none."""
        num = min(self._num_observed, len(self._embeddings))
        if not num or len(embedding) != self._embeddings.shape[1]:
            return None
        similarities = self._embeddings[:num] @ embedding
        number = self._names.get(served_model, -1)
        if not (self._one_key and number == self._keys[0, 0] and system_prompt == self._keys[1, 0]):
            similarities -= np.float32(OTHER_MODEL) * (self._keys[0, :num] != number)
            similarities -= np.float32(OTHER_SYSTEM_PROMPT) * (self._keys[1, :num] != system_prompt)
        first = max(num - NUM_NEIGHBORS, 0)
        index = np.argpartition(similarities, first)[first:] if first else np.arange(num)
        similarities = similarities[index]
        weights = self._columns[2, index] * np.exp((similarities.astype(np.float64) - 1.0) / WIDTH)
        return index, weights, similarities

    def _learn_slope(
        self, served_model: str, means: tuple[float, float], weight: float, mu: float, log_length: float
    ) -> None:
        mean_length, mean_mu = means
        difference = min(max(log_length - mean_length, -MAX_DIFFERENCE), MAX_DIFFERENCE)
        use, gap = min(weight, 1.0), mu - mean_mu
        one, two = self._slopes.get(served_model, (0.0, 0.0))
        self._slopes[served_model] = (
            DECAY * one + use * gap * difference,
            DECAY * two + use * gap * gap,
        )

    def _number(self, served_model: str) -> int:
        """Number of a served model; numbers that no entry has any more are given back from time to time."""
        number = self._names.get(served_model)
        if number is None:
            if len(self._names) >= 2 * _FIRST_SIZE:
                used, self._keys[0] = np.unique(self._keys[0], return_inverse=True)
                names = list(self._names)
                self._names = {names[old]: new for new, old in enumerate(used.tolist())}
            number = self._names[served_model] = len(self._names)
        return number

    def _order(self) -> NDArray[np.intp]:
        """Rows from the oldest to the newest."""
        size = len(self._embeddings)
        if self._num_observed <= size:
            return np.arange(self._num_observed)
        return np.roll(np.arange(size), -(self._num_observed % size))

    def _allocate(self, size: int, dimension: int) -> None:
        """An empty memory."""
        self._embeddings = np.zeros((size, dimension), np.float32)
        self._columns = np.zeros((len(_COLUMNS), size))
        #: Number of the served model, and key of the system prompt.
        self._keys = np.zeros((2, size), np.int64)
        self._request_ids = [""] * size
        self._num_observed = 0
        self._names.clear()
        self._one_key = True

    def _resize(self, size: int) -> None:
        self._keep(np.arange(self._num_observed), size)

    def _keep(self, rows: NDArray[np.intp], size: int | None = None) -> None:
        """Keeps some entries, in this order, in arrays of `size` (None: as large as now)."""
        size = len(self._embeddings) if size is None else size
        old = self._embeddings[rows], self._columns[:, rows], self._keys[:, rows]
        ids, names = [self._request_ids[row] for row in rows.tolist()], dict(self._names)
        self._allocate(size, old[0].shape[1])
        num = len(rows)
        self._embeddings[:num], self._columns[:, :num], self._keys[:, :num] = old
        self._request_ids[:num] = ids
        self._names.update(names)
        self._num_observed = num
        self._one_key = bool((self._keys[:, :num] == self._keys[:, :1]).all())
