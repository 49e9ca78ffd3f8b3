"""The figures of the studies; each function draws one PNG."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from training.fitting.families import FloatArray
from training.fitting.figure import ACCENT, COLOURS, GREY, INK, RED, WARM, new_figure, save
from training.studies import paper
from training.studies.tables import family_label

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from training.studies.families import FamiliesStudy

# Where infinity stands on an axis of nu that ends at 10.
_INFINITY_AT = 20.0
# Of the three tests; families have colours of their own.
TESTS = ("#c3ccd4", "#7f93b8", "#3b4f7a")


def draw_families(study: FamiliesStudy, nu: float, path: Path) -> None:
    """Pass rates beside the paper's, distribution of the bootstrap's p-values, and shares of best AIC."""
    content = study.content
    rows = content["families"]
    booted = bool(content["groups"]["num_bootstrapped"])
    figure = new_figure(13, 4.4)
    left, middle, right = figure.subplots(1, 3, width_ratios=(1.5, 1.0, 1.0))
    labels = [family_label(label, nu) for label in rows]
    at = np.arange(len(rows))[::-1].astype(np.float64)
    bars = [("plain KS", "ks_pass_rate", TESTS[0])]
    if booted:
        bars += [
            ("KS, bootstrap", "ks_pass_rate_boot", TESTS[1]),
            ("AD, bootstrap", "ad_pass_rate_boot", TESTS[2]),
        ]
    width = 0.75 / len(bars)
    for place, (name, key, colour) in enumerate(bars):
        offset = ((len(bars) - 1) / 2 - place) * width
        values = [100 * (row[key] or 0.0) for row in rows.values()]
        left.barh(at + offset, values, width, color=colour, label=name)
    shown = [label for label in rows if label != "log_t" or nu == paper.BEST_NU]
    marks = [at[list(rows).index(label)] for label in shown]
    values = [100 * paper.KS_PASS_RATE[label] for label in shown]
    left.plot(values, marks, "D", color="white", markeredgecolor=RED, label="plain KS in the paper, its data")
    left.axvline(95, color=GREY, linewidth=1, linestyle=":")
    left.set_yticks(at, labels)
    left.set_xlim(0, 103)
    left.set_xlabel("groups that pass at 5 % (%); dotted: 95 %, if the family were true and the test exact")
    left.xaxis.label.set_size(8)
    left.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.45, 1.17), ncols=2, frameon=False)
    if booted:
        _p_values(middle, study, nu)
    else:
        middle.set_visible(False)
    right.barh(
        at,
        [100 * (row["best_aic"] or 0.0) for row in rows.values()],
        0.6,
        color=[COLOURS[label] for label in rows],
    )
    right.set_yticks(at, labels if not booted else [""] * len(labels))
    right.set_xlabel("groups where it has the best AIC (%)")
    save(figure, path)


def _p_values(axis: Axes, study: FamiliesStudy, nu: float) -> None:
    axis.plot([0, 1], [0, 1], color=GREY, linewidth=1, linestyle="--", label="if it were true")
    for label, found in study.by_label.items():
        p = np.sort(found.ks_p_boot[study.bootstrapped])
        axis.step(
            p,
            np.arange(1, len(p) + 1) / len(p),
            where="post",
            color=COLOURS[label],
            label=family_label(label, nu),
        )
    axis.set_xlabel("bootstrap p-value of KS")
    axis.set_ylabel("share of groups below")
    axis.set_xlim(0, 1)
    axis.set_ylim(0, 1)
    axis.legend(fontsize=7, loc="lower right")


def draw_nu(content: dict[str, Any], free_nu: FloatArray, path: Path) -> None:
    """Four measures over nu, and each group's own nu."""
    figure = new_figure(13, 6.4)
    grid = figure.add_gridspec(2, 3)
    rows = content["grid"]
    at = np.array([_place(row["nu"]) for row in rows])
    panels = (
        ("ks_mean_p", "mean KS p-value (plain)", 1.0),
        ("ks_pass_rate", "groups with KS p > 0.05 (%)", 100.0),
        ("log_likelihood_per_answer", "mean ln likelihood per answer", 1.0),
        ("ad_mean", "mean Anderson-Darling statistic", 1.0),
    )
    for panel, (key, label, scale) in enumerate(panels):
        axis = figure.add_subplot(grid[panel // 2, panel % 2])
        values = scale * np.array([np.nan if row[key] is None else row[key] for row in rows])
        finite = at < _INFINITY_AT
        axis.plot(at[finite], values[finite], color=ACCENT, marker="o", markersize=4)
        axis.plot(at[~finite], values[~finite], "s", color=INK, markersize=6)
        axis.axvline(
            paper.BEST_NU, color=WARM, linewidth=1, linestyle="--", label=f"paper's choice, {paper.BEST_NU}"
        )
        best = content["best"][key]
        if best is not None:
            mark = np.flatnonzero(at == _place(best))[0]
            axis.plot(
                at[mark],
                values[mark],
                "*",
                color=RED,
                markersize=13,
                label=f"best here, {best:g}" if best != "inf" else "best here, inf",
            )
        _nu_axis(axis, at)
        axis.set_ylabel(label)
        axis.legend(fontsize=8)
    axis = figure.add_subplot(grid[:, 2])
    _free_nu(axis, free_nu)
    save(figure, path)


def _place(nu: float | str) -> float:
    return _INFINITY_AT if nu == "inf" else float(nu)


def _nu_axis(axis: Axes, at: FloatArray) -> None:
    axis.set_xscale("log")
    finite = [value for value in at if value < _INFINITY_AT]
    ticks = [value for value in (1, 2, 3.5, 5, 7, 10) if not finite or min(finite) <= value <= max(finite)]
    names = [f"{value:g}" for value in ticks]
    if (at == _INFINITY_AT).any():
        ticks, names = [*ticks, _INFINITY_AT], [*names, "∞"]
    axis.set_xticks(ticks, names)
    axis.minorticks_off()
    axis.set_xlabel("nu (∞ = log-normal)")


def _free_nu(axis: Axes, free_nu: FloatArray) -> None:
    finite = free_nu[np.isfinite(free_nu)]
    edges = np.geomspace(1.0, 100.0, 25)
    share = 100.0 / max(len(free_nu), 1)
    inner = finite[finite > 1.0]
    axis.hist(inner, bins=edges.tolist(), weights=np.full(len(inner), share), color=ACCENT)
    bars = ((0.75, np.sum(finite == 1.0)), (200.0, np.sum(np.isinf(free_nu))))
    for place, count in bars:
        axis.bar(place, count * share, width=0.35 * place, color=INK)
        axis.annotate(f"{count * share:.0f} %", (place, count * share), ha="center", va="bottom", fontsize=8)
    axis.axvline(
        paper.BEST_NU, color=WARM, linewidth=1, linestyle="--", label=f"paper's choice, {paper.BEST_NU}"
    )
    axis.set_xscale("log")
    axis.set_xticks([0.75, 2, 5, 10, 30, 100, 200], ["1", "2", "5", "10", "30", "", "∞"])
    axis.minorticks_off()
    axis.set_xlabel("each group's own nu (dark: at the ends 1 and ∞)")
    axis.set_ylabel("groups (%)")
    axis.margins(y=0.12)
    axis.legend(fontsize=8, loc="upper center")


def draw_sample_size(content: dict[str, Any], path: Path) -> None:
    """Errors of mu, sigma and the censored mean over the number of answers, and what cutting answers does."""
    figure = new_figure(12, 8)
    (upper_left, upper_right), (lower_left, lower_right) = figure.subplots(2, 2)
    rows = content["rows"]
    at = np.array([row["num_answers"] for row in rows])

    def values(key: str, part: str | None = None, scale: float = 1.0) -> FloatArray:
        found = [row[key] if part is None else row["cut"][part][key] for row in rows]
        return scale * np.array([np.nan if value is None else value for value in found], dtype=np.float64)

    lines: list[tuple[Axes, str, list[tuple[str, FloatArray, str, str]]]] = [
        (
            upper_left,
            "error of mu (log tokens)",
            [
                ("root mean square", values("mu_rmse"), ACCENT, "o-"),
                ("predicted by the standard errors", values("mu_predicted"), INK, "--"),
            ],
        ),
        (
            upper_right,
            "error of ln sigma",
            [
                ("root mean square", values("log_sigma_rmse"), ACCENT, "o-"),
                ("predicted by the standard errors", values("log_sigma_predicted"), INK, "--"),
            ],
        ),
        (
            lower_left,
            "mean relative error (%)",
            [
                ("sigma", values("sigma_relative", scale=100), ACCENT, "o-"),
                ("E[min(X, M)]", values("expected_relative", scale=100), INK, "s-"),
                ("mu", values("mu_relative", scale=100), WARM, "^-"),
            ],
        ),
    ]
    for axis, label, curves in lines:
        for name, curve, colour, style in curves:
            positive = np.where(curve > 1e-12, curve, np.nan)  # at k = N nothing is left of the error
            axis.plot(at, positive, style, color=colour, label=name, markersize=4)
        axis.set_yscale("log")
        axis.set_ylabel(label)
    axis = lower_right
    axis.axhline(0, color=GREY, linewidth=1)
    axis.plot(at, values("log_sigma_bias"), "o-", color=ACCENT, markersize=4, label="nothing more cut")
    if content["cut_share"]:
        share = f"longest {100 * content['cut_share']:.0f} % cut"
        axis.plot(
            at,
            values("log_sigma_bias", "right"),
            "s-",
            color=INK,
            markersize=4,
            label=f"{share}, right-censored",
        )
        axis.plot(
            at,
            values("log_sigma_bias", "none"),
            "^-",
            color=RED,
            markersize=4,
            label=f"{share}, taken as ended",
        )
    axis.set_ylabel("mean error of ln sigma")
    for axis in (upper_left, upper_right, lower_left, lower_right):
        axis.axvline(paper.NUM_SAMPLES, color=WARM, linewidth=1, linestyle=":", label="paper's choice, 20")
        axis.set_xscale("log")
        axis.set_xticks(at, [str(count) for count in at])
        axis.minorticks_off()
        if axis.get_yscale() == "log":
            _plain_log_ticks(axis)
        axis.set_xlabel("answers per group")
        axis.legend(fontsize=8)
    against = (
        "true parameters, answers simulated from the fits" if content["simulated"] else "fit to all answers"
    )
    figure.suptitle(f"Errors against the {against}; log-t, nu = {content['nu']:g}", fontsize=11)
    save(figure, path)


def _plain_log_ticks(axis: Axes) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator

    low, high = axis.get_ylim()
    few = (1.0, 2.0, 5.0) if high > 30 * low else (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)
    axis.yaxis.set_major_locator(LogLocator(subs=few))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
