"""How far models follow the amount that a prompt asks for: by unit, the slope of ln(output tokens) on ln(amount), and
tokens per unit. Slope 1: the length is proportional to the amount; 0: it does not depend on it.

    python -m benchmarks.lengths.compliance DATA [--sampled SAMPLES]
    python -m benchmarks.lengths.compliance --prompts FILE

Prompts are those whose amount `requested_amount` finds, of at most `MAX_CHARACTERS` characters, without code. A prompt counts
once per served model, with the mean of ln(tokens) of its samples; slopes are within the served model. Alpaca 52k is only
measured: its licence forbids to ship what was trained on it.

--prompts writes tasks that occur with several amounts each, for `gen-samples FILE --source.category category`; --sampled adds
what a model answered to them: there slopes are within the task, so that they show the amount's effect alone.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from benchmarks.shared.command import Parser
from examples.pretrained.amounts import composed_prompts
from examples.pretrained.prepare import CASTILLO_LIMIT
from scheduler_core.prediction.requested_amount import RequestedAmount, requested_amount

#: Longer prompts mostly contain texts or problems whose numbers do not ask for an amount.
MAX_CHARACTERS = 700
#: Units and number of the tasks of --prompts, each with at least `MIN_AMOUNTS` amounts.
SAMPLED_UNITS, NUM_TASKS, MIN_AMOUNTS = ("words", "sentences", "items"), 12, 3
SOURCES = (
    "ai_independence_bench",
    "atlas",
    "commongen",
    "complexbench",
    "fasteval",
    "gpteacher",
    "hallucin_pm",
    "llmzoo",
    "longform_writing",
    "mt_bench_multilingual",
    "rakuda_ranking",
    "shaberi",
    "speechmap",
)


def lengths(data: Path) -> pd.DataFrame:
    """Prompts and lengths of all sources: source, prompt, model, log_tokens (mean over samples)."""
    tables = []
    for name in ("castillo_train", "castillo_validation"):
        table = pd.read_parquet(
            data / f"{name}.parquet", columns=["dataset", "prompt", "model", "output_tokens"]
        )
        means = table.output_tokens.map(lambda values: np.log(np.clip(values, 1, CASTILLO_LIMIT)).mean())
        tables.append(table.assign(source="castillo/" + table.dataset, log_tokens=means))
    for name in SOURCES:
        table = pd.read_parquet(data / f"more/{name}.parquet")
        table = table[~table.hidden_reasoning.fillna(False).astype(bool) & table.n_tokens.ge(1)]
        tables.append(table.assign(source=name, log_tokens=np.log(table.n_tokens)))
    alpaca = pd.read_parquet(data / "many_prompts/alpaca_52k.parquet")
    for model, column in (("text-davinci-003", "n_tokens"), ("vicuna-7b", "vicuna7b_len_t00")):
        part = alpaca[alpaca[column].ge(1)]
        tables.append(part.assign(source=f"alpaca_52k/{model}", model=model, log_tokens=np.log(part[column])))
    rows = pd.concat(
        [table[["source", "prompt", "model", "log_tokens"]] for table in tables], ignore_index=True
    )
    rows = rows[rows.prompt.str.len().between(1, MAX_CHARACTERS)]
    return rows.groupby(["source", "prompt", "model"], as_index=False).log_tokens.mean()


def with_amounts(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows whose prompt asks for a number of units, with unit and log_amount."""
    amounts: dict[str, RequestedAmount | None] = {
        text: requested_amount(text) for text in rows.prompt.unique()
    }
    requested = rows.prompt.map(amounts)
    rows = rows[requested.map(lambda amount: amount is not None and amount.number is not None)].copy()
    rows["unit"] = [amounts[text].unit for text in rows.prompt]  # type: ignore[union-attr]
    rows["log_amount"] = [float(np.log(amounts[text].number)) for text in rows.prompt]  # type: ignore[union-attr, arg-type]
    return rows


