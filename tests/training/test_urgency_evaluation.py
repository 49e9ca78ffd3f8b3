"""evaluate-urgency: predictors and baselines on labelled texts, with abstention and adversarial check."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray

from data_gen.cli_import_urgency import main as import_urgency
from data_gen.urgency.labels import LabeledText, read_labels
from data_gen.urgency.seed_set import read_pairs, seed_labels
from predictors.modules import (
    Heads,
    LengthHead,
    UrgencyHead,
    load_checkpoint,
    load_tokenizer,
    save_checkpoint,
)
from scheduler_core.errors import InputError
from scheduler_core.urgency import LEVELS
from tests.predictors.predictors import TOWER, predictor
from tests.training.tiny import tiny_bert
from training.urgency.abstention import choose_threshold
from training.urgency.cli import main
from training.urgency.evaluation import EvaluationOptions, evaluate_urgency
from training.urgency.predictors import BagOfWordsBaseline, ConstantBaseline, open_urgency, save_threshold

K = len(LEVELS)
PLAIN: dict[str, Any] = {"conditioning": None, "prompt_length": True}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("urgency") / "seed.parquet"
    assert import_urgency([str(path)]) == 0
    return path


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("urgency-checkpoint"))


def write_checkpoint(folder: Path, **options: Any) -> Path:
    encoder = tiny_bert(folder / "encoder")
    save_checkpoint(
        folder / "checkpoint", predictor(encoder, **options), load_tokenizer(encoder), {"epochs": 1}
    )
    return folder / "checkpoint"


def test_a_checkpoint_is_measured_beside_the_baselines(tmp_path: Path, data: Path, checkpoint: Path) -> None:
    out, figure = tmp_path / "out.json", tmp_path / "out.png"
    code = main([str(checkpoint), "--data", str(data), "--json", str(out), "--figure", str(figure)])
    content = json.loads(out.read_text())
    assert code == (0 if content["passed"] else 1)
    assert content["passed"] == content["adversarial"]["passed"]
    assert content["num_texts"] == sum(text.split == "test" for text in read_labels(data))
    assert set(content["baselines"]) == {"constant", "bag_of_words"}
    words = content["baselines"]["bag_of_words"]
    assert words["predicted"]["kappa"] > content["baselines"]["constant"]["predicted"]["kappa"] == 0
    assert content["adversarial"]["num_pairs"] == len(read_pairs("test"))
    assert content["abstention"]["allowed_rate"] == 0.1
    assert set(content["reliability"]) == {"most likely level", "critical (level 0 or 1)"}
    assert figure.read_bytes().startswith(b"\x89PNG")


def test_seeds_of_a_recipe_share_a_line_of_the_page(tmp_path: Path, data: Path, checkpoint: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Urgency\n", encoding="utf-8")
    entries = [f"recipe={checkpoint}", "other=constant"]
    options = ["--name", "recipe", "--markdown", str(page), "--compare", json.dumps(entries)]
    main([str(checkpoint), "--data", str(data), "--json", str(tmp_path / "out.json"), *options])
    text = page.read_text(encoding="utf-8")
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in text.splitlines() if line[:2] == "| "}
    assert {"recipe", "other", "constant", "bag of words"} <= set(rows)
    # Twice the same predictor: a spread of 0.
    assert "(0.0) %" in rows["recipe"]
    assert "(" not in rows["other"]
    assert rows["other"].split(" | ")[1:] == rows["constant"].split(" | ")[1:]
    content = json.loads((tmp_path / "out.json").read_text())
    assert [entry["name"] for entry in content["compared"]] == ["recipe", "other"]
    shown = 100 * content["predicted"]["accuracy"]["value"]
    assert rows["recipe"].split(" | ")[1] == f"{shown:.1f} (0.0) %"
    reliability = text.split("Reliability of recipe:")[1]
    counts = [int(line.split(" | ")[1]) for line in reliability.splitlines() if " to " in line]
    assert sum(counts) == 2 * content["num_texts"]


@pytest.mark.parametrize("entry", ["constant", "=constant", "bag_of_words=constant"])
def test_a_further_predictor_needs_a_name_of_its_own(
    entry: str, tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--data", str(data), "--json", str(tmp_path / "out.json"), "--compare", json.dumps([entry])]
    assert main(["constant", *options]) == 2
    assert "NAME=PREDICTOR" in capsys.readouterr().err


def test_an_artifact_gives_what_its_checkpoint_gives(tmp_path: Path, checkpoint: Path) -> None:
    from export.exporter import ExportConfig, export_onnx

    artifact = tmp_path / "artifact"
    export_onnx(ExportConfig(checkpoint=str(checkpoint), out=str(artifact), legacy_exporter=True))
    texts = [text.text for text in seed_labels("llm")[::40]]
    np.testing.assert_allclose(
        open_urgency(checkpoint, accelerator="cpu")(texts),
        open_urgency(artifact, accelerator="cpu")(texts),
        atol=1e-4,
    )


def test_a_threshold_is_saved_where_the_export_looks_for_it(tmp_path: Path, data: Path) -> None:
    folder = write_checkpoint(tmp_path)
    out = tmp_path / "out.json"
    options = [
        "--save-threshold",
        "true",
        "--baselines",
        "false",
        "--risk_rate",
        "0.99",
        "--jump_rate",
        "0.99",
    ]
    main([str(folder), "--data", str(data), "--json", str(out), *options])
    saved = load_checkpoint(folder).training_info
    assert saved["epochs"] == 1
    assert saved["urgency"]["abstain_threshold"] == json.loads(out.read_text())["abstention"]["threshold"]
    nothing = choose_threshold(np.eye(K), np.arange(K))
    save_threshold(folder, nothing)
    assert load_checkpoint(folder).training_info["urgency"]["abstain_threshold"] == 1.0


def test_a_conditioned_predictor_tells_urgency_without_a_served_model(tmp_path: Path) -> None:
    rows = open_urgency(write_checkpoint(tmp_path))(["Name three rivers.", "What is that?"])
    assert rows.shape == (2, K)
    np.testing.assert_allclose(rows.sum(axis=1), 1)
    assert open_urgency(tmp_path / "checkpoint")([]).shape == (0, K)


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        (Heads(length=LengthHead(TOWER)), "no urgency head"),
        (Heads(urgency=UrgencyHead(TOWER, levels=("high", "low"))), "urgency levels"),
    ],
)
def test_a_predictor_without_our_levels_is_refused(tmp_path: Path, heads: Heads, message: str) -> None:
    folder = write_checkpoint(tmp_path, heads=heads, **PLAIN)
    with pytest.raises(InputError, match=message):
        open_urgency(folder)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--declared_tier", "soon"], "declared_tier: got 'soon'"),
        (["--risk_rate", "0"], "allowed_rate: got 0.0"),
        (["--jump_rate", "3"], "jump_rate: got 3.0"),
        (["--under_triage_cost", "0"], "under_triage_cost: got 0.0"),
        (["--batch_size", "0"], "batch_size: got 0"),
        (["--validation", "missing.parquet"], "validation: got 'missing.parquet'"),
    ],
)
def test_bad_options_are_named(
    tmp_path: Path,
    data: Path,
    checkpoint: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    message: str,
) -> None:
    out = tmp_path / "out.json"
    assert main([str(checkpoint), "--data", str(data), "--json", str(out), *options]) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_a_file_without_a_split_is_refused(
    tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "train.parquet"
    pq.write_table(pa.table({"text": ["a b", "c d"], "level": [0, 1], "split": ["train", "train"]}), path)
    assert main([str(checkpoint), "--data", str(path), "--json", str(tmp_path / "out.json")]) == 2
    assert "train.parquet, texts of split test: got 0" in capsys.readouterr().err
    assert main([str(tmp_path / "nothing"), "--data", str(path), "--json", str(tmp_path / "out.json")]) == 2


def test_baselines_learn_levels_and_weights() -> None:
    train = [
        LabeledText(text=f"{word} {n}", level=level, source="own", split="train", weight=1 + 2 * level)
        for level, word in ((0, "fire"), (3, "row"))
        for n in range(10)
    ]
    constant, words = ConstantBaseline(train), BagOfWordsBaseline(train)
    np.testing.assert_allclose(constant(["x", "y"]), [[1 / 8, 0, 0, 7 / 8, 0]] * 2)
    assert words(["a fire", "a row"]).argmax(axis=1).tolist() == [0, 3]
    assert words([]).shape == (0, K)
    with pytest.raises(InputError, match="two or more"):
        BagOfWordsBaseline(train[:10])
    with pytest.raises(InputError, match="training texts"):
        ConstantBaseline([])


def test_what_is_scheduled_is_limited_and_abstains() -> None:
    texts = [text for text in seed_labels("llm") if text.split == "test"]
    validation = [text for text in seed_labels("llm") if text.split == "validation"]
    known = {text.text: text.level for text in seed_labels("llm")}

    def oracle(asked: Sequence[str]) -> NDArray[np.float64]:
        return np.array([np.eye(K)[known.get(text, 2)] for text in asked])

    options = EvaluationOptions(max_promotion=1, max_demotion=1)
    found = evaluate_urgency(oracle, texts, validation, read_pairs("test"), options)
    assert found.predicted.accuracy.value == 1
    assert found.threshold.threshold == 0
    assert found.answered.value == 1
    assert found.scheduled.within_one.value == 1
    assert found.scheduled.recalls[0].value == 0, "from tier standard an emergency rises by one level alone"
    assert found.quiet_recall.value is None
    with pytest.raises(InputError, match="validation texts"):
        evaluate_urgency(oracle, texts, [], read_pairs("test"))


@pytest.mark.parametrize("name", ["constant", "bag-of-words", "frozen"])
def test_baselines_can_be_measured_without_a_predictor(tmp_path: Path, data: Path, name: str) -> None:
    out = tmp_path / "out.json"
    chosen = f"frozen:{tiny_bert(tmp_path / 'encoder')}" if name == "frozen" else name
    options = ["--data", str(data), "--json", str(out), "--split", "validation", "--baselines", "false"]
    code = main([chosen, *options])
    content = json.loads(out.read_text())
    assert code == (0 if content["passed"] else 1)
    assert content["baselines"] == {}
    assert content["threshold_chosen_on_measured_texts"] is True
    assert content["adversarial"]["num_pairs"] == len(read_pairs("validation"))
    if name == "constant":
        assert content["predicted"]["kappa"] == 0
