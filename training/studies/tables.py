"""The tables of a study, for the log and for the page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from training import page
from training.fitting.figure import LABELS
from training.studies.heavy_tail import MEASURES


@dataclass(frozen=True, slots=True)
class StudyTable:
    """A titled table of text cells with what has to be known to read it."""

    title: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]]
    note: str = ""

    def text(self) -> str:
        """As lines of aligned text, without the note."""
        lines = [self.header, *self.rows]
        widths = [max(len(line[column]) for line in lines) for column in range(len(self.header))]
        shown = [
            "  ".join(
                cell.rjust(width) if column else cell.ljust(width)
                for column, (cell, width) in enumerate(zip(line, widths, strict=True))
            )
            for line in lines
        ]
        return "\n".join([f"{self.title}:", *shown])

    def html(self) -> str:
        """As a section of a page."""
        parts = [page.table(self.header, self.rows)]
        if self.note:
            parts.append(page.paragraph(self.note, note=True))
        return page.section(self.title, *parts)


def percent(value: float | None, digits: int = 1) -> str:
    """A share in per cent."""
    return "-" if value is None else f"{100 * value:.{digits}f} %"


def number(value: float | str | None, digits: int = 3) -> str:
    """A number with so many digits after the point."""
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    # + 0.0 turns a rounded -0 into 0.
    return f"{round(value, digits) + 0.0:.{digits}f}"


def family_label(label: str, nu: float) -> str:
    """The family as a person writes it."""
    return f"log-t, nu = {nu:g}" if label == "log_t" else LABELS[label]


def families_tables(content: dict[str, Any], nu: float) -> list[StudyTable]:
    """Table 1's analogue, likelihoods, nested tests and tails."""
    groups = content["groups"]
    rows = content["families"]
    paper = content["paper"]
    fit = StudyTable(
        "Goodness of fit",
        ("family", "free", "KS p > 0.05", "mean p", "KS bootstrap", "AD bootstrap", "mean AD", "paper's KS"),
        [
            (
                family_label(label, nu),
                str(row["num_parameters"]),
                percent(row["ks_pass_rate"]),
                number(row["ks_mean_p"]),
                percent(row["ks_pass_rate_boot"]),
                percent(row["ad_pass_rate_boot"]),
                number(row["ad_mean"]),
                percent(paper["ks_pass_rate"][label]) if label != "log_t" or nu == 3.5 else "-",
            )
            for label, row in rows.items()
        ],
        f"Share of groups that pass at 5 %. Plain KS (the paper's test) over {groups['num_tested']} groups: its p-value "
        "takes the parameters for given although they come from the same answers, so it passes too many, the more the "
        "fewer the answers; and lengths for continuous, so it passes too few where many are equal. Bootstrap: answers drawn from the fit, rounded and cut like the real ones, and fitted again, "
        f"over {groups['num_bootstrapped']} groups; if the family were true 95 % would pass. Mean Anderson-Darling (AD) "
        f"over the {groups['num_regular']} groups where every family converged above sigma's floor (which mostly equal answers "
        f"lead to). Last column: {paper['source']}; with 100 answers a test rejects far more than with 10.",
    )
    likelihood = StudyTable(
        "Likelihood",
        (
            "family",
            "ln L per answer",
            "mean ln L ratio to log-t",
            "above log-t",
            "ratio to log-normal",
            "above log-normal",
            "mean AIC",
            "best AIC",
        ),
        [
            (
                family_label(label, nu),
                number(row["log_likelihood_per_answer"], 4),
                number(row["log_ratio_to_log_t"], 3),
                percent(row["share_above_log_t"]),
                number(row["log_ratio_to_log_normal"], 3),
                percent(row["share_above_log_normal"]),
                number(row["mean_aic"], 2),
                percent(row["best_aic"]),
            )
            for label, row in rows.items()
        ],
        f"Over the {groups['num_regular']} groups where every family converged above sigma's floor. Ratio: mean of ln L minus ln L "
        f"of log-t with nu = {nu:g}, or of the log-normal; above: share of groups where it is larger. AIC charges 2 for "
        "each free parameter.",
    )
    return [fit, likelihood, _ratio_table(content, nu), _tail_table(content, nu)]


