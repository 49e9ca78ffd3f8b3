"""Migrations between simulated replicas, with the time that their copies take."""

import math
from collections import Counter
from collections.abc import Callable, Mapping

from scheduler_core.routing.dispatcher import Dispatcher
from scheduler_core.routing.migration import Aborted, AbortReason, Copy, KVLink, Migrations, Move, Outcome
from scheduler_core.routing.snapshot import ReplicaStatus
from scheduler_core.simulator.replica import SimulatedReplica


class MigrationExecutor:
    """Executes what `migrations` returns: copies over the link of the source, and changes of replica. Moves start, and copies of
    requests that go on running end, when their source is between two steps. Without a dispatcher there are none.

    `on_end` is called with the id of a request and the time when its migration has ended.

    Attributes:
        num_migrations, num_blocks: Migrations with a change of replica, and blocks copied for them.
        pauses_s: Time for which each migrated running request stopped.
        aborted: Numbers of other migrations by reason.
    """

    def __init__(
        self,
        migrations: Migrations,
        replicas: Mapping[str, SimulatedReplica],
        dispatcher: Dispatcher | None,
        link: KVLink,
        on_end: Callable[[str, float], object],
    ) -> None:
        self._migrations, self._replicas, self._dispatcher = migrations, replicas, dispatcher
        self._link, self._on_end = link, on_end
        #: Start of the last stage of a migration, by request id.
        self._paused_s: dict[str, float] = {}
        #: Ongoing copies and their end times, by request id; infinite: waiting for the end of a step.
        self._copies: dict[str, tuple[float, Copy]] = {}
        #: Requests whose move waits for the end of a step.
        self._pending: set[str] = set()
        self.num_migrations = self.num_blocks = 0
        self.pauses_s: list[float] = []
        self.aborted: Counter[AbortReason] = Counter()

    @property
    def next_s(self) -> float:
        """Time at which the next copy ends; infinite without any."""
        if not self._copies:
            return math.inf
        return min([end_s for end_s, _ in self._copies.values()])

    @property
    def busy(self) -> frozenset[str]:
        """Requests that migrate, or are about to."""
        return self._migrations.in_flight | self._pending

    def move(self, move: Move, now: float) -> None:
        """Starts a migration when its source is between two steps, if it is still possible then."""
        dispatcher = self._dispatcher
        assert dispatcher is not None, "migrations need a router"

        def start(at: float) -> None:
            self._pending.discard(move.request_id)
            active = dispatcher.replicas.get(move.destination) is ReplicaStatus.ACTIVE
            if active and dispatcher.replica_of(move.request_id) == move.source:
                self.execute(self._migrations.start(move, at), at)

        self._pending.add(move.request_id)
        self._replicas[move.source].between_steps(start, now)

    def end_copies(self, now: float) -> None:
        """Ends the copies whose time has come."""
        if not self._copies:
            return
        for name, (end_s, copy) in sorted(self._copies.items()):
            if end_s <= now and self._copies.get(name) == (end_s, copy):
                self._copies[name] = (math.inf, copy)
                self._end_copy(copy, now)

    def _end_copy(self, copy: Copy, now: float) -> None:
        name = copy.move.request_id

        def resume(at: float) -> None:
            # Before the end of the step the migration may have ended, and another one started.
            if name in self._copies and self._copies[name][1] is copy:
                del self._copies[name]
                self.execute(self._migrations.copied(name, at), at)

        if copy.live:
            self._replicas[copy.move.source].between_steps(resume, now)
        else:
            resume(now)

    def execute(self, result: Outcome | None, now: float) -> None:
        """Executes the result of a call to `Migrations`."""
        if result is None:
            return
        name = result.move.request_id
        if isinstance(result, Copy):
            source = self._replicas[result.move.source]
            copy_s = self._link.copy_s(result.num_blocks * source.scheduler.config.kv_block_tokens)
            source.link_free_s = max(now, source.link_free_s) + copy_s
            if not result.live:
                self._paused_s[name] = now
            self._copies[name] = (source.link_free_s, result)
            return
        paused_s = self._paused_s.pop(name, None)
        if isinstance(result, Aborted):
            self._copies.pop(name, None)
            self.aborted[result.reason] += 1
        else:
            assert self._dispatcher is not None
            self._dispatcher.migrated(name, result.move.destination, now)
            self.num_migrations += 1
            self.num_blocks += result.num_blocks
            if paused_s is not None:
                self.pauses_s.append(now - paused_s)
        self._on_end(name, now)
