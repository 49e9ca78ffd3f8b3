"""Studies under benchmarks/: their tables, and drift on streams whose answer is known."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from benchmarks import drift, online_calibration
from benchmarks.answers.files import values_of, write_selected
from scheduler_core.errors import InputError
from tests.training.checkpoints import MODELS, random_checkpoint, write_drawn_answers


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


def test_online_calibration_of_a_model_and_a_source_left_out(tmp_path, capsys):
    """Outputs of model b are three times as long as those of a and c."""
    rng = np.random.default_rng(0)
    rows = []
    for number in range(600):
        words = int(rng.integers(2, 60))
        for model, factor in (("a", 1.0), ("b", 3.0), ("c", 1.0)):
            tokens = np.exp(np.log(10 * words * factor) + 0.3 * rng.standard_t(3.5, 4)).astype(int) + 1
            row = {"prompt": f"prompt {number}", "model": model, "dataset": "xy"[number % 2]}
            rows.append(row | {"prompt_tokens": words, "output_tokens": tokens.tolist()})
    data, cache, page, out = (str(tmp_path / name) for name in ("d.parquet", "e.npz", "page.md", "out.json"))
    pq.write_table(pa.Table.from_pylist(rows), data)
    digests = [online_calibration._digest(f"prompt {number}") for number in range(600)]
    np.savez(cache, digests=np.array(digests), embeddings=rng.normal(size=(600, 3)))
    words = [data, "--embeddings", cache, "--counts", "0", "200", "--seeds", "2"]
    more = ["--markdown", page, "--json", out, "--load", "1.5", "--requests", "300"]
    assert online_calibration.main([*words, *more]) == 0
    found = json.loads(Path(out).read_text())
    assert found["model"]["units"] == ["a", "b", "c"]
    crps = np.array(found["model"]["scores"])[1, :, 1]
    assert crps[1] < 0.5 * crps[0]
    assert crps[1] == pytest.approx(found["model"]["trained"][1][1], rel=0.1)
    assert len(found["source"]["units"]) == 6
    assert Path(page).read_text().count("| trained on it |") == 3
    table = [
        {"prompt": row["prompt"], "model": row["model"], "mu": 5.0, "sigma": 0.9, "nu": 3.5} for row in rows
    ]
    pq.write_table(pa.Table.from_pylist(table), tmp_path / "p.parquet")
    words += ["--predictions", str(tmp_path / "p.parquet"), "--leave_out", "model"]
    assert online_calibration.main(words) == 0
    assert "| 200 |" in capsys.readouterr().out
    assert online_calibration.main([]) == 0
