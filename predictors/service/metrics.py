"""What the service counts, in Prometheus' format; names and labels are in the README.

Without metrics the classes `ServiceMetrics` and `ArtifactMetrics` themselves are used: they count nothing. One
registry belongs to one server. With several worker processes (`WorkerMetricFiles`) every worker reports the sums over
all of them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scheduler_core.errors import MissingExtraError, TailcastError

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

logger = logging.getLogger(__name__)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# From the half millisecond of a cached answer to the seconds of an overloaded server.
SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128)


FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"  # read by prometheus_client when it is imported
# Bytes for the metrics of one artifact, by the prefix of the file that prometheus_client keeps them in. A test counts
# what all methods and statuses take of them.
LIVE_FILES = {"gauge_livesum": 2**12, "gauge_livemax": 2**12}
FILES = LIVE_FILES | {"counter": 2**16, "histogram": 2**17}


class WorkerMetricFiles:
    """Files that the workers of one service count in.

    prometheus_client maps its files into memory and extends them without taking disk space, so that a full disk ends
    the process at its next count (SIGBUS). Therefore the space is taken here, before any worker starts. A file belongs
    to the number of a worker: the next process of that number counts on in it.

    Args:
        folder: An empty folder.
        num_workers: Workers, numbered from 0.
        num_artifacts: Artifacts that each of them serves.

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
                f"({error.strerror}); free some space, set TMPDIR to another folder, or leave out http_port"
            ) from error

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of the workers."""
        return {FOLDER_VARIABLE: str(self._folder)}

    def reset_live(self, number: int) -> None:
        """Sets the gauges of a worker that has ended to 0; in place, which takes no space."""
        try:
            for prefix, size in LIVE_FILES.items():
                with (self._folder / f"{prefix}_{number}.db").open("r+b") as file:
                    file.write(bytes(size * self._num_artifacts))
        except OSError as error:  # the folder has been deleted
            logger.error("metrics of worker %d: %s", number, error)


def count_as_worker(number: int) -> None:
    """Lets this process count in the files of that worker; to be called before any metric is made."""
    from prometheus_client import values

    untyped: Any = values
    untyped.ValueClass = untyped.MultiProcessValue(process_identifier=lambda: number)


class ArtifactMetrics:
    """Counts nothing; what is counted for one artifact."""

    def entered(self) -> None:
        """A request was accepted."""

    def left(self) -> None:
        """An accepted request was answered, or failed."""

    def batch(self, lengths: Sequence[int], seconds: float) -> None:
        """A batch of prompts of these lengths (tokens) took the model so long; called in threads."""

    def failed_batch(self) -> None:
        """A batch failed; called in threads."""

    def cache(self, hit: bool) -> None:
        """The cache was asked."""

    def loaded(self, version: str, provider: str, previous: str | None) -> None:
        """A version is in service, instead of the previous one."""

    def reload(self, succeeded: bool) -> None:
        """A reload ended."""

    def answered(
        self, method: str, code: str, seconds: float, tokenise_s: float | None, queue_s: float | None
    ) -> None:
        """A prediction was answered, or refused (then without times of its parts)."""


class ServiceMetrics:
    """Counts nothing; what is counted for a server."""

    def artifact(self, name: str) -> ArtifactMetrics:
        """The counters of one artifact."""
        return ArtifactMetrics()

    def exposition(self) -> bytes:
        """All numbers in Prometheus' text format."""
        return b""


