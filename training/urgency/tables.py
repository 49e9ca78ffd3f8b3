"""The evaluation as tables in Markdown: one line for each predictor, seeds of one recipe together."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

from scheduler_core.report.markdown import markdown_table
from training.urgency.evaluation import UrgencyReport
from training.urgency.metrics import Rate

Number = Callable[[UrgencyReport], float | None]

#: Column -> number of one report; shares are shown in percent.
SHARES: dict[str, Number] = {
    "accuracy": lambda report: report.predicted.accuracy.value,
    "recall 0": lambda report: report.predicted.recalls[0].value,
    "recall 1": lambda report: report.predicted.recalls[1].value,
    "under-triage": lambda report: report.predicted.under_triage.value,
    "over-triage": lambda report: report.predicted.over_triage.value,
    "critical under-triage": lambda report: report.predicted.critical_under_triage.value,
    "critical over-triage": lambda report: report.predicted.critical_over_triage.value,
    "jumps": lambda report: report.adversarial.predicted.jumped.value,
    "jumps, decided": lambda report: report.adversarial.decided.jumped.value,
    "jumps, scheduled": lambda report: report.adversarial.scheduled.jumped.value,
    "neutral words": lambda report: report.adversarial.neutral.jumped.value,
    "ECE": lambda report: report.reliability["most likely level"].ece,
    "answered": lambda report: report.answered.value,
}
SCORES: dict[str, Number] = {
    "kappa": lambda report: report.predicted.kappa,
    "macro F1": lambda report: report.predicted.macro_f1,
}
COLUMNS = ("accuracy", "kappa", "macro F1", *list(SHARES)[1:])

NOTES = """\
- All of the most likely level but "jumps, decided" and "neutral words", which are of the level of least expected cost, and "jumps, scheduled": after abstention and limited promotion.
- recall 0, 1: share of the emergencies and of the interactive texts that are found as such.
- under-triage, over-triage: decided less or more urgent than true; critical: of levels 0 and 1, and 0 or 1 for another.
- jumps: pairs whose level a mere claim of urgency raises; neutral words: the same for words that claim nothing.
- ECE: expected calibration error. answered: share of the texts at or above the abstain threshold; 0: it always abstains.
- Several seeds of a recipe: mean, and in brackets the standard deviation between seeds."""


def urgency_markdown(reports: Mapping[str, Sequence[UrgencyReport]]) -> str:
    """Both tables.

    Args:
        reports: Name of a predictor -> its reports, one for each seed; the first one's reliability is shown.
    """
    rows = [(name, *(_cell(column, runs) for column in COLUMNS)) for name, runs in reports.items()]
    first = next(iter(reports))
    return "\n\n".join(
        [
            markdown_table(("predictor", *COLUMNS), rows),
            NOTES,
            f"Reliability of {first}:",
            _reliability(reports[first]),
        ]
    )


def _cell(column: str, reports: Sequence[UrgencyReport]) -> str:
    is_share = column in SHARES
    number = SHARES[column] if is_share else SCORES[column]
    values = [value for report in reports if (value := number(report)) is not None]
    if not values:
        return "-"
    scale, digits, unit = (100, 1, " %") if is_share else (1, 3, "")
    text = f"{scale * statistics.fmean(values):.{digits}f}"
    if len(values) > 1:
        text += f" ({scale * statistics.stdev(values):.{digits}f})"
    return text + unit


def _reliability(reports: Sequence[UrgencyReport]) -> str:
    """Bins of the predicted probability of the most likely level, over all seeds together."""
    bins: dict[tuple[float, float], list[tuple[int, float, float]]] = {}
    for report in reports:
        for entry in report.reliability["most likely level"].bins:
            if entry.mean_probability is not None and entry.frequency is not None:
                cell = (entry.count, entry.mean_probability, entry.frequency)
                bins.setdefault((entry.low, entry.high), []).append(cell)
    rows = []
    for (low, high), cells in sorted(bins.items()):
        count = sum(cell[0] for cell in cells)
        probability = sum(cell[0] * cell[1] for cell in cells) / count
        right = Rate(round(sum(cell[0] * cell[2] for cell in cells)), count)
        rows.append(
            (
                f"{low:.1f} to {high:.1f}",
                str(count),
                f"{100 * probability:.1f} %",
                f"{100 * (right.value or 0):.1f} %",
            )
        )
    return markdown_table(("predicted probability", "texts", "mean", "right"), rows)
