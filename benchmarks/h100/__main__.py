"""Accuracy of simulated latencies against vLLM on H100 GPUs, with step times from data sheets.

    python -m benchmarks.h100 RUNS.csv [--fit] [--write] [--markdown PAGE]

RUNS.csv has measured runs, one row per stage (see the h100_runs.md beside it). Every run is simulated with the constants in
roofline.json, and those of each model once more with constants that are fitted to the codegen runs of the other models only,
if there are such runs.
--fit prints the constants fitted to all codegen runs, and with --write stores them, and the errors by region, in the package.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.h100.fit import Constants, Fit, error_bands, mean_errors, relative_errors
from benchmarks.h100.runs import METRICS, WHOLE, Run, read_runs, simulate
from benchmarks.shared.command import Parser
from benchmarks.shared.pages import put_section
from scheduler_core.errors import InputError
from scheduler_core.report.page import markdown_table
from scheduler_core.shell.files import atomic_file
from scheduler_core.simulator import step_time as package
from scheduler_core.simulator.step_time.roofline import FITTED

#: Workload that constants are fitted to.
FITTED_TO = "codegen"
TITLES = ("E2E mean", "E2E P99", "TTFT mean", "TTFT P99", "ITL mean")
Errors = dict[int, dict[int, dict[str, float]]]


def percent(value: float) -> str:
    """A cell."""
    return f"{100 * value:.1f}"


def error_table(runs: list[Run], errors: Errors, latencies: dict[int, dict[int, dict[str, float]]]) -> str:
    """Measured and simulated latencies of each run and stage in ms, and the error in %."""
    rows = []
    for index, run in enumerate(runs):
        for number, of_stage in sorted(errors[index].items()):
            measured = run.measured if number == WHOLE else run.stages[number].measured
            rate = "all" if number == WHOLE else f"{run.stages[number].rate_rps:g}"
            cells = [
                f"{measured[name]:.1f} / {latencies[index][number][name]:.1f} ({100 * of_stage[name]:+.1f})"
                for name in METRICS
            ]
            rows.append([f"{run.model} {run.workload}", rate, *cells])
    return markdown_table(["run", "requests/s", *TITLES], rows)


def group_table(runs: list[Run], errors: Errors, left_out: Errors) -> str:
    """Mean absolute errors in % of whole runs, by group: those of the fit, the others, and all with their model left out."""
    groups = {
        "runs of the fit": [(index, errors) for index, run in enumerate(runs) if run.workload == FITTED_TO],
        "other runs": [(index, errors) for index, run in enumerate(runs) if run.workload != FITTED_TO],
        "model left out": [(index, left_out) for index in range(len(runs))],
    }
    rows = []
    for title, members in groups.items():
        for kind, is_moe in (("dense", False), ("experts", True)):
            chosen = [of_runs[index][WHOLE] for index, of_runs in members if runs[index].is_moe is is_moe]
            if chosen:
                cells = [percent(value) for value in mean_errors(chosen).values()]
                rows.append([f"{title}, {kind}", str(len(chosen)), *cells])
    return markdown_table(["", "runs", *TITLES], rows)


def constants_table(fitted: Constants, left_out: dict[str, Constants]) -> str:
    """Constants, and their range if one model is left out."""
    rows = [
        [
            name,
            f"{value:.3g}",
            *(
                f"{function((one[name] for one in left_out.values()), default=value):.3g}"
                for function in (min, max)
            ),
        ]
        for name, value in fitted.items()
    ]
    return markdown_table(["constant", "all models", "smallest", "largest, with one left out"], rows)


def band_table(bands: dict[str, dict[str, Any]]) -> str:
    """Errors by region in %."""
    rows = [
        [region.replace("_", " "), str(band["basis"]), *(percent(band[name]) for name in METRICS)]
        for region, band in bands.items()
    ]
    return markdown_table(["region", "basis", *TITLES], rows)


def write_json(name: str, content: object) -> None:
    """Writes a data file of the package."""
    with atomic_file(Path(package.__path__[0]) / name) as temporary:
        temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Runs the command."""
    parser = Parser(__doc__)
    parser.add_argument("runs", type=Path, metavar="RUNS.csv")
    parser.add_argument("--fit", action="store_true", help="fit the constants to all codegen runs")
    parser.add_argument("--write", action="store_true", help="write the constants and the errors by region")
    parser.add_argument("--markdown", type=Path, help="page whose tables are replaced")
    options = parser.parse_args()
    runs = read_runs(options.runs)
    traces = [run.trace() for run in runs]
    fitted_to = [run for run in runs if run.workload == FITTED_TO]
    models = list(dict.fromkeys(run.model for run in fitted_to))
    others: dict[str, Constants] = {}
    constants: Constants = dict(FITTED)
    if len(models) > 1:
        fit = Fit(fitted_to)
        others = {model: fit.constants(without=model) for model in models}
        if options.fit:
            # As roofline.json has them, so that the errors are those of the package.
            constants = {name: float(f"{value:.3g}") for name, value in fit.constants().items()}
    elif options.fit or options.write:
        raise InputError(
            "--fit, --write", options.runs.name, f"runs of workload {FITTED_TO} and two models or more"
        )
    parts = ["## Constants", constants_table(constants, others)]
    if options.write:
        write_json("roofline.json", constants)
    latencies = {
        index: simulate(run, run.step_time(**constants), traces[index]) for index, run in enumerate(runs)
    }
    errors = {index: relative_errors(run, latencies[index]) for index, run in enumerate(runs)}
    left_out = {
        index: relative_errors(
            run, simulate(run, run.step_time(**others.get(run.model, constants)), traces[index])
        )
        for index, run in enumerate(runs)
    }
    groups = group_table(runs, errors, left_out)
    bands = error_bands(runs, left_out, constants)
    if options.write:
        source = (
            f"python -m benchmarks.h100 {options.runs.name}: {len(runs)} runs, the model left out of the fit"
        )
        write_json("accuracy.json", {"source": source, "regions": bands})
    parts += ["## Runs: measured / simulated in ms (error in %)", error_table(runs, errors, latencies)]
    parts += ["## Mean absolute errors of whole runs, %", groups]
    parts += ["## Errors by region, %", band_table(bands)]
    print("\n\n".join(parts))
    if options.markdown:
        put_section(options.markdown, "h100 errors", groups)
        put_section(options.markdown, "h100 regions", band_table(bands))


if __name__ == "__main__":
    main()
