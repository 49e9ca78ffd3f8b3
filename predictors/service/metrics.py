"""Prometheus metrics of the service; the README lists names and labels.

Each server has its own registry. Several worker processes count in files of a shared folder
(`WorkerMetricFiles`), and each of them reports the sums.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from predictors.service.messages import PipelineResult
from scheduler_core.errors import MissingExtraError, TailcastError

try:
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest, values
    from prometheus_client.multiprocess import MultiProcessCollector
except ImportError as error:
    raise MissingExtraError("prometheus-client", "serve") from error

logger = logging.getLogger(__name__)

M = TypeVar("M")

# From cached predictions (half a millisecond) to an overloaded server (seconds).
SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128)

DIRECTORY_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"  # read when prometheus_client is imported
#: Bytes for the metrics of one artifact by the prefix of their file: enough for a name of 500 characters, all methods
#: and status codes, and dozens of versions.
LIVE_FILES = {"gauge_livesum": 2**12, "gauge_livemax": 2**16}
FILES = LIVE_FILES | {"counter": 2**17, "histogram": 2**17}


class WorkerMetricFiles:
    """Files in which the workers of one service count.

    prometheus_client maps its files into memory and extends them without allocating disk space: on a full disk, the
    next count ends the process (SIGBUS). Therefore the space is allocated here, before any worker starts. A file
    belongs to the number of a worker; the process that replaces it continues the counters.

    Args:
        folder: An empty folder.
        num_workers: Number of workers; they are numbered from 0.
        num_artifacts: Number of artifacts that each worker serves.

    Raises:
        TailcastError: There is not enough space.
    """

    def __init__(self, folder: Path, num_workers: int, num_artifacts: int) -> None:
        self._folder = folder
        self._num_artifacts = num_artifacts
        try:
            for number in range(num_workers):
                for prefix, size in FILES.items():
                    (folder / f"{prefix}_{number}.db").write_bytes(bytes(size * num_artifacts))
        except OSError as error:
            kib = num_workers * num_artifacts * sum(FILES.values()) // 1024
            raise TailcastError(
                f"temporary folder {folder.parent}: the metrics of {num_workers} workers need {kib} KiB there "
                f"({error.strerror}); free some space, set TMPDIR to another folder, or omit http_port"
            ) from error

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of the workers."""
        return {DIRECTORY_VARIABLE: str(self._folder)}

    def reset_live(self, number: int) -> None:
        """Clears the gauges of a worker that has exited, in place, which needs no space."""
        try:
            for prefix, size in LIVE_FILES.items():
                with (self._folder / f"{prefix}_{number}.db").open("r+b") as file:
                    file.write(bytes(size * self._num_artifacts))
        except OSError as error:  # the folder was deleted
            logger.error("metrics of worker %d: %s", number, error)


def count_as_worker(number: int) -> None:
    """Makes this process continue the files of a worker number; must be called before metrics are created."""
    untyped: Any = values
    untyped.ValueClass = untyped.MultiProcessValue(process_identifier=lambda: number)


