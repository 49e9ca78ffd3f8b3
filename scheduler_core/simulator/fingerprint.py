"""Which requests a run was of, in a few letters."""

from __future__ import annotations

import hashlib

import numpy as np

from scheduler_core.simulator.trace import Trace


def trace_fingerprint(trace: Trace) -> str:
    """SHA-256 of the ids, arrivals, lengths, caps and tiers of all requests, in order: equal where two runs had the same
    requests, whatever file or description they came from."""
    digest = hashlib.sha256()
    for name in ("request_id", "tenant"):
        digest.update("\0".join(getattr(row, name) for row in trace.requests).encode())
        digest.update(b"\1")
    digest.update(np.array([row.arrival_s for row in trace.requests], "<f8").tobytes())
    for name in ("prompt_tokens", "output_tokens", "max_tokens", "tier"):
        digest.update(np.array([getattr(row, name) for row in trace.requests], "<i8").tobytes())
    return digest.hexdigest()
