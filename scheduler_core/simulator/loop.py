"""The event loop: engine replicas, each with the same `Scheduler` that engine adapters use.

A replica starts a step when its last one has ended and it has work. Arrivals, predictions and migrations reach
it at any time and take effect in its next step. Runs of decode steps without arrival, end of a request or lack
of memory are simulated at once, with bit-identical results. A single replica is a cluster without a router.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush

from scheduler_core.engine.plan import Finished
from scheduler_core.errors import InputError
from scheduler_core.prediction.correction import Correction, RequestContext
from scheduler_core.prediction.outcome import Outcome as RequestOutcome
from scheduler_core.prediction.predictions import Prediction
from scheduler_core.prediction.session import SessionStates, session_context
from scheduler_core.ranges import check_choice
from scheduler_core.routing.base import Router, RoutingRequest, ScaleIn, ScaleOut, Scaler
from scheduler_core.routing.disaggregated import Disaggregated
from scheduler_core.routing.dispatcher import Dispatcher
from scheduler_core.routing.llumnix import MigrationPlanner
from scheduler_core.routing.migration import AbortReason, KVLink, Migrations
from scheduler_core.routing.snapshot import ReplicaRole, ReplicaStatus
from scheduler_core.scheduler import Scheduler
from scheduler_core.simulator.clients import GAVE_UP, PATIENT, ClientPlan, WaitingClients
from scheduler_core.simulator.cluster_view import ClusterView
from scheduler_core.simulator.failures import FailurePlan, FailureSource
from scheduler_core.simulator.migration_executor import MigrationExecutor
from scheduler_core.simulator.records import RequestRecord
from scheduler_core.simulator.replica import SimulatedReplica, prefix_blocks
from scheduler_core.simulator.sources import EventSource, TraceEvent
from scheduler_core.simulator.step_time.base import StepTime, delays_of
from scheduler_core.simulator.trace import Trace, TraceRequest
from scheduler_core.simulator.trace_predictions import Predictions, Progress
from scheduler_core.simulator.watch import ReplicaWatch, RunWatch, Step


@dataclass(slots=True)
class SimulationOutcome:
    """Result of a simulation over all replicas.

    Attributes:
        records: Finished requests, in the order of their end.
        refused: Requests that could never run: reason by id.
        failed: Requests that were lost with their replica, or given up by their client, and not sent again: reason by id.
        unserved: The rows of both, refused and failed, with their actual arrivals.
        num_unfinished: Requests that had arrived but not ended at the horizon, or with `stop_after`.
        start_s, end_s: First arrival, end of the last step.
        busy_s, num_steps: Sums over all replicas.
        request_seconds, waiting_seconds, replica_seconds: Integrals over time of the numbers of requests in the system
            (arrived, not ended), of waiting requests, and of replicas that run, drain or (re)start.
        failed_seconds: Time that failed requests were in the system.
        num_failures, num_killed: Failures of replicas; drained ones that were killed after `drain_timeout_s`.
        num_retried, num_retries: Lost requests that were sent again, and how often in all.
        num_lost_tokens: Tokens in the KV cache of lost requests, which were computed again or in vain.
        num_given_up, num_client_retries: Requests that their clients gave up for good, and how often others were sent again.
        num_aborted_tokens: Tokens in the KV cache of requests when their clients gave up.
        num_migrated_blocks: Blocks copied for migrated requests.
        migration_pauses_s: Time for which each migrated running request stopped.
        scaling: Decisions of the auto-scaler and their times in seconds.
    """

    records: list[RequestRecord] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    unserved: list[TraceRequest] = field(default_factory=list)
    num_unfinished: int = 0
    start_s: float = 0.0
    end_s: float = 0.0
    busy_s: float = 0.0
    num_steps: int = 0
    request_seconds: float = 0.0
    waiting_seconds: float = 0.0
    replica_seconds: float = 0.0
    failed_seconds: float = 0.0
    num_failures: int = 0
    num_killed: int = 0
    num_retried: int = 0
    num_retries: int = 0
    num_lost_tokens: int = 0
    num_given_up: int = 0
    num_client_retries: int = 0
    num_aborted_tokens: int = 0
    num_migrations: int = 0
    num_migrated_blocks: int = 0
    migration_pauses_s: list[float] = field(default_factory=list)
    aborted_migrations: Counter[AbortReason] = field(default_factory=Counter)
    scaling: list[tuple[float, ScaleIn | ScaleOut]] = field(default_factory=list)


class Simulation:
    """Runs a trace to its end; each request finishes, is refused, or fails: with its replica, or because its client gives up.

    Args:
        step_time: Durations of the engine's steps, for all replicas or by id.
        schedulers: A new scheduler for each replica, by id; a single one needs no id. Their counters and
            memory peaks can be read afterwards.
        predictions: Passed to the schedulers as `update` events, `latency_s` after the arrivals.
        router: A new router that chooses the replica of each request. None with one replica.
        calibration: Corrects each prediction when it reaches the scheduler, with the requests finished until then.
        served_model: Name of the served model for `calibration`; empty: `model` of each row.
        horizon_s: Time at which the run ends, although requests are not finished; None: runs until all are.
        stop_after: Number of finished requests after which the run ends; None: no limit.
        is_decided: Called with each finished request, and with the row of each that its client gave up for good; the run ends when
            it returns True, but not before a request has finished.
        exact_steps: Simulate every step individually; slower, same result. Always the case with a planner.
        progress: Called with the number of requests ended since the last call.
        roles: Phases by replica; default: both.
        planner: Moves requests between replicas every `interval_s`.
        stage_blocks: See `Migrations`.
        link: Duration of copies between replicas; None: `KVLink` with its defaults.
        scaler: Starts and drains replicas every `interval_s`; None: all run. `schedulers` includes those it may start.
        standby: Replicas that are only started by the scaler. Drained replicas can be started again.
        startup_s: Time until a replica started by the scaler is available; it counts for `max_replicas` at once.
        drain_timeout_s: Time after which a draining replica is killed with its requests; None: it drains to its end.
        failures: When replicas fail, and what becomes of their requests; None: they don't.
        clients: When clients give up, and how often they send again; default: they wait. Latencies count from the first sending.
        snapshot_interval_s: How old the metrics are at most that a router scrapes (`Router.scrapes`).

    Raises:
        InputError: There is no replica, or a required router is missing; a standby replica is unknown; in `run`: there was no
            suitable replica for some requests.
    """

    def __init__(
        self,
        trace: Trace,
        schedulers: Scheduler | Mapping[str, Scheduler],
        step_time: StepTime | Mapping[str, StepTime],
        predictions: Predictions,
        router: Router | None = None,
        *,
        horizon_s: float | None = None,
        stop_after: int | None = None,
        is_decided: Callable[[RequestRecord | TraceRequest], bool] | None = None,
        exact_steps: bool = False,
        calibration: Correction | None = None,
        served_model: str = "",
        watch: RunWatch | None = None,
        progress: Progress | None = None,
        roles: Mapping[str, ReplicaRole] | None = None,
        planner: MigrationPlanner | Disaggregated | None = None,
        interval_s: float = 0.05,
        stage_blocks: int | None = 64,
        link: KVLink | None = None,
        scaler: Scaler | None = None,
        standby: AbstractSet[str] = frozenset(),
        startup_s: float = 0.0,
        drain_timeout_s: float | None = None,
        failures: FailurePlan | None = None,
        clients: ClientPlan = PATIENT,
        snapshot_interval_s: float = 0.0,
    ) -> None:
        if isinstance(schedulers, Scheduler):
            schedulers = {"0": schedulers}
        if not schedulers:
            raise InputError("schedulers", schedulers, "at least one replica")
        parts = (planner, scaler, failures)
        if router is None and (len(schedulers) > 1 or any(part is not None for part in parts)):
            raise InputError("router", None, "a router for several replicas, planner, scaler or failures")
        for name in standby:
            check_choice("standby", name, schedulers)
        step_times = step_time if isinstance(step_time, Mapping) else dict.fromkeys(schedulers, step_time)
        self._fresh = scaler is not None or (router is not None and router.sees_tokens)
        self._plan = FailurePlan() if failures is None else failures
        #: Requests in the system.
        self._rows: dict[str, TraceRequest] = {}
        self._replicas = {
            name: SimulatedReplica(
                name,
                scheduler,
                step_times[name],
                self._rows,
                exact=exact_steps or planner is not None,
                fresh=self._fresh or failures is not None or clients.timeout_s is not None,
                watch=None if watch is None else ReplicaWatch(watch, name, scheduler),
            )
            for name, scheduler in schedulers.items()
        }
        self._predicted = predictions.by_id
        self._calibration, self._served_model = calibration, served_model
        #: What online calibration knows of the sessions.
        self._sessions = SessionStates()
        #: Corrected predictions of requests in the system, by request id.
        self._corrected: dict[str, Prediction] = {}
        frontend_s = max(delays_of(model).frontend_s for model in step_times.values())
        #: Failures of replicas; None if none can occur.
        self._failures: FailureSource | None = None
        self._fails = failures is not None or drain_timeout_s is not None
        self._num_retries: dict[str, int] = {}
        self._client_plan = clients
        self._clients = None if clients.timeout_s is None else WaitingClients(clients.timeout_s)
        #: Of requests that clients sent again: when they did first, and how often.
        self._first_s: dict[str, float] = {}
        self._num_sent_again: dict[str, int] = {}
        self._source = EventSource(trace, predictions, frontend_s)
        self._horizon_s = math.inf if horizon_s is None else horizon_s
        self._stop_after = math.inf if stop_after is None else stop_after
        self._is_decided = is_decided
        self._progress = progress
        self._dispatcher = None if router is None else Dispatcher(router)
        #: Session -> replica of its latest request.
        self._replica_of_session: dict[str, str] = {}
        self._roles = {name: (roles or {}).get(name, ReplicaRole.BOTH) for name in schedulers}
        self._planner = planner
        self._interval_s = interval_s
        self._migrations = Migrations(schedulers, stage_blocks)
        self._executor = MigrationExecutor(
            self._migrations, self._replicas, self._dispatcher, link or KVLink(), self._migrated
        )
        #: Predictions that have arrived, and those that wait for the end of a migration.
        self._delivered: dict[str, Prediction | None] = {}
        self._delayed: dict[str, Prediction | None] = {}
        self._scaler = scaler
        self._standby = set(standby)
        self._startup_s, self._drain_timeout_s = startup_s, drain_timeout_s
        #: Heap of the times at which starting replicas join, and their ids.
        self._starting: list[tuple[float, str]] = []
        self._draining: set[str] = set()
        #: Whether replicas or the assignment of requests change without a request's event.
        self._changes = planner is not None or scaler is not None or self._fails
        self._view = ClusterView(self._replicas, self._roles, self._settle, snapshot_interval_s)
        self._next_tick_s = math.inf
        #: Numbers of requests in the system and waiting, their time, and whether they may have changed.
        self._counts = (0, 0)
        self._counted_s = 0.0
        self._may_count = False
        #: Number of replicas that run, drain or start, and the time since then.
        self._num_replicas = 0
        self._replicas_s = 0.0
        self._outcome = SimulationOutcome()

    def run(self) -> SimulationOutcome:
        """Runs until every request has finished or was refused."""
        now = self._counted_s = self._outcome.start_s = self._source.start_s
        if self._fails:
            self._failures = FailureSource(self._plan, self._replicas, now)
        if self._dispatcher is not None:
            for name in self._replicas:
                if name not in self._standby:
                    self._dispatcher.joined(name, self._roles[name])
                    if self._failures is not None:
                        self._failures.joined(name, now)
        if self._planner is not None or self._scaler is not None:
            self._next_tick_s = now + self._interval_s
        self._count_replicas(now)
        end_s, records = self._horizon_s, self._outcome.records
        while now < math.inf and now <= self._horizon_s and len(records) < self._stop_after:
            before, now = now, self._advance(now)
            if len(records) >= self._stop_after:
                end_s = before
        executor, outcome = self._executor, self._outcome
        outcome.num_migrations, outcome.num_migrated_blocks = executor.num_migrations, executor.num_blocks
        outcome.migration_pauses_s, outcome.aborted_migrations = executor.pauses_s, executor.aborted
        if now < math.inf:
            self._count(end_s)
            outcome.num_unfinished = len(self._rows)
            outcome.end_s = end_s
            self._count_replicas(end_s)
            return outcome
        if self._dispatcher is not None and self._dispatcher.num_pending:
            raise InputError("roles", self._roles, "at least one replica that can run every request")
        assert not self._rows, "a request was lost"
        assert not self._migrations.in_flight, "a migration did not end"
        outcome.end_s = self._counted_s
        self._count_replicas(self._counted_s)
        return outcome

    @property
    def _num_pending(self) -> int:
        """Number of requests that wait for a replica."""
        return 0 if self._dispatcher is None else self._dispatcher.num_pending

    def _advance(self, now: float) -> float:
        """Processes all events at time `now`: ends of steps and copies, failures, starts of replicas, clients that give up,
        arrivals, predictions, migrations, starts of steps. Returns the time of the next event; infinite if there is none."""
        replicas, source, failures = self._replicas, self._source, self._failures
        for replica in replicas.values():
            if replica.step is not None and replica.step.end_s <= now:
                self._complete(replica, replica.step)
        self._executor.end_copies(now)
        if self._draining:
            self._release(now)
        while failures is not None and failures.next_s <= now:
            failure = failures.pop()
            if failure is not None:
                self._fail(*failure, now)
        while self._starting and self._starting[0][0] <= now:
            self._join(heappop(self._starting)[1], now)
            self._count_replicas(now)
        if self._clients is not None:
            for name in self._clients.due(now):
                self._check_client(self._clients, name, now)
        while source.next_s <= now:
            self._deliver(source.pop())
        if now >= self._next_tick_s:
            self._tick(now)
            self._count_replicas(now)
        next_s = source.next_s
        # Events at one of several replicas shorten its run of steps, see `_reach`.
        until_s = math.inf if self._dispatcher is not None and not self._fresh else next_s
        if self._starting:
            until_s = min(until_s, self._starting[0][0])
        if failures is not None:
            until_s = min(until_s, failures.next_s)
        if self._scaler is not None:
            until_s = min(until_s, self._next_tick_s)
        for replica in replicas.values():
            step = replica.step or self._begin(replica, now, until_s)
            if step is not None and step.end_s < next_s:
                next_s = step.end_s
        if self._may_count:
            self._count(now)
        next_s = min(next_s, self._executor.next_s)
        if self._clients is not None:
            next_s = min(next_s, self._clients.next_s)
        if self._changes and (self._rows or source.next_s < math.inf):
            next_s = min(next_s, self._next_change_s())
        return next_s

    def _next_change_s(self) -> float:
        """Time of the next start, failure or decision about replicas, as long as there are requests to come."""
        next_s = self._starting[0][0] if self._starting else math.inf
        if self._failures is not None:
            next_s = min(next_s, self._failures.next_s)
        if len(self._rows) > self._num_pending:
            return min(next_s, self._next_tick_s)
        if self._scaler is not None and self._num_replicas > self._scaler.min_replicas:
            # An idle cluster shrinks.
            next_s = min(
                next_s, max(self._next_tick_s, self._next_tick_s - self._interval_s + self._scaler.interval_s)
            )
        return next_s

    def _count(self, now: float) -> None:
        """Integrates the numbers of requests up to `now`, if they have changed."""
        self._may_count = False
        waiting = self._num_pending
        for replica in self._replicas.values():
            waiting += replica.scheduler.num_waiting + len(replica.held)
        counts = (len(self._rows), waiting)
        if counts != self._counts:
            elapsed = now - self._counted_s
            self._outcome.request_seconds += elapsed * self._counts[0]
            self._outcome.waiting_seconds += elapsed * self._counts[1]
            self._counts, self._counted_s = counts, now

    def _count_replicas(self, now: float) -> None:
        """Integrates the number of replicas up to `now`."""
        self._outcome.replica_seconds += max(0.0, now - self._replicas_s) * self._num_replicas
        replicas = self._replicas if self._dispatcher is None else self._dispatcher.replicas
        self._num_replicas, self._replicas_s = len(replicas) + len(self._starting), now

    def _deliver(self, event: TraceEvent) -> None:
        name = event.request.request_id
        if event.is_arrival:
            self._arrive(event.request, event.time_s)
        elif name not in self._outcome.refused and name not in self._outcome.failed:
            if self._rows.get(name, event.request) is not event.request:
                return  # of a request that was sent again since
            prediction = self._prediction(event.request)
            if self._migrations.stopped(name) is not None:
                self._delayed[name] = prediction
            else:
                self._update(name, prediction, event.time_s)

    def _prediction(self, row: TraceRequest) -> Prediction | None:
        """The prediction of a request, corrected by online calibration."""
        prediction = self._predicted[row.request_id]
        if self._calibration is None or prediction is None or prediction.length is None:
            return prediction
        length = self._calibration.correct(self._context(row, prediction), prediction.length)
        self._corrected[row.request_id] = corrected = replace(prediction, length=length)
        return corrected

    def _observe(self, item: Finished, row: TraceRequest) -> None:
        """Updates online calibration with a finished request."""
        prediction = self._predicted.get(row.request_id)
        if self._calibration is None or prediction is None or prediction.length is None:
            return
        outcome = RequestOutcome(
            prediction=prediction.length,
            prompt_tokens=row.prompt_tokens,
            output_tokens=item.output_tokens,
            finished=item.reason != "length",
            max_tokens=row.max_tokens,
        )
        self._calibration.observe(self._context(row, prediction), outcome)
        if row.session_id is not None:
            # Without the time: a recorded pause contains a part of the next output's.
            self._sessions.observe(
                row.session_id,
                output_tokens=item.output_tokens,
                input_tokens=row.prompt_tokens,
                ended_by=row.ended_by,
            )

    def _context(self, row: TraceRequest, prediction: Prediction) -> RequestContext:
        context = RequestContext(
            served_model=self._served_model or row.model,
            tenant=row.tenant,
            prompt_tokens=row.prompt_tokens,
            embedding=prediction.embedding,
        )
        return session_context(context, self._sessions, row.session_id or "")

    def _update(self, name: str, prediction: Prediction | None, now: float) -> None:
        if self._dispatcher is None:
            (replica,) = self._replicas.values()
            replica.update(name, prediction, now)
            return
        self._delivered[name] = prediction
        replica_id = self._dispatcher.replica_of(name)
        if replica_id is not None:
            replica = self._replicas[replica_id]
            self._reach(replica, now)
            replica.update(name, prediction, now)

    def _arrive(self, row: TraceRequest, now: float) -> None:
        name = row.request_id
        self._may_count = True
        request = row.request()
        refusals = [replica.scheduler.refusal(request) for replica in self._replicas.values()]
        if all(refusal is not None for refusal in refusals):
            self._outcome.refused[name] = str(refusals[0])
            self._outcome.unserved.append(row)
            self._end_request(row, now)
            return
        self._rows[name] = row
        if name not in self._first_s:
            self._outcome.request_seconds += now - row.arrival_s  # in the front end
        if self._clients is not None:
            self._clients.wait(name, row.arrival_s, now)
        if self._dispatcher is None:
            (replica,) = self._replicas.values()
            replica.add(request, now)
        else:
            replica = next(iter(self._replicas.values()))
            blocks = prefix_blocks(row, replica.scheduler.config.kv_block_tokens)
            item = RoutingRequest(request=request, prefix_blocks=blocks)
            self._dispatcher.arrived(item)
            self._dispatch(self._dispatcher, now)

    def _reach(self, replica: SimulatedReplica, now: float) -> None:
        """Called before an event at a replica; shortens its run of steps so that the event takes effect."""
        if self._clients is not None:
            self._settle(replica, now)  # requests may be aborted during the step under way
            return
        replica.shorten(now)
        if replica.step is not None and replica.step.end_s <= now:
            self._complete(replica, replica.step)

    def _settle(self, replica: SimulatedReplica, now: float) -> None:
        """Completes the steps of a replica that have ended, but for the one under way; before a router reads its tokens, too."""
        replica.shorten(now)
        step = replica.step
        if step is not None and step.end_s <= now:
            self._complete(replica, step)
            return
        if step is not None and replica.split():
            self._complete(replica, step)
            self._begin(replica, step.end_s, now)

    def _leave(self, replica: SimulatedReplica, session: str, now: float) -> None:
        """Ends a session at a replica that it has left, after the step under way: what its combined steps evict must not depend
        on it."""
        self._reach(replica, now)
        replica.between_steps(lambda at: replica.scheduler.end_session(session, at), now)

    def _end_request(self, row: TraceRequest, now: float) -> None:
        self._source.end_request(row, now)
        if self._progress is not None:
            self._progress(1)

    def _dispatch(self, dispatcher: Dispatcher, now: float) -> None:
        """Sends pending requests to replicas."""
        if not dispatcher.num_pending:
            return
        for item, replica_id in dispatcher.dispatch(self._view.seen(dispatcher, now), now):
            request, replica = item.request, self._replicas[replica_id]
            if request.session:
                former = self._replica_of_session.get(request.session, replica_id)
                self._replica_of_session[request.session] = replica_id
                if former != replica_id:
                    self._leave(self._replicas[former], request.session, now)
            self._reach(replica, now)
            replica.add(request, now)
            if request.request_id in self._delivered:
                replica.update(request.request_id, self._delivered[request.request_id], now)

    def _join(self, name: str, now: float) -> None:
        dispatcher = self._dispatcher
        assert dispatcher is not None, "the scaler needs a router"
        self._may_count = True
        dispatcher.joined(name, self._roles[name])
        if self._failures is not None:
            self._failures.joined(name, now)
        self._dispatch(dispatcher, now)

    def _start(self, name: str, join_s: float, now: float) -> None:
        """Starts a replica, which joins at `join_s`."""
        if join_s <= now:
            self._join(name, now)
        else:
            heappush(self._starting, (join_s, name))

    def _begin(self, replica: SimulatedReplica, now: float, until_s: float) -> Step | None:
        """Starts the next step of a replica, if it has work."""
        step = replica.begin(now, until_s)
        if step is not None and (step.plan.admitted or step.plan.preempted):
            self._may_count = True
            if self._dispatcher is not None:
                for name in step.plan.preempted:
                    self._executor.execute(
                        self._migrations.left_source(name, AbortReason.PREEMPTED, now), now
                    )
        return step

    def _complete(self, replica: SimulatedReplica, step: Step) -> None:
        outcome = self._outcome
        for item in replica.complete(step):
            self._finish(replica, item, step.end_s)
        outcome.busy_s += step.end_s - step.start_s
        outcome.num_steps += step.num_steps
        replica.run_deferred(step.end_s)

    def _finish(self, replica: SimulatedReplica, item: Finished, now: float) -> None:
        name, replica_id = item.request_id, None
        self._may_count = True
        if self._dispatcher is not None:
            self._executor.execute(self._migrations.left_source(name, AbortReason.FINISHED, now), now)
            self._dispatcher.finished(name, now, item.first_token_s)
            replica_id = replica.name
        row = self._leave_system(name)
        prediction = self._corrected.pop(name, None) or self._predicted.get(name)
        record = RequestRecord.of(item, row, prediction, now, replica_id)
        self._observe(item, row)
        self._outcome.records.append(record)
        self._decide(record)
        self._end_request(row, now)

    def _decide(self, ended: RequestRecord | TraceRequest) -> None:
        """Ends the run if a request that has finished or was given up decides it."""
        if self._is_decided is not None and self._is_decided(ended):
            self._stop_after = max(1, len(self._outcome.records))

    def _tick(self, now: float) -> None:
        """Executes decisions of scaler and planner; moves start when their source is between two steps."""
        self._next_tick_s = now + self._interval_s
        dispatcher = self._dispatcher
        assert dispatcher is not None, "planner and scaler need a router"
        if self._scaler is not None:
            self._scale(self._scaler, dispatcher, now)
        if self._planner is None:
            return
        held = {name for replica in self._replicas.values() for name in replica.held}
        busy = self._executor.busy | held
        for move in self._planner.plan(self._view.snapshots(dispatcher, keep_requests=True), busy, now):
            self._executor.move(move, now)

    def _scale(self, scaler: Scaler, dispatcher: Dispatcher, now: float) -> None:
        snapshots = self._view.snapshots(dispatcher, keep_requests=False)
        for signal in scaler.decide(snapshots, len(self._starting), now):
            if isinstance(signal, ScaleIn):
                self._drain(signal.victim, dispatcher, now)
            else:
                num_active = sum(status is ReplicaStatus.ACTIVE for status in dispatcher.replicas.values())
                if not self._standby or num_active + len(self._starting) >= scaler.max_replicas:
                    continue
                name = min(self._standby)
                self._standby.remove(name)
                self._start(name, now + self._startup_s, now)
            self._outcome.scaling.append((now, signal))

    def _drain(self, name: str, dispatcher: Dispatcher, now: float) -> None:
        dispatcher.draining(name)
        self._draining.add(name)
        if self._drain_timeout_s is not None and self._failures is not None:
            self._failures.kill(name, now + self._drain_timeout_s)
        for aborted in self._migrations.on_draining(name, now):
            self._executor.execute(aborted, now)

    def _release(self, now: float) -> None:
        """Stops the draining replicas that are empty."""
        for name in sorted(self._draining):
            replica = self._replicas[name]
            if replica.is_idle and name not in self._migrations.replicas:
                assert self._dispatcher is not None
                self._dispatcher.left(name, now)
                self._stopped(replica, now)
                self._count_replicas(now)

    def _fail(self, name: str, down_s: float, now: float) -> None:
        """Ends a replica at once: its requests are sent again or fail, its caches are lost, and it restarts unless it
        was draining."""
        dispatcher, outcome, replica = self._dispatcher, self._outcome, self._replicas[name]
        assert dispatcher is not None
        status = dispatcher.replicas.get(name)
        if status is None:
            return
        self._may_count = True
        items = dispatcher.failed(name, now)
        lost: list[tuple[RoutingRequest, float | None]] = []
        for item in items:
            request_id = item.request.request_id
            state = self._migrations.stopped(request_id) or replica.scheduler.find(request_id)
            lost.append((item, None if state is None else state.last_token_s))
            outcome.num_lost_tokens += 0 if state is None else state.num_computed_tokens
        for aborted in self._migrations.on_failed(name, now):
            self._executor.execute(aborted, now)
        outcome.busy_s += replica.stop(now)
        self._stopped(replica, now)
        if down_s == math.inf:
            outcome.num_killed += 1
        else:
            outcome.num_failures += 1
        if status is ReplicaStatus.ACTIVE:
            self._standby.remove(name)
            self._start(name, now + down_s, now)
        for item, token_s in lost:
            self._retry(item, token_s, now)
        self._dispatch(dispatcher, now)
        self._count_replicas(now)

    def _stopped(self, replica: SimulatedReplica, now: float) -> None:
        """Forgets what an empty replica that has left had: its prefixes and sessions."""
        name = replica.name
        prefixes = replica.scheduler.pool.kv.prefixes
        if prefixes is not None:
            prefixes.clear()
        for session, home in [*self._replica_of_session.items()]:
            if home == name:
                del self._replica_of_session[session]
                replica.scheduler.end_session(session, now)
        self._draining.discard(name)
        self._standby.add(name)
        self._view.forget(name)
        if self._failures is not None:
            self._failures.left(name)

    def _retry(self, item: RoutingRequest, token_s: float | None, now: float) -> None:
        """Sends a lost request again, from its prompt, or lets it fail; `token_s` is the time of its last token."""
        name, plan, outcome = item.request.request_id, self._plan, self._outcome
        num = self._num_retries.get(name, 0)
        if num < plan.max_retries and (plan.retry_started or token_s is None):
            assert self._dispatcher is not None
            self._dispatcher.arrived(item)
            if self._clients is not None and token_s is not None:
                self._clients.wait(name, token_s, now)
            self._num_retries[name] = num + 1
            outcome.num_retried += num == 0
            outcome.num_retries += 1
            return
        reason = (
            f"its replica failed after {num} retries"
            if num == plan.max_retries
            else "its replica failed after output tokens"
        )
        self._lose(name, reason, now)

    def _lose(self, name: str, reason: str, now: float) -> TraceRequest:
        """Ends a request that has failed; its row."""
        row, outcome = self._leave_system(name), self._outcome
        self._corrected.pop(name, None)
        outcome.failed[name] = reason
        outcome.unserved.append(row)
        outcome.failed_seconds += now - row.arrival_s
        self._end_request(row, now)
        return row

    def _leave_system(self, name: str) -> TraceRequest:
        """Forgets a request that ends; its row, with the time at which it was sent first."""
        row = self._rows.pop(name)
        if self._clients is not None:
            self._clients.leave(name)
            self._num_sent_again.pop(name, None)
            first_s = self._first_s.pop(name, None)
            if first_s is not None:
                row = replace(row, arrival_s=first_s)
        return row

    def _check_client(self, clients: WaitingClients, name: str, now: float) -> None:
        """Gives up a request without a token for `timeout_s`, wherever it is; others wait for their next token."""
        dispatcher, migrations, replica, stopped = self._dispatcher, self._migrations, None, None
        if dispatcher is None:
            (replica,) = self._replicas.values()
        elif (replica_id := dispatcher.replica_of(name)) is not None:
            replica = self._replicas[replica_id]
        token_s = None
        if replica is not None:
            stopped = migrations.stopped(name)
            token_s = replica.last_token_s(name, now) if stopped is None else stopped.last_token_s
        if token_s is not None and token_s + clients.timeout_s > now:
            clients.wait(name, token_s, now)
            return
        if replica is not None:
            self._reach(replica, now)
            state = stopped or replica.scheduler.find(name)
            self._outcome.num_aborted_tokens += 0 if state is None else state.num_computed_tokens
            self._delayed.pop(name, None)
            self._executor.execute(migrations.given_up(name, now), now)
            replica.abort(name, now)
        if dispatcher is not None:
            dispatcher.aborted(name, now)
        self._may_count = True
        self._delivered.pop(name, None)
        self._send_again(name, now)

    def _send_again(self, name: str, now: float) -> None:
        """Sends a request that was given up again, or lets it fail."""
        num, row, outcome = self._num_sent_again.get(name, 0), self._rows[name], self._outcome
        if num < self._client_plan.max_retries:
            self._num_sent_again[name] = num + 1
            self._first_s.setdefault(name, row.arrival_s)
            self._rows[name] = again = replace(row, arrival_s=now + self._client_plan.retry_after_s)
            self._source.send(again)
            outcome.num_client_retries += 1
            return
        outcome.num_given_up += 1
        retries = f" after {num} {'retry' if num == 1 else 'retries'}" if num else ""
        self._decide(self._lose(name, f"{GAVE_UP}{retries}", now))

    def _migrated(self, name: str, now: float) -> None:
        """Delivers the prediction of a request that waited for the end of its migration."""
        if name in self._delayed:
            self._update(name, self._delayed.pop(name), now)
