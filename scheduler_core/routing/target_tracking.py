"""Target tracking: Kubernetes' horizontal pod autoscaler (kubernetes.io, "Horizontal Pod Autoscaling", algorithm details;
pkg/controller/podautoscaler) with an average target, as KEDA sets it for vLLM's production-stack."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from scheduler_core.ranges import FINITE, INTEGERS, POSITIVE, check_choice, check_ranges
from scheduler_core.routing.base import ScaleIn, ScaleOut, Scaler
from scheduler_core.routing.snapshot import ReplicaSnapshot, ReplicaStatus


@dataclass(kw_only=True, slots=True)
class TargetTracking(Scaler):
    """Keeps the mean of a metric over the replicas at a target.

    desired = ceil(sum of the metric / target), or n if |sum / (target n) - 1| <= tolerance
    out: to desired, at most to max(2 n, n + 4);  in: to the largest desired of the last `window_s`

    | symbol | meaning | unit |
    | --- | --- | --- |
    | metric | waiting, running or all requests (concurrency, as Knative's), or kv_usage | requests, or a fraction |
    | n | replicas that run or start; starting ones have no metric, draining ones do not count | - |
    | interval_s | between two decisions: the controller's period and Prometheus' scrape interval | s |
    | window_s | stabilization window of scale-in; the start counts as n | s |

    The replica that joined last is drained first. Differs from the source: a starting replica is not cancelled; the metric
    is read at the decision, where a scrape and a poll before it delay it by up to `interval_s` each.
    """

    METRICS: ClassVar[tuple[str, ...]] = ("waiting", "running", "concurrency", "kv_usage")

    metric: str = "waiting"
    target: float = 5.0
    tolerance: float = 0.1
    window_s: float = 300.0
    interval_s: float = 15.0
    #: Time and desired number of the decisions in the window.
    _desired: list[tuple[float, int]] = field(default_factory=list, init=False, repr=False)
    _last_s: float = field(default=-math.inf, init=False, repr=False)

    def __post_init__(self) -> None:
        check_choice("metric", self.metric, self.METRICS)
        most = 1.0 if self.metric == "kv_usage" else FINITE
        check_ranges(self, target=(POSITIVE, most), tolerance=(0.0, 1.0))
        check_ranges(self, window_s=(0.0, FINITE), interval_s=(POSITIVE, FINITE))
        check_ranges(self, min_replicas=(1, self.max_replicas), max_replicas=(1, INTEGERS))

    def decide(
        self, replicas: Sequence[ReplicaSnapshot], num_starting: int, now: float
    ) -> Sequence[ScaleOut | ScaleIn]:
        # Tolerates rounding of sums of intervals.
        if now - self._last_s < self.interval_s * (1 - 1e-9):
            return ()
        active = [replica for replica in replicas if replica.status is ReplicaStatus.ACTIVE]
        num = len(active) + num_starting
        if not num:
            return ()
        if self._last_s == -math.inf:
            self._desired.append((now, num))
        self._last_s = now
        total = math.fsum(self.value(replica) for replica in active)
        steady = 1 - self.tolerance <= total / (self.target * num) <= 1 + self.tolerance
        desired = num if steady else math.ceil(total / self.target)
        self._desired = [(at, one) for at, one in self._desired if at > now - self.window_s]
        self._desired.append((now, desired))
        if desired < num:
            desired = max(one for _, one in self._desired)
        desired = min(desired, max(2 * num, num + 4))
        desired = max(self.min_replicas, min(desired, self.max_replicas))
        if desired >= num:
            return [ScaleOut()] * (desired - num)
        # A cluster in which the others still start keeps one that runs.
        num_drained = min(num - desired, len(active) - 1)
        return [ScaleIn(replica.replica_id) for replica in active[len(active) - num_drained :]]

    def value(self, replica: ReplicaSnapshot) -> float:
        """The metric of one replica."""
        match self.metric:
            case "waiting":
                return float(replica.num_waiting)
            case "running":
                return float(replica.num_running)
            case "concurrency":
                return float(replica.num_requests)
        return 1 - replica.num_free_blocks / replica.num_kv_blocks