def counterfactual_prompts(seed: int) -> pd.DataFrame:
    """Tasks of our own wording in ASCII, most of them English, with several amounts each, `NUM_TASKS` for each unit: prompt,
    category (the task)."""
    composed = composed_prompts({}, 4_000, np.random.default_rng(seed))
    plain = [each for each in composed if not each.system and not each.bound and each.text.isascii()]
    rows = with_amounts(
        pd.DataFrame({"prompt": [each.text for each in plain], "task": [each.task for each in plain]})
    )
    rows = rows[rows.unit.isin(SAMPLED_UNITS)]
    rows = rows[rows.groupby("task").log_amount.transform("nunique") >= MIN_AMOUNTS]
    order = rows.groupby("unit").task.transform(lambda tasks: pd.factorize(tasks)[0])
    return rows[order < NUM_TASKS].assign(category=lambda chosen: "task " + chosen.task.astype(str))


def sampled_lengths(samples: pd.DataFrame) -> pd.DataFrame:
    """Rows as of `lengths` for samples of counterfactual prompts; model: with the task."""
    rows = samples.assign(
        source="sampled/" + samples.model,
        model=samples.model + ", " + samples.category,
        log_tokens=np.log(samples.output_tokens),
    )
    return rows.groupby(["source", "prompt", "model"], as_index=False).log_tokens.mean()


def slope(rows: pd.DataFrame) -> tuple[float, float]:
    """Slope of log_tokens on log_amount within served models, and its standard error by prompts (each prompt once)."""
    centred = rows[["log_tokens", "log_amount"]] - rows.groupby("model")[
        ["log_tokens", "log_amount"]
    ].transform("mean")
    by_prompt = centred.assign(prompt=rows.prompt).groupby("prompt").mean()
    x, y = by_prompt.log_amount.to_numpy(), by_prompt.log_tokens.to_numpy()
    squares = float(x @ x)
    if squares < 1e-9 or len(x) < 3:
        return float("nan"), float("nan")
    value = float(x @ y) / squares
    return value, float(np.sqrt(((y - value * x) @ (y - value * x)) / (len(x) - 2) / squares))


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table, or writes the prompts."""
    parser = Parser(__doc__)
    parser.add_argument("data", type=Path, nargs="?")
    parser.add_argument("--sampled", type=Path)
    parser.add_argument("--prompts", type=Path)
    options = parser.parse_args(arguments)
    if (options.prompts is None) == (options.data is None and options.sampled is None):
        parser.error("name DATA or --sampled or both, or --prompts")
    if options.prompts is not None:
        counterfactual_prompts(seed=0)[["prompt", "category"]].to_parquet(options.prompts, index=False)
        return 0
    tables = [] if options.data is None else [lengths(options.data)]
    left_out = ""
    if options.sampled is not None:
        samples = pd.read_parquet(options.sampled)
        finished = samples[samples.finish_reason == "stop"]
        tables.append(sampled_lengths(finished))
        left_out = f"left out: {len(samples) - len(finished)} of {len(samples)} samples, which did not finish"
    rows = with_amounts(pd.concat(tables, ignore_index=True))
    print("| source | unit | prompts | models | amounts (10, 50, 90 %) | slope | tokens per unit |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for (source, unit), part in rows.groupby(["source", "unit"]):
        if part.prompt.nunique() < 10:
            continue
        value, error = slope(part)
        tokens = np.exp((part.log_tokens - part.log_amount).median())
        quantiles = (
            np.exp(part.drop_duplicates("prompt").log_amount.quantile([0.1, 0.5, 0.9])).round().astype(int)
        )
        amounts = ", ".join(map(str, quantiles))
        print(
            f"| {source} | {unit} | {part.prompt.nunique()} | {part.model.nunique()} | {amounts} | "
            f"{value:.2f} ± {error:.2f} | {tokens:.1f} |"
        )
    if left_out:
        print(left_out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
