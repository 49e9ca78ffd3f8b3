"""`calibrate`: the batch fit of a correction to a checkpoint's samples, and the command."""

import json
from dataclasses import asdict

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from data_gen.splits import overlap, smallest_hashes
from predictors.modules.checkpoint import load_checkpoint
from predictors.modules.config import Conditioning
from predictors.modules.heads import Heads, RankHead
from tests.training.checkpoints import MODELS, SMALL_TOWER, prompts, random_checkpoint, write_drawn_answers
from tests.training.data import assert_refused
from training.commands.calibrate import main
from training.commands.evaluate import main as evaluate


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint, and answers longer and wider than it says, for calibrating and for checking."""
    root = tmp_path_factory.mktemp("calibrate")
    checkpoint = random_checkpoint(root, info={"data": {"name": "x"}, "note": "kept"})
    for name, seed in (("answers", 0), ("new", 1)):
        wrong = {"shift": (0.6, -0.5), "scale": (1.6, 0.8), "max_tokens": 2000, "num_prompts": 150}
        write_drawn_answers(root / f"{name}.parquet", checkpoint, seed=seed, **wrong)
    return root


def coverage(predictor, data, out):
    args = [str(predictor), "--data", str(data), "--json", str(out), "--progress", "false"]
    assert evaluate([*args, "--ceiling", "false"]) == 0
    return json.loads(out.read_text())


def test_the_command_writes_a_calibrated_checkpoint(folder, tmp_path):
    args = [str(folder / "checkpoint"), "--data", str(folder / "answers.parquet"), "--progress", "false"]
    out = tmp_path / "calibrated"
    assert main([*args, "--out", str(out), "--report", str(tmp_path / "report.html")]) == 0
    page = (tmp_path / "report.html").read_text()
    assert all(f"<td>{name}</td>" in page for name in MODELS)
    info = json.loads((out / "training.json").read_text())
    assert info["note"] == "kept"
    assert info["calibration"]["is_better"] is True
    assert not load_checkpoint(out).model.calibration.is_identity
    before = coverage(folder / "checkpoint", folder / "new.parquet", tmp_path / "a.json")
    after = coverage(out, folder / "new.parquet", tmp_path / "b.json")
    for name in MODELS:
        for level in ("p50", "p90"):
            row = after["by_model"][name]["coverage"][level]
            assert row["estimate"] == pytest.approx(row["level"], abs=0.06)
        old = before["by_model"][name]["coverage"]["p50"]["estimate"]
        assert abs(old - 0.5) > 0.1
    # calibrating again starts from the uncalibrated predictions
    assert main([str(out), *args[1:], "--out", str(tmp_path / "again")]) == 0
    again = load_checkpoint(tmp_path / "again").model.calibration
    for name, table in asdict(again).items():
        assert json.loads(json.dumps(table)) == info["calibration"][name]


def test_a_predictor_without_conditions_has_one_entry(folder, tmp_path):
    plain = random_checkpoint(tmp_path / "plain", conditioning=None)
    args = [str(plain), "--data", str(folder / "answers.parquet"), "--progress", "false"]
    assert main([*args, "--out", str(tmp_path / "out")]) == 0
    calibration = load_checkpoint(tmp_path / "out").model.calibration
    assert calibration.num_models == 0
    assert len(calibration.location) == len(calibration.log_scale) == 1


def test_rows_of_unknown_served_models_say_nothing_of_a_mean_over_the_known_ones(tmp_path):
    conditioning = Conditioning(MODELS, width=4, unknown_is_mean=True)
    checkpoint = random_checkpoint(tmp_path, conditioning=conditioning)
    data = write_drawn_answers(tmp_path / "a.parquet", checkpoint, num_prompts=60, num_answers=4)
    table = pq.read_table(data)
    names = pc.if_else(pc.equal(table["model"], MODELS[0]), table["model"], pa.scalar("another"))
    pq.write_table(table.set_column(table.column_names.index("model"), "model", names), data)
    args = [str(checkpoint), "--data", str(data), "--out", str(tmp_path / "out"), "--progress", "false"]
    assert main(args) in (0, 3)
    summary = json.loads((tmp_path / "out/training.json").read_text())["calibration"]
    assert summary["data"]["num_rows"] == 60
    # The model without rows and the unknown one get what fits all rows.
    assert summary["location"][0] == summary["location"][2] != summary["location"][1]


def test_a_calibration_that_is_not_better_says_so_and_exits_with_3(folder, tmp_path, caplog):
    checkpoint = folder / "checkpoint"
    right = write_drawn_answers(tmp_path / "right.parquet", checkpoint, num_prompts=40, num_answers=4)
    args = [str(checkpoint), "--data", str(right), "--out", str(tmp_path / "out"), "--progress", "false"]
    assert main(args) == 3
    assert "IS NOT BETTER THAN BEFORE" in caplog.text
    summary = json.loads((tmp_path / "out/training.json").read_text())["calibration"]
    assert summary["held_back"]["CRPS, ln tokens"][-1] >= 0


@pytest.mark.mend  # The coverage of P99 is unknown if most outputs are truncated: NaN, which ended the command.
def test_a_figure_that_truncated_outputs_hide_is_null(folder, tmp_path):
    checkpoint = folder / "checkpoint"
    data = write_drawn_answers(
        tmp_path / "a.parquet", checkpoint, num_prompts=40, num_answers=4, max_tokens=3
    )
    args = [str(checkpoint), "--data", str(data), "--out", str(tmp_path / "out"), "--progress", "false"]
    assert main(args) in (0, 3)
    summary = json.loads((tmp_path / "out/training.json").read_text())["calibration"]
    assert None in [each for values in summary["held_back"].values() for each in values]


def test_training_prompts_are_noticed(tmp_path, caplog):
    texts = prompts(60)
    data = {"smallest_hashes": smallest_hashes(texts), "split": {"seed": 0, "fractions": [0.6, 0.2, 0.2]}}
    checkpoint = random_checkpoint(tmp_path, info={"data": data})
    answers = write_drawn_answers(tmp_path / "answers.parquet", checkpoint, num_prompts=60)
    args = [str(checkpoint), "--data", str(answers), "--progress", "false"]
    assert main([*args, "--out", str(tmp_path / "out")]) in (0, 3)
    assert "about 100 % of the prompts are in the training data" in caplog.text
    assert "--split test" in caplog.text
    caplog.clear()
    assert evaluate([*args, "--split", "train", "--ceiling", "false"]) == 0
    assert "in the training data" not in caplog.text
    many, new = ([f"{name} {number}" for number in range(5000)] for name in ("prompt", "new"))
    assert overlap([*many[:500], *new[:500]], smallest_hashes(many)) == pytest.approx(0.5, abs=0.2)
    assert overlap(["new"], smallest_hashes(many)) == overlap(many, []) == 0.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["{root}/nothing"], "an existing checkpoint folder"),
        (["{root}/checkpoint", "--held_back", "1"], "held_back: got 1"),
        (["{root}/checkpoint", "--split", "test"], "the predictor does not record a split"),
        (["{rank}"], "a checkpoint with a length head"),
        (["{root}/checkpoint", "--out", "{root}"], "a path that does not contain that of predictor"),
    ],
)
def test_bad_input_is_one_line(options, message, folder, tmp_path, capsys):
    rank = random_checkpoint(tmp_path, heads=Heads(rank=RankHead(tower=SMALL_TOWER)))
    words = [word.format(root=folder, rank=rank) for word in options]
    words += ["--data", str(folder / "answers.parquet")] if "--data" not in words else []
    words += ["--out", str(tmp_path / "out")] if "--out" not in words else []
    assert_refused(main, [*words, "--progress", "false"], message, tmp_path, capsys)
