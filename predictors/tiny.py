"""The predictor `tiny`: output lengths in the thread of the scheduler; needs only numpy and tokenizers.

A prompt of 400 characters takes 0.17 ms (`benchmarks.predictors.tiny`). Tables have a vector for
each token, each (hashed) pair of neighbors and each (hashed) combination of the first three tokens. Their sums
over the prompt, divided by the square root of their number, and features of the number of tokens are the input of
a network with two hidden layers and the outputs mu and ln sigma for every served model. Hashed n-grams are from
Joulin et al. (2016, arXiv:1607.01759). `python -m examples.pretrained.tiny` distills it from tailcast-minilm.

For the memory of past requests, the vectors of the tokens and the first hidden layer also give an embedding of 64 numbers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from predictors.pretrained import TINY, predictor_folder
from predictors.tokenizer import PromptTokenizer
from scheduler_core.errors import InputError, MissingExtraError
from scheduler_core.prediction.predictions import Embedding, LengthPrediction, Prediction
from scheduler_core.prediction.predictor import PredictionRequest, Predictor
from scheduler_core.prediction.prompt_text import PartTokens, PromptForm
from scheduler_core.prediction.requested_amount import with_amount
from scheduler_core.shell.files import existing_file, sha256_file
from scheduler_core.shell.json_text import read_json_object, valid_unicode

#: File of the weights in an artifact folder, instead of model.onnx.
WEIGHTS = "model.npz"
#: `opset` of the manifest; changes with the features below.
OPSET = {"tailcast.tiny": 1}
#: Names of tables and layers in the file.
TABLES = ("token", "pair", "start")
LAYERS = ("hidden_1", "hidden_2", "output")
#: Arrays of the embedding, which a file may lack.
EMBEDDING = ("embedding_center", "embedding_weight", "embedding_bias")
#: Pattern of tokens: words without digits, numbers, line breaks, and every other sign or CJK character by itself.
PATTERN = r"[^\W\d぀-ヿ一-鿿가-힣]+|\d+|\n+|[^\w\s]|\w"
#: Multiplier of Fibonacci hashing; the highest bits of the product are the hash.
_MULTIPLIER = 0x9E3779B97F4A7C15
#: Characters per token of the maximum length, up to which `AsciiTokenizer` tries a text.
_MAX_ASCII = 8

Floats = NDArray[np.float32]
Integers = NDArray[np.int64]


def hashed_pairs(ids: Integers, num_buckets: int) -> Integers:
    """Table row of each pair of neighbors: token ids [n] -> [n - 1]. `num_buckets` is a power of 2."""
    keys = (ids[:-1] * 2**20 + ids[1:]).view(np.uint64)
    keys *= np.uint64(_MULTIPLIER)
    keys >>= np.uint64(65 - num_buckets.bit_length())
    return keys.view(np.int64)


def hashed_starts(ids: Integers, num_buckets: int) -> list[int]:
    """Table rows [6] of the first three tokens, single, in pairs and together; see `hashed_pairs`."""
    first, second, third = (*(ids[:3] + 1).tolist(), 0, 0, 0)[:3]
    second, third = second << 20, third << 40
    keys = (first, second, third, first + second, second + third, first + second + third)
    shift = 65 - num_buckets.bit_length()
    return [(key * _MULTIPLIER & 2**64 - 1) >> shift for key in keys]


def length_features(num_tokens: Any) -> list[Any]:
    """Three features of the number of tokens of a prompt (a number or an array)."""
    log = np.log1p(num_tokens) - 4
    return [log, np.maximum(log, 0), np.maximum(log - 1.5, 0)]


class TinyModel:
    """Network from token ids to mu and sigma; thread-safe. InputError for an invalid file.

    The file has `TABLES` as int8 with a scale per row, `LAYERS` as weight and bias in float16, and may have `EMBEDDING`.
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
            arrays = [content[name].astype(np.float32) for name in EMBEDDING if name in content]
            self._embedding = (arrays[0], arrays[1], arrays[2]) if arrays else None
            self.predict(np.arange(3), len(self._output[1]) - 1)  # verify that the shapes match
        except Exception as error:  # numpy, zipfile, zlib and tokenize share no base class
            allowed = f"a complete weights file of a tiny predictor ({type(error).__name__}: {error})"
            raise InputError(f"artifact file {path.name}", str(path), allowed) from error

    def __call__(self, ids: Integers, served_model: int) -> tuple[float, float]:
        """mu and sigma in log tokens from token ids [n]; served_model is 1 + its index, 0 = unknown."""
        return self._parameters(self._hidden(self._features(ids)), served_model)

    def predict(self, ids: Integers, served_model: int) -> tuple[float, float, Embedding | None]:
        """mu, sigma and the embedding [D], a unit vector; None if the file has none."""
        features = self._features(ids)
        hidden = self._hidden(features)
        embedding = None if self._embedding is None else self._embed(features, hidden)
        return *self._parameters(hidden, served_model), embedding

    def inputs_of_embedding(self, ids: Integers) -> tuple[Floats, Floats]:
        """The two parts of the input of the embedding: vectors of tokens [T] and first hidden layer [H]."""
        features = self._features(ids)
        return features[: self._token.shape[1]], self._hidden(features)

    def _features(self, ids: Integers) -> Floats:
        num_tokens = len(ids)
        pairs, starts = hashed_pairs(ids, len(self._pair)), hashed_starts(ids, len(self._start))
        log = math.log1p(num_tokens) - 4  # as length_features, which is slow for one number
        return np.concatenate((
            self._token.take(ids, 0).sum(0) * max(num_tokens, 1) ** -0.5,
            self._pair.take(pairs, 0).sum(0) * max(num_tokens - 1, 1) ** -0.5,
            self._start.take(starts, 0).sum(0),
            (log, max(log, 0.0), max(log - 1.5, 0.0)),
        ), dtype=np.float32)  # fmt: skip

    def _hidden(self, features: Floats) -> Floats:
        hidden = features @ self._first[0]
        hidden += self._first[1]
        np.maximum(hidden, 0, out=hidden)
        return hidden

    def _parameters(self, hidden: Floats, served_model: int) -> tuple[float, float]:
        last = hidden @ self._second[0]
        last += self._second[1]
        np.maximum(last, 0, out=last)
        mu, log_sigma = (self._output[0][served_model] @ last + self._output[1][served_model]).tolist()
        return mu, math.exp(log_sigma)

    def _embed(self, features: Floats, hidden: Floats) -> Embedding:
        assert self._embedding is not None
        center, weight, bias = self._embedding
        parts = embedding_input(features[: self._token.shape[1]], hidden, center)
        return unit_vector(parts @ weight + bias)


