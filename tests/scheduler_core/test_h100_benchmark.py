"""The benchmark of vLLM on H100: the fit finds the constants that made a table, and the command reports and writes."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.h100 import __main__ as command
from benchmarks.h100.fit import Fit
from benchmarks.h100.runs import METRICS, WHOLE, Run, Stage, read_runs, simulate
from scheduler_core.errors import InputError
from scheduler_core.simulator import step_time

CONSTANTS = {
    "memory_efficiency": 0.8, "layer_s": 3e-5, "link_efficiency": 0.2, "frontend_s": 0.012, "compute_efficiency": 0.55,
}  # fmt: skip
COLUMNS = (
    "model", "tensor_parallel", "workload", "stage", "rate_rps", "duration_s", "prompt_tokens_min", "prompt_tokens_max",
    "output_tokens", "unique_prompts", "max_num_seqs", "max_num_batched_tokens", *METRICS,
)  # fmt: skip


def engine(model: str, devices: int, workload: str) -> Run:
    """A short run, with latencies of an engine that has the constants above."""
    nothing = dict.fromkeys(METRICS, 0.0)
    stages = {0: Stage(5.0, 30.0, nothing), 1: Stage(25.0, 15.0, nothing)}
    run = Run(model, devices, workload, (580, 604), 120, 30, 128, 2048, stages, nothing)
    latencies = simulate(run, run.step_time(**CONSTANTS), run.trace())
    measured = {number: replace(stage, measured=latencies[number]) for number, stage in stages.items()}
    return replace(run, stages=measured, measured=latencies[WHOLE])


@pytest.fixture(scope="module")
def runs() -> list[Run]:
    return [
        engine(model, devices, workload)
        for model, devices in (("Llama-2-7b-hf", 1), ("Llama-2-70b-hf", 4), ("CodeLlama-34b-Instruct-hf", 2))
        for workload in ("codegen", "roleplay")
    ]


@pytest.fixture
def table(runs: list[Run], tmp_path: Path) -> Path:
    path = tmp_path / "runs.csv"
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(COLUMNS)
        for run in runs:
            for number, stage in {**run.stages, WHOLE: Stage(25.0, 45.0, run.measured)}.items():
                rows.writerow(
                    [
                        run.model, run.tensor_parallel, run.workload, number, stage.rate_rps, stage.duration_s,
                        *run.prompt_tokens, run.output_tokens, run.unique_prompts, run.max_num_seqs,
                        run.max_num_batched_tokens, *(stage.measured[name] for name in METRICS),
                    ]
                )  # fmt: skip
    return path


def test_the_fit_finds_the_constants_of_the_engine(runs: list[Run]) -> None:
    fitted = Fit([run for run in runs if run.workload == "codegen"]).constants()
    assert fitted.keys() == CONSTANTS.keys()
    for name, value in CONSTANTS.items():
        assert fitted[name] == pytest.approx(value, rel=0.15), name


@pytest.mark.slow
def test_the_command_reports_errors_and_writes_the_page_and_the_data(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package = tmp_path / "package"
    package.mkdir()
    monkeypatch.setattr(step_time, "__path__", [str(package)])
    page = tmp_path / "page.md"
    monkeypatch.setattr("sys.argv", ["h100", str(table), "--fit", "--write", "--markdown", str(page)])
    command.main()
    assert "| Llama-2-70b-hf roleplay | all |" in capsys.readouterr().out
    written = json.loads((package / "roofline.json").read_text())
    assert written["layer_s"] == pytest.approx(CONSTANTS["layer_s"], rel=0.15)
    regions = json.loads((package / "accuracy.json").read_text())["regions"]
    assert regions["light"]["basis"] == "measured"
    assert regions["overload"]["basis"] == "propagated"
    # Without the 7B model little is known of attention, without the others of links: the errors are those of extrapolation.
    assert 0 < regions["light"]["e2e_mean"] < 0.3
    assert "model left out, dense | 6 |" in page.read_text()


@pytest.mark.slow
def test_runs_of_other_workloads_need_no_fit(
    table: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [line for line in table.read_text().splitlines() if ",codegen," not in line]
    table.write_text("\n".join([line for line in lines if ",1,25.0," not in line]) + "\n")
    monkeypatch.setattr("sys.argv", ["h100", str(table)])
    command.main()
    text = capsys.readouterr().out
    assert "| other runs, dense | 3 |" in text
    assert "nan" not in text.partition("## Mean")[2]
    monkeypatch.setattr("sys.argv", ["h100", str(table), "--fit"])
    with pytest.raises(InputError, match="--fit"):
        command.main()


def test_the_table_is_read_as_it_was_written(table: Path, runs: list[Run]) -> None:
    assert read_runs(table) == runs
