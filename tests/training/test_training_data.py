"""Rows, labels, splits, batches and options of a training run."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from data_gen.splits import split_of
from predictors.modules import Heads, LengthHead, Normalization, PredictorConfig, load_tokenizer, tokenize
from scheduler_core.errors import InputError
from tests.training.data import SERVED_MODELS, write_labels, write_lists, write_rows, write_sample_file
from tests.training.tiny import tiny_bert
from training.batches import Batching, EpochPlans, batch_ends, sampling_weights
from training.config import (
    BucketTask,
    ConditioningOptions,
    LengthTask,
    RankTask,
    StageConfig,
    TrainConfig,
    UrgencyTask,
)
from training.data import Examples, SplitData, length_ordered_batches, loader, pad
from training.initial_model import length_statistics, quantile_edges
from training.labels import UrgencyLabels, read_labels, read_split_labels
from training.module import rate_factor
from training.rows import join, read_split_rows


def config(**options):
    return TrainConfig(**({"data": "d", "out": "o"} | options))


def all_rows(path, **options):
    """Rows of a file, whatever the split."""
    found = read_split_rows(config(data=str(path), fractions=(0.5, 0.5, 0.0), **options))
    return join([found.train, found.validation])


READING = PredictorConfig(encoder="tiny", heads=Heads(length=LengthHead()), max_length=24)


@pytest.fixture(scope="module")
def rows_file(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("rows") / "rows.parquet")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(tiny_bert(tmp_path_factory.mktemp("bert")))


def test_rows_of_a_prompt_stand_together_with_their_answers(rows_file):
    rows = all_rows(rows_file)
    table = pq.read_table(rows_file).to_pylist()
    assert len(rows) == len(table) == 90
    assert len(rows.prompts) == 30
    assert (np.diff(rows.prompt) >= 0).all()
    expected = {(row["prompt"], row["model"]): row for row in table}
    for at in range(len(rows)):
        row = expected[rows.prompts[rows.prompt[at]], rows.models[rows.model[at] - 1]]
        answers = slice(rows.offsets[at], rows.offsets[at + 1])
        assert rows.lengths[answers].tolist() == row["output_tokens"]
        assert rows.finished[answers].tolist() == row["finished"]
        assert rows.max_tokens[at] == (np.inf if all(row["finished"]) else 300)
        found = rows.temperature[at]
        assert np.isnan(found) if row["temperature"] is None else found == row["temperature"]


def test_prompts_go_to_the_split_of_their_id(rows_file):
    found = read_split_rows(config(data=str(rows_file), split_seed=4))
    for name, part in (("train", found.train), ("validation", found.validation)):
        assert {split_of(prompt_id, 4) for prompt_id in part.prompt_ids} == {name}
    assert len(found.train.prompts) + len(found.validation.prompts) + found.num_test_prompts == 30
    assert set(found.train.prompts).isdisjoint(found.validation.prompts)


def test_several_files_share_prompts_and_keep_their_weights(rows_file, tmp_path):
    other = write_rows(tmp_path / "other.parquet", models=("large", "new"), num_prompts=40, seed=1)
    one = read_split_rows(config(data=str(rows_file)))
    both = read_split_rows(config(data=[str(rows_file), str(other)], data_weights=(1.0, 0.25)))
    assert both.train.models == (*SERVED_MODELS, "new")
    assert set(one.train.prompts) < set(both.train.prompts)
    large = both.train.models.index("large") + 1
    of_first = both.train.prompt == both.train.prompts.index(one.train.prompts[0])
    assert both.train.weight[of_first & (both.train.model == large)].tolist() == [1.0, 0.25]
    assert len(both.train.lengths) == both.train.offsets[-1]


def test_a_validation_file_leaves_all_data_to_training_but_for_shared_texts(rows_file, tmp_path):
    other = write_rows(tmp_path / "other.parquet", num_prompts=6, seed=1)
    found = read_split_rows(config(data=str(rows_file), validation=str(other)))
    assert len(found.validation.prompts) == 6
    assert len(found.train.prompts) == 24
    assert found.num_shared == 6
    part = read_split_rows(config(data=str(rows_file), validation=str(other), validation_split="train"))
    assert 0 < len(part.validation.prompts) < 6
    # What is not validated on may be reported on, so it is not learnt from either.
    assert len(part.train.prompts) == 24


def test_rows_with_a_flagged_fit_are_left_out_only_where_fits_are_targets(tmp_path):
    lengths = [[100, 100, 100] if row % 3 == 0 else [5 + row, 9, 12] for row in range(60)]
    finished = [[row % 3 != 0] * 3 for row in range(60)]
    path = write_lists(tmp_path / "x.parquet", lengths, finished=finished)
    fitted = read_split_rows(config(data=str(path), length=LengthTask(objective="mse")))
    assert fitted.num_excluded == 20
    assert np.isfinite(fitted.train.mu).all()
    raw = read_split_rows(config(data=str(path)))
    assert raw.num_excluded == 0
    assert not raw.train.finished.all()


def test_one_answer_per_prompt_is_enough_without_fits(tmp_path):
    path = write_lists(tmp_path / "x.parquet", [[5 + row] for row in range(30)])
    rows = all_rows(path)
    assert rows.counts.tolist() == [1] * 30
    statistics = length_statistics(rows)
    assert statistics.mu_mean == pytest.approx(np.log(np.arange(5, 35)).mean())
    assert statistics.sigma_log_std > 0


def test_temperature_names_a_row_where_it_is_a_condition(tmp_path):
    path = write_lists(
        tmp_path / "x.parquet",
        [[5 + row, 9, 12] for row in range(40)],
        prompt_id=[f"p{row // 2}" for row in range(40)],
        prompt=[f"write {row // 2}" for row in range(40)],
        temperature=[0.2, 0.9] * 20,
    )
    assert len(all_rows(path)) == 20
    apart = all_rows(path, conditioning=ConditioningOptions())
    assert len(apart) == 40
    assert sorted(apart.temperature[:2].tolist()) == [0.2, 0.9]


def test_too_few_prompts_are_refused(tmp_path):
    path = write_lists(tmp_path / "x.parquet", [[5, 6, 7], [8, 9, 10]])
    with pytest.raises(InputError, match="usable samples in the .* split"):
        read_split_rows(config(data=str(path)))


@pytest.mark.parametrize("kind", ["parquet", "csv", "jsonl"])
def test_labels_have_names_or_numbers(kind, tmp_path):
    path = tmp_path / f"labels.{kind}"
    rows = [("server on fire", "emergency", 2.0), ("tidy up, some day", "4", 1.0)]
    if kind == "parquet":
        columns = dict(zip(("text", "level", "weight"), map(list, zip(*rows, strict=True)), strict=True))
        pq.write_table(pa.table(columns), path)
    elif kind == "csv":
        path.write_text("text,level,weight\n" + "".join(f'"{a}",{b},{c}\n' for a, b, c in rows))
    else:
        lines = [json.dumps({"text": a, "level": b, "weight": c}) for a, b, c in rows]
        path.write_text("\n".join(lines))
    labels = read_labels(str(path), UrgencyTask().levels)
    assert labels.level.tolist() == [0, 4]
    assert labels.weight.tolist() == [2.0, 1.0]
    assert labels.texts[1] == "tidy up, some day"


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"text": ["a"], "urgency": [1]}, "also level"),
        ({"text": ["a", "b"], "level": [1, 5]}, "row 1, column level: got 5; allowed: 0 to 4"),
        ({"text": ["a"], "level": ["soon"]}, "column level: got 'soon'"),
        ({"text": ["a"], "level": [None]}, "column level: got None"),
        ({"text": [" "], "level": [1]}, "row 0, column text"),
        ({"text": ["a"], "level": [1], "weight": [0.0]}, "row 0, column weight"),
        ({"text": pa.array([], pa.string()), "level": pa.array([], pa.int64())}, "rows: got 0"),
    ],
)
def test_bad_labels_are_named(columns, message, tmp_path):
    pq.write_table(pa.table(columns), tmp_path / "x.parquet")
    with pytest.raises(InputError, match=message):
        read_labels(str(tmp_path / "x.parquet"), UrgencyTask().levels)


def test_labels_are_split_by_their_text(tmp_path):
    options = {"data": None, "length": None, "urgency": UrgencyTask()}
    path = str(write_labels(tmp_path / "x.parquet"))
    train, validation = read_split_labels(config(urgency_data=path, **options))
    assert set(train.texts).isdisjoint(validation.texts)
    assert all(split_of(text, 0) == "train" for text in train.texts)
    assert all(split_of(text, 0) == "validation" for text in validation.texts)
    own = str(write_labels(tmp_path / "own.parquet", count=10))
    train, validation = read_split_labels(config(urgency_data=path, urgency_validation=own, **options))
    assert len(train) == 30
    assert len(validation) == 10


def test_tokens_are_cut_and_padded_to_the_longest_of_the_batch(tokenizer):
    ids = tokenize(tokenizer, ["write a story", "a", "the " * 90], max_length=20)
    assert [len(tokens) for tokens in ids] == [5, 3, 20]
    input_ids, mask = pad(ids[:2], 0)
    assert input_ids.shape == (2, 5)
    assert mask.sum(dim=1).tolist() == [5, 3]
    assert input_ids[1, 3:].tolist() == [0, 0]
    assert list(length_ordered_batches(ids, 2)) == [[1, 0], [2]]


def test_a_batch_reads_each_prompt_once_for_all_its_rows(rows_file, tokenizer):
    rows = all_rows(rows_file)
    data = SplitData.of(rows, UrgencyLabels.none(), tokenizer, READING)
    numbers = np.array([0, 7, 8, 9])
    examples = Examples(data, Normalization(), numbers)
    plans = EpochPlans(
        data.num_tokens, data.row_offsets, Batching(batch_size=4, shuffled=False, by_length=False)
    )
    batch = next(iter(loader(examples, plans)))
    assert batch.inputs[0].shape[0] == 4
    assert batch.row_prompt.tolist() == [place for place in range(4) for _ in range(3)]
    assert sorted(batch.served_model[:3].tolist()) == [7, 8, 9]
    for row, at in enumerate(batch.row.tolist()):
        own = rows.lengths[rows.offsets[at] : rows.offsets[at + 1]]
        assert batch.samples.tokens[row][batch.samples.present[row]].tolist() == own.tolist()
    assert batch.level_weight.tolist() == [0.0] * 4
    assert torch.isnan(batch.fits).all()


def test_labels_join_the_prompts_by_text(rows_file, tokenizer):
    rows = all_rows(rows_file)
    labels = UrgencyLabels([rows.prompts[2], "the server is down"], np.array([3, 0]), np.array([1.0, 2.0]))
    data = SplitData.of(rows, labels, tokenizer, READING)
    assert len(data) == 31
    assert data.level[[2, 30]].tolist() == [3, 0]
    assert data.level_weight[[2, 30]].tolist() == [1.0, 2.0]
    assert data.row_offsets[30] == data.row_offsets[31] == len(rows)
    assert data.name(30) == "the server is down"
    batch = Examples(data, Normalization(), np.zeros(4, dtype=np.int64))[
        next(iter(EpochPlans(data.num_tokens[30:], data.row_offsets[30:], Batching(batch_size=1))))._replace(
            prompts=np.array([30])
        )
    ]
    assert batch.samples.tokens.shape == (0, 0)
    assert batch.level.tolist() == [0]


def plans_of(num_tokens, batching, **options):
    counts = np.asarray(num_tokens, dtype=np.int64)
    return EpochPlans(counts, np.arange(len(counts) + 1, dtype=np.int64), batching, **options)


def test_batches_keep_the_budget_of_tokens_and_hold_similar_lengths():
    lengths = np.random.default_rng(0).integers(4, 200, 1000)
    plans = plans_of(lengths, Batching(batch_size=32, batch_tokens=1000), seed=3, num_epochs=4)
    counts, padding = [], 0
    for epoch in range(4):
        plans.set_epoch(epoch)
        found = list(plans)
        counts.append(len(found))
        assert sorted(np.concatenate([plan.prompts for plan in found]).tolist()) == list(range(1000))
        for plan in found:
            cells = lengths[plan.prompts].max() * len(plan.prompts)
            assert cells <= 1000
            assert len(plan.prompts) <= 32
            padding += cells
    assert len(set(counts)) == 1
    assert counts[0] == len(plans)
    assert padding / 4 < 1.15 * lengths.sum()


def test_the_order_follows_from_seed_and_epoch():
    def order(seed, epoch):
        plans = plans_of([7] * 50, Batching(batch_size=8), seed=seed)
        plans.set_epoch(epoch)
        return [plan.prompts.tolist() for plan in plans]

    assert order(1, 2) == order(1, 2)
    assert order(1, 2) != order(1, 3)
    assert order(1, 2) != order(2, 2)


def test_a_prompt_longer_than_the_budget_is_a_batch_of_its_own():
    batching = Batching(batch_size=8, batch_tokens=20)
    assert batch_ends(np.array([3, 4, 50, 5, 5]), batching) == [2, 3, 5]
    assert batch_ends(np.array([], dtype=np.int64), batching) == []


def test_of_many_rows_others_are_drawn_in_each_epoch():
    offsets = np.array([0, 10, 12], dtype=np.int64)
    plans = EpochPlans(np.array([5, 5]), offsets, Batching(batch_size=2, rows_per_prompt=4))
    drawn = []
    for epoch in range(6):
        plans.set_epoch(epoch)
        [plan] = list(plans)
        by_prompt = {int(prompt): plan.rows[plan.row_prompt == at] for at, prompt in enumerate(plan.prompts)}
        assert len(set(by_prompt[0].tolist())) == 4
        assert by_prompt[1].tolist() == [10, 11]
        drawn.append(tuple(by_prompt[0].tolist()))
    assert len(set(drawn)) > 1


def test_draws_with_replacement_follow_the_weights():
    weights = np.array([1.0, 1.0, 2.0] * 1000)
    plans = plans_of([5] * 3000, Batching(batch_size=100, by_length=False), seed=5, weights=weights)
    drawn = np.concatenate([plan.prompts for plan in plans])
    assert len(drawn) == 3000
    assert np.mean(drawn % 3 == 2) == pytest.approx(0.5, abs=3 * np.sqrt(0.25 / 3000))


def test_sampling_follows_the_last_rule_that_applies():
    rules = ((5.5, 1.0, 1.5), (6.0, 1.3, 2.0))
    weights = sampling_weights(np.array([5.0, 5.6, 6.1, 5.0]), np.array([0.2, 0.2, 0.2, 1.1]), rules)
    assert weights.tolist() == [1.0, 1.5, 2.0, 1.5]


def test_quantiles_make_buckets_of_equal_share(tmp_path):
    path = write_sample_file(tmp_path / "s.parquet", num_prompts=60, num_samples=20, max_tokens=10_000)
    rows = all_rows(path)
    edges = quantile_edges(rows, 4)
    shares = np.bincount(np.searchsorted(edges, rows.lengths, side="right")) / len(rows.lengths)
    assert len(edges) == 3
    np.testing.assert_allclose(shares, 0.25, atol=0.03)


def test_the_learning_rate_rises_and_then_does_as_the_schedule_says():
    factors = [rate_factor(step, 10, 2) for step in range(11)]
    assert factors == pytest.approx([0.5, 1.0, 1.0, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8, 0.0])
    assert [rate_factor(step, 4, 0) for step in range(5)] == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert [rate_factor(step, 4, 1, "constant") for step in range(4)] == [1.0] * 4
    assert [rate_factor(step, 4, 0, "cosine") for step in (0, 2, 4)] == pytest.approx([1.0, 0.5, 0.0])


NO_STAGES = {name: StageConfig(epochs=0, learning_rate=1.0) for name in ("stage1", "stage2")}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"batch_tokens": 0}, "batch_tokens"),
        ({"clip_norm": 0.0}, "clip_norm"),
        ({"weight_decay": -1.0}, "weight_decay"),
        ({"seed": -1}, "seed"),
        ({"encoder_dropout": 1.0}, "encoder_dropout"),
        ({"group_by": "model"}, "prompt_id among them"),
        ({"out": ""}, "out"),
        ({"oversampling": ((5.0, 1.0, 2.0),)}, "oversampling: got"),
        ({"oversampling": ((5.0, 1.0, 0.0),), "length": LengthTask(objective="mse")}, "oversampling"),
        ({"length": None}, "at least one of these heads"),
        ({"data": None}, "data: got None"),
        ({"urgency": UrgencyTask()}, "urgency_data: got None"),
        ({"urgency_data": "x"}, "there is no urgency head"),
        (
            {"length": None, "urgency": UrgencyTask(), "urgency_data": "x"},
            "no head learns from output lengths",
        ),
        ({"data_weights": (1.0, 2.0)}, "data_weights"),
        ({"only_conditioning": True}, "init and conditioning"),
        (NO_STAGES, "at least one epoch"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(InputError, match=message):
        config(**options)


@pytest.mark.parametrize(
    ("kind", "options", "name"),
    [
        (StageConfig, {"epochs": -1}, "epochs"),
        (StageConfig, {"learning_rate": 0.0}, "learning_rate"),
        (StageConfig, {"warmup_fraction": 1.0}, "warmup_fraction"),
        (StageConfig, {"layer_decay": 0.0}, "layer_decay"),
        (StageConfig, {"patience": 0}, "patience"),
        (LengthTask, {"objective": "crps", "learn_nu": True}, "objective"),
        (LengthTask, {"nu": 0.0}, "nu"),
        (LengthTask, {"weight": 0.0}, "weight"),
        (BucketTask, {"num_buckets": 1}, "num_buckets"),
        (RankTask, {"group_tokens": 0.0}, "group_tokens"),
        (ConditioningOptions, {"served_model_dropout": 1.0}, "served_model_dropout"),
    ],
)
def test_bad_options_of_a_part_are_named(kind, options, name):
    needed = {"epochs": 1, "learning_rate": 1e-3} if kind is StageConfig else {}
    with pytest.raises(InputError, match=name):
        kind(**needed | options)