def unit_vector(values: Floats) -> Floats:
    """The vector [D] divided by its length; zeros remain."""
    return np.asarray(values / np.float32(max(math.sqrt(float(values @ values)), 1e-9)))


def embedding_input(tokens: Floats, hidden: Floats, center: Floats) -> Floats:
    """Input [T + H] of the projection to an embedding: both parts as unit vectors, the second one after centering."""
    return np.concatenate((unit_vector(tokens), unit_vector(hidden - center)))


class AsciiTokenizer:
    """Token ids of ASCII texts as by the tokenizer of a tiny artifact, in half the time.

    Python's regular expressions and those of the package tokenizers agree on `PATTERN` for ASCII; elsewhere they differ,
    such as on combining marks.
    """

    def __init__(self, path: Path, *, max_length: int, amounts: bool) -> None:
        content = read_json_object(path, "tokenizer")
        split = {"type": "Split", "pattern": {"Regex": PATTERN}, "behavior": "Removed", "invert": True}
        parts = {"normalizer": None, "pre_tokenizer": split, "post_processor": None}
        model = content.get("model") or {}
        #: Whether the file is one of `examples.pretrained.tiny`; other tokenizers are left to the package.
        self._is_known = model.get("type") == "WordLevel" and all(
            content.get(name) == value for name, value in parts.items()
        )
        self._numbers: Mapping[str, int] = model["vocab"] if self._is_known else {}
        self._unknown = self._numbers.get(model.get("unk_token", ""), 0)
        self._max_length = max_length
        self._amounts = amounts
        self._tokens = re.compile(PATTERN, re.ASCII).findall

    def __call__(self, prompt: str) -> Integers | None:
        """Token ids [n]; None for other texts, and for those that are too long."""
        if not self._is_known or len(prompt) > _MAX_ASCII * self._max_length or not prompt.isascii():
            return None
        text = with_amount(prompt) if self._amounts else prompt
        tokens = self._tokens(text)
        if len(tokens) > self._max_length:
            return None
        number, unknown = self._numbers.get, self._unknown
        return np.array([number(token, unknown) for token in tokens], dtype=np.int64)