def _ratio_table(content: dict[str, Any], nu: float) -> StudyTable:
    return StudyTable(
        "Likelihood-ratio tests of nested families",
        ("null", "alternative", "groups", "mean 2 ln LR", "5 % point", "above it"),
        [
            (
                family_label(test["null"], nu),
                family_label(test["alternative"], nu),
                str(test["num_groups"]),
                number(test["mean_statistic"], 2),
                number(test["median_point"], 2),
                percent(test["share_rejected"]),
            )
            for test in content["likelihood_ratio_tests"]
        ],
        "Above it: share of groups whose 2 ln LR exceeds the 5 % point, 5 % if the null were true. The point is simulated "
        "under the null for each number of answers (beyond 200 it nears its limit: chi-squared with one degree of "
        "freedom, 3.84; for the log-normal, nu = inf, an even mixture of it with 0: 2.71). Groups without cut answers. "
        "Equal lengths favour a small nu; with integers on, lengths count as intervals and they do not.",
    )


def _tail_table(content: dict[str, Any], nu: float) -> StudyTable:
    found, paper = content["heavy_tail"], content["paper"]["heavy_tail"]

    def shown(name: str, value: float | None) -> str:
        return percent(value) if name.endswith("share") else number(value, 2)

    low, middle, high = content["groups"]["samples_per_group"]
    return StudyTable(
        "How heavy the tails are",
        ("measure", "mean", "median", "median by the fit", "groups", "paper's mean"),
        [
            (
                text.removeprefix("mean "),
                shown(name, found[name]["mean"]),
                shown(name, found[name]["median"]),
                shown(name, found[name].get("fit_median")),
                str(found[name]["num_groups"]),
                shown(name, paper[name]),
            )
            for name, text in MEASURES.items()
        ],
        "Of each group's answers, then over groups; a cut answer counts with its cap. These groups have "
        + (f"{low} answers each" if low == high else f"{low} to {high} answers (median {middle:g})")
        + f", the paper's 100: of N answers the skewness is at most (N - 2) / sqrt(N - 1), "
        f"{_most_skewed(middle):.1f} at the median, P99 hardly exceeds the longest answer and the longest tenth is that "
        f"one, so few answers make tails look light. By the fit: exp(sigma t), t the quantile of Student's t with "
        f"nu = {nu:g}, does not have that bias, but takes the family for true.",
    )


def _most_skewed(count: float) -> float:
    return float(max(count - 2, 0) / max(count - 1, 1) ** 0.5)


def nu_tables(content: dict[str, Any]) -> list[StudyTable]:
    """Figure 8's numbers."""
    best, free, groups = content["best"], content["free_nu"], content["groups"]
    rows = StudyTable(
        "Degrees of freedom",
        ("nu", "mean KS p", "KS p > 0.05", "ln L per answer", "mean AD", "at floor"),
        [
            (
                f"{row['nu']}" if isinstance(row["nu"], str) else f"{row['nu']:g}",
                number(row["ks_mean_p"], 4),
                percent(row["ks_pass_rate"], 2),
                number(row["log_likelihood_per_answer"], 4),
                number(row["ad_mean"], 4),
                percent(row["share_at_floor"], 2),
            )
            for row in content["grid"]
        ],
        f"KS over {groups['num_tested']} groups; likelihood and Anderson-Darling (AD) over the {groups['num_regular']} "
        "that converged with sigma above its floor for every nu. inf is the log-normal. Plain KS p-values: they compare, they do "
        "not test.",
    )
    shown = StudyTable(
        "Best nu",
        ("by", "nu", "paper's"),
        [
            ("mean KS p", _nu(best["ks_mean_p"]), f"{content['paper']['best_nu']:g}"),
            ("KS pass rate", _nu(best["ks_pass_rate"]), "-"),
            ("likelihood, one nu for all", _nu(best["log_likelihood_per_answer"]), "-"),
            ("mean Anderson-Darling", _nu(best["ad_mean"]), "-"),
            (
                "each group's own (quartiles)",
                " / ".join(_nu(value) for value in free["quartiles"]) or "-",
                "-",
            ),
            ("share of groups at 1", percent(free["share_at_1"]), "-"),
            ("share of groups at inf", percent(free["share_at_inf"]), "-"),
        ],
        f"A group's own nu is looked for in [1, 100] and at infinity. From a few answers it is a very rough estimate: of groups "
        f"as large as the median one {_at_infinity(free, '3.5')} would be found at infinity if the true nu were 3.5, and "
        f"{_at_infinity(free, 'inf')} if it were infinite (simulated).",
    )
    return [rows, shown]


