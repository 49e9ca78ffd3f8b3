"""Tables of `deadlines.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.vllm.outcomes import ALL
from scheduler_core.report.page import markdown_table

#: Class that the sides are to protect, by mix; its column is empty where there is none.
URGENT = {"deadlines": "paying", "levels": "level 0"}
HEADER = (
    "mix, load", "side", "TTFT P50", "P99", "TTFT P50, urgent", "TTLT mean", "P99", "TTLT mean, urgent", "TBT P99",
    "in time, urgent, %", "in time, %", "simulated TTFT P50", "simulated TTLT mean, error in %",
)  # fmt: skip
STEPS = {
    "step_with_prompt_s": "step with a prompt, s",
    "decode_step_s": "other step, s",
    "fraction_with_prompt": "with a prompt",
    "prompt_tokens_per_step_with_prompt": "its prompt tokens",
    "decodes_per_step_with_prompt": "its decodes",
    "decodes_per_step": "decodes per step",
    "fraction_of_decodes_held_back": "decodes held back",
    "waiting": "waiting",
    "kv_use": "KV use",
    "max_kv_use": "largest",
    "preemptions": "preemptions",
    "scheduling_ms": "scheduling, ms",
    "slowness": "steps, times the fit",
}


def page(results: Mapping[str, Any]) -> str:
    """Markdown: latencies with the simulator's beside them, what the steps contained, and notes."""
    order = list(results["mixes"])
    rows = sorted(
        results["rows"], key=lambda row: (order.index(row["mix"]), row["load"] or 0.0, row["repetition"])
    )
    names = [(_title(row), row["side"]) for row in rows]
    latencies = [[*name, *_latencies(row)] for name, row in zip(names, rows, strict=True)]
    steps = [
        [*name, *(f"{row['steps'][key]:.3g}" for key in STEPS)] for name, row in zip(names, rows, strict=True)
    ]
    tables = [markdown_table(HEADER, latencies), markdown_table([*HEADER[:2], *STEPS.values()], steps)]
    return "\n\n".join([*tables, *_notes(results)]) + "\n"


def _title(row: Mapping[str, Any]) -> str:
    return str(row["mix"]) if row["load"] is None else f"{row['mix']}, {row['load']:g}"


def _latencies(row: Mapping[str, Any]) -> list[str]:
    engine, simulator = row["engine"], row["simulator"]
    everyone, urgent = engine[ALL], engine.get(URGENT.get(row["mix"], ""), {})
    error = 100 * (simulator[ALL]["ttlt_mean"] / everyone["ttlt_mean"] - 1)
    return [
        *(f"{everyone[key]:.2f}" for key in ("ttft_p50", "ttft_p99")),
        _cell(urgent, "ttft_p50"),
        *(f"{everyone[key]:.2f}" for key in ("ttlt_mean", "ttlt_p99")),
        _cell(urgent, "ttlt_mean"),
        f"{everyone['tbt_p99']:.2f}",
        _cell(urgent, "deadlines_kept", 100, 1),
        _cell(everyone, "deadlines_kept", 100, 1),
        f"{simulator[ALL]['ttft_p50']:.2f}",
        f"{error:+.1f}",
    ]


def _cell(values: Mapping[str, float], name: str, factor: float = 1, digits: int = 2) -> str:
    return f"{factor * values[name]:.{digits}f}" if name in values else "-"


def _notes(results: Mapping[str, Any]) -> list[str]:
    fit = results["fit"]
    notes = [
        "Step times of the simulator: "
        + ", ".join(f"{name} {1e3 * value:.3g} ms" for name, value in fit.items() if name != "median_error")
        + f"; median error of a step {100 * fit['median_error']:.1f} %."
    ]
    for name, mix in results["mixes"].items():
        limits = {tenant: limit for tenant, limit in mix["tbt_slo_s"].items() if limit is not None}
        text = (
            f"Limits between tokens: {', '.join(f'{t} {s:g} s' for t, s in sorted(limits.items()))}. "
            if limits
            else ""
        )
        text += "" if mix["gap_s"] is None else f"Spikes every {mix['gap_s']:.2g} s. "
        notes.append(
            f"{name}: {mix['num_requests']} requests, prompts of {mix['prompt_tokens']['mean']:.0f} and outputs of "
            f"{mix['output_tokens']['mean']:.0f} tokens (means); {mix['max_num_seqs']} slots, "
            f"{mix['max_num_batched_tokens']} tokens per step, memory for {mix['kv_tokens']} tokens; capacity "
            f"{mix['capacity_rps']:.2f} requests/s. {text}".strip()
        )
    return notes
