"""Features of prompts that several entrants use: predictions of artifacts, embeddings, lexical features.

They are computed once, and the slow ones are kept in a folder; an entrant's time includes that for one prompt alone.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.lengths.streams import Stream, Streams
from benchmarks.shared.pooled import ENCODER, encoder_features
from predictors.artifact import open_artifact
from predictors.pretrained import PRETRAINED, TINY
from predictors.runtime import open_runtime
from predictors.tiny import TinyPredictor
from scheduler_core.prediction.correction import Correction, RequestContext
from scheduler_core.prediction.outcome import Outcome
from scheduler_core.prediction.predictions import Embedding, LengthPrediction
from scheduler_core.prediction.predictor import PredictionRequest
from training.evaluating.batch_predictor import BatchPredictor, InferenceOptions, open_batch_predictor

FloatArray = NDArray[np.float64]
#: Prompts that are timed one by one.
NUM_TIMED = 50
_CODE = re.compile(
    r"\b(?:code|function|class|script|program|implement|algorithm|debug|refactor|sql|regex|api)\b"
)
_FORMAT = re.compile(r"\b(?:table|json|list|bullets?|markdown|csv|xml|steps)\b")
_VERBS = (
    "what", "write", "explain", "summarize", "how", "list", "implement", "compare", "describe", "generate", "why", "define",
)  # fmt: skip
_LIMIT = re.compile(
    r"\b(?:in|under|at most|no more than) \d+ (?:words?|sentences?)\b|\b(?:briefly|concisely)\b"
)
_WORD, _CLAUSE = re.compile(r"\w+"), re.compile(r"[,;:]|\b(?:and|or|but|then)\b")


def lexical(prompt: str) -> list[float]:
    """19 features of the text, of the kinds that Clairvoyant describes (arXiv 2606.07248): size, code, length limit,
    question, format, clauses, and the first of 12 verbs or none."""
    text = prompt.lower()
    vocabulary = set(_WORD.findall(text))
    verb = next((verb for verb in _VERBS if verb in vocabulary), None)
    flags = (_CODE.search(text), _LIMIT.search(text), text.rstrip().endswith("?"), _FORMAT.search(text))
    more = (*map(bool, flags), len(_CLAUSE.findall(text)), verb is None)
    return [float(value) for value in (len(prompt) // 4, *more, *(verb == each for each in _VERBS))]


@dataclass
class Features:
    """Features of prompts, and models trained on them; `cache` is the folder of the slow ones."""

    streams: Streams
    cache: Path
    #: Microseconds of one core for one prompt, by the name of the features.
    microseconds: dict[str, float] = field(default_factory=dict)
    _tables: dict[str, dict[str, Any]] = field(default_factory=dict)
    _trained: dict[str, Any] = field(default_factory=dict)

    def length(self, artifact: str, prompt: str) -> LengthPrediction:
        """The prediction of an artifact for an unknown served model."""
        prediction = self._tables[artifact][prompt]
        if artifact == TINY:
            return prediction  # type: ignore[no-any-return]
        mu, sigma, nu = prediction.tolist()
        return LengthPrediction(mu, sigma, nu)

    def embedding(self, prompt: str) -> Embedding:
        """The embedding [D] of the predictor `tiny`, a unit vector."""
        return np.asarray(self._tables["embedding"][prompt])

    def num_tokens(self, prompt: str) -> int:
        """Number of tokens of a prompt, up to the maximum of the tokenizer."""
        return int(self._tables["num_tokens"][prompt])

    def pooled(self, prompt: str) -> FloatArray:
        """Mean of the outputs of the frozen encoder MiniLM, and ln tokens, of a prompt."""
        return np.asarray(self._tables["pooled"][prompt], float)

    def trained(self, name: str, train: Callable[[], Any]) -> Any:
        """The result of `train`, which runs once for each name."""
        if name not in self._trained:
            self._trained[name] = train()
        return self._trained[name]

    def training(self) -> tuple[list[str], FloatArray]:
        """Prompts [N] and ln lengths [N, 10] of CASTILLO's training part, one row for each prompt and served model."""
        return self.trained("training", self.streams.training)  # type: ignore[no-any-return]

    def prepare(self, names: Iterable[str], prompts: Iterable[str]) -> None:
        """Computes features of prompts: "pooled", or the name or folder of an artifact; always those of `tiny`."""
        texts = list(dict.fromkeys(prompts))
        self._prepare_tiny(texts)
        for name in dict.fromkeys(names):
            if name == "pooled":
                self._add(name, texts, f"pooled-{ENCODER}", partial(encoder_features, ENCODER))
                self.microseconds[name] = _microseconds(PRETRAINED, texts)
            elif name not in (TINY, "embedding"):
                predictor = open_batch_predictor(name, InferenceOptions())
                version = open_artifact(name).manifest.artifact_version
                self._add(name, texts, version, partial(_parameters, predictor))
                self.microseconds[name] = _microseconds(name, texts)

    def _prepare_tiny(self, texts: Sequence[str]) -> None:
        requests = [PredictionRequest("", text, 1) for text in texts]
        start = time.process_time()
        predictions = asyncio.run(TinyPredictor().predict(requests))
        self.microseconds |= dict.fromkeys(
            (TINY, "embedding"), 1e6 * (time.process_time() - start) / len(texts)
        )
        tables = [self._tables.setdefault(name, {}) for name in (TINY, "embedding", "num_tokens")]
        for text, prediction in zip(texts, predictions, strict=True):
            values = prediction.length, prediction.embedding, prediction.prompt_tokens or len(text) // 4
            for table, value in zip(tables, values, strict=True):
                table[text] = value

    def _add(
        self, name: str, texts: Sequence[str], version: str, compute: Callable[[Sequence[str]], NDArray[Any]]
    ) -> None:
        """Adds features that `compute` returns for texts, as rows [N, F], from the cache where it has them."""
        self.cache.mkdir(parents=True, exist_ok=True)
        file = self.cache / f"{re.sub('[^A-Za-z0-9.+-]', '_', version)}.npz"
        rows: dict[str, NDArray[Any]] = {}
        if file.is_file():
            with np.load(file) as content:
                rows = dict(zip(content["keys"].tolist(), content["values"], strict=True))
        missing = [text for text in texts if _key(text) not in rows]
        if missing:
            rows.update(zip(map(_key, missing), compute(missing), strict=True))
            np.savez(file, keys=np.array(list(rows)), values=np.array(list(rows.values())))
        self._tables.setdefault(name, {}).update((text, rows[_key(text)]) for text in texts)