class PrometheusMetrics(ServiceMetrics):
    """Counts with `prometheus_client`, in a registry of its own."""

    def __init__(self) -> None:
        try:
            from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
        except ImportError as error:
            raise MissingExtraError("prometheus-client", "serve") from error
        self.registry: CollectorRegistry = CollectorRegistry()
        own: dict[str, Any] = {"registry": self.registry}
        by_artifact = ["artifact"]
        self.requests = Counter(
            "tailcast_requests", "Predictions asked for, by outcome.", [*by_artifact, "method", "code"], **own
        )
        self.seconds = Histogram(
            "tailcast_request_seconds",
            "From a request's arrival to its answer.",
            [*by_artifact, "method"],
            buckets=SECONDS,
            **own,
        )
        self.tokenise = Histogram(
            "tailcast_tokenise_seconds", "Reading the prompt.", by_artifact, buckets=SECONDS, **own
        )
        self.queue = Histogram(
            "tailcast_queue_seconds", "Waiting for a batch.", by_artifact, buckets=SECONDS, **own
        )
        self.inference = Histogram(
            "tailcast_inference_seconds", "Model calls.", by_artifact, buckets=SECONDS, **own
        )
        self.size = Histogram(
            "tailcast_batch_size", "Prompts in a model call.", by_artifact, buckets=SIZES, **own
        )
        self.real = Counter("tailcast_tokens", "Tokens read by the model.", by_artifact, **own)
        self.padding = Counter(
            "tailcast_padding_tokens",
            "Padding read beside them; its share is padding / (tokens + padding).",
            by_artifact,
            **own,
        )
        self.failed = Counter("tailcast_failed_batches", "Model calls that failed.", by_artifact, **own)
        self.hits = Counter("tailcast_cache_hits", "Predictions found in the cache.", by_artifact, **own)
        self.misses = Counter(
            "tailcast_cache_misses", "Predictions not found in the cache.", by_artifact, **own
        )
        self.reloads = Counter(
            "tailcast_reloads", "Artifact replacements, by outcome.", [*by_artifact, "outcome"], **own
        )
        self.length = Gauge(
            "tailcast_queue_length",
            "Requests accepted and not yet answered.",
            by_artifact,
            multiprocess_mode="livesum",
            **own,
        )
        self.info = Gauge(
            "tailcast_artifact_info",
            "1 for the version in service.",
            [*by_artifact, "version", "provider"],
            multiprocess_mode="livemax",
            **own,
        )

    def artifact(self, name: str) -> ArtifactMetrics:
        """The counters of one artifact."""
        return _PrometheusArtifactMetrics(self, name)

    def exposition(self) -> bytes:
        """All numbers in Prometheus' text format."""
        from prometheus_client import CollectorRegistry, generate_latest

        if FOLDER_VARIABLE not in os.environ:
            return generate_latest(self.registry)
        from prometheus_client import multiprocess

        registry = CollectorRegistry()
        untyped: Any = multiprocess
        untyped.MultiProcessCollector(registry)
        return generate_latest(registry)


class _PrometheusArtifactMetrics(ArtifactMetrics):
    def __init__(self, metrics: PrometheusMetrics, name: str) -> None:
        self._metrics = metrics
        self._name = name
        self._length = metrics.length.labels(name)
        self._tokenise = metrics.tokenise.labels(name)
        self._queue = metrics.queue.labels(name)
        self._inference = metrics.inference.labels(name)
        self._size = metrics.size.labels(name)
        self._real = metrics.real.labels(name)
        self._padding = metrics.padding.labels(name)
        self._failed = metrics.failed.labels(name)
        self._hits = metrics.hits.labels(name)
        self._misses = metrics.misses.labels(name)
        self._answers: dict[tuple[str, str], Any] = {}
        self._seconds: dict[str, Any] = {}

    def entered(self) -> None:
        self._length.inc()

    def left(self) -> None:
        self._length.dec()

    def batch(self, lengths: Sequence[int], seconds: float) -> None:
        real = sum(lengths)
        self._size.observe(len(lengths))
        self._inference.observe(seconds)
        self._real.inc(real)
        self._padding.inc(len(lengths) * max(lengths) - real)

    def failed_batch(self) -> None:
        self._failed.inc()

    def cache(self, hit: bool) -> None:
        (self._hits if hit else self._misses).inc()

    def loaded(self, version: str, provider: str, previous: str | None) -> None:
        if previous is not None and previous != version:
            self._metrics.info.labels(self._name, previous, provider).set(0)
        self._metrics.info.labels(self._name, version, provider).set(1)

    def reload(self, succeeded: bool) -> None:
        self._metrics.reloads.labels(self._name, "taken" if succeeded else "refused").inc()

    def answered(
        self, method: str, code: str, seconds: float, tokenise_s: float | None, queue_s: float | None
    ) -> None:
        # `labels` looks a child up under a lock; what is found once is kept.
        counter = self._answers.get((method, code))
        if counter is None:
            counter = self._answers[method, code] = self._metrics.requests.labels(self._name, method, code)
        counter.inc()
        histogram = self._seconds.get(method)
        if histogram is None:
            histogram = self._seconds[method] = self._metrics.seconds.labels(self._name, method)
        histogram.observe(seconds)
        if tokenise_s is not None:
            self._tokenise.observe(tokenise_s)
        if queue_s is not None:
            self._queue.observe(queue_s)
