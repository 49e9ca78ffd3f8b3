"""The example that makes the shipped predictors: data, scores on sources that training never saw, distillation."""

from __future__ import annotations

import io
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pandas as pd
import pytest
import torch
from safetensors.torch import save_file
from scipy import stats

from examples.pretrained import __main__ as recipe
from examples.pretrained import distillation, minilm, tiny, tiny_network
from examples.pretrained import prepare as prepare_module
from examples.pretrained.card import training_sentences
from examples.pretrained.prepare import (
    CHOICE,
    FAMILIES,
    FAMILY_STEP,
    OPTIONS,
    SET_ASIDE,
    SOURCES,
    Prepared,
    part_of,
    prepare,
    served_model,
)
from examples.pretrained.unseen import markdown, score_source, score_sources
from examples.shell import Shell
from predictors.modules.checkpoint import load_checkpoint, save_checkpoint
from predictors.modules.config import Conditioning, PredictorConfig
from predictors.modules.encoder import load_encoder, load_tokenizer
from predictors.modules.heads import Heads, LengthHead
from predictors.modules.normalization import Normalization
from predictors.modules.predictor import PromptPredictor
from predictors.pretrained import shipped_folder
from predictors.runtime import ArtifactRuntime, open_runtime
from predictors.tiny import WEIGHTS, TinyModel
from predictors.tokenizer import PromptTokenizer
from scheduler_core.errors import InputError
from scheduler_core.prediction.requested_amount import with_amount
from tests.training.tiny import tiny_bert
from training.correcting.encoder_shift import FeatureRuntime
from training.network.data import SampleLengths
from training.network.inference import predict_prompts
from training.network.losses import log_t_crps

