"""The predictor `tiny`: output lengths in the scheduler's own thread; needs numpy and tokenizers alone.

A prompt of 400 characters takes less than 100 microseconds where the tables are in the processor's caches, some 0.4 ms
where they are not (benchmarks/tiny_predictor.py).
Tables hold a vector for each token, each pair of neighbors (hashed) and each combination of a prompt's first three tokens
(hashed); their sums over the prompt, scaled by the root of their number, and the logarithm of the number of tokens are the
input of a network with two hidden layers, which gives mu and ln sigma for every served model. Hashed n-grams as in Joulin
et al. (2016, arXiv:1607.01759); it is distilled from tailcast-minilm by `python -m examples.pretrained.tiny`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from predictors.pretrained import TINY, shipped_folder
from predictors.tokenizer import PromptTokenizer
from scheduler_core.errors import InputError, MissingExtraError
from scheduler_core.files import existing_file, sha256_file
from scheduler_core.json_text import read_json_object, valid_unicode
from scheduler_core.predictions import LengthPrediction, Prediction
from scheduler_core.predictor import PredictionRequest

#: File of the weights in an artifact folder, in the place of model.onnx.
WEIGHTS = "model.npz"
#: Stands in the manifest's opset; changes with the features below.
OPSET = {"tailcast.tiny": 1}
#: Tables of vectors, and layers of the network, by their names in the file.
TABLES = ("token", "pair", "start")
LAYERS = ("hidden_1", "hidden_2", "output")
#: Of Fibonacci hashing: the highest bits of the product are the hash.
_MULTIPLIER = 0x9E3779B97F4A7C15

Floats = NDArray[np.float32]
Integers = NDArray[np.int64]


def hashed_pairs(ids: Integers, num_buckets: int) -> Integers:
    """Row of each pair of neighbors in a table of `num_buckets` rows, a power of 2: [n] token ids to [n - 1]."""
    keys = (ids[:-1] * 2**20 + ids[1:]).view(np.uint64)
    keys *= np.uint64(_MULTIPLIER)
    keys >>= np.uint64(65 - num_buckets.bit_length())
    return keys.view(np.int64)


def hashed_starts(ids: Integers, num_buckets: int) -> list[int]:
    """Rows of the first three tokens, alone, in pairs and together [6], in a table as of `hashed_pairs`."""
    first, second, third = (*(ids[:3] + 1).tolist(), 0, 0, 0)[:3]
    second, third = second << 20, third << 40
    keys = (first, second, third, first + second, second + third, first + second + third)
    shift = 65 - num_buckets.bit_length()
    return [(key * _MULTIPLIER & 2**64 - 1) >> shift for key in keys]


def length_features(num_tokens: Any) -> list[Any]:
    """A prompt's number of tokens (a number or an array) as three inputs of the network."""
    log = np.log1p(num_tokens) - 4
    return [log, np.maximum(log, 0), np.maximum(log - 1.5, 0)]


class TinyModel:
    """Token ids to mu and sigma; its calls may come from several threads at a time.

    The file has `TABLES` as int8 with a scale for each row, `LAYERS` as weight and bias in float16; InputError for another.
    """

    def __init__(self, path: Path) -> None:
        try:
            with open(path, "rb") as stream, np.load(stream, allow_pickle=False) as file:
                content: Mapping[str, NDArray[Any]] = {name: file[name] for name in file.files}
            tables = [content[name] * content[f"{name}_scale"].astype(np.float32) for name in TABLES]
            self._token, self._pair, self._start = tables
            (self._first, self._second, self._output) = (
                (content[f"{name}_weight"].astype(np.float32), content[f"{name}_bias"].astype(np.float32))
                for name in LAYERS
            )
            self(np.arange(3), len(self._output[1]) - 1)  # do their shapes fit each other?
        except (OSError, EOFError, KeyError, ValueError, TypeError, IndexError, BadZipFile) as error:
            allowed = f"a whole file of the weights of a tiny predictor ({type(error).__name__}: {error})"
            raise InputError(f"artifact file {path.name}", str(path), allowed) from error

    def __call__(self, ids: Integers, served_model: int) -> tuple[float, float]:
        """mu and sigma in log tokens of token ids [n], n >= 0; a served model is 1 + its position in the manifest, 0 = unknown."""
        num_tokens = len(ids)
        pairs, starts = hashed_pairs(ids, len(self._pair)), hashed_starts(ids, len(self._start))
        features = np.concatenate((
            self._token.take(ids, 0).sum(0) * max(num_tokens, 1) ** -0.5,
            self._pair.take(pairs, 0).sum(0) * max(num_tokens - 1, 1) ** -0.5,
            self._start.take(starts, 0).sum(0),
            length_features(num_tokens),
        ), dtype=np.float32)  # fmt: skip
        for weight, bias in (self._first, self._second):
            features = features @ weight
            features += bias
            np.maximum(features, 0, out=features)
        mu, log_sigma = (self._output[0][served_model] @ features + self._output[1][served_model]).tolist()
        return mu, math.exp(log_sigma)


