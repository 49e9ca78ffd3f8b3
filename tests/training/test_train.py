"""The two-stage recipe, predictors that read whole conversations, and the command `train`."""

import csv
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from predictors.heads import Tower
from predictors.modules.checkpoint import load_checkpoint
from predictors.modules.encoder import load_encoder
from predictors.modules.predictor import PromptPredictor
from scheduler_core.errors import InputError, TailcastError
from scheduler_core.prediction.prompt_text import PartTokens, PromptForm
from scheduler_core.shell.files import locked_folder
from tests.training.data import SERVED_MODELS, assert_refused, write_labels, write_rows, write_sample_file
from tests.training.tiny import ENCODERS, tiny_bert
from training.commands.train import main
from training.evaluating.config import EvaluateConfig
from training.evaluating.run import evaluate
from training.fitting.samples import with_conversations
from training.network import tasks
from training.network.config import ConditioningOptions, StageConfig, TrainConfig
from training.network.inference import predict_prompts
from training.network.initial_model import set_dropout
from training.network.module import StageModule
from training.network.tasks import LengthTask
from training.network.train import train

WHOLE = PromptForm(conversations=True)
NO_STAGE = StageConfig(epochs=0, learning_rate=1e-3)
MSE = LengthTask(objective="mse")
WIDE = Tower(hidden_sizes=(32, 16), dropouts=(0.0, 0.0))
LOSS = r"loss of a batch in epoch 0 is not finite \(prompts p0\d\d, p0\d\d, p0\d\d, ...; length nan\)"
GRADIENT = "gradient of a batch in epoch 0"
MEMORY = r"batch of \d prompts \(the longest has \d+ tokens.*batch_tokens"
URGENCY_ALONE = {"length": None, "urgency": tasks.UrgencyTask(), "urgency_data": "{labels}", "data": None}
MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    return tiny_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    return write_sample_file(tmp_path_factory.mktemp("data") / "samples.parquet", max_tokens=150)


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("several") / "rows.parquet")


def stage(epochs=1, learning_rate=1e-3, **options):
    return StageConfig(epochs=epochs, learning_rate=learning_rate, **options)


def tiny(encoder, samples, out, **options):
    defaults = {"data": str(samples), "out": str(out), "encoder": encoder, "max_length": 24, "batch_size": 8}
    defaults |= {"stage1": stage(warmup_fraction=0.2), "stage2": stage()}
    defaults |= {"tower": Tower(hidden_sizes=(8, 8, 4))}
    defaults |= {"accelerator": "cpu", "threads": 1, "progress": False}
    return TrainConfig(**(defaults | options))


def weights(out):
    return load_file(Path(out) / "model.safetensors")


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def history(out):
    with open(Path(out) / "metrics.csv", newline="") as stream:
        return list(csv.DictReader(stream))


def predict(checkpoint, texts, *conditions, **options):
    return predict_prompts(checkpoint.model, checkpoint.tokenizer, texts, *conditions, **options)


def test_both_stages_train_and_the_checkpoint_records_them(bert, samples, tmp_path):
    random = torch.random.get_rng_state()
    info = train(tiny(bert, samples, tmp_path / "out", length=MSE))

    assert torch.equal(random, torch.random.get_rng_state())
    checkpoint = load_checkpoint(tmp_path / "out")
    assert checkpoint.training_info == json.loads(json.dumps(info))
    assert checkpoint.config.known_models == ("m",)
    data = info["data"]
    [file] = data["files"]["data"]
    assert (file["name"], len(file["sha256"])) == ("samples.parquet", 64)
    assert data["split"] == {"seed": 0, "fractions": [0.6, 0.2, 0.2]}
    assert sum(data["num_prompts"].values()) + data["num_test_prompts"] == 40 - data["num_excluded"]
    assert data["baselines"]["marginal_mu"] > 0
    assert info["versions"]["torch"] == torch.__version__
    assert info["throughput"]["stage1"]["tokens_per_second"] > 0
    assert not (tmp_path / "out.partial").exists()

    rows = history(tmp_path / "out")
    assert [(row["stage"], row["epoch"]) for row in rows] == [("1", "0"), ("2", "0")]
    assert [float(row["sigma_weight"]) for row in rows] == [3.0, 4.0]
    assert [int(row["num_prompts"]) for row in rows] == [data["num_prompts"]["train"]] * 2
    best = min(rows, key=lambda row: float(row["validation_loss"]))
    assert info["metrics"]["best_stage"] == int(best["stage"])
    assert info["metrics"]["validation_loss"] == pytest.approx(float(best["validation_loss"]))
    start, end = load_encoder(bert).state_dict(), weights(tmp_path / "out")
    assert any(not torch.equal(value, end[f"encoder.{name}"]) for name, value in start.items())


