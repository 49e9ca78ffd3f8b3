"""The event loop of a cluster: many replicas, each the same `Scheduler` as in the loop of one, behind a router.

Every replica steps on its own; arrivals, predictions and migrations reach it at their own times. With one replica and no
migration the results are those of `loop.Simulation` to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace

from scheduler_core.errors import InputError
from scheduler_core.plan import Finished
from scheduler_core.predictions import LengthPrediction, Prediction
from scheduler_core.request import Request
from scheduler_core.routing import (
    AutoScaler,
    Dispatcher,
    ReplicaRole,
    ReplicaSnapshot,
    ReplicaStatus,
    Router,
    RoutingRequest,
    ScaleOut,
)
from scheduler_core.routing.migration import Migrations
from scheduler_core.routing.moves import Aborted, Copy, Move, Outcome
from scheduler_core.scheduler import Scheduler
from scheduler_core.simulator.cluster_outcome import ClusterOutcome, ReplicaChange
from scheduler_core.simulator.cluster_replicas import ClusterReplicas
from scheduler_core.simulator.fetch import Predictions
from scheduler_core.simulator.kv_link import KvLink
from scheduler_core.simulator.loop import Progress
from scheduler_core.simulator.planner import Planner
from scheduler_core.simulator.prefix_cache import prefix_blocks
from scheduler_core.simulator.records import finished_record
from scheduler_core.simulator.replica import SimulatedReplica, Step
from scheduler_core.simulator.sources import ClosedLoop, Source, TraceEvent
from scheduler_core.simulator.step_time import StepTime
from scheduler_core.simulator.trace import Trace, TraceRequest


class ClusterSimulation:
    """Runs a trace on several replicas to its end; every request finishes or is refused.

    Args:
        trace: What arrives.
        schedulers: A fresh scheduler for each replica, by id.
        router: Which replica gets what; a fresh one.
        step_time: Durations of steps; see `step_times`.
        predictions: What reaches the schedulers as `update` events.
        delays_s: By request id: seconds from arrival to that event; 0 where missing.
        requests: By id: requests with tiers, targets and so on, instead of those made from the trace's rows.
        roles: By replica: which phases it runs; both where missing.
        planner: Which requests move, asked every `interval_s`; None: nobody moves.
        interval_s: Time between two questions to the planner.
        stage_blocks: See `Migrations`.
        link: Durations of copies.
        changes: What happens to replicas on the way. Those that join later, or that only the scaler starts, are among
            the schedulers too.
        scaler: Starts and drains replicas, asked every `interval_s`; None: nobody does.
        standby: Replicas that are there only when the scaler starts them. A drained one is ready to start again.
        exact_steps: Take every step by itself; always so with a planner.
        step_times: By replica: durations of its steps, where they are others than `step_time`.
        startup_s: How long a replica takes to start after the scaler has asked for it. Those that start count as there
            when the scaler's `max_replicas` is kept.
        clients: A closed loop of clients; None: requests arrive at their times.
        prefix_cache_tokens: Tokens of earlier turns of conversations that each replica keeps. What a replica has is lost
            when it fails or leaves; a request that begins anew finds what its new replica has.
        progress: Called with the number of requests finished or refused since the last call.
        rebuild: Makes a fresh scheduler for a replica that joins again after it has failed; None: none does.

    Raises:
        InputError: There is no replica, a change or a step time is of one that does not exist, `interval_s` is not above
            0, or `startup_s` is negative; by `run`: requests were left for which no replica came.
    """

    def __init__(
        self,
        trace: Trace,
        schedulers: Mapping[str, Scheduler],
        router: Router,
        step_time: StepTime,
        predictions: Predictions,
        *,
        delays_s: dict[str, float] | None = None,
        requests: Mapping[str, Request] | None = None,
        roles: Mapping[str, ReplicaRole] | None = None,
        planner: Planner | None = None,
        interval_s: float = 0.05,
        stage_blocks: int | None = 64,
        link: KvLink | None = None,
        changes: Sequence[ReplicaChange] = (),
        scaler: AutoScaler | None = None,
        standby: AbstractSet[str] = frozenset(),
        exact_steps: bool = False,
        step_times: Mapping[str, StepTime] | None = None,
        startup_s: float = 0.0,
        clients: ClosedLoop | None = None,
        prefix_cache_tokens: int = 0,
        progress: Progress | None = None,
        rebuild: Callable[[str], Scheduler] | None = None,
    ) -> None:
        if not 0 < interval_s < math.inf:
            raise InputError("interval_s", interval_s, "seconds > 0")
        if not 0 <= startup_s < math.inf:
            raise InputError("startup_s", startup_s, "seconds >= 0")
        named = (*standby, *(change.replica_id for change in changes), *(step_times or {}))
        for name in named:
            if name not in schedulers:
                raise InputError("standby, changes, step_times", name, ", ".join(schedulers))
        speeds = {name: (step_times or {}).get(name, step_time) for name in schedulers}
        self._all = ClusterReplicas(schedulers, speeds, prefix_cache_tokens, rebuild)
        self._replicas, self._ports, self._prefixes = self._all.by_id, self._all.ports, self._all.prefixes
        self._changes = sorted(changes, key=lambda change: -change.time_s)
        self._startup_s = startup_s
        self._starting: set[str] = set()
        self._progress = progress
        self._scaler = scaler
        self._standby = set(standby)
        self._roles = {name: (roles or {}).get(name, ReplicaRole.BOTH) for name in schedulers}
        self._dispatcher = Dispatcher(router)
        self._answers = predictions.answers
        self._requests = requests or {}
        self._planner = planner
        self._interval_s = interval_s
        self._migrations = Migrations(self._ports, stage_blocks)
        self._link = link or KvLink()
        self._exact_steps = exact_steps or planner is not None
        self._fresh = router.sees_tokens or scaler is not None
        self._copies: dict[str, tuple[float, Copy]] = {}
        self._asked: set[str] = set()
        self._held: dict[str, Prediction | LengthPrediction | None] = {}
        self._rows: dict[str, TraceRequest] = {}
        self._told: dict[str, Prediction | LengthPrediction | None] = {}
        self._source = Source(trace, predictions, delays_s, clients)
        self._next_tick_s = math.inf
        self._seen_until_s = 0.0
        self._outcome = ClusterOutcome()

    def run(self) -> ClusterOutcome:
        """Runs until every request has finished or was refused."""
        now = self._seen_until_s = self._outcome.total.start_s = self._source.start_s
        first = {
            change.replica_id: change.kind for change in self._changes
        }  # they are in falling order of time
        later = self._standby | {name for name, kind in first.items() if kind == "join"}
        for name in self._replicas:
            if name not in later:
                self._dispatcher.joined(name, now, self._roles[name])
        if self._planner is not None or self._scaler is not None:
            self._next_tick_s = now + self._interval_s
        while math.isfinite(now):
            self._advance(now)
            now = self._next_time()
        if self._dispatcher.num_pending:
            raise InputError(
                "roles, changes", self._roles, "a replica in the end that can take every request"
            )
        assert not self._rows, "a request was lost"
        assert not self._migrations.in_flight, "a migration never ended"
        self._outcome.total.end_s = self._seen_until_s
        return self._outcome

    def _next_time(self) -> float:
        """When something happens next; infinite if nothing ever will."""
        times = [one.step.end_s for one in self._replicas.values() if one.step is not None]
        times += [end_s for end_s, copy in self._copies.values() if end_s < math.inf]
        times.append(self._source.next_s)
        if self._changes:
            times.append(self._changes[-1].time_s)
        if len(self._rows) > self._dispatcher.num_pending:
            times.append(self._next_tick_s)
        return min(times, default=math.inf)

    def _advance(self, now: float) -> None:
        """Everything that happens at this time: steps and copies end, events arrive, requests move, steps begin."""
        for one in self._replicas.values():
            if one.step is not None and one.step.end_s <= now:
                self._complete(one, one.step)
        for name, (end_s, copy) in sorted(self._copies.items()):
            if end_s <= now and self._copies.get(name) == (end_s, copy):
                self._copies[name] = (math.inf, copy)
                self._copy_ends(copy, now)
        while self._changes and self._changes[-1].time_s <= now:
            self._change(self._changes.pop())
        while self._source.next_s <= now:
            self._deliver(self._source.pop())
        if now >= self._next_tick_s:
            self._tick(now)
        for one in self._replicas.values():
            if one.step is None:
                self._begin(one, now)

    def _deliver(self, event: TraceEvent) -> None:
        name = event.request.request_id
        if event.arrives:
            self._arrive(event.request)
        elif name not in self._outcome.total.refused:
            if self._migrations.stopped(name):
                self._held[name] = self._answers[name]
            else:
                self._update(name, self._answers[name], event.time_s)

    def _update(self, name: str, answer: Prediction | LengthPrediction | None, now: float) -> None:
        self._told[name] = answer
        where = self._dispatcher.replica_of(name)
        if where is not None:
            self._replicas[where].port.scheduler.update(name, answer, now)

    def _arrive(self, row: TraceRequest) -> None:
        name, now = row.request_id, row.arrival_s
        request = self._requests.get(name) or row.request()
        refusals = [port.scheduler.refusal(request) for port in self._ports.values()]
        comes = not refusals and any(change.kind == "join" for change in self._changes)
        if not comes and all(refusal is not None for refusal in refusals):
            self._outcome.total.refused[name] = str(refusals[0]) if refusals else "no replica is left"
            self._source.ended(row, now)
            if self._progress is not None:
                self._progress(1)
            return
        self._observe(now)
        self._rows[name] = row
        size = next(iter(self._ports.values())).kv_block_tokens if self._ports else 0
        blocks = prefix_blocks(row, size) if size else ()
        item = RoutingRequest(request=request, tier=request.tier, prefix_blocks=blocks)
        self._dispatcher.arrived(item)
        self._dispatch(now)

    def _dispatch(self, now: float) -> None:
        """Gives what is pending to replicas."""
        if not self._dispatcher.num_pending:
            return
        whole = self._dispatcher.router.needs_requests
        pictures = {one.replica_id: one for one in self._snapshots(keep_requests=whole)}
        for placed in self._dispatcher.dispatch(pictures, now):
            name = placed.item.request.request_id
            scheduler = self._replicas[placed.replica_id].port.scheduler
            cached = self._prefixes[placed.replica_id].hit(self._rows[name])
            request = placed.item.request
            scheduler.add(replace(request, cached_prefix_tokens=cached) if cached else request, now)
            if name in self._told:
                scheduler.update(name, self._told[name], now)

    def _change(self, change: ReplicaChange) -> None:
        now, name = change.time_s, change.replica_id
        self._observe(now)
        if change.kind == "join":
            self._standby.discard(name)
            self._starting.discard(name)
            self._all.restore(name)
            self._dispatcher.joined(name, now, self._roles[name])
        elif change.kind == "drain":
            self._drain(name, now)
        else:
            self._fail(name, now)
        self._dispatch(now)

    def _drain(self, name: str, now: float) -> None:
        self._dispatcher.draining(name, now)
        for ended in self._migrations.on_draining(name, now):
            self._handle(ended, now)

    def _fail(self, name: str, now: float) -> None:
        for ended in self._migrations.on_failed(name, now):
            self._handle(ended, now)
        self._all.remove(name)
        lost = {item.request.request_id for item in self._dispatcher.failed(name, now)}
        self._outcome.num_restarts += len(lost)
        self._asked -= lost

    def _snapshots(self, *, keep_requests: bool) -> tuple[ReplicaSnapshot, ...]:
        return self._all.snapshots(self._dispatcher.replicas, self._roles, keep_requests=keep_requests)

    def _begin(self, one: SimulatedReplica, now: float) -> None:
        """Begins the replica's next step, if it has work."""
        until_s = self._source.next_s
        if self._changes:
            until_s = min(until_s, self._changes[-1].time_s)
        if self._scaler is not None:
            until_s = min(until_s, self._next_tick_s)
        step = one.begin(self._rows, now, until_s=until_s, exact=self._exact_steps, fresh=self._fresh)
        if step is not None:
            for name in step.plan.preempted:
                self._handle(self._migrations.on_preempted(name, now), now)
            for name in step.plan.admitted:
                self._dispatcher.admitted(name, now)

    def _complete(self, one: SimulatedReplica, step: Step) -> None:
        now, total = step.end_s, self._outcome.total
        finished = one.complete(self._rows)
        self._observe(now)
        for item in finished:
            self._finish(one, item, now)
        total.busy_s += now - step.start_s
        total.num_steps += step.num_steps
        one.catch_up(now)

    def _finish(self, one: SimulatedReplica, item: Finished, now: float) -> None:
        name = item.request_id
        self._handle(self._migrations.on_finished(name, now), now)
        self._dispatcher.finished(name, now)
        self._outcome.replica_of[name] = one.name
        row = self._rows.pop(name)
        record = finished_record(item, row, self._answers.get(name), now)
        self._outcome.total.records.append(record)
        self._prefixes[one.name].keep(row)
        self._source.ended(row, now)
        if self._progress is not None:
            self._progress(1)

    def _tick(self, now: float) -> None:
        """Asks the planner and the scaler; moves begin when their source is between two steps."""
        self._next_tick_s = now + self._interval_s
        if self._scaler is not None:
            self._scale(self._scaler, now)
        if self._planner is None:
            return
        busy = self._migrations.in_flight | self._asked
        for move in self._planner.plan(self._snapshots(keep_requests=True), busy, now):
            self._asked.add(move.request_id)
            self._replicas[move.source].between_steps(lambda at, move=move: self._start(move, at), now)  # type: ignore[misc]

    def _scale(self, scaler: AutoScaler, now: float) -> None:
        status = self._dispatcher.replicas
        for name, one in status.items():
            idle = self._replicas[name].num_requests == 0 and name not in self._migrations.replicas
            if one is ReplicaStatus.DRAINING and idle:
                self._dispatcher.left(name, now)
                self._standby.add(name)
                self._all.forget_prefixes(name)
        signal = scaler.signal(self._snapshots(keep_requests=False), now)
        if signal is None or (isinstance(signal, ScaleOut) and not self._may_start(scaler, status)):
            return
        self._outcome.scaling.append((now, signal))
        if isinstance(signal, ScaleOut):
            started = min(self._standby)
            self._standby.remove(started)
            join = ReplicaChange(now + self._startup_s, started, "join")
            if self._startup_s == 0:
                self._change(join)
                return
            self._starting.add(started)
            self._changes.append(join)
            self._changes.sort(key=lambda change: -change.time_s)
        else:
            self._drain(signal.victim, now)

    def _may_start(self, scaler: AutoScaler, status: Mapping[str, ReplicaStatus]) -> bool:
        num_active = sum(one is ReplicaStatus.ACTIVE for one in status.values())
        return bool(self._standby) and num_active + len(self._starting) < scaler.max_replicas

    def _start(self, move: Move, now: float) -> None:
        self._asked.discard(move.request_id)
        active = self._dispatcher.replicas.get(move.destination) is ReplicaStatus.ACTIVE
        if active and self._dispatcher.replica_of(move.request_id) == move.source:
            self._handle(self._migrations.start(move, now), now)

    def _copy_ends(self, copy: Copy, now: float) -> None:
        name = copy.move.request_id

        def go_on(at: float) -> None:
            # Between the end of the copy and that of the step the migration may have ended, and another have begun.
            if name in self._copies and self._copies[name][1] is copy:
                del self._copies[name]
                self._handle(self._migrations.copied(name, at), at)

        if copy.live:
            self._replicas[copy.move.source].between_steps(go_on, now)
        else:
            go_on(now)

    def _handle(self, outcome: Outcome | None, now: float) -> None:
        if outcome is None:
            return
        name, out = outcome.move.request_id, self._outcome
        if isinstance(outcome, Copy):
            source = self._replicas[outcome.move.source]
            source.link_free_s = max(now, source.link_free_s) + self._link.copy_s(outcome.num_blocks)
            self._copies[name] = (source.link_free_s, outcome)
            return
        if isinstance(outcome, Aborted):
            self._copies.pop(name, None)
            out.ended[outcome.reason] += 1
        else:
            self._dispatcher.migrated(name, outcome.move.destination, now)
            out.num_migrations += 1
            out.num_migrated_blocks += outcome.num_blocks
        if name in self._held:
            self._update(name, self._held.pop(name), now)

    def _observe(self, now: float) -> None:
        """Adds the stretch since the last change of the number of requests to the integrals."""
        elapsed, total = now - self._seen_until_s, self._outcome.total
        total.request_seconds += elapsed * len(self._rows)
        total.waiting_seconds += elapsed * (self._all.num_waiting + self._dispatcher.num_pending)
        self._seen_until_s = now
