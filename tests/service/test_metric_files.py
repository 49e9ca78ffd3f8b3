"""Metrics of several workers in files: their space is allocated before a worker starts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from predictors.service.metrics import WorkerMetricFiles
from scheduler_core.errors import TailcastError

WORKER = """
import sys, grpc
from predictors.service.metrics import ArtifactMetrics, ServiceMetrics, count_as_worker
from predictors.service.messages import PipelineResult
count_as_worker(int(sys.argv[1]))
server = ServiceMetrics()
for name in sys.argv[2:]:
    metrics = ArtifactMetrics(server, name)
    previous = None
    for number in range(60):
        version = f"{number:064}"
        metrics.loaded(version, "CPUExecutionProvider", previous)
        previous = version
    metrics.queue_length.inc()
    for method in ("Predict", "PredictBatch", "HTTP", "HTTP Predict", "ModelInfer"):
        for code in grpc.StatusCode:
            metrics.request(method, code.name, 0.1, PipelineResult(None, 1, False, 0.1, 0.1, 0.1, 1))
    metrics.batch([3], 0.1)
    metrics.failed_batches.inc()
    metrics.cache(True), metrics.cache(False)
    metrics.reload(True), metrics.reload(False)
print(server.exposition().decode())
"""


# On a full disk a count ended the process by SIGBUS, again and again: 0 of 485 requests were answered.
@pytest.mark.mend
def test_metrics_of_workers_stay_within_the_space_that_is_allocated_for_them(tmp_path: Path) -> None:
    names = ["a" * 500, "b" * 500]
    files = WorkerMetricFiles(tmp_path, num_workers=2, num_artifacts=2)
    sizes = {file.name: file.stat().st_size for file in tmp_path.iterdir()}
    assert len(sizes) == 8
    assert all(file.stat().st_blocks * 512 >= sizes[file.name] for file in tmp_path.iterdir())

    def exposition(worker: int) -> str:
        command = [sys.executable, "-c", WORKER, str(worker), *names]
        environment = os.environ | files.environment
        return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout

    exposition(0)
    files.reset_live(0)
    exposition(0)  # the second process of the same worker
    text = exposition(1)
    assert f'tailcast_failed_batches_total{{artifact="{names[0]}"}} 3.0' in text
    assert f'tailcast_queue_length{{artifact="{names[1]}"}} 2.0' in text  # without the process that has ended
    assert {file.name: file.stat().st_size for file in tmp_path.iterdir()} == sizes


# See above: too little space is an error at the start.
@pytest.mark.mend
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device without space")
def test_no_space_for_the_metrics_of_workers_is_an_error_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "histogram_1.db").symlink_to("/dev/full")
    with pytest.raises(TailcastError, match=r"metrics of 2 workers need 648 KiB.*No space left"):
        WorkerMetricFiles(tmp_path, num_workers=2, num_artifacts=1)