class ServiceMetrics:
    """Metrics of one server, in a separate registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def metric(kind: Callable[..., M], name: str, text: str, *labels: str, **options: Any) -> M:
            return kind(f"tailcast_{name}", text, ["artifact", *labels], registry=self.registry, **options)

        counter = functools.partial(metric, Counter)
        histogram = functools.partial(metric, Histogram, buckets=SECONDS)

        self.requests = counter("requests", "Requested predictions, by outcome.", "method", "code")
        self.seconds = histogram("request_seconds", "Time from arrival to response.", "method")
        self.tokenize = histogram("tokenize_seconds", "Time of tokenization.")
        self.queue = histogram("queue_seconds", "Time waiting for a batch.")
        self.inference = histogram("inference_seconds", "Time of model calls.")
        self.batch_size = histogram("batch_size", "Prompts in a model call.", buckets=SIZES)
        self.tokens = counter("tokens", "Prompt tokens in model calls.")
        self.padding = counter("padding_tokens", "Padding tokens in model calls.")
        self.failed = counter("failed_batches", "Model calls that failed.")
        self.hits = counter("cache_hits", "Predictions from the cache.")
        self.misses = counter("cache_misses", "Predictions not in the cache.")
        self.missing = counter("missing_parts", "Predictions without this part of a joined artifact.")
        self.reloads = counter("reloads", "Artifact replacements, by outcome.", "outcome")
        self.certificate_reloads = self._file_reloads(
            "certificate", "Readings of new certificates, by outcome."
        )
        self.token_reloads = self._file_reloads("token", "Readings of new bearer tokens, by outcome.")
        sum_gauge = functools.partial(metric, Gauge, multiprocess_mode="livesum")
        self.queue_length = sum_gauge("queue_length", "Requests in flight.")
        max_gauge = functools.partial(metric, Gauge, multiprocess_mode="livemax")
        self.info = max_gauge("artifact_info", "1 for the version in service.", "version", "provider")

    def _file_reloads(self, name: str, text: str) -> Counter:
        reloads = Counter(f"tailcast_{name}_reloads", text, ["outcome"], registry=self.registry)
        for outcome in ("taken", "refused"):  # an increase from nothing is none
            reloads.labels(outcome)
        return reloads

    def exposition(self) -> bytes:
        """All metrics in Prometheus' text format."""
        if DIRECTORY_VARIABLE not in os.environ:
            return generate_latest(self.registry)
        registry = CollectorRegistry()
        MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return generate_latest(registry)


class ArtifactMetrics:
    """Metrics of one artifact; results of `labels`, which takes a lock, are cached."""

    def __init__(self, metrics: ServiceMetrics, name: str) -> None:
        self._metrics, self._name = metrics, name
        self.queue_length = metrics.queue_length.labels(name)
        for outcome in ("taken", "refused"):
            metrics.reloads.labels(name, outcome)
        self.failed_batches = metrics.failed.labels(name)
        self.missing = metrics.missing.labels(name)
        self._tokenize = metrics.tokenize.labels(name)
        self._queue = metrics.queue.labels(name)
        self._inference = metrics.inference.labels(name)
        self._batch_size = metrics.batch_size.labels(name)
        self._tokens = metrics.tokens.labels(name)
        self._padding = metrics.padding.labels(name)
        self._hits = metrics.hits.labels(name)
        self._misses = metrics.misses.labels(name)
        self._requests = functools.cache(functools.partial(metrics.requests.labels, name))
        self._seconds = functools.cache(functools.partial(metrics.seconds.labels, name))

    def batch(self, lengths: Sequence[int], seconds: float) -> None:
        """Counts a batch of prompts with the given lengths (tokens); thread-safe."""
        num_tokens = sum(lengths)
        self._batch_size.observe(len(lengths))
        self._inference.observe(seconds)
        self._tokens.inc(num_tokens)
        self._padding.inc(len(lengths) * max(lengths) - num_tokens)

    def cache(self, hit: bool) -> None:
        """Counts a cache lookup."""
        (self._hits if hit else self._misses).inc()

    def loaded(self, version: str, provider: str, previous: str | None) -> None:
        """Sets the version in service, and clears the previous one."""
        if previous is not None and previous != version:
            self._metrics.info.labels(self._name, previous, provider).set(0)
        self._metrics.info.labels(self._name, version, provider).set(1)

    def reload(self, succeeded: bool) -> None:
        """Counts a finished reload."""
        self._metrics.reloads.labels(self._name, "taken" if succeeded else "refused").inc()

    def request(self, method: str, code: str, seconds: float, result: PipelineResult | None) -> None:
        """Counts a finished request; `result` is None if it was rejected."""
        self._requests(method, code).inc()
        self._seconds(method).observe(seconds)
        if result is not None and not result.cached:
            self._tokenize.observe(result.tokenize_s)
            self._queue.observe(result.queue_s)
