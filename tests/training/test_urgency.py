"""evaluate-urgency: metrics, abstention, adversarial check, predictors and baselines on labelled texts."""

import json
from dataclasses import asdict

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from data_gen.commands.import_urgency import main as import_urgency
from data_gen.urgency.labels import LabeledText, read_labels
from data_gen.urgency.seed_set import read_pairs, seed_labels
from predictors.modules.checkpoint import load_checkpoint, save_checkpoint
from predictors.modules.encoder import load_tokenizer
from predictors.modules.heads import Heads, LengthHead, UrgencyHead
from scheduler_core.errors import InputError
from scheduler_core.prediction.urgency import LEVELS, NEAR_UNIFORM
from tests.training.checkpoints import TOWER, predictor
from tests.training.data import assert_refused
from tests.training.tiny import tiny_bert
from training.commands.evaluate_urgency import main
from training.urgency.abstention import ClaimRows, choose_threshold, failures
from training.urgency.baselines import bag_of_words_baseline, constant_baseline
from training.urgency.config import EvaluateUrgencyConfig
from training.urgency.evaluation import check_claims, evaluate_urgency, open_urgency, save_threshold
from training.urgency.metrics import reliability, upper_bound, urgency_metrics

K = len(LEVELS)
PLAIN = {"conditioning": None, "prompt_length": True}


def hits(rates, *names):
    return {name: (rates[name]["hits"], rates[name]["cases"]) for name in names}


def test_triage_rates_by_hand():
    metrics = urgency_metrics([0, 0, 0, 1, 1, 2, 3, 4, 4, 4], [0, 1, 4, 1, 2, 1, 3, 4, 0, 3])
    expected = {"critical_recall": (3, 5), "under_triage": (3, 10), "over_triage": (3, 10)}
    expected |= {"critical_under_triage": (3, 5), "emergency_under_triage": (2, 3)}
    expected |= {"critical_over_triage": (2, 5), "within_one": (8, 10)}
    assert hits(metrics, *expected) == expected
    assert hits(metrics["recalls"], *LEVELS[:2]) == {"emergency": (1, 3), "interactive": (1, 2)}


@given(num_cases=st.integers(1, 200), data=st.data(), delta=st.floats(0.001, 0.5))
def test_clopper_pearson_bounds_are_where_the_tail_is_delta(num_cases, data, delta):
    num_hits = data.draw(st.integers(0, num_cases))
    high = upper_bound(num_hits, num_cases, delta)
    if num_hits < num_cases:
        assert binom.cdf(num_hits, num_cases, high) == pytest.approx(delta, rel=1e-6)
    assert upper_bound(0, 0, delta) == 1.0


def test_reliability_counts_and_error_by_hand():
    diagram = reliability(np.array([0.05, 0.05, 0.95, 1.0]), np.array([False, True, True, True]))
    assert [entry["count"] for entry in diagram["bins"]] == [2, 0, 0, 0, 0, 0, 0, 0, 0, 2]
    assert diagram["bins"][0]["frequency"] == pytest.approx(0.5)
    assert diagram["bins"][1]["mean_probability"] is None
    assert diagram["ece"] == pytest.approx(0.5 * 0.45 + 0.5 * 0.025)


def sure(levels, confidence):
    """Probabilities of `confidence` for the levels, the rest equal."""
    confidence = np.broadcast_to(confidence, len(levels))
    rows = np.repeat(((1 - confidence) / (K - 1))[:, None], K, axis=1)
    rows[np.arange(len(levels)), levels] = confidence
    return rows


def draw(random, num):
    """Probabilities whose failures get rarer with their confidence, but not as rare as they say; and true levels."""
    confidence, guess = random.uniform(0.25, 0.99, size=num), random.integers(0, K, size=num)
    wrong = random.random(num) > confidence**0.5
    return sure(guess, confidence), np.where(wrong, random.integers(0, K, size=num), guess)


