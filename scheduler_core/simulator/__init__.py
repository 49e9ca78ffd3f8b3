"""Simulator: a trace, a policy and a model of the engine's speed in, latencies out."""

from __future__ import annotations

from scheduler_core.simulator.cluster import ClusterSimulation
from scheduler_core.simulator.cluster_outcome import ClusterOutcome, ReplicaChange
from scheduler_core.simulator.fetch import Predictions, fetch_predictions, fetch_predictions_async
from scheduler_core.simulator.kv_link import KvLink
from scheduler_core.simulator.records import RequestRecord
from scheduler_core.simulator.run import SimulationConfig, SimulationResult, prepare_trace, run_simulation
from scheduler_core.simulator.step_time import LinearStepTime
from scheduler_core.simulator.trace import Trace, TraceRequest
from scheduler_core.simulator.trace_file import load_trace

__all__ = [
    "ClusterOutcome",
    "ClusterSimulation",
    "KvLink",
    "LinearStepTime",
    "Predictions",
    "ReplicaChange",
    "RequestRecord",
    "SimulationConfig",
    "SimulationResult",
    "Trace",
    "TraceRequest",
    "fetch_predictions",
    "fetch_predictions_async",
    "load_trace",
    "prepare_trace",
    "run_simulation",
]
