"""Drift detection on real outputs: one served model is replaced by another under the same name.

    python -m benchmarks.correcting.drift PREDICTOR --data FILE [--swap OLD=NEW ...] [--before 1500] [--after 3000] [--json OUT]
        [--markdown benchmarks/results/drift.md]

FILE holds samples of several served models that PREDICTOR was not trained on. A stream has up to --before
outputs of OLD in random order, then up to --after outputs of NEW to the same prompts, as if the model behind
the name had been replaced. All outputs are predicted as outputs of OLD, and the stream goes through the
monitor of `evaluate-stream`. Without --swap each model is replaced by the next one in alphabetical order, and
by itself (NEW = OLD); an alarm is then a false one, or shows that the predictor is wrong for OLD.

Coverage is measured after the change: of the original predictions; of predictions that are recalibrated at
alarms, after the first alarm; and of online recalibration, which is updated after every output.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.shared.pages import put_section
from benchmarks.shared.study import implied_max_tokens
from scheduler_core.errors import InputError
from scheduler_core.lengths.student_t import student_t_cdf
from scheduler_core.prediction.correction import RequestContext
from scheduler_core.prediction.linear_correction import features_of
from scheduler_core.prediction.outcome import Outcome
from scheduler_core.prediction.predictions import LengthPrediction
from scheduler_core.prediction.score_window import COVERAGE_LEVELS
from scheduler_core.report.page import markdown_table
from training.commands.evaluate_stream import ModelMonitor
from training.evaluating.batch_predictor import InferenceOptions, open_batch_predictor
from training.evaluating.rows import EvaluationRows
from training.fitting.fits import FitOptions, read_fits_or_fit

FloatArray = NDArray[np.float64]
SECTION = "drift"
HEADER = (
    "served model",
    "replaced by",
    "alarms before",
    "alarm after",
    "reason",
    "alarms in all",
    "as predicted",
    "recalibrated at alarms",
    "recalibrated with every output",
)


@dataclass(slots=True)
class Coverage:
    """Outputs at or below the predicted quantiles."""

    covered: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COVERAGE_LEVELS, 0))
    count: int = 0

    def add(self, output: Outcome, prediction: LengthPrediction) -> None:
        """Counts one output and its prediction."""
        z = (math.log(output.output_tokens) - prediction.mu) / prediction.sigma
        probability = student_t_cdf(z, prediction.nu)
        self.count += 1
        for name, level in COVERAGE_LEVELS.items():
            self.covered[name] += bool(output.finished) and probability <= level

    def shares(self) -> dict[str, float] | None:
        """Level -> fraction; None if there are no outputs."""
        return {name: hits / self.count for name, hits in self.covered.items()} if self.count else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Swap:
    """Result of one stream.

    Attributes:
        old, new: Served models.
        alarms_before: Alarms before the change.
        delay: Outputs from the change to the next alarm; None: there was no alarm.
        reason: Reason that this alarm reports.
        num_alarms: Number of alarms in the stream.
        predicted, at_alarms, running: Coverage by level after the change, at_alarms after the first alarm
            that follows it; None if there are no outputs.
    """

    old: str
    new: str
    alarms_before: int
    delay: int | None
    reason: str | None
    num_alarms: int
    predicted: dict[str, float] | None
    at_alarms: dict[str, float] | None
    running: dict[str, float] | None


def watched(old: str, new: str, outcomes: Sequence[Outcome], change: int, window: int, arl: float) -> Swap:
    """Sends a stream through a monitor; outputs from index `change` on are those of `new`."""
    monitor = ModelMonitor(window, arl)
    predicted, at_alarms, running = Coverage(), Coverage(), Coverage()
    alarms_before, delay, reason = 0, None, None
    for number, outcome in enumerate(outcomes):
        prediction = outcome.prediction
        assert prediction is not None
        if number >= change:
            predicted.add(outcome, prediction)
            running.add(outcome, monitor.running.correct(RequestContext(), prediction))
            if delay is not None:
                at_alarms.add(outcome, monitor.in_use.corrected(prediction, features_of(prediction, None)))
        alarm = monitor.update(outcome, prediction)
        if alarm is None:
            continue
        if number < change:
            alarms_before += 1
        elif delay is None:
            delay, reason = number - change + 1, str(alarm["reason"])
    return Swap(
        old=old,
        new=new,
        alarms_before=alarms_before,
        delay=delay,
        reason=reason,
        num_alarms=monitor.num_alarms,
        predicted=predicted.shares(),
        at_alarms=at_alarms.shares(),
        running=running.shares(),
    )


@dataclass(frozen=True, slots=True)
class Answered:
    """Outputs and predictions for all rows of a file.

    Attributes:
        rows: The file.
        mu, sigma, nu: Predicted parameters of each row [G].
        row_of: (prompt, served model) -> row.
    """

    rows: EvaluationRows
    mu: FloatArray
    sigma: FloatArray
    nu: FloatArray
    row_of: dict[tuple[str, str], int]

    @property
    def models(self) -> list[str]:
        """Served models, sorted."""
        return sorted({model for _, model in self.row_of})

    def stream(
        self, old: str, new: str, before: int, after: int, rng: np.random.Generator
    ) -> tuple[list[Outcome], int]:
        """Outputs with predictions, and the number of outputs before the change.

        Raises:
            InputError: No prompt has outputs of both models.
        """
        shared = sorted(
            prompt for prompt, model in self.row_of if model == old and (prompt, new) in self.row_of
        )
        if not shared:
            raise InputError("--swap", f"{old}={new}", "two served models with outputs to the same prompts")
        own = self._answers([(prompt, old) for prompt in shared], old, rng)
        first = own[:before]
        second = own[before:] if new == old else self._answers([(prompt, new) for prompt in shared], old, rng)
        return first + second[:after], len(first)

    def _answers(self, keys: Sequence[tuple[str, str]], old: str, rng: np.random.Generator) -> list[Outcome]:
        """All outputs of some rows in random order, predicted as outputs of `old`."""
        outcomes = []
        offsets, outputs = self.rows.fits.groups.offsets, self.rows.outputs
        for prompt, model in keys:
            row, said = self.row_of[prompt, model], self.row_of[prompt, old]
            limit = outputs.max_tokens[row]
            outcomes += [
                Outcome(
                    prediction=LengthPrediction(
                        float(self.mu[said]), float(self.sigma[said]), float(self.nu[said])
                    ),
                    output_tokens=int(outputs.lengths[at]),
                    finished=bool(outputs.finished[at]),
                    served_model=old,
                    max_tokens=int(limit) if math.isfinite(limit) else None,
                )
                for at in range(int(offsets[row]), int(offsets[row + 1]))
            ]
        return [outcomes[number] for number in rng.permutation(len(outcomes)).tolist()]


def read_answered(predictor: str, data: str, options: InferenceOptions) -> Answered:
    """Opens the predictor and predicts each row of the file.

    Raises:
        InputError: The predictor has no distribution, or the data have no served models.
    """
    opened = open_batch_predictor(predictor, options)
    fits = read_fits_or_fit(
        data, FitOptions(nu=opened.fit_nu, max_tokens=implied_max_tokens(data)), min_samples=1
    )
    rows = EvaluationRows.of(fits)
    if None in rows.served_models:
        raise InputError("--data", data, "samples with served models (column model)")
    prediction = opened.predict(rows.prompts, rows.served_models, rows.temperatures)
    if prediction.mu is None or prediction.sigma is None:
        raise InputError("PREDICTOR", predictor, "a predictor with a length distribution")
    keys = zip(rows.prompts, rows.served_models, strict=True)
    return Answered(
        rows,
        prediction.mu,
        prediction.sigma,
        np.broadcast_to(np.asarray(prediction.nu, dtype=np.float64), len(rows)),
        {(prompt, str(model)): row for row, (prompt, model) in enumerate(keys)},
    )


def pairs_of(models: Sequence[str], swaps: Sequence[str] | None) -> list[tuple[str, str]]:
    """(OLD, NEW) pairs of --swap; by default each model with itself and with the next one.

    Raises:
        InputError: A served model is not in the data.
    """
    if not swaps:
        following = [*models[1:], *models[:1]]
        return [
            pair
            for old, new in zip(models, following, strict=True)
            for pair in dict.fromkeys([(old, old), (old, new)])
        ]
    pairs = []
    for swap in swaps:
        old, _, new = swap.partition("=")
        for name in (old, new):
            if name not in models:
                raise InputError("--swap", swap, f"OLD=NEW, out of {', '.join(models)}")
        pairs.append((old, new))
    return pairs


def markdown(swaps: Sequence[Swap]) -> str:
    """Markdown table of the swaps."""
    return markdown_table(HEADER, [_row(swap) for swap in swaps])


def _row(swap: Swap) -> list[str]:
    return [
        swap.old,
        "-" if swap.old == swap.new else swap.new,
        str(swap.alarms_before),
        "-" if swap.delay is None else str(swap.delay),
        "-" if swap.reason is None else swap.reason.replace("_", " "),
        str(swap.num_alarms),
        _percent(swap.predicted),
        _percent(swap.at_alarms),
        _percent(swap.running),
    ]


def _percent(shares: dict[str, float] | None) -> str:
    return "-" if shares is None else " / ".join(f"{100 * share:.0f}" for share in shares.values())


def main(args: Sequence[str] | None = None) -> int:
    """Prints the table; returns 2 if an input is missing or invalid."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("predictor", nargs="?")
    parser.add_argument("--data")
    parser.add_argument("--swap", nargs="+", help="OLD=NEW")
    parser.add_argument("--before", type=int, default=1500, help="maximum outputs before the change")
    parser.add_argument("--after", type=int, default=3000, help="maximum outputs after the change")
    parser.add_argument("--window", type=int, default=1000, help="see evaluate-stream")
    parser.add_argument("--arl", type=float, default=100_000, help="see evaluate-stream")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json")
    parser.add_argument("--markdown", help="Markdown page whose table is replaced; created if missing")
    options = parser.parse_args(args)
    if options.predictor is None or options.data is None:
        print("nothing to measure: PREDICTOR and --data FILE are required (see --help)")
        return 0
    try:
        answered = read_answered(
            options.predictor, options.data, InferenceOptions(options.batch_size, progress=False)
        )
        swaps = []
        for old, new in pairs_of(answered.models, options.swap):
            rng = np.random.default_rng(options.seed)
            outcomes, change = answered.stream(old, new, options.before, options.after, rng)
            swaps.append(watched(old, new, outcomes, change, options.window, options.arl))
            print(" | ".join(_row(swaps[-1])), flush=True)
        if options.json:
            content: list[dict[str, Any]] = [asdict(swap) for swap in swaps]
            Path(options.json).write_text(json.dumps(content, indent=1), encoding="utf-8")
        if options.markdown:
            put_section(options.markdown, SECTION, markdown(swaps))
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
