"""The CASTILLO example: what is trained on has nothing of what is reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from examples.castillo.prepare import prepare

PROMPTS = ("Name three rivers.", "Write a sort in C.", "What is a tide?")
MODELS = ("small/model", "large/model")


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)


def castillo_rows(prompts: list[str]) -> list[dict[str, Any]]:
    common = {"dataset": "Alpaca", "prompt_tokens": 4, "temperature": 0.7, "top_p": 0.9}
    common |= {"category": "undefined", "output_tokens": list(range(10, 20))}
    return [
        common | {"model": model, "prompt_id": f"id {prompt}", "prompt": prompt}
        for prompt in prompts
        for model in MODELS
    ]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """The sets in their layout: 200 validation prompts, all of which stand in Alpaca too, in another spelling."""
    folder = tmp_path / "data"
    validation = [f"Question number {number}: what is it?" for number in range(200)]
    write(folder / "castillo_validation.parquet", castillo_rows(validation))
    write(folder / "castillo_train.parquet", castillo_rows([*PROMPTS, validation[0], *validation[1:30]]))
    texts = [*(text.upper() for text in validation), *(f"Sum up\n\ntext {n}" for n in range(50))]
    alpaca = [
        {"prompt": text, "has_input": "\n\n" in text, "prompt_tokens": 5, "model": "text-davinci-003"}
        | {"n_tokens": 20 + number, "vicuna7b_len_t00": 30 if number % 2 else None}
        for number, text in enumerate(texts)
    ]
    write(folder / "many_prompts" / "alpaca_52k.parquet", alpaca)
    others = [{"prompt": text, "subset": "own", "model": "m", "n_tokens": 9} for text in ("first", "second")]
    write(folder / "multi_model" / "alpaca_eval.parquet", others)
    common = {"dataset": "d", "prompt_id": "p", "prompt": "Hello?", "model": "m", "temperature": 0.8}
    write(folder / "multi_model" / "zeroeval.parquet", [common | {"full_prompt_tokens": 6, "n_tokens": 7}])
    oasst = common | {"top_p": 0.9, "run": "r", "tokens": [5, 400], "finished": [True, False]}
    write(folder / "repeated_samples" / "oasst_sampling_reports.parquet", [oasst])
    return folder


def prompts_of(path: Path) -> set[str]:
    return set(pq.read_table(path, columns=["prompt"]).column(0).to_pylist())


def words(texts: set[str]) -> set[str]:
    return {" ".join(text.lower().replace(":", "").replace("?", "").split()) for text in texts}


def test_the_report_is_held_out_from_every_set(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    files = prepare(data, out, alpaca_share=1.0)
    parts = ("tune", "calibration", "report")
    tune, calibration, report = (prompts_of(out / f"{name}.parquet") for name in parts)
    assert len(tune | calibration | report) == len(tune) + len(calibration) + len(report) == 200
    assert len(tune) == pytest.approx(120, abs=25)
    assert len(report) == pytest.approx(50, abs=25)
    trained = set.union(*(words(prompts_of(file)) for file in files))
    assert not trained & words(report)
    # ... but for those, nothing is left out.
    assert words(tune) <= trained
    assert words(set(PROMPTS)) <= trained
    assert {f"sum up input text {number}" for number in range(50)} <= trained


def test_alpacas_inputs_are_joined_as_in_castillo_and_a_share_is_taken(data: Path, tmp_path: Path) -> None:
    prepare(data, tmp_path / "all", alpaca_share=1.0)
    whole = prompts_of(tmp_path / "all" / "train_alpaca_52k.parquet")
    assert "Sum up\nInput: text 3" in whole
    prepare(data, tmp_path / "some", alpaca_share=0.3)
    some = prompts_of(tmp_path / "some" / "train_alpaca_52k.parquet")
    assert some < whole
    assert 0.15 < len(some) / len(whole) < 0.45


def test_answers_of_unknown_end_count_as_finished_and_cut_ones_as_cut(data: Path, tmp_path: Path) -> None:
    prepare(data, tmp_path / "out", alpaca_share=1.0)
    for name, ends in (("alpaca_eval", ["stop", "stop"]), ("oasst", ["stop", "length"])):
        table = pq.read_table(tmp_path / "out" / f"train_{name}.parquet")
        assert table.column("finish_reason").to_pylist() == ends
