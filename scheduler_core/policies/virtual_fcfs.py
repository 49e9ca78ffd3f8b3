"""What the latency would be now under first come, first served: a fluid FCFS queue fed with the same work.

A policy that reorders requests does as much work as FCFS would. So FCFS needs no second engine: its queue serves, in order of
arrival, as much work as the real engine has done, and both have the same work left at any time. As the virtual service of Friedman &
Henderson 2003 ("Fairness and efficiency in web server protocols", SIGMETRICS), with FCFS in place of processor sharing.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import numpy as np

from scheduler_core.request import RequestState

#: Groups of predictions to an octave.
_GROUPS_PER_OCTAVE = 2
_PRIOR_REQUESTS = 4.0


class PredictionBias:
    """ratio(g) = (sum of true + k m_g) / (sum of predicted + k m_g), over the finished requests of group g.

    The expectation of a fitted log-t depends on its tail, of which few samples exist: it may be off by a sixth in the mean
    while every quantile is right. A single ratio over all that have finished would miss that: under shortest first those
    predicted long have not. Given the prediction, finishing does not depend on the true length.

    A group is half an octave of predicted lengths, m_g its geometric middle, k = 4 the number of correctly predicted
    requests that it starts with.
    """

    def __init__(self) -> None:
        self._true: dict[int, float] = {}
        self._predicted: dict[int, float] = {}

    @staticmethod
    def group(predicted_tokens: float) -> int:
        """The group of a prediction, in tokens; below one token all are alike."""
        return math.floor(_GROUPS_PER_OCTAVE * math.log2(max(predicted_tokens, 1.0)))

    def learn(self, predicted_tokens: float, true_tokens: float) -> None:
        """An output expected to have `predicted_tokens` had `true_tokens`."""
        group = self.group(predicted_tokens)
        self._predicted[group] = self._predicted.get(group, 0.0) + predicted_tokens
        self._true[group] = self._true.get(group, 0.0) + true_tokens

    def ratio(self, group: int) -> float:
        """Expected true tokens for each predicted one; 1 before anything is learned."""
        prior = _PRIOR_REQUESTS * math.pow(2.0, (group + 0.5) / _GROUPS_PER_OCTAVE)
        return (self._true.get(group, 0.0) + prior) / (self._predicted.get(group, 0.0) + prior)


@dataclass(slots=True)
class _Job:
    """Work of a request: expected output tokens of a group of predictions; group None: they are the true ones.

    `served` are the corrected tokens that the virtual queue has served it, None before it has left that.
    """

    prompt_work: float
    decode_tokens: float
    group: int | None
    served: float | None = None


class VirtualFcfs:
    """Latencies of the virtual queue. Work is in output tokens; the sum of `served` is the work of the finished.

    A request's work is the expected one, corrected by the bias of earlier predictions of its size, until it finishes, then
    the true one; after a virtual departure the difference is credited.

    Args:
        window: Virtual departures looked at for `quantile_s`.
        refresh_every: Departures between two computations of the quantile.
        quantile: Of the window's latencies, in (0, 1).

    Attributes:
        quantile_s: The quantile, in seconds; None before it has been computed.
    """

    def __init__(self, *, window: int = 500, refresh_every: int = 25, quantile: float = 0.99) -> None:
        self._queue: deque[tuple[str, float]] = deque()
        self._jobs: dict[str, _Job] = {}
        self._bias = PredictionBias()
        self._expected: dict[int, float] = {}
        self._certain_work = 0.0
        self._credit = 0.0
        self._latencies: deque[float] = deque(maxlen=window)
        self._refresh_every = refresh_every
        self._num_new = 0
        self._quantile = quantile
        self.quantile_s: float | None = None

    def arrived(self, state: RequestState, prompt_work: float, decode_tokens: float) -> None:
        """A request joins the virtual queue, with the work of its prompt and its expected output tokens."""
        job = _Job(prompt_work, decode_tokens, PredictionBias.group(decode_tokens))
        self._queue.append((state.request_id, state.request.arrival_s))
        self._jobs[state.request_id] = job
        self._count(job, 1.0)

    def predicted(self, state: RequestState, decode_tokens: float) -> None:
        """A better idea of the output tokens."""
        job = self._jobs.get(state.request_id)
        if job is not None:
            self._revise(job, job.prompt_work, decode_tokens, PredictionBias.group(decode_tokens))

    def finished(self, state: RequestState, decode_tokens: float) -> None:
        """The real request has ended after so many output tokens."""
        job = self._jobs.get(state.request_id)
        if job is not None:
            self._bias.learn(job.decode_tokens, decode_tokens)
            self._end(state, job, job.prompt_work, decode_tokens)

    def dropped(self, state: RequestState) -> None:
        """The real request was aborted before its first token: no work at all."""
        job = self._jobs.get(state.request_id)
        if job is not None:
            self._end(state, job, 0.0, 0.0)

    def served(self, work: float) -> None:
        """The real engine has done work."""
        self._credit += work

    def advance(self, now: float, token_s: float = 0.0) -> None:
        """Ends the virtual requests that the work done so far has served.

        `token_s` are the seconds that a request's own output token takes beyond its part of the engine's work: 0 for a
        server that serves one request at a time.
        """
        queue = self._queue
        while queue:
            request_id, arrival_s = queue[0]
            job = self._jobs[request_id]
            decode = self._corrected(job.decode_tokens, job.group)
            if self._credit < job.prompt_work + decode:
                break
            queue.popleft()
            self._count(job, -1.0)
            self._credit -= job.prompt_work + decode
            job.served = decode
            if job.group is None:
                del self._jobs[request_id]
            self._latencies.append(now - arrival_s + token_s * decode)
            self._num_new += 1
        if not queue:
            self._credit, self._certain_work = min(self._credit, 0.0), 0.0
            self._expected.clear()
        if self._num_new >= self._refresh_every:
            self._num_new = 0
            self.quantile_s = float(np.quantile(np.fromiter(self._latencies, float), self._quantile))

    @property
    def backlog(self) -> float:
        """Work left, in both queues; at the engine's speed the latency of a virtual request that arrives now."""
        ratio = self._bias.ratio
        expected = sum(ratio(group) * tokens for group, tokens in self._expected.items())
        return max(self._certain_work + expected - self._credit, 0.0)

    def _corrected(self, tokens: float, group: int | None) -> float:
        return tokens if group is None else self._bias.ratio(group) * tokens

    def _end(self, state: RequestState, job: _Job, prompt_work: float, decode_tokens: float) -> None:
        self._revise(job, prompt_work, decode_tokens, None)
        if job.served is not None:
            del self._jobs[state.request_id]

    def _revise(self, job: _Job, prompt_work: float, decode_tokens: float, group: int | None) -> None:
        """The work of a job is another than was thought; what it was served too much is given back."""
        if job.served is None:
            self._count(job, -1.0)
        else:
            tokens = self._corrected(decode_tokens, group)
            self._credit -= prompt_work + tokens - job.prompt_work - job.served
            job.served = tokens
        job.prompt_work, job.decode_tokens, job.group = prompt_work, decode_tokens, group
        if job.served is None:
            self._count(job, 1.0)

    def _count(self, job: _Job, sign: float) -> None:
        """Into the work left, or out of it."""
        self._certain_work += sign * job.prompt_work
        if job.group is None:
            self._certain_work += sign * job.decode_tokens
        else:
            self._expected[job.group] = self._expected.get(job.group, 0.0) + sign * job.decode_tokens