def _at_infinity(free: dict[str, Any], nu: str) -> str:
    return percent(free["share_at_inf_if_true"][nu], 0)


def _nu(value: float | str | None) -> str:
    return number(value) if value is None or isinstance(value, str) else f"{value:.3g}"


def sample_size_tables(content: dict[str, Any]) -> list[StudyTable]:
    """Figure 7's numbers, and what cutting answers does to them."""
    rows = content["rows"]
    simulated = content["simulated"]
    against = "the true parameters" if simulated else "the fit to all answers"
    suffix = " (simulated)" if simulated else ""
    position = StudyTable(
        f"Error of mu and of the censored mean against {against}{suffix}",
        (
            "answers",
            "groups",
            "mu: relative",
            "mu: rms",
            "predicted rms",
            "within 1.96 se",
            "E[min(X, M)]: relative",
            "not fitted",
        ),
        [
            (
                str(row["num_answers"]),
                str(row["num_groups"]),
                percent(row["mu_relative"], 2),
                number(row["mu_rmse"]),
                number(row["mu_predicted"]),
                percent(row["mu_within"]),
                percent(row["expected_relative"]),
                percent(row["share_not_fitted"]),
            )
            for row in rows
        ],
        "Relative: mean of |error| / value (mu > 0); rms in log tokens; predicted: rms of the standard errors by the "
        "observed information"
        + (
            ". Answers are drawn from the log-t fits of the file, whole tokens, cut at the cap: the family is true by "
            "construction."
            if simulated
            else " times sqrt(1 - k / N), since a part of N answers is closer to the fit to all N than to the truth: "
            "multiply errors by 1 / sqrt(1 - k / N) for the error against the truth."
        )
        + " M is the cap, or the longest answer of the file where no cap is known. Not fitted: every answer was cut.",
    )
    scale = StudyTable(
        f"Error of sigma against {against}{suffix}",
        (
            "answers",
            "relative",
            "relative, P90",
            "ln sigma: bias",
            "ln sigma: rms",
            "predicted rms",
            "within 1.96 se",
            "degenerate",
        ),
        [
            (
                str(row["num_answers"]),
                percent(row["sigma_relative"]),
                percent(row["sigma_relative_p90"]),
                number(row["log_sigma_bias"]),
                number(row["log_sigma_rmse"]),
                number(row["log_sigma_predicted"]),
                percent(row["log_sigma_within"]),
                percent(row["share_degenerate"]),
            )
            for row in rows
        ],
        "Degenerate: sigma at its floor, since most of the answers drawn are equal; those parts count in the relative "
        "error (as about 100 %), not in that of ln sigma.",
    )
    if not content["cut_share"]:
        return [position, scale]
    share = percent(content["cut_share"], 0)
    cut = StudyTable(
        f"The same with the longest {share} of each group's answers cut"
        + (" (simulated)" if simulated else ""),
        (
            "answers",
            "mu bias: right-censored",
            "taken as ended",
            "ln sigma bias: uncut",
            "right-censored",
            "taken as ended",
            "sigma rel.: right-censored",
            "taken as ended",
            "E rel.: right-censored",
            "taken as ended",
        ),
        [
            (
                str(row["num_answers"]),
                number(row["cut"]["right"]["mu_bias"]),
                number(row["cut"]["none"]["mu_bias"]),
                number(row["log_sigma_bias"]),
                number(row["cut"]["right"]["log_sigma_bias"]),
                number(row["cut"]["none"]["log_sigma_bias"]),
                percent(row["cut"]["right"]["sigma_relative"]),
                percent(row["cut"]["none"]["sigma_relative"]),
                percent(row["cut"]["right"]["expected_relative"]),
                percent(row["cut"]["none"]["expected_relative"]),
            )
            for row in rows
        ],
        "The same answers, cut at a length that this share of the group exceeds, fitted with cut answers as at least so "
        "long (right-censored, ours) and as ended there (the paper's way). The bias of the second does not go away with "
        "more answers. What is left of the first's with many answers is the family's misfit: the tail that it expects is "
        "not the one that was cut.",
    )
    return [position, scale, cut]
