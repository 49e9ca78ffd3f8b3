"""Studies under benchmarks/: their tables, and drift on streams whose answer is known."""

from __future__ import annotations

import json
import math

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from benchmarks import drift
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