NUM_PROMPTS = 30


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    root = tmp_path_factory.mktemp("public")
    data, out = root / "data", root / "out"
    data.mkdir()
    for folder in ("more", "multi_model", "repeated_samples"):
        (data / folder).mkdir()
    for split in ("train", "validation"):
        rows = [
            {"dataset": "Dolly", "model": model, "prompt": f"{split} prompt {number}", "temperature": 0.6,
             "output_tokens": [3, 20_000, 5]}
            for number in range(NUM_PROMPTS) for model in ("a/b", "c/d")
        ]  # fmt: skip
        pd.DataFrame(rows).to_parquet(data / f"castillo_{split}.parquet")
    for file in [source.file for source in SOURCES] + [f"more/{name}" for name in (*CHOICE, *SET_ASIDE)]:
        table = _source(Path(file).name)
        size = len(table)
        if file.startswith("repeated_samples"):
            table = table.assign(tokens=[[4, 6]] * size, finished=[[True, False]] * size)
        elif file.startswith("more"):
            columns = {"n_tokens_reasoning": [None, 100.0] * (size // 2)}
            columns["hidden_reasoning"] = [number % 10 == 0 for number in range(size)]
            table = table.assign(api_tokens=[None, None, None, 7.0] * (size // 4), **columns)
        if file.endswith(FAMILIES):
            table = table.drop(columns=["api_tokens", "n_tokens_reasoning"])
            # Numbers of the prompts modulo the step, so that each part has families.
            family = table.prompt.str.extract(r"(\d+)$", expand=False).astype(int) % FAMILY_STEP
            table = table.assign(family=family.astype(str), system_prompt="Think step by step.")
            table["prompt_id"] = table.prompt
        table.to_parquet(data / f"{file}.parquet")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare_module, "NUM_REASONING", 20)
        patch.setattr(prepare_module, "NUM_FORMATS", 20)
        return prepare(data, out)


def _source(name: str) -> pd.DataFrame:
    models = ["gpt-4o-2024-08-06", "org/own-fine-tune-3", "other", "gpt-4o"]
    rows = [
        {"dataset": name, "prompt": f"{name} prompt {number}", "model": model, "n_tokens": number + 1, "finished": None}
        for number in range(NUM_PROMPTS) for model in models
    ]  # fmt: skip
    return pd.DataFrame(rows)


def test_splits_share_no_prompts(prepared: Prepared) -> None:
    def prompts(files: list[Path]) -> set[str]:
        return {prompt for file in files for prompt in pd.read_parquet(file).prompt}

    training = prompts(list(prepared.training))
    assert len(training) > NUM_PROMPTS * len(SOURCES) // 2
    assert prepared.calibration in prepared.choice
    for file in (*prepared.choice, prepared.report, *prepared.set_aside.values()):
        held_out = prompts([file])
        assert held_out
        assert not held_out & training


def test_lengths_count_reasoning_and_leave_hidden_reasoning_out(prepared: Prepared) -> None:
    [file] = [file for file in prepared.training if file.stem == "rakuda_ranking"]
    table = pd.read_parquet(file).set_index(["prompt", "model"]).output_tokens
    # Rows of prompt 1: 4 (gpt-4o, snapshot), 5 (unknown, 100 thinking tokens), 6 (unknown), 7 (gpt-4o, 7 by the provider).
    assert sorted(table["rakuda_ranking prompt 1", "gpt-4o"]) == [2, 7]
    unknown = table[[model is None or pd.isna(model) for _, model in table.index]]
    assert sorted(unknown.loc["rakuda_ranking prompt 1"].iloc[0]) == [2, 102]
    # Of prompt 0 the first row is hidden.
    assert sorted(table["rakuda_ranking prompt 0", "gpt-4o"]) == [7]


def test_castillo_is_censored_at_its_limit(prepared: Prepared) -> None:
    row = pd.read_parquet(prepared.calibration).iloc[0]
    assert list(row.output_tokens) == [3, 15_000, 5]
    assert list(row.finished) == [True, False, True]


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-7B-Instruct"),
        ("qwen2.5-7b-instruct-gptq-int4", "Qwen/Qwen2.5-7B-Instruct"),
        ("gpt-4o-mini-2024-07-18", "gpt-4o-mini"),
        ("/data/checkpoints/gpt-4o-like", None),
        ("my-llama-3.1-8b-instruct-lora", None),
    ],
)
def test_served_models_by_name(name: str, known: str | None) -> None:
    assert served_model(name) == known


def test_scores_of_an_unseen_source() -> None:
    prompts = ["word " * (3 * number + 1) for number in range(24)]
    mu = np.linspace(2.0, 6.0, 24)

    def predict(texts):  # type: ignore[no-untyped-def]
        """The same for an unknown served model and for two known ones."""
        rows = mu[[prompts.index(text) for text in texts]]
        values = np.stack([rows, np.full(len(rows), 0.3), np.full(len(rows), 3.5)])
        return dict.fromkeys(("", "gpt-4", "gpt-4o"), values)

    rows = [
        {"prompt_id": str(number), "prompt": prompt, "model": model, "output_tokens": np.array([length, length + 1])}
        for number, prompt in enumerate(prompts)
        for model, length in (("gpt-4o", round(1000 * float(mu[number]))), ("other", 50 - number))
    ]  # fmt: skip
    score = score_source(predict, "made up", pd.DataFrame(rows))
    assert (score.num_prompts, score.num_models) == (24, 2)
    assert score.named == pytest.approx(1.0)
    assert score.unknown == score.mean
    assert score.ceiling is not None
    assert "| made up | 24 | 2 |" in markdown([score])


@pytest.mark.parametrize("predictor", ["pretrained", "tiny"])
def test_sources_are_scored_with_what_the_artifact_predicts(predictor: str, tmp_path: Path) -> None:
    prompts = [f"Write {number} lines on the sea. " * number for number in range(1, 25)]
    mu = open_runtime(predictor).predict(prompts, ["gpt-4"] * 24).mu
    order = np.argsort(np.argsort(mu))
    rows = [
        {"prompt_id": str(number), "prompt": prompt, "model": "gpt-4", "output_tokens": np.array([10 + order[number]])}
        for number, prompt in enumerate(prompts)
    ]  # fmt: skip
    pd.DataFrame(rows).to_parquet(tmp_path / "one.parquet")
    [score] = score_sources(shipped_folder(predictor), {"one": tmp_path / "one.parquet"})
    assert score.named == pytest.approx(1.0)


PROMPTS = [
    "Name three rivers of Europe.",
    "Write an essay about the sea and its tides.",
    "def f(x):\n    return 3",
]


@pytest.fixture(scope="module")
def teacher() -> ArtifactRuntime:
    return open_runtime("pretrained")


def test_the_teacher_predicts_what_its_artifact_predicts(teacher: ArtifactRuntime) -> None:
    names = teacher.artifact.manifest.served_models
    found = distillation.teacher_predictions(teacher, PROMPTS, {"gpt-4": 0.6})
    assert found.shape == (3, len(names), 2)
    for name, temperature in (("gpt-4o", None), ("gpt-4", 0.6)):
        rows = teacher.predict(PROMPTS, [name] * 3, [temperature] * 3)
        np.testing.assert_allclose(found[:, names.index(name), 0], rows.mu, atol=1e-4)
        np.testing.assert_allclose(found[:, names.index(name), 1], rows.sigma, atol=1e-4)


def test_predictions_are_kept_for_the_same_prompts(teacher: ArtifactRuntime, tmp_path: Path) -> None:
    file = tmp_path / "targets.npz"
    first = tiny.stored_targets(file, teacher, PROMPTS[:1], {})
    written = file.stat().st_mtime_ns
    np.testing.assert_array_equal(tiny.stored_targets(file, teacher, PROMPTS[:1], {}), first)
    assert file.stat().st_mtime_ns == written
    assert len(tiny.stored_targets(file, teacher, PROMPTS, {})) == 3
    assert not np.array_equal(tiny.stored_targets(file, teacher, PROMPTS[:1], {"gpt-4": 0.6}), first)


def test_the_crps_of_pairs_of_lengths_is_least_at_the_teachers_mu_and_sigma() -> None:
    rows = np.full(20_000, 7.0), np.full(20_000, 0.7)
    lengths = distillation.pairs_of_lengths(*rows, 3.5, np.random.default_rng(0))
    present = torch.ones(lengths.shape, dtype=torch.bool)
    limits = torch.full((len(lengths),), torch.inf)
    samples = SampleLengths(torch.from_numpy(lengths).float(), present, present, limits)

    def crps(mu: float, sigma: float) -> float:
        return float(log_t_crps(torch.tensor(mu), torch.tensor(sigma), 3.5, samples).mean())

    steps = np.linspace(-0.1, 0.1, 21)
    assert abs(steps[np.argmin([crps(7.0 + step, 0.7) for step in steps])]) <= 0.015
    assert abs(steps[np.argmin([crps(7.0, 0.7 * (1 + step)) for step in steps])]) <= 0.03


def save_teacher(folder: Path, names: tuple[str, ...]) -> PromptPredictor:
    """A small teacher of these served models, saved as the checkpoint `teacher` in the folder."""
    encoder = tiny_bert(folder / "encoder")
    conditioning = Conditioning(served_models=names, temperature=True)
    heads = Heads(length=LengthHead())
    config = PredictorConfig(encoder=encoder, heads=heads, max_length=32, conditioning=conditioning)
    model = PromptPredictor(config, load_encoder(encoder), Normalization(mu_mean=7.0, mu_std=1.0)).eval()
    save_checkpoint(folder / "teacher", model, load_tokenizer(encoder), {})
    return model


def test_rows_of_the_teacher_have_its_mu_and_sigma(tmp_path: Path) -> None:
    model = save_teacher(tmp_path, tuple(f"org/{number}" for number in range(10)))
    tokenizer = load_tokenizer(str(tmp_path / "encoder"))
    file = tmp_path / "rows.parquet"
    distillation.write_teacher_rows(file, tmp_path / "teacher", None, PROMPTS, {"org/1": 0.6}, seed=0)
    rows = pd.read_parquet(file)
    assert rows.groupby("prompt").model.nunique().eq(8).all()
    assert rows.temperature.notna().eq(rows.model == "org/1").all()
    expected = predict_prompts(
        model, tokenizer, rows.prompt.tolist(), rows.model.tolist(), [value if value == value else None for value in rows.temperature]
    )  # fmt: skip
    low, high = np.log(np.stack(rows.output_tokens)).T
    np.testing.assert_allclose((low + high) / 2, expected["mu"], atol=0.03)
    distances = expected["sigma"][:, None] * stats.t.ppf(0.5 + (np.arange(16) + 0.5) / 32, 3.5)
    nearest = np.abs((high - low)[:, None] / 2 - distances).min(axis=1)
    assert nearest.max() < 0.03


@pytest.fixture
def small_teacher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A teacher of two served models, and few synthetic and composed prompts to learn from it."""
    save_teacher(tmp_path, ("a/b", "gpt-4o"))
    monkeypatch.setattr(recipe, "MADE_UP", 20)
    monkeypatch.setattr(recipe, "NUM_PROMPTS", 20)
    monkeypatch.setattr(prepare_module, "NUM_REASONING", 20)
    monkeypatch.setattr(prepare_module, "NUM_FORMATS", 20)
    return tmp_path / "teacher"


def test_files_of_the_teacher_are_kept_for_the_same_prompts(
    prepared: Prepared, small_teacher: Path, tmp_path: Path
) -> None:
    (tmp_path / "data").mkdir()
    steps = recipe._Steps(Shell(tmp_path / "logs", io.StringIO()), tmp_path, prepared, "tailcast-minilm")
    files = steps.teach(small_teacher, None)
    assert {file.stem.rsplit("-")[-1] for file in files} >= {"synthetic", "castillo", "others"}
    assert any(file.stem.startswith("amounts") for file in files)
    written = {file: file.stat().st_mtime_ns for file in files}
    assert steps.teach(small_teacher, None) == files
    assert {file: file.stat().st_mtime_ns for file in files} == written
    training = dict(list(prepared.training.items())[:2])
    fewer = replace(steps, files=replace(prepared, training=training)).teach(small_teacher, None)
    assert {file.stem.split("-")[-1] for file in files.keys() - fewer.keys()} >= {"synthetic", "others"}
    assert len(fewer) == len(files)


@pytest.mark.slow
def test_the_recipe_runs_from_the_data_to_a_calibrated_checkpoint(
    prepared: Prepared, small_teacher: Path, tmp_path: Path
) -> None:
    data = shutil.copytree(prepared.report.parents[1] / "data", tmp_path / "data")
    rows = pd.read_parquet(data / "castillo_validation.parquet")
    # Lengths that the checkpoint does not predict: a recipe whose calibration is not better stops.
    rows["output_tokens"] = [np.array([20, 30, 45]) + number for number in range(len(rows))]
    rows.to_parquet(data / "castillo_validation.parquet")
    options = ("--stage1.epochs=1", "--stage2.epochs=1", "--batch_size=64", "--precision=32-true")
    config = recipe.PretrainedConfig(
        data=str(data),
        out=str(tmp_path / "out"),
        teacher=str(small_teacher),
        initial=None,
        train_options=options,
        export=False,
    )
    recipe.pretrained(config)
    weights = tmp_path / "out" / "checkpoint" / "model.safetensors"
    written = weights.stat().st_mtime_ns
    recipe.pretrained(config)  # nothing is left to do
    assert weights.stat().st_mtime_ns == written
    model = load_checkpoint(tmp_path / "out" / "calibrated").model
    assert model.config.form.part_tokens is not None
    assert model.config.form.part_tokens.format_size

    out = tmp_path / "continued"
    # So small steps that there is as much to calibrate as before.
    rates = [
        f"--{name}=1e-6"
        for name in ("stage1.learning_rate", "stage1.heads_learning_rate", "stage2.learning_rate")
    ]
    continued = replace(config, out=str(out), continued=str(weights.parent), train_options=(*options, *rates))
    recipe.pretrained(continued)
    run = json.loads((out / "checkpoint" / "run.json").read_text())["config"]
    assert run["init"] == str(weights.parent)
    assert {Path(file).name.startswith("share-") for file in run["data"]} == {True, False}
    assert (out / "calibrated").is_dir()
    averaged, before, after = (
        load_checkpoint(folder).model.state_dict()
        for folder in (out / "averaged", weights.parent, out / "checkpoint")
    )
    for name, tensor in averaged.items():
        torch.testing.assert_close(tensor, (before[name] + after[name]) / 2)


@pytest.mark.parametrize("share", [0.4, 1.0])
def test_a_continued_training_has_whole_prompts_and_all_options(
    prepared: Prepared, share: float, tmp_path: Path
) -> None:
    training = {Path(shutil.copy(file, tmp_path)): weight for file, weight in prepared.training.items()}
    parts = part_of(training, share)
    assert list(parts.values()) == list(training.values())
    numbers = []
    for file, part in zip(training, parts, strict=True):
        rows, chosen = pd.read_parquet(file), pd.read_parquet(part)
        prompts = set(chosen.prompt)
        assert len(chosen) == rows.prompt.isin(prompts).sum()
        if file.stem == OPTIONS:
            assert part == file
        else:
            numbers.append((len(prompts), rows.prompt.nunique()))
    ratio = sum(number for number, _ in numbers) / sum(number for _, number in numbers)
    assert ratio == pytest.approx(share, abs=0.1)


def test_two_teachers_are_averaged(teacher: ArtifactRuntime, tmp_path: Path) -> None:
    save_teacher(tmp_path, teacher.artifact.manifest.served_models)
    mu = []
    for number, previous in enumerate((None, teacher)):
        file = tmp_path / f"{number}.parquet"
        distillation.write_teacher_rows(file, tmp_path / "teacher", previous, PROMPTS, {"gpt-4": 0.6}, seed=0)
        rows = pd.read_parquet(file)
        mu.append(np.log(np.stack(rows.output_tokens)).mean(axis=1))
    temperatures = [value if value == value else None for value in rows.temperature]
    own = teacher.predict(rows.prompt.tolist(), rows.model.tolist(), temperatures).mu
    share = distillation.CHECKPOINT_SHARE
    np.testing.assert_allclose(mu[1], share * mu[0] + (1 - share) * own, atol=0.05)


def test_teachers_have_the_same_served_models(teacher: ArtifactRuntime, tmp_path: Path) -> None:
    save_teacher(tmp_path, ("org/own",))
    with pytest.raises(InputError, match="an artifact with the served models of"):
        distillation.write_teacher_rows(
            tmp_path / "rows.parquet", tmp_path / "teacher", teacher, PROMPTS, {}, seed=0
        )


def test_the_encoder_of_the_shipped_artifact_has_the_features_of_its_graph(tmp_path: Path) -> None:
    minilm.write_encoder(tmp_path / "initial", None)
    minilm.write_encoder(tmp_path / "trained", shipped_folder("pretrained"))
    runtime = open_runtime("pretrained")
    states = FeatureRuntime(runtime, threads=1)
    features = states.features(PROMPTS[:2])[:, :384]
    errors = {}
    for name in ("initial", "trained"):
        encoder, tokenizer = load_encoder(str(tmp_path / name)), load_tokenizer(str(tmp_path / name))
        with torch.no_grad():
            found = np.stack(
                [
                    encoder(**tokenizer(with_amount(text), return_tensors="pt")).last_hidden_state[0, 0]
                    for text in PROMPTS[:2]
                ]
            )
        errors[name] = np.abs(found - features).mean() / np.abs(features).mean()
    assert errors["trained"] < 0.15 < 1.0 < errors["initial"]


def test_the_shipped_artifact_becomes_a_checkpoint_with_its_predictions(
    prepared: Prepared, teacher: ArtifactRuntime, tmp_path: Path
) -> None:
    minilm.write_checkpoint(tmp_path / "checkpoint", teacher.artifact)
    checkpoint = load_checkpoint(tmp_path / "checkpoint")
    assert checkpoint.config.form == teacher.artifact.manifest.form
    for name, temperature in (("gpt-4o", None), ("google/gemma-2-9b-it", 0.7), (None, None)):
        rows = [name] * len(PROMPTS), [temperature] * len(PROMPTS)
        expected = teacher.predict(PROMPTS, *rows)
        found = predict_prompts(checkpoint.model, checkpoint.tokenizer, PROMPTS, *rows)
        np.testing.assert_allclose(found["mu"], expected.mu, atol=0.15)
        np.testing.assert_allclose(found["sigma"], expected.sigma, rtol=0.1)
        assert expected.sigma_within is not None
        np.testing.assert_allclose(found["sigma_within"], expected.sigma_within, rtol=0.25)
    steps = recipe._Steps(Shell(tmp_path / "logs", io.StringIO()), tmp_path, prepared, "tailcast-minilm")
    assert steps.checkpoint_of(str(tmp_path / "checkpoint")) == tmp_path / "checkpoint"
    again = load_checkpoint(steps.checkpoint_of("pretrained"))
    assert steps.checkpoint_of("pretrained") == again.path == tmp_path / "initial"
    for one, other in zip(again.model.parameters(), checkpoint.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_checkpoints_with_other_weights_are_not_averaged(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("earlier", "later")]
    for folder, width in zip(folders, (3, 4), strict=True):
        folder.mkdir()
        save_file({"heads": torch.ones(width)}, folder / "model.safetensors")
    with pytest.raises(InputError, match="a checkpoint with the weights of the recipe"):
        minilm.write_average(tmp_path / "averaged", *folders, 0.5)
    assert not (tmp_path / "averaged").exists()


def test_only_an_artifact_of_minilm_can_be_continued(teacher: ArtifactRuntime, tmp_path: Path) -> None:
    manifest = teacher.artifact.manifest
    other = replace(teacher.artifact, manifest=manifest.model_copy(update={"conditioning": None}))
    with pytest.raises(InputError, match="with a length head, conditioned on the served model"):
        minilm.write_checkpoint(tmp_path / "checkpoint", other)
    with pytest.raises(InputError, match="an artifact with the file model.onnx"):
        minilm.write_checkpoint(tmp_path / "checkpoint", open_runtime("tiny").artifact)
    assert not (tmp_path / "checkpoint").exists()


def test_the_encoder_has_a_token_for_line_breaks(tmp_path: Path) -> None:
    minilm.write_encoder(tmp_path / "encoder", None)
    tokenizer = PromptTokenizer(
        tmp_path / "encoder" / "tokenizer.json", max_length=16, truncation_side="middle"
    )
    [one, two, none] = tokenizer(["a\n b", "a\r\n\n  b", "a b"])
    assert one.ids.tolist() == two.ids.tolist()
    assert (one.num_tokens, none.num_tokens) == (5, 4)


def test_only_an_int8_graph_has_an_encoder(tmp_path: Path) -> None:
    graph = onnx.helper.make_graph([], "empty", [], [])
    onnx.save(onnx.helper.make_model(graph), tmp_path / "model.onnx")
    with pytest.raises(InputError, match="an int8 graph of a BERT encoder with 6 layers"):
        minilm.write_encoder(tmp_path / "encoder", tmp_path)
    assert not (tmp_path / "encoder").exists()


def test_prompts_of_castillo_and_of_other_sources(prepared: Prepared) -> None:
    castillo, others = distillation.real_prompts(prepared)
    assert len({*castillo, *others}) == len(castillo) + len(others)
    assert all("train prompt" in text or "validation prompt" in text for text in castillo)
    assert others
    assert not any("train prompt" in text or "validation prompt" in text for text in others)
    made_up = distillation.made_up_prompts(castillo, others, 100, seed=0)
    num_castillo = sum("train" in text or "validation" in text for text in made_up)
    assert 0 < num_castillo < 100


def test_prompts_of_repeated_words_are_those_of_others() -> None:
    prompts = tiny.repeated_prompts(PROMPTS, 50, seed=0)
    assert prompts == tiny.repeated_prompts(PROMPTS, 50, seed=0)
    for prompt in prompts:
        words = prompt.split()
        period = next(n for n in range(1, 5) if words[n:] == words[:-n])
        assert len(words) / period >= 8
        assert any(" ".join(words[:period]) in " ".join(text.split()) for text in PROMPTS)
    assert max(map(len, prompts)) > 1_000


def test_made_up_prompts_repeat_and_consist_of_words_of_the_given_ones() -> None:
    made = distillation.made_up_prompts(PROMPTS[:2], PROMPTS[2:], 50, seed=1)
    assert made == distillation.made_up_prompts(PROMPTS[:2], PROMPTS[2:], 50, seed=1)
    assert len(set(made)) > 20
    words = {word for one in PROMPTS for word in one.split()}
    # Two pieces may meet without a space.
    assert {word for one in made for word in one.split()} <= words | {a + b for a in words for b in words}


def test_numpy_calculates_what_torch_does(tmp_path: Path) -> None:
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    network = tiny_network.TinyNetwork(40, torch.randn(5, 2))
    with torch.no_grad():
        for table in network.tables:
            steps = torch.randint(-127, 128, table.weight.shape).float()
            steps[:, 0] = 127  # so that int8 has them exactly
            table.weight.copy_(steps / 300)
        for values in (network.norm.weight, network.norm.bias, network.norm.running_mean):
            values.normal_()
        network.norm.running_var.uniform_(0.5, 2.0)
    np.savez(tmp_path / WEIGHTS, **network.eval().arrays())
    model = TinyModel(tmp_path / WEIGHTS)
    prompts = [rng.integers(0, 40, size) for size in (0, 1, 2, 3, 4, 50, 512)]
    with torch.no_grad():
        expected = network(*tiny_network.bags_of(prompts)).numpy()
    for ids, outputs in zip(prompts, expected, strict=True):
        for number, (mu, log_sigma) in enumerate(outputs, 1):
            found = model(ids, number)
            np.testing.assert_allclose([found[0], np.log(found[1])], [mu, log_sigma], atol=0.02)
        unknown = model(ids, 0)
        np.testing.assert_allclose([unknown[0], np.log(unknown[1])], outputs.mean(0), atol=0.02)


def test_the_tokenizer_has_words_of_two_prompts_lines_and_single_characters() -> None:
    tokenizer = tiny.make_tokenizer(["Ab 12,\n\n東京", "Ab 12,\n\n京都", "Ab cd"])
    assert tokenizer.encode("Ab cd 12, \n\n京").tokens == ["Ab", "[UNK]", "12", ",", "\n\n", "京"]


def test_training_learns_the_words_of_long_outputs_and_calibration_their_true_length(tmp_path: Path) -> None:
    prompts = [f"{('yes', 'essay')[number % 2]} {number % 7}" for number in range(200)]
    mu = np.array([3.0 + 3 * (number % 2) for number in range(200)], dtype=np.float32)
    targets = np.stack([np.stack([mu, np.full(200, 0.5, np.float32)], axis=-1)] * 2, axis=1)
    tiny.make_tokenizer(prompts).save(str(tmp_path / "tokenizer.json"))
    tokenizer = PromptTokenizer(tmp_path / "tokenizer.json", max_length=8, truncation_side="middle")
    columns = {"prompt": prompts, "model": ["a"] * 200, "finished": [[True, True]] * 200}
    parts = []
    for name, shift in (("training", 0.0), ("calibration", 1.0)):
        lengths = [np.round(np.exp(value + shift + np.array([-0.4, 0.4]))) for value in mu]
        pd.DataFrame(columns | {"output_tokens": lengths}).to_parquet(tmp_path / name)
        parts.append(tiny_network.Prompts.of(prompts, tokenizer, targets, {tmp_path / name: 1.0}, ["a", "b"]))
    data, calibration = parts
    content = tiny_network.train(data, tokenizer.vocabulary_size, epochs=30, seed=0).arrays()
    np.savez(tmp_path / WEIGHTS, **content)
    before = TinyModel(tmp_path / WEIGHTS)
    np.savez(tmp_path / WEIGHTS, **tiny.calibrated(content, before, calibration, nu=3.5))
    after = TinyModel(tmp_path / WEIGHTS)
    np.savez(tmp_path / WEIGHTS, **content, **tiny.embedding(after, data.tokens))
    one, other, long_prompt = (
        TinyModel(tmp_path / WEIGHTS).predict(data.tokens[row], 0)[2] for row in (0, 2, 1)
    )
    assert one is not None
    assert other is not None
    assert long_prompt is not None
    assert float(one @ other) > 0.5 + float(one @ long_prompt)
    for number_of_model in (0, 1):
        (short, _), (long, _) = (before(data.tokens[number], number_of_model) for number in (0, 1))
        assert long - short == pytest.approx(3.0, abs=0.5)
        assert after(data.tokens[1], number_of_model)[0] - long == pytest.approx(1.0, abs=0.2)


def test_without_a_teacher_the_tiny_network_learns_the_true_lengths(tmp_path: Path) -> None:
    prompts = [f"{('yes', 'essay')[number % 2]} {number % 7}" for number in range(200)]
    tiny.make_tokenizer(prompts).save(str(tmp_path / "tokenizer.json"))
    tokenizer = PromptTokenizer(tmp_path / "tokenizer.json", max_length=8, truncation_side="middle")
    lengths = [np.round(np.exp(3.0 + 3 * (number % 2) + np.array([-0.4, 0.4]))) for number in range(200)]
    columns = {"prompt": prompts, "model": "a", "finished": [[True, True]] * 200, "output_tokens": lengths}
    pd.DataFrame(columns).to_parquet(tmp_path / "training")
    data = tiny_network.Prompts.of(prompts, tokenizer, None, {tmp_path / "training": 1.0}, ["a", "b"])
    network = tiny_network.train(data, tokenizer.vocabulary_size, epochs=30, seed=0, num_models=2)
    with torch.no_grad():
        short, long = network(*tiny_network.bags_of(data.tokens[:2]))[:, 0, 0].tolist()
    assert short == pytest.approx(3.0, abs=0.3)
    assert long == pytest.approx(6.0, abs=0.3)


def test_the_card_tells_how_the_shipped_version_was_trained() -> None:
    shipped = (shipped_folder("pretrained").parent / "README.md").read_text(encoding="utf-8")
    assert training_sentences(start="checkpoint", distilled=True) in shipped
    assert "previous version" in training_sentences(start="encoder", distilled=True)
    assert "previous version" not in training_sentences(start=None, distilled=True)
    assert "tailcast-smollm2" not in training_sentences(start=None, distilled=False)