def _key(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:32]


def _parameters(predictor: BatchPredictor, texts: Sequence[str]) -> FloatArray:
    """mu, sigma and nu [N, 3] for an unknown served model."""
    nothing = [None] * len(texts)
    predicted = predictor.predict(texts, nothing, nothing)
    columns = (predicted.mu, predicted.sigma, predicted.nu)
    return np.column_stack([np.broadcast_to(np.asarray(each, float), len(texts)) for each in columns])


def _microseconds(artifact: str, texts: Sequence[str]) -> float:
    """Time of an artifact for one prompt on one core; that of `pretrained` is also that of its encoder alone."""
    runtime = open_runtime(artifact, provider="cpu")
    timed = texts[:: max(len(texts) // NUM_TIMED, 1)][:NUM_TIMED]
    start = time.process_time()
    for text in timed:
        runtime.predict([text], [None], [None])
    return 1e6 * (time.process_time() - start) / len(timed)


def held_out_streams(
    data: Path, cache: Path, num_seeds: int, max_tokens: int
) -> tuple[list[Stream], Features]:
    """Streams of all applications that no predictor was trained on, with limited lengths, and their features."""
    streams = Streams(data)
    features = Features(streams, cache)
    mixed = [streams.mixed(seed) for seed in range(num_seeds)]
    mixed = [[(request, min(tokens, max_tokens)) for request, tokens in stream] for stream in mixed]
    features.prepare([PRETRAINED], [request.prompt for stream in mixed for request, _ in stream])
    return mixed, features


def remembered(
    stream: Stream, features: Features, num_in_flight: int
) -> tuple[list[LengthPrediction], list[LengthPrediction]]:
    """Predictions of the requests as they arrive: as shipped, and with the memory, which learns a length after
    `num_in_flight` further requests."""
    correction, ended = Correction(), deque[tuple[RequestContext, Outcome]]()
    shipped, corrected = [], []
    for request, tokens in stream:
        prediction = features.length(PRETRAINED, request.prompt)
        num_tokens, embedding = features.num_tokens(request.prompt), features.embedding(request.prompt)
        context = RequestContext(prompt_tokens=num_tokens, embedding=embedding)
        shipped.append(prediction)
        corrected.append(correction.correct(context, prediction))
        ended.append((context, Outcome(output_tokens=tokens, finished=True, prediction=prediction)))
        if len(ended) > num_in_flight:
            correction.observe(*ended.popleft())
    return shipped, corrected
