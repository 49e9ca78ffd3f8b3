"""What the latency would be now under first come, first served: a fluid FCFS queue fed with the same work.

A policy that reorders requests does as much work as FCFS would. So FCFS needs no second engine: its queue serves, in order of
arrival, as much work as the real engine has done, and both have the same work left at any time. As the virtual service of Friedman &
Henderson 2003 ("Fairness and efficiency in web server protocols", SIGMETRICS), with FCFS in place of processor sharing.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from scheduler_core.indices.prediction_bias import PredictionBias
from scheduler_core.request import RequestState


@dataclass(slots=True)
class _Job:
    """Work of a request in the virtual queue; `group` is that of its prediction, None once the true length is known."""

    prompt_work: float
    decode_tokens: float
    group: int | None


@dataclass(frozen=True, slots=True)
class _Departed:
    """Served by the virtual queue, not yet by the real engine: expected tokens, and the corrected ones it was served."""

    prompt_work: float
    expected_tokens: float
    decode_tokens: float


class VirtualFcfs:
    """Latencies of the virtual queue. Work is in output tokens: what is told to `served` adds up to the work of the finished.

    A request's work is the expected one, corrected by the bias of earlier predictions of its size, until it finishes, then
    the true one; a virtual departure before that is made up for by the difference. Memory: the requests virtually waiting,
    those gone from the virtual queue alone, and a window of latencies.

    Args:
        window: Virtual departures looked at for `quantile_s`.
        refresh_every: Departures between two computations of the quantile.
        quantile: Of the window's latencies, in (0, 1).

    Attributes:
        quantile_s: The quantile, in seconds; None before it has been computed.
    """

    __slots__ = (
        "_bias",
        "_credit",
        "_departed",
        "_expected",
        "_jobs",
        "_known",
        "_latencies",
        "_new",
        "_quantile",
        "_queue",
        "_refresh_every",
        "quantile_s",
    )

    def __init__(self, *, window: int = 500, refresh_every: int = 25, quantile: float = 0.99) -> None:
        self._queue: deque[tuple[str, float]] = deque()
        self._jobs: dict[str, _Job] = {}
        self._departed: dict[str, _Departed] = {}
        self._bias = PredictionBias()
        self._expected: dict[int, float] = {}
        self._known = 0.0
        self._credit = 0.0
        self._latencies: deque[float] = deque(maxlen=window)
        self._refresh_every = refresh_every
        self._new = 0
        self._quantile = quantile
        self.quantile_s: float | None = None

    def arrived(self, state: RequestState, prompt_work: float, decode_tokens: float) -> None:
        """A request joins the virtual queue.

        Args:
            state: The request.
            prompt_work: Work of its prompt, >= 0, in output tokens.
            decode_tokens: Expected output tokens.
        """
        job = _Job(prompt_work, decode_tokens, PredictionBias.group(decode_tokens))
        self._queue.append((state.request_id, state.request.arrival_s))
        self._jobs[state.request_id] = job
        self._count(job, 1.0)

    def predicted(self, state: RequestState, decode_tokens: float) -> None:
        """A better idea of the output tokens."""
        job = self._jobs.get(state.request_id)
        if job is not None:
            self._count(job, -1.0)
            job.decode_tokens, job.group = decode_tokens, PredictionBias.group(decode_tokens)
            self._count(job, 1.0)
            return
        gone = self._departed.get(state.request_id)
        if gone is not None:
            tokens = self._bias.ratio(PredictionBias.group(decode_tokens)) * decode_tokens
            self._credit -= tokens - gone.decode_tokens
            self._departed[state.request_id] = _Departed(gone.prompt_work, decode_tokens, tokens)

    def finished(self, state: RequestState, decode_tokens: float) -> None:
        """The real request has ended after so many output tokens."""
        job = self._jobs.get(state.request_id)
        if job is not None:
            self._bias.learn(job.decode_tokens, decode_tokens)
            self._becomes(job, job.prompt_work, decode_tokens)
            return
        gone = self._departed.pop(state.request_id, None)
        if gone is not None:
            self._bias.learn(gone.expected_tokens, decode_tokens)
            self._credit -= decode_tokens - gone.decode_tokens

    def dropped(self, state: RequestState) -> None:
        """The real request was aborted before its first token: no work at all."""
        job = self._jobs.get(state.request_id)
        if job is not None:
            self._becomes(job, 0.0, 0.0)
            return
        gone = self._departed.pop(state.request_id, None)
        if gone is not None:
            self._credit += gone.prompt_work + gone.decode_tokens

    def served(self, work: float) -> None:
        """The real engine has done work."""
        self._credit += work

    def advance(self, now: float, token_s: float = 0.0) -> None:
        """Lets depart whom the work done so far serves.

        Args:
            now: Time in seconds.
            token_s: Seconds that a request's own output token takes beyond its share of the engine's work, 0 for a server that
                serves one request at a time.
        """
        queue, jobs = self._queue, self._jobs
        while queue:
            request_id, arrival_s = queue[0]
            job = jobs[request_id]
            decode = self._decode_tokens(job)
            if self._credit < job.prompt_work + decode:
                break
            queue.popleft()
            del jobs[request_id]
            self._count(job, -1.0)
            self._credit -= job.prompt_work + decode
            if job.group is not None:
                self._departed[request_id] = _Departed(job.prompt_work, job.decode_tokens, decode)
            self._latencies.append(now - arrival_s + token_s * decode)
            self._new += 1
        if not queue:
            self._credit, self._known = min(self._credit, 0.0), 0.0
            self._expected.clear()
        if self._new >= self._refresh_every:
            self._new = 0
            self.quantile_s = float(np.quantile(np.fromiter(self._latencies, float), self._quantile))

    @property
    def backlog(self) -> float:
        """Work left, in both queues; at the engine's speed the latency of a virtual request that arrives now."""
        ratio = self._bias.ratio
        expected = sum(ratio(group) * tokens for group, tokens in self._expected.items())
        return max(self._known + expected - self._credit, 0.0)

    def _decode_tokens(self, job: _Job) -> float:
        return job.decode_tokens if job.group is None else self._bias.ratio(job.group) * job.decode_tokens

    def _becomes(self, job: _Job, prompt_work: float, decode_tokens: float) -> None:
        """Its work is known now."""
        self._count(job, -1.0)
        job.prompt_work, job.decode_tokens, job.group = prompt_work, decode_tokens, None
        self._count(job, 1.0)

    def _count(self, job: _Job, sign: float) -> None:
        """Into the work left, or out of it."""
        self._known += sign * job.prompt_work
        if job.group is None:
            self._known += sign * job.decode_tokens
        else:
            self._expected[job.group] = self._expected.get(job.group, 0.0) + sign * job.decode_tokens
