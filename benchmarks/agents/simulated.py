"""Recorded agents' sessions in the simulator: settings, policies and the values of one run."""

from __future__ import annotations

from collections import defaultdict
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np

from benchmarks.agents.page import FCFS, HRRN, OURS, TRUE, UNPREDICTED, Setting, Values
from benchmarks.agents.returns import TrueReturns
from scheduler_core.engine.prefix_cache import Hit
from scheduler_core.policies import make_policy
from scheduler_core.policies.base import Policy
from scheduler_core.policies.working_set import WorkingSet
from scheduler_core.prediction.predictions import Prediction
from scheduler_core.prediction.session import SessionFeatures, SessionPredictor
from scheduler_core.routing import make_router
from scheduler_core.scheduler import Scheduler, SchedulerConfig
from scheduler_core.simulator.loop import Simulation
from scheduler_core.simulator.step_time.base import LinearStepTime
from scheduler_core.simulator.trace import Trace
from scheduler_core.simulator.trace_predictions import Predictions
from scheduler_core.simulator.workloads.agents import Agents
from scheduler_core.simulator.workloads.workload import Workload

STEP = LinearStepTime(
    base_s=0.012,
    per_prefill_token_s=1 / 30_000,
    per_decode_s=0.00025,
    per_context_token_s=0.0,
    per_swapped_token_s=1 / 150_000,
)
BLOCK, CHUNK, MAX_PAUSE_S = 64, 4096, 60.0
#: Tokens of host memory: more than all sessions have.
HOST_TOKENS = 10**9
KV_TOKENS, NUM_SESSIONS = (3_000_000, 4_500_000, 6_000_000), (40, 60, 100)
NUM_REPLICAS = 8
#: Name in the tables -> policy and parameters.
POLICIES: dict[str, tuple[str, dict[str, Any]]] = {
    FCFS: ("fcfs", {}),
    HRRN: ("hrrn", {}),
    "longest_prefix": ("longest_prefix", {}),
    "uniboost_uncached": ("uniboost_uncached", {}),
    "thunder_agent": ("thunder_agent", {}),
    "continuum": ("continuum", {}),
    UNPREDICTED: ("working_set", {"predict_returns": False}),
    OURS: ("working_set", {}),
    TRUE: ("working_set", {}),
}
ROUTED, ROUTERS = (FCFS, OURS), ("jsq", "prefix_affine", "session_affine")
#: --quick: (sessions, with a host tier) over 1 M tokens of KV memory.
QUICK = ((4, False), (16, False), (16, True))
QUICK_TOKENS = 1_000_000


@lru_cache(maxsize=1)
def _trace(file: str, num_sessions: int, minutes: float, seed: int) -> Trace:
    """Turns of so many sessions; enough that none runs out of them."""
    turns = round(num_sessions * (80 + 5 * minutes))
    agents = Agents(num_sessions=num_sessions, file=file, max_pause_s=MAX_PAUSE_S)
    return Workload(num_requests=turns, agents=agents).trace(seed)


def pauses_s(trace: Trace) -> dict[str, list[float | None]]:
    """Session -> the pauses after its turns in seconds; None after the last one."""
    pauses: dict[str, list[float | None]] = defaultdict(list)
    for row in sorted(trace.requests, key=lambda row: row.turn):
        before = pauses[row.session_id or ""]
        if before:
            before[-1] = row.think_time_s or 0.0
        before.append(None)
    return pauses