class TinySession:
    """A `TinyModel` with the interface of an ONNX Runtime session, for `predictors.runtime`."""

    def __init__(self, path: Path) -> None:
        self._model = TinyModel(path)

    def get_providers(self) -> list[str]:
        """Where it runs, by ONNX Runtime's name."""
        return ["CPUExecutionProvider"]

    def run(self, names: Sequence[str], feed: Mapping[str, NDArray[Any]]) -> list[Floats]:
        """The outputs mu and sigma [B] of B prompts; arguments as of an ONNX Runtime session."""
        rows = zip(feed["input_ids"], feed["attention_mask"], feed["served_model"].tolist(), strict=True)
        outputs = [self._model(ids[mask > 0], served_model) for ids, mask, served_model in rows]
        columns = dict(zip(("mu", "sigma"), np.array(outputs, dtype=np.float32).T, strict=True))
        return [columns[name] for name in names]


class TinyPredictor:
    """A `scheduler_core.predictor.Predictor` that calculates where it is called; `length` is the same without an event loop.

    InputError if a file of the artifact folder is missing, or differs from the manifest in its SHA-256.
    """

    def __init__(self, folder: Path) -> None:
        manifest = read_json_object(folder / "manifest.json", "artifact manifest")
        for name in (WEIGHTS, "tokenizer.json"):
            digest = sha256_file(existing_file(folder / name, "artifact"))
            if digest != (expected := manifest["files"].get(name)):
                allowed = f"{expected}, as in manifest.json"
                raise InputError(f"artifact file {name}", f"SHA-256 {digest}", allowed)
        self._model = TinyModel(folder / WEIGHTS)
        try:
            self._tokenizer = PromptTokenizer(
                folder / "tokenizer.json",
                max_length=manifest["max_length"],
                truncation_side=manifest["truncation_side"],
            )
        except ModuleNotFoundError as error:
            raise MissingExtraError("tokenizers", "predict") from error
        self._numbers = {name: number for number, name in enumerate(manifest["served_models"], 1)}
        self._nu: float = manifest["nu"]
        self._artifact = (manifest["artifact_id"], manifest["artifact_version"])

    def length(self, prompt: str, served_model: str = "") -> LengthPrediction:
        """The predicted length of a response; a served model that is not in the manifest is unknown. TailcastError if the
        prompt is no text, or the numbers are none that a scheduler can use."""
        [tokens] = self._tokenizer([prompt])
        mu, sigma = self._model(tokens.ids, self._numbers.get(served_model, 0))
        return LengthPrediction(mu, sigma, self._nu, *self._artifact)

    async def predict(self, requests: Sequence[PredictionRequest]) -> list[Prediction]:
        """One prediction for each request, in their order; raises as `length`."""
        texts = [(valid_unicode(request.prompt), request.served_model) for request in requests]
        return [Prediction(length=self.length(*text)) for text in texts]

    async def close(self) -> None:
        """Does nothing: there is nothing to close."""


def load(predictor: str = TINY) -> TinyPredictor:
    """The tiny predictor that comes with tailcast; raises as `TinyPredictor` and `shipped_folder`."""
    return TinyPredictor(shipped_folder(predictor))
