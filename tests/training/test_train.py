"""The two-stage recipe and the command `train`."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from safetensors.torch import load_file

from predictors.modules import load_checkpoint, load_encoder
from scheduler_core.errors import InputError, TailcastError
from scheduler_core.files import locked_folder
from tests.training.data import SERVED_MODELS, write_labels, write_rows, write_sample_file
from tests.training.tiny import tiny_bert, tiny_deberta, tiny_distilbert, tiny_opt
from training.cli_train import main
from training.config import (
    ConditioningOptions,
    LengthTask,
    StageConfig,
    TowerOptions,
    TrainConfig,
    UrgencyTask,
)
from training.initial_model import set_dropout
from training.module import StageModule
from training.prediction import predict_prompts
from training.train import train

NO_STAGE = StageConfig(epochs=0, learning_rate=1e-3)
MSE = LengthTask(objective="mse")


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    return tiny_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    return write_sample_file(
        tmp_path_factory.mktemp("data") / "samples.parquet", num_prompts=40, max_tokens=150
    )


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("several") / "rows.parquet")


def tiny(encoder, samples, out, **options):
    defaults = {
        "data": str(samples),
        "out": str(out),
        "encoder": encoder,
        "max_length": 24,
        "tower": TowerOptions(hidden_sizes=(8, 8, 4)),
        "batch_size": 8,
        "stage1": StageConfig(epochs=1, learning_rate=1e-3, warmup_fraction=0.2),
        "stage2": StageConfig(epochs=1, learning_rate=1e-3),
        "accelerator": "cpu",
        "threads": 1,
        "progress": False,
    }
    return TrainConfig(**(defaults | options))


def weights(out):
    return load_file(Path(out) / "model.safetensors")


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def history(out):
    with open(Path(out) / "metrics.csv", newline="") as stream:
        return list(csv.DictReader(stream))


def test_both_stages_train_and_the_checkpoint_records_them(bert, samples, tmp_path):
    info = train(tiny(bert, samples, tmp_path / "out", length=MSE))

    checkpoint = load_checkpoint(tmp_path / "out")
    assert checkpoint.training_info == json.loads(json.dumps(info))
    assert checkpoint.config.known_models == ("m",)
    assert checkpoint.config.heads.length.nu == 3.5
    [file] = info["data"]["files"]["data"]
    assert file["name"] == "samples.parquet"
    assert len(file["sha256"]) == 64
    assert info["data"]["split"] == {"seed": 0, "fractions": [0.6, 0.2, 0.2]}
    assert (
        sum(info["data"]["num_prompts"].values()) + info["data"]["num_test_prompts"]
        == 40 - info["data"]["num_excluded"]
    )
    assert info["data"]["baselines"]["marginal_mu"] > 0
    assert info["versions"]["torch"] == torch.__version__
    assert set(info["throughput"]) == {"stage1", "stage2"}
    assert info["throughput"]["stage1"]["tokens_per_second"] > 0
    assert not (tmp_path / "out.partial").exists()

    rows = history(tmp_path / "out")
    assert [(row["stage"], row["epoch"]) for row in rows] == [("1", "0"), ("2", "0")]
    assert [float(row["sigma_weight"]) for row in rows] == [3.0, 4.0]
    assert [int(row["num_prompts"]) for row in rows] == [info["data"]["num_prompts"]["train"]] * 2
    best = min(rows, key=lambda row: float(row["validation_loss"]))
    assert info["metrics"]["best_stage"] == int(best["stage"])
    assert info["metrics"]["validation_loss"] == pytest.approx(float(best["validation_loss"]))
    start, found = load_encoder(bert).state_dict(), weights(tmp_path / "out")
    assert any(not torch.equal(value, found[f"encoder.{name}"]) for name, value in start.items())


def test_stage_1_trains_with_dropout_and_stage_2_leaves_the_encoder_as_it_is(bert, several, tmp_path):
    modes = {True: [], False: []}

    def record(module, inputs):
        if type(module).__name__ == "BertModel":
            modes[torch.is_grad_enabled()].append({part.training for part in module.modules()})

    hook = torch.nn.modules.module.register_module_forward_pre_hook(record)
    try:
        train(tiny(bert, several, tmp_path / "one", stage2=NO_STAGE))
        assert modes[True]
        assert all(mode == {True} for mode in modes[True])
        modes[True].clear()
        modes[False].clear()
        stage2 = StageConfig(epochs=3, learning_rate=1e-2)
        train(tiny(bert, several, tmp_path / "out", stage1=NO_STAGE, stage2=stage2))
    finally:
        hook.remove()
    assert modes[True] == []
    assert all(mode == {False} for mode in modes[False])
    trained = weights(tmp_path / "out")
    start = load_encoder(bert).state_dict()
    assert all(torch.equal(value, trained[f"encoder.{name}"]) for name, value in start.items())


@pytest.mark.parametrize("build", [tiny_bert, tiny_deberta, tiny_distilbert, tiny_opt])
def test_dropout_of_the_encoder_can_be_another(build, tmp_path):
    encoder = load_encoder(build(tmp_path / "encoder")).train()
    tokens = {"input_ids": torch.arange(5, 11)[None], "attention_mask": torch.ones(1, 6, dtype=torch.int64)}

    def spread(rate):
        set_dropout(encoder, rate)
        runs = [encoder(**tokens).last_hidden_state for _ in range(2)]
        return float((runs[0] - runs[1]).detach().abs().max())

    assert spread(0.0) == 0.0
    assert spread(0.3) > 0.0


@pytest.mark.parametrize("objective", ["nll", "crps", "mse"])
def test_it_learns_from_words_and_served_model(objective, bert, tmp_path):
    rows = write_rows(tmp_path / "s.parquet", num_prompts=60, num_samples=8)
    stages = {
        "stage1": StageConfig(epochs=4, learning_rate=3e-3, warmup_fraction=0.1),
        "stage2": StageConfig(epochs=25, learning_rate=3e-3, patience=25),
    }
    tower = TowerOptions(hidden_sizes=(32, 16), dropouts=(0.0, 0.0))
    conditioning = ConditioningOptions(width=8)
    info = train(
        tiny(
            bert,
            rows,
            tmp_path / "out",
            tower=tower,
            length=LengthTask(objective=objective),
            conditioning=conditioning,
            **stages,
        )
    )
    assert info["metrics"]["validation"]["r2_log"] > 0.75
    checkpoint = load_checkpoint(tmp_path / "out")
    texts = ["write a short list of 12"] * 4 + ["write a long list of 13"]
    models, temperatures = [*SERVED_MODELS, None, "small"], [0.0, 0.7, None, 0.7, 0.0]
    found = predict_prompts(checkpoint.model, checkpoint.tokenizer, texts, models, temperatures)
    small, middle, large, unknown, longer = found["mu"].tolist()
    assert small < middle < large
    assert small < unknown < large + 0.1
    assert longer > small + 0.3
    assert 0.02 < found["sigma"][0] < 0.6


def test_nll_with_a_learned_nu_and_integers_trains(bert, several, tmp_path):
    task = LengthTask(learn_nu=True, integers=True)
    info = train(tiny(bert, several, tmp_path / "out", length=task))
    assert np.isfinite(info["metrics"]["validation_loss"])
    checkpoint = load_checkpoint(tmp_path / "out")
    found = predict_prompts(checkpoint.model, checkpoint.tokenizer, ["write a story"])
    assert 1 < found["nu"][0] < 100


@pytest.mark.parametrize("objective", ["nll", "crps"])
def test_sigma_within_is_learned(objective, bert, tmp_path):
    rows = write_rows(tmp_path / "rows.parquet", num_prompts=60, num_samples=8, models=("m",))
    stages = {
        "stage1": StageConfig(epochs=3, learning_rate=3e-3),
        "stage2": StageConfig(epochs=25, learning_rate=3e-3),
    }
    tower = TowerOptions(hidden_sizes=(32, 16), dropouts=(0.0, 0.0))
    task = LengthTask(objective=objective, within=True)
    train(tiny(bert, rows, tmp_path / "out", tower=tower, length=task, **stages))
    checkpoint = load_checkpoint(tmp_path / "out")
    texts = ["write a short list of 12", "write a long list of 13"]
    short, long = predict_prompts(checkpoint.model, checkpoint.tokenizer, texts)["sigma_within"]
    assert short == pytest.approx(0.15, abs=0.1)
    assert long > short


def test_half_precision_trains_float32_weights(bert, several, tmp_path):
    kinds = set()

    def look(module, inputs, output):
        kinds.add(output.dtype)

    hook = torch.nn.modules.module.register_module_forward_hook(
        lambda module, inputs, output: (
            look(module, inputs, output) if isinstance(module, torch.nn.Linear) else None
        )
    )
    try:
        train(tiny(bert, several, tmp_path / "out", precision="bf16-mixed"))
    finally:
        hook.remove()
    assert kinds == {torch.bfloat16, torch.float32}
    found = weights(tmp_path / "out")
    assert all(value.dtype == torch.float32 and torch.isfinite(value).all() for value in found.values())


def test_an_early_stop_is_after_epochs_without_a_better_one(bert, samples, tmp_path):
    stage2 = StageConfig(epochs=200, learning_rate=0.3, patience=2)
    info = train(tiny(bert, samples, tmp_path / "out", stage1=NO_STAGE, stage2=stage2))
    rows = history(tmp_path / "out")
    assert len(rows) < 200
    assert int(rows[-1]["epoch"]) == info["metrics"]["best_epoch"] + 2


def test_under_triage_counts_in_the_best_epoch_of_urgency_alone(bert, tmp_path):
    labels = write_labels(tmp_path / "labels.parquet", count=80)
    urgency = UrgencyTask(levels=("a", "b", "c", "d", "e"))
    options = {"data": None, "urgency_data": str(labels), "length": None, "urgency": urgency}
    stage1 = StageConfig(epochs=8, learning_rate=5e-3)
    info = train(tiny(bert, None, tmp_path / "out", stage1=stage1, stage2=NO_STAGE, **options))
    rows = history(tmp_path / "out")
    ranks = [float(row["validation_under_triage"]) + float(row["validation_loss"]) for row in rows]
    assert info["metrics"]["best_epoch"] == ranks.index(min(ranks))
    assert load_checkpoint(tmp_path / "out").config.heads.urgency.levels == urgency.levels


def test_layers_of_the_encoder_can_learn_more_slowly(bert, samples, tmp_path):
    stage1 = StageConfig(
        epochs=1, learning_rate=1e-3, heads_learning_rate=1e-2, layer_decay=0.1, schedule="constant"
    )
    train(tiny(bert, samples, tmp_path / "out", stage1=stage1, stage2=NO_STAGE, weight_decay=0.0))
    start, found = load_encoder(bert).state_dict(), weights(tmp_path / "out")
    moved = [
        float((found[f"encoder.encoder.layer.{layer}.output.dense.weight"] - start[name]).abs().max())
        for layer, name in ((n, f"encoder.layer.{n}.output.dense.weight") for n in (0, 1))
    ]
    assert moved[0] < 0.3 * moved[1]


def test_event_files_are_written_where_asked(bert, samples, tmp_path):
    train(tiny(bert, samples, tmp_path / "out", tensorboard=str(tmp_path / "events")))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "events" / "stage1"))
    events.Reload()
    [point] = events.Scalars("validation_length")
    assert point.value == pytest.approx(float(history(tmp_path / "out")[0]["validation_length"]), rel=1e-5)


def interrupt(monkeypatch, stage, epoch):
    """Ctrl-C in the second batch of an epoch."""
    step = StageModule.training_step

    def training_step(self, batch, batch_idx):
        is_stage_1 = self.network.encoder.training
        if (1 if is_stage_1 else 2, self.current_epoch, batch_idx) == (stage, epoch, 1):
            raise KeyboardInterrupt
        return step(self, batch, batch_idx)

    monkeypatch.setattr(StageModule, "training_step", training_step)


def test_a_finished_checkpoint_is_replaced_only_on_demand(bert, samples, tmp_path):
    out = tmp_path / "out"
    train(tiny(bert, samples, out))
    before = weights(out)
    with pytest.raises(InputError, match="out: .*--overwrite true replaces this checkpoint"):
        train(tiny(bert, samples, out, seed=1))
    (out / "notes.txt").write_text("mine")
    with pytest.raises(TailcastError, match="holds notes.txt, which is not part of the checkpoint"):
        train(tiny(bert, samples, out, seed=1, overwrite=True))
    assert same(before, weights(out))
    assert (out / "notes.txt").read_text() == "mine"
    (out / "notes.txt").unlink()
    with (
        locked_folder(tmp_path / "out.partial", "out"),
        pytest.raises(InputError, match="a run that no other process is working on"),
    ):
        train(tiny(bert, samples, out, seed=1, overwrite=True))
    train(tiny(bert, samples, out, seed=1, overwrite=True))
    assert not same(before, weights(out))
    assert not (tmp_path / "out.partial").exists()


LONG = {
    "stage1": StageConfig(epochs=3, learning_rate=1e-3, warmup_fraction=0.2),
    "stage2": StageConfig(epochs=3, learning_rate=1e-3),
    "conditioning": ConditioningOptions(width=4),
    "batch_tokens": 60,
    "rows_per_prompt": 2,
}


@pytest.fixture(scope="module")
def uninterrupted(bert, several, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "out"
    info = train(tiny(bert, several, out, **LONG))
    return weights(out), info


@pytest.mark.parametrize(("stage", "epoch"), [(1, 0), (1, 2), (2, 0), (2, 2)])
def test_an_interrupted_and_resumed_run_equals_an_uninterrupted_one(
    stage, epoch, uninterrupted, bert, several, tmp_path, monkeypatch
):
    config = tiny(bert, several, tmp_path / "out", **LONG)
    with monkeypatch.context() as patch:
        interrupt(patch, stage, epoch)
        with pytest.raises(KeyboardInterrupt):
            train(config)
    assert not (tmp_path / "out").exists()
    epochs = []
    monkeypatch.setattr(
        StageModule, "on_train_epoch_end", lambda self: epochs.append(self.current_epoch), raising=False
    )
    info = train(config)
    assert len(epochs) == 6 - 3 * (stage - 1) - epoch
    expected, expected_info = uninterrupted
    assert same(expected, weights(tmp_path / "out"))
    assert info["metrics"] == expected_info["metrics"]


def test_a_run_that_had_stopped_early_is_not_resumed(bert, samples, tmp_path, monkeypatch):
    stage2 = StageConfig(epochs=200, learning_rate=0.3, patience=2)
    config = tiny(bert, samples, tmp_path / "out", stage1=NO_STAGE, stage2=stage2)
    with monkeypatch.context() as patch:
        patch.setattr("training.trainer.read_history", lambda path: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            train(config)
    train(config)
    whole = tiny(bert, samples, tmp_path / "whole", stage1=NO_STAGE, stage2=stage2)
    train(whole)
    assert len(history(tmp_path / "out")) == len(history(tmp_path / "whole"))
    assert same(weights(tmp_path / "out"), weights(tmp_path / "whole"))


def test_state_of_other_options_is_refused(bert, samples, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        interrupt(patch, 1, 0)
        with pytest.raises(KeyboardInterrupt):
            train(tiny(bert, samples, tmp_path / "out"))
    with pytest.raises(InputError, match=r"same batch_size; --resume false"):
        train(tiny(bert, samples, tmp_path / "out", batch_size=4))
    assert train(tiny(bert, samples, tmp_path / "out", batch_size=4, resume=False))["metrics"]


def test_the_seed_decides(bert, samples, tmp_path):
    def run(name, seed):
        before = torch.random.get_rng_state()
        train(tiny(bert, samples, tmp_path / name, seed=seed, stage2=NO_STAGE, deterministic=True))
        assert torch.equal(before, torch.random.get_rng_state())
        torch.rand(3)
        return weights(tmp_path / name)["heads.length.mu.rest.0.weight"]

    one, again, other = run("a", 1), run("b", 1), run("c", 2)
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


def test_a_loss_that_is_not_finite_stops_and_saves_the_batch(bert, several, tmp_path, monkeypatch):
    original = StageModule.training_step

    def training_step(self, batch, batch_idx):
        if batch_idx == 1:
            batch = batch._replace(weight=batch.weight * float("nan"))
        return original(self, batch, batch_idx)

    monkeypatch.setattr(StageModule, "training_step", training_step)
    message = r"loss of a batch in epoch 0 is not finite \(prompts p0\d\d, p0\d\d, p0\d\d, ...; length nan\)"
    with pytest.raises(TailcastError, match=message):
        train(tiny(bert, several, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_gradient_that_is_not_finite_stops_too(bert, samples, tmp_path, monkeypatch):
    original = StageModule.training_step

    def training_step(self, batch, batch_idx):
        loss = original(self, batch, batch_idx)
        # 0 * sqrt(0) is 0, its derivative is not a number
        return loss + 0 * (self.network.heads["length"].mu.rest[0].bias * 0).pow(2).sum().sqrt()

    monkeypatch.setattr(StageModule, "training_step", training_step)
    with pytest.raises(TailcastError, match="gradient of a batch in epoch 0"):
        train(tiny(bert, samples, tmp_path / "out"))


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory."), MemoryError()])
def test_running_out_of_memory_names_the_batch(error, bert, samples, tmp_path, monkeypatch):
    def losses(self, batch, sigma_weight):
        raise error

    monkeypatch.setattr(StageModule, "_losses", losses)
    with pytest.raises(TailcastError, match=r"batch of 8 prompts \(the longest has \d+ tokens.*batch_tokens"):
        train(tiny(bert, samples, tmp_path / "out"))


def test_fits_and_samples_train_the_same_model(bert, samples, tmp_path):
    from training.cli_fit_dist import main as fit_dist

    assert fit_dist([str(samples), "--out", str(tmp_path / "fits.parquet"), "--alternatives", "false"]) == 0
    for name, task in (("mse", MSE), ("nll", LengthTask())):
        train(tiny(bert, samples, tmp_path / f"{name}-a", length=task))
        train(tiny(bert, tmp_path / "fits.parquet", tmp_path / f"{name}-b", length=task))
        assert same(weights(tmp_path / f"{name}-a"), weights(tmp_path / f"{name}-b"))


def test_batching_of_predictions_changes_nothing(bert, several, tmp_path):
    train(tiny(bert, several, tmp_path / "out", conditioning=ConditioningOptions()))
    checkpoint = load_checkpoint(tmp_path / "out")
    prompts = ["write a long story", "a", "name the short list of 12 rivers", "a"]
    models, temperatures = ["small", None, "stranger", "large"], [0.0, None, 1.0, 0.7]
    found = predict_prompts(
        checkpoint.model, checkpoint.tokenizer, prompts, models, temperatures, batch_size=4
    )
    for row in range(4):
        single = predict_prompts(
            checkpoint.model, checkpoint.tokenizer, prompts[row : row + 1], [models[row]], [temperatures[row]]
        )
        for name in ("mu", "sigma"):
            np.testing.assert_allclose(found[name][row], single[name][0], rtol=1e-5)
    assert found["mu"][1] != found["mu"][3]
    assert predict_prompts(checkpoint.model, checkpoint.tokenizer, [])["mu"].shape == (0,)


def test_without_dropout_of_served_models_unknown_models_are_refused(bert, several, tmp_path):
    train(tiny(bert, several, tmp_path / "out", conditioning=ConditioningOptions(served_model_dropout=0.0)))
    checkpoint = load_checkpoint(tmp_path / "out")
    with pytest.raises(
        InputError, match="served model: got 'stranger'; allowed: one of large, middle, small"
    ):
        predict_prompts(checkpoint.model, checkpoint.tokenizer, ["a"], ["stranger"])


@pytest.fixture(scope="module")
def conditioned(bert, several, tmp_path_factory):
    out = tmp_path_factory.mktemp("conditioned") / "out"
    train(tiny(bert, several, out, conditioning=ConditioningOptions(width=4)))
    return out


def test_a_new_served_model_changes_its_own_embedding_and_nothing_else(conditioned, bert, tmp_path):
    rows = write_rows(tmp_path / "new.parquet", models=("small", "new"), num_samples=3, seed=5)
    config = tiny(
        bert,
        rows,
        tmp_path / "out",
        init=str(conditioned),
        only_conditioning=True,
        conditioning=ConditioningOptions(),
        stage2=StageConfig(epochs=5, learning_rate=0.1),
    )
    info = train(config)
    before, after = weights(conditioned), weights(tmp_path / "out")
    embedding = "conditions.served_model.weight"
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before if name != embedding)
    assert torch.equal(before[embedding], after[embedding][:4])
    assert after[embedding].shape[0] == 5
    assert not torch.equal(after[embedding][4], before[embedding][0])
    assert info["metrics"]["best_stage"] == 2

    old, new = load_checkpoint(conditioned), load_checkpoint(tmp_path / "out")
    assert new.config.conditioning.served_models == (*old.config.conditioning.served_models, "new")
    assert old.model.normalization == new.model.normalization
    for model in (*SERVED_MODELS, None):
        one, other = (
            predict_prompts(c.model, c.tokenizer, ["write a long story"], [model])["mu"] for c in (old, new)
        )
        assert one == other


def test_a_checkpoint_can_be_trained_further(conditioned, bert, several, tmp_path):
    info = train(
        tiny(
            bert,
            several,
            tmp_path / "out",
            init=str(conditioned),
            conditioning=ConditioningOptions(),
            stage2=NO_STAGE,
        )
    )
    before, after = weights(conditioned), weights(tmp_path / "out")
    assert before.keys() == after.keys()
    assert not same(before, after)
    assert info["config"]["init"] == str(conditioned)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"only_conditioning": True}, "a served model that is new"),
        (
            {
                "length": None,
                "urgency": UrgencyTask(),
                "urgency_data": "{labels}",
                "data": None,
                "conditioning": None,
            },
            "a checkpoint with this head; it has length",
        ),
        ({"length": LengthTask(nu=4.0)}, "length.nu: got 4.0; allowed: 3.5"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(options, message, conditioned, bert, several, tmp_path):
    labels = write_labels(tmp_path / "labels.parquet")
    options = {name: str(labels) if value == "{labels}" else value for name, value in options.items()}
    config = {"init": str(conditioned), "conditioning": ConditioningOptions()} | options
    with pytest.raises(InputError, match=message):
        train(tiny(bert, several, tmp_path / "out", **config))


def test_a_checkpoint_of_another_version_is_refused(conditioned, bert, several, tmp_path):
    import shutil

    old = tmp_path / "old"
    shutil.copytree(conditioned, old)
    content = json.loads((old / "config.json").read_text())
    (old / "config.json").write_text(json.dumps(content | {"format_version": 1}))
    config = tiny(bert, several, tmp_path / "out", init=str(old), conditioning=ConditioningOptions())
    with pytest.raises(InputError, match="format_version: got 1"):
        train(config)


@pytest.mark.slow
def test_two_processes_share_stage_1(bert, several, tmp_path):
    stages = {
        "stage1": StageConfig(epochs=2, learning_rate=1e-3),
        "stage2": StageConfig(epochs=1, learning_rate=1e-3),
    }
    info = train(tiny(bert, several, tmp_path / "out", devices=2, **stages))
    rows = history(tmp_path / "out")
    assert [(row["stage"], row["epoch"]) for row in rows] == [("1", "0"), ("1", "1"), ("2", "0")]
    # 18 prompts in batches of at most 8: two batches for each process.
    assert 2 * int(rows[0]["num_prompts"]) >= info["data"]["num_prompts"]["train"]
    assert int(rows[2]["num_prompts"]) == info["data"]["num_prompts"]["train"]
    assert load_checkpoint(tmp_path / "out").config.heads.names == ("length",)


def test_the_command_trains_from_yaml_and_overrides(bert, several, tmp_path):
    recipe = {
        "encoder": bert,
        "max_length": 24,
        "tower": {"hidden_sizes": [8, 4], "dropouts": [0.1, 0.1]},
        "length": {"objective": "crps"},
        "conditioning": {"width": 4},
        "stage1": {"epochs": 5, "learning_rate": 1e-3},
        "stage2": {"epochs": 2, "learning_rate": 1e-3},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    args = ["--config", str(tmp_path / "recipe.yaml"), "--data", str(several), "--out", str(tmp_path / "out")]
    overrides = [
        "--stage1.epochs",
        "1",
        "--length.objective",
        "nll",
        "--conditioning.width=3",
        "--bucket.num_buckets",
        "4",
    ]
    assert main([*args, *overrides, "--threads", "1", "--accelerator", "cpu"]) == 0
    checkpoint = load_checkpoint(tmp_path / "out")
    config = checkpoint.training_info["config"]
    assert (config["stage1"]["epochs"], config["stage2"]["epochs"]) == (1, 2)
    assert config["length"]["objective"] == "nll"
    assert checkpoint.config.conditioning.width == 3
    assert checkpoint.config.heads.names == ("length", "bucket")
    assert len(checkpoint.config.heads.bucket.edges) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--encoder", "microsoft/deberta-v3-base"], "encoder: got 'microsoft/deberta-v3-base'"),
        (["--encoder", "/no/such/encoder"], "encoder: got '/no/such/encoder'"),
        (["--encoder", "{dir}/opt"], "a padding token"),
        (["--max_length", "2000"], "max_length: got 2000"),
        (["--fractions", "[1.0, 0.5, 0.5]"], "fractions"),
        (["--fractions", "[1.0, 0.0, 0.0]"], "validation split"),
        (["--fractions", "[0.0, 1.0, 0.0]"], "train split"),
        (["--served_model", "other"], "column model: got 'other'"),
        (["--data", "{dir}/nothing.parquet"], "data: got"),
        (["--data", "{dir}/broken.parquet"], "a whole Parquet file"),
        (["--data", "{dir}/no_prompt.parquet"], "also prompt"),
        (["--urgency_data", "{dir}/no_level.parquet", "--urgency.weight", "1"], "also level"),
        (["--validation", "{dir}/nothing.parquet"], "validation: got"),
        (["--init", "{dir}/nothing"], "init: got"),
        (["--out", "{dir}/broken.parquet"], "out: got"),
        (["--out", "{dir}/full"], "a new or empty folder"),
        (["--stage1.epochs", "-1"], "epochs"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(options, message, bert, samples, tmp_path, capsys):
    (tmp_path / "broken.parquet").write_bytes(samples.read_bytes()[:-300])
    pq.write_table(pq.read_table(samples).drop_columns(["prompt"]), tmp_path / "no_prompt.parquet")
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "no_level.parquet")
    tiny_opt(tmp_path / "opt", padding=False)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious").touch()
    before = sorted(tmp_path.rglob("*"))
    given = {"--data": str(samples), "--out": str(tmp_path / "out"), "--encoder": bert, "--max_length": "24"}
    given |= dict(zip(options[::2], [option.format(dir=tmp_path) for option in options[1::2]], strict=True))
    args = [word for pair in given.items() for word in pair]
    assert main([*args, "--stage2.epochs", "1", "--threads", "1", "--progress", "false"]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert message in lines[-1]
    assert not any("Traceback" in line for line in lines)
    assert sorted(tmp_path.rglob("*")) == before


def test_an_encoder_can_be_taken_from_a_checkpoint(bert, samples, tmp_path):
    train(tiny(bert, samples, tmp_path / "first"))
    off = StageConfig(epochs=0, learning_rate=1e-3)
    train(tiny(str(tmp_path / "first"), samples, tmp_path / "second", stage1=off, seed=7))
    first, second = weights(tmp_path / "first"), weights(tmp_path / "second")
    encoders = [
        {name: value for name, value in found.items() if name.startswith("encoder.")}
        for found in (first, second)
    ]
    assert encoders[0]
    assert same(*encoders)
    assert not same(first, second)
    fresh = {f"encoder.{name}": value for name, value in load_encoder(bert).state_dict().items()}
    assert not same(encoders[0], fresh)
