"""Studies under benchmarks/: their tables, and drift on streams whose answer is known."""

from __future__ import annotations

import json
import math

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from benchmarks import drift, new_served_model, samples_per_prompt
from benchmarks.answers.files import values_of, write_selected
from scheduler_core.errors import InputError
from tests.training.checkpoints import MODELS, random_checkpoint, write_drawn_answers
from training.drift.monitor import ObservedOutput


def metrics(r2):
    """What `evaluate` writes of a predictor, as far as the tables show it."""
    coverage = {level: {"estimate": 0.5} for level in ("p50", "p90", "p99")}
    return {
        "mu": {"r2": r2},
        "kendall_tau": {"median_vs_fitted_mu": None},
        "sigma_log1p": {"r2": 0.25},
        "crps_tokens": 100.0,
        "coverage": coverage,
    }


def test_samples_per_prompt_shows_earlier_results(tmp_path, capsys):
    results, page = tmp_path / "r.json", tmp_path / "page.md"
    results.write_text(json.dumps({"nll-1": {"checkpoint": metrics(0.5), "calibrated": metrics(0.75)}}))
    assert samples_per_prompt.main(["--results", str(results), "--markdown", str(page)]) == 0
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert printed[1][:3] == ["nll-1", "0.500", "-"]
    assert printed[2][:3] == ["nll-1", "calibrated", "0.750"]
    assert "| nll-1 calibrated | 0.750 | - | 0.250 | 100.000 |" in page.read_text()


def test_new_served_models_are_averaged(tmp_path, capsys):
    results = tmp_path / "r.json"
    content = {name: {"0": metrics(r2), "50": metrics(r2 + 0.2)} for name, r2 in (("a", 0.2), ("b", 0.4))}
    results.write_text(json.dumps(content))
    assert new_served_model.main(["--results", str(results), "--markdown", str(tmp_path / "page.md")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-5] for line in lines if line.startswith("mean of 2")] == ["0.300", "0.500"]
    assert "| mean of 2 | 50 | 0.500 | - | 100.000 |" in (tmp_path / "page.md").read_text()


@pytest.mark.parametrize("study", [samples_per_prompt, new_served_model])
def test_missing_files_are_named(study, capsys):
    assert study.main(["--train", "x.parquet"]) == 2
    assert "--calibration" in capsys.readouterr().err


def test_rows_are_selected_out_of_several_files(tmp_path):
    files = [str(tmp_path / name) for name in ("a.parquet", "b.parquet")]
    pq.write_table(pa.table({"model": ["x", "y"], "sample_index": [0, 5]}), files[0])
    pq.write_table(pa.table({"model": ["z"], "sample_index": [7], "more": [1.0]}), files[1])
    assert values_of(files, "model") == {"x", "y", "z"}
    (tmp_path / "out").mkdir()
    found = write_selected(files, tmp_path / "out", lambda rows: pc.less(rows["sample_index"], 6))
    assert [pq.read_table(file).num_rows for file in found] == [2]
    with pytest.raises(InputError, match="--train"):
        write_selected(files, tmp_path / "out", lambda rows: pc.less(rows["sample_index"], 0))


def outcomes(count, shift, rng):
    """Answers whose residuals are `shift` + T under the prediction mu = 5, sigma = 0.5."""
    lengths = np.exp(5.0 + 0.5 * (shift + rng.standard_t(3.5, count)))
    return [ObservedOutput(mu=5.0, sigma=0.5, output_tokens=max(1, round(x)), finished=True) for x in lengths]


def test_a_replaced_model_is_noticed_and_coverage_comes_back():
    rng = np.random.default_rng(0)
    stream = outcomes(800, 0.0, rng) + outcomes(2500, 1.5, rng)
    found = drift.watched("a", "b", stream, 800, 500, 100_000)
    assert found.alarms_before == 0
    assert found.delay is not None
    assert 1 <= found.delay < 100
    assert found.reason == "longer"
    assert found.predicted["p50"] < 0.2
    for shares in (found.at_alarms, found.running):
        assert shares["p50"] == pytest.approx(0.5, abs=0.07)
        assert shares["p90"] == pytest.approx(0.9, abs=0.05)
    same = drift.watched("a", "a", outcomes(3000, 0.0, rng), 800, 500, 100_000)
    assert (same.num_alarms, same.delay, same.at_alarms) == (0, None, None)
    assert same.predicted["p90"] == pytest.approx(0.9, abs=0.03)


def test_drift_on_a_file_of_two_served_models(tmp_path, capsys):
    checkpoint = random_checkpoint(tmp_path)
    data = write_drawn_answers(
        tmp_path / "answers.parquet", checkpoint, num_prompts=60, shift=(0.0, 3.0), max_tokens=2000
    )
    page, out = tmp_path / "page.md", tmp_path / "out.json"
    words = [str(checkpoint), "--data", str(data), "--before", "300", "--markdown", str(page)]
    assert drift.main([*words, "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    assert {(row["old"], row["new"]) for row in found} == {(a, b) for a in MODELS for b in MODELS}
    swapped = next(row for row in found if (row["old"], row["new"]) == MODELS)
    assert swapped["delay"] is not None
    assert math.isclose(sum(map(len, (swapped["predicted"], swapped["running"]))), 6)
    assert page.read_text().count("\n| ") >= 4
    assert drift.main([*words, "--swap", "small-llm=other"]) == 2
    assert "OLD=NEW" in capsys.readouterr().err
    assert drift.main([]) == 0