def test_stage_1_has_dropout_and_stage_2_leaves_the_encoder_as_it_is(bert, several, tmp_path, request):
    modes = {True: [], False: []}

    def record(module, inputs):
        if type(module).__name__ == "BertModel":
            modes[torch.is_grad_enabled()].append({part.training for part in module.modules()})

    request.addfinalizer(torch.nn.modules.module.register_module_forward_pre_hook(record).remove)
    train(tiny(bert, several, tmp_path / "one", stage2=NO_STAGE))
    assert modes[True]
    assert all(mode == {True} for mode in modes[True])
    modes |= {True: [], False: []}
    train(tiny(bert, several, tmp_path / "out", stage1=NO_STAGE, stage2=stage(3, 1e-2)))
    assert modes[True] == []
    assert all(mode == {False} for mode in modes[False])
    trained, start = weights(tmp_path / "out"), load_encoder(bert).state_dict()
    assert all(torch.equal(value, trained[f"encoder.{name}"]) for name, value in start.items())


@pytest.mark.parametrize("kind", ["bert", "deberta", "distilbert", "opt"])
def test_dropout_of_the_encoder_can_be_another(kind, tmp_path):
    encoder = load_encoder(ENCODERS[kind](tmp_path / "encoder")).train()
    tokens = {"input_ids": torch.arange(5, 11)[None], "attention_mask": torch.ones(1, 6, dtype=torch.int64)}

    def difference(rate):
        set_dropout(encoder, rate)
        runs = [encoder(**tokens).last_hidden_state for _ in range(2)]
        return float((runs[0] - runs[1]).detach().abs().max())

    assert difference(0.0) == 0.0
    assert difference(0.3) > 0.0


@pytest.mark.parametrize("objective", ["nll", "crps", "mse"])
def test_it_learns_from_words_and_served_model(objective, bert, tmp_path):
    rows = write_rows(tmp_path / "s.parquet", num_prompts=60, num_samples=8)
    options = {"stage1": stage(4, 3e-3, warmup_fraction=0.1), "stage2": stage(25, 3e-3, patience=25)}
    options |= {"tower": WIDE, "conditioning": ConditioningOptions(width=8)}
    options["length"] = LengthTask(objective=objective, within=objective != "mse")
    assert train(tiny(bert, rows, tmp_path / "out", **options))["metrics"]["validation"]["r2_log"] > 0.75
    texts = ["write a short list of 12"] * 4 + ["write a long list of 13"]
    models, temperatures = [*SERVED_MODELS, None, "small"], [0.0, 0.7, None, 0.7, 0.0]
    prediction = predict(load_checkpoint(tmp_path / "out"), texts, models, temperatures)
    small, middle, large, unknown, longer = prediction["mu"].tolist()
    assert small < middle < large
    assert small < unknown < large + 0.1
    assert longer > small + 0.3
    assert 0.02 < prediction["sigma"][0] < 0.6
    if objective != "mse":
        within = prediction["sigma_within"]
        assert within[0] == pytest.approx(0.15, abs=0.1)
        assert within[4] > within[0]


def test_half_precision_trains_float32_weights_and_a_learned_nu(
    bert, several, tmp_path, request, monkeypatch, caplog
):
    kinds = set()

    def record(module, inputs, output):
        if isinstance(module, torch.nn.Linear):
            kinds.add(output.dtype)

    request.addfinalizer(torch.nn.modules.module.register_module_forward_hook(record).remove)
    task = LengthTask(learn_nu=True, nu=5.0)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": False})
    info = train(tiny(bert, several, tmp_path / "out", precision="bf16-mixed", length=task))
    assert "no bfloat16 instructions" in caplog.text
    assert np.isfinite(info["metrics"]["validation_loss"])
    assert 1 < predict(load_checkpoint(tmp_path / "out"), ["write a story"])["nu"][0] < 100
    assert kinds == {torch.bfloat16, torch.float32}
    trained = weights(tmp_path / "out").values()
    assert all(value.dtype == torch.float32 and torch.isfinite(value).all() for value in trained)