def test_a_chosen_threshold_keeps_its_rates_as_often_as_promised():
    random = np.random.default_rng(3)
    num, delta, runs = 50_000, 0.1, 200
    rows, true = draw(random, num)
    confidence, failed = rows.max(axis=1), failures(rows, true, "wrong")
    tiers = np.full(num, 2)
    # The more confident the prediction for a claimed text, the less often a claim raised it.
    claimed = random.uniform(0.25, 0.99, size=num)
    level = np.where(random.random(num) > 2.2 * (1 - claimed) * 0.3, 2, 0)
    claims = ClaimRows(plain=sure(tiers, 0.99), claimed=sure(level, claimed), tiers=tiers)
    certified, broken = np.zeros(2), np.zeros(2)
    for _ in range(runs):
        some = random.integers(0, num, size=300)
        part = ClaimRows(plain=claims.plain[some], claimed=claims.claimed[some], tiers=tiers[some])
        options = {"delta": delta, "risk": "wrong"}
        data, limits = (rows[some], true[some]), {"allowed_rate": 0.9, "claims": part, "jump_rate": 0.1}
        own = choose_threshold(*data, allowed_rate=0.15, **options).threshold
        both = choose_threshold(*data, **limits, **options).threshold
        certified += own < 1, both < 1
        if own < 1:
            broken[0] += failed[confidence >= own].mean() > 0.15
        if both < 1:
            before, after = claims.scheduled(both)
            broken[1] += np.mean(after < before) > 0.1
    assert (certified > runs / 2).all()
    # Three standard errors above delta.
    assert (broken / runs <= delta + 3 * (delta * (1 - delta) / runs) ** 0.5).all()


def test_perfect_predictions_never_abstain_and_hopeless_or_few_ones_always():
    true = np.tile(np.arange(K), 40)
    perfect = choose_threshold(np.eye(K)[true], true)
    assert perfect.threshold == NEAR_UNIFORM / K
    assert (perfect.num_answered, perfect.num_failures) == (len(true), 0)
    hopeless = choose_threshold(np.eye(K)[np.full(len(true), 4)], true)
    assert (hopeless.threshold, hopeless.num_answered, hopeless.bound) == (1, 0, None)
    assert choose_threshold(np.eye(K), np.arange(K)).threshold == 1


def test_claims_that_are_half_believed_raise_the_threshold():
    true, tiers = np.tile(np.arange(K), 60), np.tile(np.arange(1, K), 30)
    rows, top = sure(true, 0.95), np.zeros_like(tiers)
    claims = ClaimRows(plain=sure(tiers, 0.95), claimed=sure(top, 0.6), tiers=tiers)
    assert choose_threshold(rows, true).threshold == NEAR_UNIFORM / K
    certified = choose_threshold(rows, true, claims=claims)
    assert certified.threshold == 0.61
    assert (certified.jumps["num_jumps"], certified.jumps["num_pairs"]) == (0, len(tiers))
    assert 0 < certified.jumps["bound"] <= certified.jumps["allowed_rate"]
    believed = ClaimRows(plain=claims.plain, claimed=sure(top, 0.95), tiers=tiers)
    assert choose_threshold(rows, true, claims=believed).threshold == 1
    # Of a predictor that is sure of nearly all, what it is surest of: no chain began above 0.9.
    surest = ClaimRows(plain=sure(tiers, 0.99), claimed=sure(top, 0.93), tiers=tiers)
    assert choose_threshold(sure(true, 0.99), true, claims=surest).threshold == 0.94


def loud(texts):
    """Takes an exclamation mark or a word in capitals for an emergency."""
    shouts = [any(word.isupper() and len(word) > 3 for word in text.split()) or "!" in text for text in texts]
    return np.array([np.eye(K)[0 if shout else 3] for shout in shouts])


def test_a_predictor_that_follows_shouting_fails_and_is_described():
    report = check_claims(loud, read_pairs(), threshold=0.0, max_promotion=1)
    assert not report["passed"]
    assert report["predicted"]["jumped"]["value"] > 0.4
    assert report["decided"]["levels"].keys() == {"3"}
    assert report["neutral"]["jumped"]["value"] == 0
    assert report["scheduled_max_levels"] == 1, "promotion is limited"
    assert len(report["examples"]) == 20


