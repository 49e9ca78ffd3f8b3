"""One process of `serve-predictor`: opens the artifacts, and serves them until it is stopped."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import sys
from collections.abc import Callable

from predictors.hosting.logs import set_up_logs
from predictors.hosting.process import ignore_hangups, run, run_until_stopped
from predictors.hosting.tracing import set_up_exporting
from predictors.runtime import CPU
from predictors.service.artifacts import open_sources
from predictors.service.batcher import BatchingSettings
from predictors.service.config import ServeConfig
from predictors.service.metrics import count_as_worker
from predictors.service.pipeline import worker_cores
from predictors.service.server import PredictionServer
from scheduler_core.errors import TailcastError

logger = logging.getLogger(__name__)


def run_server(
    config: ServeConfig,
    on_ready: Callable[[int], object],
    on_stop: Callable[[], object] = lambda: None,
    *,
    worker: int | None = None,
) -> None:
    """Serves until SIGTERM or SIGINT; a worker with a number also until stdin is closed. `on_ready` gets the gRPC port."""
    server = open_server(config, worker=worker)
    run(run_until_stopped(server, server.reload, on_ready, on_stop, stop_at_eof=worker is not None))
    logger.info("stopped")


def open_server(config: ServeConfig, *, worker: int | None = None) -> PredictionServer:
    """The unbound server of `config` with its artifacts; `worker` is its number, if any."""
    sources, runtimes, joined = open_sources(config)
    provider = runtimes[0].provider
    batching = batching_settings(config, provider)
    cores: list[int] = []
    if provider == CPU:
        cores = worker_cores(batching.num_workers, worker or 0, config.workers)
    if config.traces:
        set_up_exporting()
    return PredictionServer(
        runtimes,
        batching,
        config,
        reopen=lambda name: sources[name].open(),
        joined=joined,
        source_state=lambda: [source.state() for source in sources.values()],
        shares_ports=worker is not None,
        worker_cores=cores,
    )


def batching_settings(config: ServeConfig, provider: str) -> BatchingSettings:
    """Batching defaults of the provider, overridden by `config`."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    on_cpu = BatchingSettings.cpu(max(1, num_cores // config.workers))
    defaults = on_cpu if provider == CPU else BatchingSettings.gpu()
    options = {name: getattr(config, name) for name in ("max_batch", "max_queue", "num_workers")}
    overrides = {name: value for name, value in options.items() if value is not None}
    return dataclasses.replace(defaults, **overrides)


def main(text: str, number: int) -> int:
    """Runs worker `number` of several with the options `text`, the JSON of a ServeConfig, until SIGTERM or the exit of its
    supervisor; returns the exit code. It writes one byte to stdout when it is ready; later output goes to stderr."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")

    def on_ready(port: int) -> None:
        os.write(sys.stdout.fileno(), b"\n")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    ignore_hangups()
    config = ServeConfig(**json.loads(text))
    set_up_logs(config.log_format)
    if config.http_port is not None:
        count_as_worker(number)
    try:
        run_server(config, on_ready, worker=number)
    except (TailcastError, OSError) as error:
        sys.stderr.write(f"serve-predictor: error: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1], int(sys.argv[2])))