class TinySession:
    """A `TinyModel` with the interface of an ONNX Runtime session, for `predictors.runtime`."""

    def __init__(self, path: Path) -> None:
        self._model = TinyModel(path)

    def get_providers(self) -> list[str]:
        """Execution provider, with ONNX Runtime's name."""
        return ["CPUExecutionProvider"]

    def run(self, names: Sequence[str], feed: Mapping[str, NDArray[Any]]) -> list[Floats]:
        """Outputs mu and sigma [B]; arguments as in an ONNX Runtime session."""
        rows = zip(feed["input_ids"], feed["attention_mask"], feed["served_model"].tolist(), strict=True)
        outputs = [self._model(ids[mask > 0], served_model) for ids, mask, served_model in rows]
        columns = dict(zip(("mu", "sigma"), np.array(outputs, dtype=np.float32).T, strict=True))
        return [columns[name] for name in names]


class TinyPredictor(Predictor):
    """Runs the tiny artifact in the calling thread; `length` is its blocking method.

    `artifact` is "tiny", shipped with tailcast, or the folder of such an artifact. InputError if a file of the
    folder is missing or differs from its SHA-256 in the manifest.
    """

    def __init__(self, artifact: str | Path = TINY) -> None:
        folder = predictor_folder(artifact)
        manifest = read_json_object(folder / "manifest.json", "artifact manifest")
        for name in (WEIGHTS, "tokenizer.json"):
            digest = sha256_file(existing_file(folder / name, "artifact"))
            if digest != (expected := manifest["files"].get(name)):
                allowed = f"{expected}, as in manifest.json"
                raise InputError(f"artifact file {name}", f"SHA-256 {digest}", allowed)
        self._model = TinyModel(folder / WEIGHTS)
        amounts = manifest.get("amounts", False)
        self._ascii = AsciiTokenizer(
            folder / "tokenizer.json", max_length=manifest["max_length"], amounts=amounts
        )
        try:
            self._tokenizer = PromptTokenizer(
                folder / "tokenizer.json",
                max_length=manifest["max_length"],
                truncation_side=manifest["truncation_side"],
                amounts=amounts,
            )
        except ModuleNotFoundError as error:
            raise MissingExtraError("tokenizers", "predict") from error
        self._numbers = {name: number for number, name in enumerate(manifest["served_models"], 1)}
        parts = manifest.get("part_tokens")
        self._form = PromptForm(
            conversations=manifest["conversations"],
            part_tokens=None if parts is None else PartTokens(**parts),
        )
        self._nu: float = manifest["nu"]
        self._artifact: tuple[str, str] = (manifest["artifact_id"], manifest["artifact_version"])

    def length(self, prompt: str, served_model: str = "") -> LengthPrediction:
        """The predicted output length; a served model that is not in the manifest counts as unknown.
        TailcastError if the prompt is not valid text or the prediction is out of range."""
        mu, sigma = self._model(self._ids(prompt)[0], self._numbers.get(served_model, 0))
        return LengthPrediction(mu, sigma, self._nu, *self._artifact)

    async def predict(
        self, requests: Sequence[PredictionRequest], *, timeout_s: float | None = None
    ) -> list[Prediction]:
        """One prediction per request, in order; raises as `length`."""
        return [
            self._prediction(valid_unicode(each.text(self._form)), each.served_model) for each in requests
        ]

    async def load(self) -> str:
        """The artifact's version."""
        return self._artifact[1]

    def _prediction(self, prompt: str, served_model: str) -> Prediction:
        ids, truncated = self._ids(prompt)
        mu, sigma, embedding = self._model.predict(ids, self._numbers.get(served_model, 0))
        length = LengthPrediction(mu, sigma, self._nu, *self._artifact)
        prompt_tokens = None if truncated else len(ids)
        return Prediction(
            length=length, prompt_tokens=prompt_tokens, prompt_chars=len(prompt), embedding=embedding
        )

    def embedding(self, prompt: str) -> Embedding | None:
        """The embedding of a prompt [D], also where its length is out of range; None if the artifact has none."""
        return self._model.predict(self._ids(prompt)[0], 0)[2]

    def _ids(self, prompt: str) -> tuple[Integers, bool]:
        """Token ids of a prompt, and whether it was truncated."""
        if (ids := self._ascii(prompt)) is not None:
            return ids, False
        [tokens] = self._tokenizer([prompt])
        return tokens.ids, tokens.truncated