@pytest.mark.parametrize(("has_instructions", "used"), [(False, "32-true"), (True, "bf16-mixed")])
def test_precision_auto_is_what_the_device_has_instructions_for(
    bert, samples, tmp_path, monkeypatch, caplog, has_instructions, used
):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": has_instructions})
    out = tmp_path / "out"
    train(tiny(bert, samples, out, precision="auto", accelerator="cpu"))
    assert json.loads((out / "training.json").read_text())["config"]["precision"] == used
    assert "no bfloat16 instructions" not in caplog.text


def test_under_triage_counts_in_the_best_epoch_of_urgency_alone(bert, tmp_path):
    labels = write_labels(tmp_path / "labels.parquet", count=80)
    urgency = tasks.UrgencyTask(levels=("a", "b", "c", "d", "e"))
    options = {"data": None, "urgency_data": str(labels), "length": None, "urgency": urgency}
    info = train(tiny(bert, None, tmp_path / "out", stage1=stage(8, 5e-3), stage2=NO_STAGE, **options))
    rows = history(tmp_path / "out")
    ranks = [float(row["validation_under_triage"]) + float(row["validation_loss"]) for row in rows]
    assert info["metrics"]["best_epoch"] == ranks.index(min(ranks))
    assert load_checkpoint(tmp_path / "out").config.heads.urgency.levels == urgency.levels


def test_heads_can_learn_faster_and_events_are_written(bert, samples, tmp_path):
    stage1 = stage(1, 1e-9, heads_learning_rate=1e-2, schedule="constant")
    options = {"stage2": NO_STAGE, "weight_decay": 0.0, "tensorboard": str(tmp_path / "events")}
    train(tiny(bert, samples, tmp_path / "out", stage1=stage1, **options))
    start, end = load_encoder(bert).state_dict(), weights(tmp_path / "out")
    assert max(float((end[f"encoder.{name}"] - value).abs().max()) for name, value in start.items()) < 1e-7
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "events" / "stage1"))
    events.Reload()
    [point] = events.Scalars("validation_length")
    assert point.value == pytest.approx(float(history(tmp_path / "out")[0]["validation_length"]), rel=1e-5)


def interrupt(monkeypatch, number, epoch):
    """Ctrl-C in the second batch of an epoch of a stage."""
    step = StageModule.training_step

    def training_step(self, batch, batch_idx):
        if (1 if self.network.encoder.training else 2, self.current_epoch, batch_idx) == (number, epoch, 1):
            raise KeyboardInterrupt
        return step(self, batch, batch_idx)

    monkeypatch.setattr(StageModule, "training_step", training_step)


def test_a_finished_checkpoint_is_replaced_only_on_demand(bert, samples, tmp_path):
    out = tmp_path / "out"
    train(tiny(bert, samples, out))
    before = weights(out)
    with pytest.raises(InputError, match="out: .*--overwrite true replaces this checkpoint"):
        train(tiny(bert, samples, out, seed=1))
    refused = pytest.raises(InputError, match="a folder that no other process has locked")
    with locked_folder(tmp_path / "out.partial", "out"), refused:
        train(tiny(bert, samples, out, seed=1, overwrite=True))
    assert same(before, weights(out))
    train(tiny(bert, samples, out, seed=1, overwrite=True))
    assert not same(before, weights(out))


LONG = {"stage1": stage(3, warmup_fraction=0.2), "stage2": stage(3), "batch_tokens": 60, "rows_per_prompt": 2}
LONG |= {"conditioning": ConditioningOptions(width=4), "bucket": tasks.BucketTask(), "rank": tasks.RankTask()}


