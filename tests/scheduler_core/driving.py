"""Runs a scheduler to its end and writes down what each step did, in a form that a person can work out by hand."""

from collections.abc import Mapping, Sequence

from scheduler_core.plan import Finished, StepPlan, StepResult
from scheduler_core.predictions import Prediction
from scheduler_core.request import Request
from scheduler_core.scheduler import Scheduler


def line(plan: StepPlan) -> str:
    """One step in words: "a+4" a chunk of 4 tokens, "a+4." the last chunk, "b" a decode, "-c" preempted.

    "-c(5)" keeps 5 tokens on the host, "<c(5)" brings them back.
    """
    kept = {moved.request_id: f"({moved.num_tokens})" for moved in plan.swapped_out}
    words = [f"<{moved.request_id}({moved.num_tokens})" for moved in plan.swapped_in]
    words += [f"{c.request_id}+{c.num_tokens}{'.' if c.is_last else ''}" for c in plan.prefills]
    words += plan.decodes
    words += [f"-{name}{kept.get(name, '')}" for name in plan.preempted]
    return " ".join(words)


class Drive:
    """Steps of `step_s` seconds until everything is done; the scheduler is validated after every call.

    Args:
        core: Fresh.
        rows: Requests and their true output lengths.
        step_s: Duration of each step.
        predictions: By request; they come with it.
    """

    def __init__(
        self,
        core: Scheduler,
        rows: Sequence[tuple[Request, int]],
        step_s: float = 1.0,
        predictions: Mapping[str, Prediction] | None = None,
    ) -> None:
        self.predictions = predictions or {}
        self.core = core
        self.lengths: Mapping[str, int] = {item.request_id: length for item, length in rows}
        self.coming = sorted((item for item, _ in rows), key=lambda item: item.arrival_s)
        self.step_s = step_s
        self.now = 0.0
        self.plans: list[StepPlan] = []
        self.finished: dict[str, Finished] = {}
        self.finish_s: dict[str, float] = {}

    def step(self) -> StepPlan | None:
        """One step; None if nobody is there."""
        self._deliver()
        plan = self.core.schedule(self.now)
        self.core.validate()
        if plan is None:
            return None
        self.plans.append(plan)
        self.now += self.step_s
        self._deliver(before_end=True)
        sampling = [*plan.decodes, *(chunk.request_id for chunk in plan.prefills if chunk.is_last)]
        stopped = [
            name
            for name in sampling
            if name in self.core
            and self.core.state(name).num_output_tokens + 1 == self.lengths[name]
            and self.lengths[name] < self.core.state(name).request.max_tokens
        ]
        for item in self.core.complete(StepResult(plan.step, tuple(stopped)), self.now):
            assert item.request_id not in self.finished, "finished twice"
            self.finished[item.request_id] = item
            self.finish_s[item.request_id] = self.now
        self.core.validate()
        return plan

    def run(self, most_steps: int = 10_000) -> list[str]:
        """All steps; idle times are skipped."""
        for _ in range(most_steps):
            if self.step() is None:
                if not self.coming:
                    return self.lines
                self.now = self.coming[0].arrival_s
        raise AssertionError("it does not end")

    @property
    def lines(self) -> list[str]:
        """What each step did, see `line`."""
        return [line(plan) for plan in self.plans]

    @property
    def prefill_tokens(self) -> dict[str, int]:
        """By request: tokens processed in prefill."""
        found = dict.fromkeys(self.lengths, 0)
        for plan in self.plans:
            for chunk in plan.prefills:
                found[chunk.request_id] += chunk.num_tokens
        return found

    def _deliver(self, before_end: bool = False) -> None:
        while self.coming and (
            self.coming[0].arrival_s < self.now or (not before_end and self.coming[0].arrival_s == self.now)
        ):
            item = self.coming.pop(0)
            now = item.arrival_s if before_end else self.now
            self.core.add(item, now)
            if item.request_id in self.predictions:
                self.core.update(item.request_id, self.predictions[item.request_id], now)