def simulate(file: str, setting: Setting, name: str, minutes: float) -> Values:
    """Values of one policy: numbers and seconds."""
    num_replicas = NUM_REPLICAS if setting.router else 1
    num_sessions = setting.num_sessions * num_replicas
    trace = _trace(file, num_sessions, minutes, setting.seed)
    config = SchedulerConfig(
        max_num_seqs=64,
        max_num_batched_tokens=CHUNK + 64,
        num_kv_blocks=setting.kv_tokens // BLOCK,
        kv_block_tokens=BLOCK,
        num_host_cache_blocks=HOST_TOKENS // BLOCK if setting.host else 0,
        batching="chunked_prefill",
        batching_parameters={"chunk_tokens": CHUNK},
    )
    hits: dict[str, int] = {}
    schedulers = {}
    for replica in range(num_replicas):
        scheduler = schedulers[str(replica)] = Scheduler(config, _policy(name, trace))
        _count_hits(scheduler, hits)
    length = Prediction(length=SessionPredictor().predict(SessionFeatures()))
    horizon_s = 60.0 * minutes
    outcome = Simulation(
        trace,
        schedulers,
        STEP,
        Predictions(by_id=dict.fromkeys([row.request_id for row in trace.requests], length)),
        make_router(setting.router) if setting.router else None,
        horizon_s=horizon_s,
    ).run()
    records = outcome.records
    ttft_s = np.array([record.ttft_s for record in records])
    waits_s = [
        horizon_s - state.request.arrival_s for each in schedulers.values() for state in each.pool.waiting
    ]
    last = {row.session_id: row.request_id for row in sorted(trace.requests, key=lambda row: row.turn)}
    ended = {record.request_id for record in records}
    contexts: dict[int, list[int]] = {number: [] for number in range(num_sessions)}
    for record in records:
        number = int((record.session_id or "").split("/")[0][1:]) % num_sessions
        contexts[number].append(record.prompt_tokens + record.output_tokens)
    turns = np.array([len(tokens) for tokens in contexts.values()], float)
    return {
        "turns": len(records) / horizon_s,
        "mean": float(ttft_s.mean()),
        "P50": float(np.median(ttft_s)),
        "P99": float(np.quantile(ttft_s, 0.99)),
        "longest": max([float(ttft_s.max()), *waits_s]),
        "jain": float(turns.sum() ** 2 / (len(turns) * (turns**2).sum())),
        "sessions": float(len(ended & set(last.values()))),
        "hits": BLOCK
        * sum(hits.get(name, 0) for name in ended)
        / sum(record.prompt_tokens for record in records),
        "contexts": sum(float(np.mean(tokens)) for tokens in contexts.values() if tokens)
        / (setting.kv_tokens * num_replicas),
        "left": float(len(trace) / num_sessions - turns.max()),
    }


def _policy(name: str, trace: Trace) -> Policy:
    policy = make_policy(*POLICIES[name])
    if name == TRUE:
        assert isinstance(policy, WorkingSet)
        policy.returns = TrueReturns(pauses_s(trace))
    return policy


def _count_hits(scheduler: Scheduler, hits: dict[str, int]) -> None:
    """Keeps the blocks that each request finds in the KV cache at its (last) admission."""
    prefixes = scheduler.pool.kv.prefixes
    assert prefixes is not None
    pin = prefixes.pin

    def counted(request_id: str, hit: Hit) -> int:
        hits[request_id] = hit.num_blocks
        return pin(request_id, hit)

    prefixes.pin = counted  # type: ignore[method-assign]


def settings(seeds: int, quick: bool) -> list[Setting]:
    """All settings, seed by seed."""
    if quick:
        return [Setting("", 0, host, num, QUICK_TOKENS) for num, host in QUICK]
    return [
        Setting(router, seed, *case)
        for seed in range(seeds)
        for router, cases in [
            ("", list(product((False, True), NUM_SESSIONS, KV_TOKENS))),
            *((name, [(False, NUM_SESSIONS[1], KV_TOKENS[0])]) for name in ROUTERS),
        ]
        for case in cases
    ]


def policies(setting: Setting) -> tuple[str, ...]:
    return ROUTED if setting.router else tuple(POLICIES)


def run_setting(file: str, setting: Setting, minutes: float) -> tuple[Setting, dict[str, Values]]:
    """The values of all policies."""
    return setting, {name: simulate(file, setting, name, minutes) for name in policies(setting)}