@pytest.fixture(scope="module")
def uninterrupted(bert, several, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "out"
    info = train(tiny(bert, several, out, **LONG))
    return weights(out), info


@pytest.mark.parametrize(("number", "epoch"), [(1, 0), (1, 2), (2, 0), (2, 2)])
def test_a_resumed_run_equals_a_whole_one(number, epoch, uninterrupted, bert, several, tmp_path, monkeypatch):
    config = tiny(bert, several, tmp_path / "out", **LONG)
    with monkeypatch.context() as patch:
        interrupt(patch, number, epoch)
        with pytest.raises(KeyboardInterrupt):
            train(config)
    assert not (tmp_path / "out").exists()
    ended = []
    monkeypatch.setattr(StageModule, "on_train_epoch_end", lambda self: ended.append(self), raising=False)
    info = train(config)
    assert len(ended) == 6 - 3 * (number - 1) - epoch
    expected, expected_info = uninterrupted
    assert same(expected, weights(tmp_path / "out"))
    assert info["metrics"] == expected_info["metrics"]


def test_a_run_stops_early_and_is_then_not_resumed(bert, samples, tmp_path, monkeypatch):
    options = {"stage1": NO_STAGE, "stage2": stage(200, 0.3, patience=2)}
    config = tiny(bert, samples, tmp_path / "out", **options)
    with monkeypatch.context() as patch:
        patch.setattr(
            "training.network.trainer.read_history", lambda path: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        with pytest.raises(KeyboardInterrupt):
            train(config)
    train(config)
    info = train(tiny(bert, samples, tmp_path / "whole", **options))
    rows = history(tmp_path / "whole")
    assert int(rows[-1]["epoch"]) == info["metrics"]["best_epoch"] + 2 < 199
    assert len(history(tmp_path / "out")) == len(rows)
    assert same(weights(tmp_path / "out"), weights(tmp_path / "whole"))


def test_state_of_other_options_is_refused(bert, samples, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        interrupt(patch, 1, 0)
        with pytest.raises(KeyboardInterrupt):
            train(tiny(bert, samples, tmp_path / "out"))
    with pytest.raises(InputError, match=r"same batch_size; --resume false"):
        train(tiny(bert, samples, tmp_path / "out", batch_size=4))
    assert train(tiny(bert, samples, tmp_path / "out", batch_size=4, resume=False))["metrics"]


def weight_of_nan(step):
    def training_step(self, batch, batch_idx):
        factor = float("nan") if batch_idx else 1.0
        return step(self, batch._replace(weight=batch.weight * factor), batch_idx)

    return training_step


def gradient_of_nan(step):
    def training_step(self, batch, batch_idx):
        # 0 * sqrt(0) is 0, its derivative is not a number
        bias = self.network.heads["length"].mu.rest[0].bias
        return step(self, batch, batch_idx) + 0 * (bias * 0).pow(2).sum().sqrt()

    return training_step


def no_memory(step):
    def training_step(self, batch, batch_idx):
        self.current = batch, self._splits["train"]
        raise torch.OutOfMemoryError("CUDA out of memory.") if batch_idx else MemoryError

    return training_step


@pytest.mark.parametrize(
    ("fault", "message"), [(weight_of_nan, LOSS), (gradient_of_nan, GRADIENT), (no_memory, MEMORY)]
)
def test_a_failure_names_its_batch(fault, message, bert, several, tmp_path, monkeypatch):
    monkeypatch.setattr(StageModule, "training_step", fault(StageModule.training_step))
    with pytest.raises(TailcastError, match=message):
        train(tiny(bert, several, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_fits_and_samples_train_the_same_model(bert, samples, tmp_path):
    from training.commands.fit_dist import main as fit_dist

    assert fit_dist([str(samples), "--out", str(tmp_path / "fits.parquet"), "--alternatives", "false"]) == 0
    for name, task in (("mse", MSE), ("nll", LengthTask())):
        train(tiny(bert, samples, tmp_path / f"{name}-a", length=task))
        train(tiny(bert, tmp_path / "fits.parquet", tmp_path / f"{name}-b", length=task))
        assert same(weights(tmp_path / f"{name}-a"), weights(tmp_path / f"{name}-b"))


def test_without_dropout_of_served_models_unknown_models_are_refused(bert, several, tmp_path):
    train(tiny(bert, several, tmp_path / "out", conditioning=ConditioningOptions(served_model_dropout=0.0)))
    with pytest.raises(InputError, match="served model: got 'stranger'; allowed: one of large, middle"):
        predict(load_checkpoint(tmp_path / "out"), ["a"], ["stranger"])


def test_dropout_hides_temperatures_from_training_alone(bert, several, tmp_path, monkeypatch):
    table = pq.read_table(several)
    table = table.drop_columns("temperature").append_column("temperature", pa.array(np.ones(len(table))))
    pq.write_table(table, tmp_path / "rows.parquet")
    scores, hidden = PromptPredictor.scores, {True: [], False: []}

    def recording(self, features, served_model, temperature, row_prompt):
        hidden[self.training].append(temperature.isnan())
        return scores(self, features, served_model, temperature, row_prompt)

    monkeypatch.setattr(PromptPredictor, "scores", recording)
    options = ConditioningOptions(served_model_dropout=0.0, temperature_dropout=0.5)
    train(tiny(bert, tmp_path / "rows.parquet", tmp_path / "out", conditioning=options))
    assert 0.3 < torch.cat(hidden[True]).float().mean() < 0.7
    assert not torch.cat(hidden[False]).any()


@pytest.fixture(scope="module")
def conditioned(bert, several, tmp_path_factory):
    out = tmp_path_factory.mktemp("conditioned") / "out"
    train(tiny(bert, several, out, conditioning=ConditioningOptions(width=4)))
    return out


def test_batching_of_predictions_changes_nothing(conditioned):
    checkpoint = load_checkpoint(conditioned)
    prompts = ["write a long story", "a", "name the short list of 12 rivers", "a"]
    models, temperatures = ["small", None, "stranger", "large"], [0.0, None, 1.0, 0.7]
    together = predict(checkpoint, prompts, models, temperatures, batch_size=4)
    for row in range(4):
        single = predict(checkpoint, [prompts[row]], [models[row]], [temperatures[row]])
        for name in ("mu", "sigma"):
            np.testing.assert_allclose(together[name][row], single[name][0], rtol=1e-5)
    assert together["mu"][1] != together["mu"][3]
    assert predict(checkpoint, [])["mu"].shape == (0,)


def test_a_new_served_model_changes_its_own_embedding_and_nothing_else(conditioned, bert, tmp_path):
    rows = write_rows(tmp_path / "new.parquet", models=("small", "new"), num_samples=3, seed=5)
    options = {"init": str(conditioned), "only_conditioning": True, "conditioning": ConditioningOptions()}
    info = train(tiny(bert, rows, tmp_path / "out", stage2=stage(5, 0.1), **options))
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
        one, other = (predict(checkpoint, ["write a long story"], [model])["mu"] for checkpoint in (old, new))
        assert one == other


def test_a_new_served_model_needs_no_options_but_data_and_checkpoint(conditioned, several, tmp_path, capsys):
    rows = write_rows(tmp_path / "new.parquet", models=("new",), num_samples=1, num_prompts=90, seed=5)
    args = ["--init", conditioned, "--only_conditioning", "true", "--data", rows, "--progress", "false"]
    args = [str(word) for word in args]
    assert main([*args, "--out", str(tmp_path / "out"), "--threads", "1"]) == 0
    info = json.loads((tmp_path / "out/training.json").read_text())
    assert (info["config"]["max_length"], info["config"]["pooling"]) == (24, ["cls", "mean", "max"])
    assert (info["config"]["stage2"]["learning_rate"], info["config"]["stage2"]["epochs"]) == (0.03, 60)
    losses = [float(row["validation_loss"]) for row in history(tmp_path / "out")]
    assert min(losses) < losses[0] - 1e-3
    # A loss that does not move is an error, and leaves nothing to resume.
    still = ["--stage2", '{"epochs": 2, "learning_rate": 1e-9}', "--out", str(tmp_path / "still")]
    assert main([*args, *still]) == 2
    assert "did not reduce the validation loss" in capsys.readouterr().err
    assert not (tmp_path / "still").exists() and not (tmp_path / "still.partial").exists()  # noqa: PT018


def test_a_checkpoint_can_be_trained_further(conditioned, bert, several, tmp_path):
    options = {"init": str(conditioned), "conditioning": ConditioningOptions(), "stage2": NO_STAGE}
    info = train(tiny(bert, several, tmp_path / "out", amounts=True, **options))
    assert not load_checkpoint(conditioned).config.amounts
    assert load_checkpoint(tmp_path / "out").config.amounts  # it says what its texts are made of
    before, after = weights(conditioned), weights(tmp_path / "out")
    assert before.keys() == after.keys()
    assert not same(before, after)
    assert info["config"]["init"] == str(conditioned)


def test_an_encoder_can_be_taken_from_a_checkpoint(conditioned, bert, samples, tmp_path):
    train(tiny(str(conditioned), samples, tmp_path / "second", stage1=NO_STAGE, seed=7))
    first, second = weights(conditioned), weights(tmp_path / "second")
    fresh = {f"encoder.{name}": value for name, value in load_encoder(bert).state_dict().items()}
    encoders = [{name: part[name] for name in fresh} for part in (first, second)]
    assert same(*encoders)
    assert not same(first, second)
    assert not same(encoders[0], fresh)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"only_conditioning": True}, "a served model that the checkpoint does not have"),
        (URGENCY_ALONE | {"conditioning": None}, "a checkpoint with this head; it has length"),
        ({"length": LengthTask(nu=4.0)}, "length.nu: got 4.0; allowed: 3.5"),
        ({"length": LengthTask(within=True)}, "does not predict sigma_within"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(options, message, conditioned, bert, several, tmp_path):
    config = {"init": str(conditioned), "conditioning": ConditioningOptions()} | options
    if config.get("urgency_data"):
        config["urgency_data"] = str(write_labels(tmp_path / "labels.parquet"))
    with pytest.raises(InputError, match=message):
        train(tiny(bert, several, tmp_path / "out", **config))


def command(bert, several, out, *options):
    args = {"--encoder": bert, "--data": several, "--out": out, "--max_length": 24, "--batch_size": 8}
    args |= {"--tower.hidden_sizes": "[8, 8, 4]", "--stage1.epochs": 2, "--stage2.epochs": 1}
    args |= {"--threads": 1, "--accelerator": "cpu", "--progress": "false"}
    return [str(word) for pair in args.items() for word in pair] + [*options]


@pytest.mark.slow
@pytest.mark.parametrize("num_nodes", [1, 2])
def test_processes_of_one_and_of_several_machines_share_both_stages(num_nodes, bert, several, tmp_path):
    """Two nodes are two processes of this machine."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    words = ["--devices", str(3 - num_nodes), "--num_nodes", str(num_nodes)]
    nodes = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "training.commands.train",
                *command(bert, several, tmp_path / "out", *words),
            ],
            env=os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NODE_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(num_nodes)
    ]
    errors = [node.communicate(timeout=300)[1] for node in nodes]
    assert [node.returncode for node in nodes] == [0] * num_nodes, errors
    rows = history(tmp_path / "out")
    assert [(row["stage"], row["epoch"]) for row in rows] == [("1", "0"), ("1", "1"), ("2", "0")]
    # 18 prompts in batches of at most 8: two batches for each process, one of them for the second time.
    num_prompts = load_checkpoint(tmp_path / "out").training_info["data"]["num_prompts"]["train"]
    assert all(num_prompts <= int(row["num_prompts"]) <= num_prompts + 8 for row in rows)
    assert not (tmp_path / "out.partial").exists()
    assert "stage 2 epoch 1/1" in errors[0]


@pytest.mark.parametrize("rank", ["", "2"])
def test_a_node_needs_its_number(rank, bert, several, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("NODE_RANK", rank)
    assert main(command(bert, several, tmp_path / "out", "--num_nodes", "2")) == 2
    assert f"NODE_RANK: got '{rank}'; allowed: integers from 0 to 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--encoder", "microsoft/deberta-v3-base"], "encoder: got 'microsoft/deberta-v3-base'"),
        (["--encoder", "{dir}/unpadded"], "a padding token"),
        (["--max_length", "2000"], "max_length: got 2000"),
        (["--fractions", "[1.0, 0.5, 0.5]"], "fractions"),
        (["--fractions", "[0.0, 1.0, 0.0]"], "train split"),
        (["--data", "{dir}/nothing.parquet"], "data: got"),
        (["--data", "{dir}/broken.parquet"], "a whole Parquet file"),
        (["--data", "{dir}/no_prompt.parquet"], "also prompt"),
        (["--urgency_data", "{dir}/no_level.parquet", "--urgency.weight", "1"], "also level"),
        (["--init", "{dir}/nothing"], "init: got"),
        (["--out", "{dir}/broken.parquet"], "out: got"),
        (["--stage1.epochs", "-1"], "epochs"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(options, message, bert, samples, tmp_path, capsys):
    (tmp_path / "broken.parquet").write_bytes(samples.read_bytes()[:-300])
    pq.write_table(pq.read_table(samples).drop_columns(["prompt"]), tmp_path / "no_prompt.parquet")
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "no_level.parquet")
    tokenizer = Path(tiny_bert(tmp_path / "unpadded")) / "tokenizer_config.json"
    tokenizer.write_text(json.dumps(json.loads(tokenizer.read_text()) | {"pad_token": None}))
    words = [word.format(dir=tmp_path) for word in options]
    assert_refused(main, command(bert, samples, tmp_path / "out", *words), message, tmp_path, capsys)


def test_the_system_prompt_is_learnt_from_where_it_is_read(bert, tmp_path):
    """The same last messages under two system prompts, of which one makes outputs ten times as long."""
    rng = np.random.default_rng(0)
    rows = []
    for number in range(60):
        system, length = (("write a short essay", 20.0), ("write a long story", 200.0))[number // 30]
        row = {"prompt_id": f"p{number}", "model": "m", "prompt": f"the list of {number % 30}"}
        row["messages"] = [{"role": "system", "content": system}, {"role": "user", "content": row["prompt"]}]
        tokens = np.ceil(length * np.exp(rng.normal(0, 0.1, 4))).astype(int)
        rows.append(row | {"output_tokens": tokens.tolist()})
    chats, out = tmp_path / "chats.parquet", tmp_path / "checkpoint"
    pq.write_table(pa.Table.from_pylist(rows), chats)
    parts = {"stage1": NO_STAGE, "stage2": stage(100, 1e-2, batch_size=8)}
    parts["tower"] = Tower(hidden_sizes=(16,), dropouts=(0.0,), layer_norm=False)
    parts["part_tokens"] = PartTokens(options=4, system=8, turns=4, last=10)
    train(tiny(bert, chats, out, max_length=32, conversations=True, amounts=True, **parts))
    trained = load_checkpoint(out).config
    assert (trained.form.part_tokens, trained.amounts) == (parts["part_tokens"], True)
    options = {"predictor": str(out), "json": str(tmp_path / "e.json"), "ceiling": False, "progress": False}
    whole = evaluate(EvaluateConfig(data=str(chats), **options))["model"]["mu"]["r2"]
    pq.write_table(pq.read_table(chats).drop_columns(["messages"]), tmp_path / "last.parquet")
    last = evaluate(EvaluateConfig(data=str(tmp_path / "last.parquet"), **options))["model"]["mu"]["r2"]
    assert whole > 0.8
    assert last < 0.5  # without the system prompt nothing tells long answers from short ones


def test_rows_without_messages_are_lone_user_messages_and_fits_have_none():
    messages = [[{"role": "system", "content": "x"}, {"role": "user", "content": "b"}], None]
    table = pa.table({"prompt": ["b", "c"], "messages": pa.array(messages, MESSAGES)})
    assert with_conversations(table, Path("t"), WHOLE).column("prompt").to_pylist() == [
        "system: x\n\nuser: b",
        "c",
    ]
    plain = pa.table({"prompt": ["b"]})
    large = table.set_column(
        0, "prompt", table.column("prompt").cast(pa.large_string())
    )  # as pandas writes it
    assert with_conversations(large, Path("t"), WHOLE).schema.field("prompt").type == pa.large_string()
    assert with_conversations(plain, Path("t"), WHOLE) is plain
    fits = pa.table({"prompt": ["a"], "mu": [1.0], "sigma": [1.0], "nu": [3.5]})
    with pytest.raises(InputError, match="fits do not store conversations"):
        with_conversations(fits, Path("fits.parquet"), WHOLE)
