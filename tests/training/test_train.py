"""The two-stage recipe and the command `train`."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from safetensors.torch import load_file

import training
from predictors.modules import load_checkpoint, load_encoder
from scheduler_core.errors import InputError, TailcastError
from tests.training.data import write_sample_file
from tests.training.tiny import tiny_bert, tiny_deberta
from training.cli_train import main
from training.config import StageConfig, TrainConfig
from training.prediction import predict_prompts
from training.stage import StageModule
from training.train import train

CONFIGS = sorted((Path(training.__file__).parent / "configs").glob("*.yaml"))


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    return tiny_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    return write_sample_file(
        tmp_path_factory.mktemp("data") / "samples.parquet", num_prompts=40, max_tokens=150
    )


def tiny(encoder, samples, out, **options):
    defaults = {
        "data": str(samples),
        "out": str(out),
        "encoder": encoder,
        "max_length": 24,
        "hidden_sizes": (8, 8, 4),
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


@pytest.mark.parametrize("kind", ["bert", "deberta"])
def test_both_stages_train_and_the_checkpoint_says_how(kind, bert, samples, tmp_path):
    encoder = bert if kind == "bert" else tiny_deberta(tmp_path / "encoder")
    info = train(tiny(encoder, samples, tmp_path / "out"))

    checkpoint = load_checkpoint(tmp_path / "out")
    assert checkpoint.training_info == json.loads(json.dumps(info))
    assert checkpoint.config.served_models == ("m",)
    assert checkpoint.config.nu == 3.5
    assert info["data"]["name"] == "samples.parquet"
    assert len(info["data"]["sha256"]) == 64
    assert info["data"]["split"] == {"seed": 0, "fractions": [0.6, 0.2, 0.2]}
    assert sum(info["data"]["num_targets"].values()) + sum(info["data"]["num_excluded"].values()) == 40
    assert set(info["metrics"]["test"]["baselines"]) == {"constant", "marginal", "prompt_length"}
    assert info["versions"]["torch"] == torch.__version__
    assert not (tmp_path / "out.partial").exists()

    with open(tmp_path / "out" / "metrics.csv", newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [(row["stage"], row["epoch"]) for row in rows] == [("1", "0"), ("2", "0")]
    assert [float(row["sigma_weight"]) for row in rows] == [3.0, 4.0]
    best = min(rows, key=lambda row: float(row["validation_loss"]))
    assert info["metrics"]["best_stage"] == int(best["stage"])
    assert info["metrics"]["validation_loss"] == pytest.approx(float(best["validation_loss"]))
    start = load_encoder(encoder).state_dict()
    moved = [
        name
        for name, value in start.items()
        if not torch.equal(value, weights(tmp_path / "out")[f"encoder.{name}"])
    ]
    assert moved


def test_stage_2_leaves_the_encoder_bit_identical_and_in_eval_mode(bert, samples, tmp_path):
    modes = set()

    def look(module, inputs):
        if type(module).__name__ == "BertModel":
            modes.update(part.training for part in module.modules())

    hook = torch.nn.modules.module.register_module_forward_pre_hook(look)
    try:
        stages = {
            "stage1": StageConfig(epochs=0, learning_rate=1e-3),
            "stage2": StageConfig(epochs=3, learning_rate=1e-2),
        }
        train(tiny(bert, samples, tmp_path / "out", **stages))
    finally:
        hook.remove()
    assert modes == {False}
    trained = weights(tmp_path / "out")
    start = load_encoder(bert).state_dict()
    assert all(torch.equal(value, trained[f"encoder.{name}"]) for name, value in start.items())
    assert len(start) > 20


def test_stage_1_trains_with_dropout(bert, samples, tmp_path):
    modes = []

    def look(module, inputs):
        if type(module).__name__ == "BertModel" and torch.is_grad_enabled():
            modes.append({part.training for part in module.modules()})

    hook = torch.nn.modules.module.register_module_forward_pre_hook(look)
    try:
        train(tiny(bert, samples, tmp_path / "out", stage2=StageConfig(epochs=0, learning_rate=1e-3)))
    finally:
        hook.remove()
    assert modes
    assert all(mode == {True} for mode in modes)


def test_it_learns_what_the_words_say(bert, tmp_path):
    samples = write_sample_file(tmp_path / "s.parquet", num_prompts=100, num_samples=12, max_tokens=10_000)
    stages = {
        "stage1": StageConfig(epochs=4, learning_rate=3e-3, warmup_fraction=0.1),
        "stage2": StageConfig(epochs=20, learning_rate=3e-3),
    }
    info = train(tiny(bert, samples, tmp_path / "out", hidden_sizes=(32, 16), dropouts=(0.0, 0.0), **stages))
    test = info["metrics"]["test"]
    assert test["model"]["mu"]["r2"] > 0.8
    assert test["model"]["kendall_tau"]["median_vs_fitted_mu"] > 0.5
    for baseline in test["baselines"].values():
        assert test["model"]["crps_tokens"] < baseline["crps_tokens"]
        assert test["model"]["nll"] < baseline["nll"]


LONG = {
    "stage1": StageConfig(epochs=3, learning_rate=1e-3, warmup_fraction=0.2),
    "stage2": StageConfig(epochs=3, learning_rate=1e-3),
}


@pytest.fixture(scope="module")
def uninterrupted(bert, samples, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "out"
    info = train(tiny(bert, samples, out, **LONG))
    return weights(out), info


def interrupt(monkeypatch, stage, epoch):
    """Ctrl-C in the second batch of an epoch."""
    step = StageModule.training_step

    def training_step(self, batch, batch_idx):
        is_stage_1 = hasattr(self.network, "encoder")
        if (1 if is_stage_1 else 2, self.current_epoch, batch_idx) == (stage, epoch, 1):
            raise KeyboardInterrupt
        return step(self, batch, batch_idx)

    monkeypatch.setattr(StageModule, "training_step", training_step)


@pytest.mark.parametrize(("stage", "epoch"), [(1, 0), (1, 2), (2, 0), (2, 2)])
def test_an_interrupted_and_resumed_run_equals_the_whole_one(
    stage, epoch, uninterrupted, bert, samples, tmp_path, monkeypatch
):
    config = tiny(bert, samples, tmp_path / "out", **LONG)
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
    found = weights(tmp_path / "out")
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert info["metrics"] == expected_info["metrics"]


def test_state_of_other_options_is_not_taken_up(bert, samples, tmp_path, monkeypatch):
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
        train(
            tiny(bert, samples, tmp_path / name, seed=seed, stage2=StageConfig(epochs=0, learning_rate=1.0))
        )
        assert torch.equal(before, torch.random.get_rng_state())
        torch.rand(3)
        return weights(tmp_path / name)["towers.mu.0.weight"]

    one, again, other = run("a", 1), run("b", 1), run("c", 2)
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


def test_a_loss_that_is_not_finite_stops_and_names_the_prompts(bert, samples, tmp_path, monkeypatch):
    original = StageModule.training_step

    def training_step(self, batch, batch_idx):
        if batch_idx == 1:
            batch = batch._replace(mu=batch.mu * float("nan"))
        return original(self, batch, batch_idx)

    monkeypatch.setattr(StageModule, "training_step", training_step)
    with pytest.raises(
        TailcastError, match=r"loss of a batch in epoch 0 is not finite \(prompts p0.*out\.diverged\.json"
    ):
        train(tiny(bert, samples, tmp_path / "out"))
    saved = json.loads((tmp_path / "out.diverged.json").read_text())
    assert len(saved["prompt_ids"]) == 8
    assert saved["what"] == "loss"
    assert not (tmp_path / "out").exists()


def test_a_gradient_that_is_not_finite_stops_too(bert, samples, tmp_path, monkeypatch):
    original = StageModule.training_step

    def training_step(self, batch, batch_idx):
        loss = original(self, batch, batch_idx)
        # 0 * sqrt(0) is 0, its derivative is not a number
        return loss + 0 * (self.network.towers.mu[0].bias * 0).pow(2).sum().sqrt()

    monkeypatch.setattr(StageModule, "training_step", training_step)
    with pytest.raises(TailcastError, match="gradient of a batch in epoch 0"):
        train(tiny(bert, samples, tmp_path / "out"))


def test_fits_and_samples_train_the_same_model(bert, samples, tmp_path):
    from training.cli_fit_dist import main as fit_dist

    assert fit_dist([str(samples), "--out", str(tmp_path / "fits.parquet"), "--alternatives", "false"]) == 0
    train(tiny(bert, samples, tmp_path / "a"))
    train(tiny(bert, tmp_path / "fits.parquet", tmp_path / "b"))
    one, other = weights(tmp_path / "a"), weights(tmp_path / "b")
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_batching_of_predictions_changes_nothing(bert, samples, tmp_path):
    train(tiny(bert, samples, tmp_path / "out"))
    checkpoint = load_checkpoint(tmp_path / "out")
    prompts = ["write a long story", "a", "name the short list of 12 rivers", "essay"]
    mu, sigma = predict_prompts(checkpoint.model, checkpoint.tokenizer, prompts, batch_size=4)
    alone = [predict_prompts(checkpoint.model, checkpoint.tokenizer, [prompt]) for prompt in prompts]
    np.testing.assert_allclose(mu, [one[0][0] for one in alone], rtol=1e-5)
    np.testing.assert_allclose(sigma, [one[1][0] for one in alone], rtol=1e-5)
    assert predict_prompts(checkpoint.model, checkpoint.tokenizer, [])[0].shape == (0,)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_config_is_a_recipe(path, samples, tmp_path, capsys):
    args = ["--config", str(path), "--data", str(samples), "--out", str(tmp_path / "out"), "--print_config"]
    with pytest.raises(SystemExit) as stop:
        main(args)
    assert stop.value.code == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    for name, value in yaml.safe_load(path.read_text()).items():
        expected = {**printed[name], **value} if isinstance(value, dict) else value
        assert printed[name] == expected


def test_the_paper_recipe_is_the_papers():
    config = yaml.safe_load(next(path for path in CONFIGS if path.stem == "tie-deberta").read_text())
    defaults = TrainConfig(data="d", out="o")
    assert config["encoder"] == "microsoft/deberta-v3-base"
    assert (config["stage1"]["epochs"], config["stage2"]["epochs"]) == (12, 8)
    assert (config["stage1"]["learning_rate"], config["stage2"]["learning_rate"]) == (2e-5, 5e-5)
    for name in ("batch_size", "weight_decay", "adam_epsilon", "clip_norm", "max_length"):
        assert config[name] == getattr(defaults, name)


def test_the_command_trains_from_yaml_and_overrides(bert, samples, tmp_path):
    recipe = {
        "encoder": bert,
        "max_length": 24,
        "hidden_sizes": [8, 4],
        "dropouts": [0.1, 0.1],
        "stage1": {"epochs": 5, "learning_rate": 1e-3},
        "stage2": {"epochs": 2, "learning_rate": 1e-3},
        "oversampling": [[4.0, 0.5, 3.0]],
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    args = ["--config", str(tmp_path / "recipe.yaml"), "--data", str(samples), "--out", str(tmp_path / "out")]
    assert main([*args, "--stage1.epochs", "1", "--threads", "1", "--accelerator", "cpu"]) == 0
    config = load_checkpoint(tmp_path / "out").training_info["config"]
    assert (config["stage1"]["epochs"], config["stage2"]["epochs"]) == (1, 2)
    assert config["oversampling"] == [[4.0, 0.5, 3.0]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--encoder", "microsoft/deberta-v3-base"], "encoder: got 'microsoft/deberta-v3-base'"),
        (["--encoder", "/no/such/encoder"], "encoder: got '/no/such/encoder'"),
        (["--max_length", "2000"], "max_length: got 2000"),
        (["--fractions", "[1.0, 0.5, 0.5]"], "fractions"),
        (["--fractions", "[1.0, 0.0, 0.0]"], "validation split"),
        (["--served_model", "other"], "column model: got 'other'"),
        (["--data", "{dir}/nothing.parquet"], "data: got"),
        (["--data", "{dir}/broken.parquet"], "a whole Parquet file"),
        (["--data", "{dir}/no_prompt.parquet"], "also prompt"),
        (["--out", "{dir}/broken.parquet"], "out: got"),
        (["--out", "{dir}/full"], "a new or empty folder"),
        (["--stage1.epochs", "-1"], "epochs"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(options, message, bert, samples, tmp_path, capsys):
    (tmp_path / "broken.parquet").write_bytes(samples.read_bytes()[:-300])
    pq.write_table(pq.read_table(samples).drop_columns(["prompt"]), tmp_path / "no_prompt.parquet")
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