def test_constant_predictors_are_not_moved_by_claims():
    report = check_claims(lambda texts: np.tile(np.eye(K)[2], (len(texts), 1)), read_pairs("test"))
    assert report["passed"]
    assert report["decided"]["jumped"]["hits"] == report["decided"]["fell"]["hits"] == 0
    assert report["examples"] == []


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("urgency") / "seed.parquet"
    assert import_urgency([str(path)]) == 0
    return path


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("urgency-checkpoint"))


def write_checkpoint(folder, **options):
    encoder = tiny_bert(folder / "encoder")
    model = predictor(encoder, **options)
    save_checkpoint(folder / "checkpoint", model, load_tokenizer(encoder), {"epochs": 1})
    return folder / "checkpoint"


def evaluate(measured, data, folder, *options):
    """Content of the JSON file."""
    code = main([str(measured), "--data", str(data), "--json", str(folder / "out.json"), *options])
    content = json.loads((folder / "out.json").read_text())
    assert code == (0 if content["passed"] else 3)
    return content


def test_a_checkpoint_is_compared_with_baselines_and_other_seeds(tmp_path, data, checkpoint):
    options = ["--name", "recipe", "--compare", json.dumps([f"recipe={checkpoint}", "other=constant"])]
    content = evaluate(checkpoint, data, tmp_path, *options)
    assert content["passed"] == content["adversarial"]["passed"]
    assert content["num_texts"] == sum(text.split == "test" for text in read_labels(data))
    assert set(content["baselines"]) == {"constant", "bag_of_words"}
    words = content["baselines"]["bag_of_words"]
    assert words["predicted"]["kappa"] > content["baselines"]["constant"]["predicted"]["kappa"] == 0
    assert content["adversarial"]["num_pairs"] == len(read_pairs("test"))
    assert content["abstention"]["allowed_rate"] == 0.1
    assert [entry["name"] for entry in content["compared"]] == ["recipe", "other"]


def test_claims_that_jump_the_queue_fail_the_command(tmp_path, data, monkeypatch):
    monkeypatch.setattr("training.urgency.evaluation._open", lambda *_: loud)
    options = ["--baselines", "false", "--risk_rate", "0.99", "--jump_rate", "0.001"]
    threshold = choose_threshold(np.eye(K)[[2] * 99], np.full(99, 2))
    monkeypatch.setattr("training.urgency.evaluation.choose_threshold", lambda *_, **__: threshold)
    assert not evaluate("loud", data, tmp_path, *options)["passed"]


def test_an_artifact_gives_what_its_checkpoint_gives(tmp_path, checkpoint):
    from export.exporter import ExportConfig, export_onnx

    artifact = tmp_path / "artifact"
    export_onnx(ExportConfig(checkpoint=str(checkpoint), out=str(artifact), legacy_exporter=True))
    texts = [text.text for text in seed_labels("llm")[::40]]
    one, other = (open_urgency(folder, accelerator="cpu")(texts) for folder in (checkpoint, artifact))
    np.testing.assert_allclose(one, other, atol=1e-4)
    np.testing.assert_allclose(one.sum(axis=1), 1)
    assert open_urgency(checkpoint)([]).shape == (0, K)


def test_a_threshold_is_saved_where_the_export_looks_for_it(tmp_path, data):
    folder = write_checkpoint(tmp_path)
    options = "--save-threshold true --baselines false --risk_rate 0.99 --jump_rate 0.99"
    content = evaluate(folder, data, tmp_path, *options.split())
    info = load_checkpoint(folder).training_info
    assert info["epochs"] == 1
    assert info["urgency"]["abstain_threshold"] == content["abstention"]["threshold"]
    save_threshold(folder, asdict(choose_threshold(np.eye(K), np.arange(K))))
    assert load_checkpoint(folder).training_info["urgency"]["abstain_threshold"] == 1.0


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        (Heads(length=LengthHead(TOWER)), "no urgency head"),
        (Heads(urgency=UrgencyHead(TOWER, levels=("high", "low"))), "urgency levels"),
    ],
)
def test_a_predictor_without_our_levels_is_refused(tmp_path, heads, message):
    with pytest.raises(InputError, match=message):
        open_urgency(write_checkpoint(tmp_path, heads=heads, **PLAIN))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--risk_rate", "0"], "allowed_rate: got 0.0"),
        (["--batch_size", "0"], "batch_size: got 0"),
        (["--validation", "missing.parquet"], "validation: got 'missing.parquet'"),
        (["--data", "{dir}/train.parquet"], "train.parquet, texts of split test: got 0"),
        (["--compare", '["bag_of_words=x"]'], "NAME=PREDICTOR"),
    ],
)
def test_bad_options_are_named(tmp_path, data, checkpoint, capsys, options, message):
    train = pa.table({"text": ["a b", "c d"], "level": [0, 1], "split": ["train", "train"]})
    pq.write_table(train, tmp_path / "train.parquet")
    words = [word.format(dir=tmp_path) for word in options]
    words = [checkpoint, "--data", data, "--json", tmp_path / "out.json", *words]
    assert_refused(main, words, message, tmp_path, capsys)


def test_baselines_learn_levels_and_weights():
    train = [
        LabeledText(text=f"{word} {n}", level=level, source="own", split="train", weight=1 + 2 * level)
        for level, word in ((0, "fire"), (3, "row"))
        for n in range(10)
    ]
    frequencies, words = constant_baseline(train), bag_of_words_baseline(train)
    np.testing.assert_allclose(frequencies(["x", "y"]), [[1 / 8, 0, 0, 7 / 8, 0]] * 2)
    assert words(["a fire", "a row"]).argmax(axis=1).tolist() == [0, 3]
    assert words([]).shape == (0, K)
    with pytest.raises(InputError, match="two or more"):
        bag_of_words_baseline(train[:10])
    with pytest.raises(InputError, match="training texts"):
        constant_baseline([])


def test_what_is_scheduled_is_limited_and_abstains():
    seed = seed_labels("llm")
    texts, validation = ([text for text in seed if text.split == split] for split in ("test", "validation"))
    levels = {text.text: text.level for text in seed}
    options = EvaluateUrgencyConfig(predictor="-", data="-", json="-")

    def oracle(prompts):
        return np.array([np.eye(K)[levels.get(text, 2)] for text in prompts])

    report = evaluate_urgency(oracle, texts, validation, read_pairs("test"), options)
    assert report["predicted"]["accuracy"]["value"] == 1
    assert report["abstention"]["threshold"] == NEAR_UNIFORM / K
    assert report["abstention"]["answered"]["value"] == 1
    assert report["abstention"]["wrong"]["value"] == 0
    assert {name: part["cases"] for name, part in report["abstention"]["right_by_decided_level"].items()} == {
        name: part["hits"] for name, part in report["abstention"]["answered_by_level"].items()
    }
    # From tier standard an emergency rises by one level alone.
    assert report["scheduled"]["recalls"]["emergency"]["value"] == 0
    assert report["quiet_emergencies_found"]["value"] is None


@pytest.mark.parametrize("name", ["constant", "bag-of-words", "frozen"])
def test_baselines_can_be_measured_without_a_predictor(tmp_path, data, name):
    measured = f"frozen:{tiny_bert(tmp_path / 'encoder')}" if name == "frozen" else name
    content = evaluate(measured, data, tmp_path, "--split", "validation", "--baselines", "false")
    assert content["baselines"] == {}
    assert content["threshold_chosen_on_measured_texts"] is True
    assert content["adversarial"]["num_pairs"] == len(read_pairs("validation"))
    if name == "constant":
        assert content["predicted"]["kappa"] == 0
