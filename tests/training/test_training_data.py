"""Rows, labels, splits, batches and options of a training run."""

from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from data_gen.splits import split_of
from predictors.modules.config import Conditioning, PredictorConfig
from predictors.modules.encoder import load_tokenizer
from predictors.modules.heads import Heads, LengthHead
from predictors.modules.normalization import Normalization
from scheduler_core.errors import InputError
from tests.training.data import SERVED_MODELS, write_labels, write_lists, write_rows, write_sample_file
from tests.training.tiny import tiny_bert
from training.fitting.rows import join
from training.network.batches import Batching, EpochPlans, batch_ends
from training.network.config import ConditioningOptions, StageConfig, TrainConfig
from training.network.data import Examples, SplitData, loader, pad, prompt_weights
from training.network.initial_model import length_statistics, quantile_edges
from training.network.losses import HeadLoss
from training.network.module import rate_factor
from training.network.splits import read_split_labels, read_split_rows
from training.network.tasks import BucketTask, LengthTask, UrgencyTask

READING = PredictorConfig(encoder="tiny", heads=Heads(length=LengthHead()), max_length=24)
NO_STAGES = {name: StageConfig(epochs=0, learning_rate=1.0) for name in ("stage1", "stage2")}
MSE = LengthTask(objective="mse")
URGENCY_ALONE = {"length": None, "urgency": UrgencyTask(), "urgency_data": "x"}


def config(**options):
    return TrainConfig(**({"data": "d", "out": "o"} | options))


def all_rows(path, **options):
    """Rows of a file, whatever the split."""
    splits = read_split_rows(config(data=str(path), fractions=(0.5, 0.5, 0.0), **options))
    return join([splits.train, splits.validation])


@pytest.fixture(scope="module")
def rows_file(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("rows") / "rows.parquet")


def test_rows_of_a_prompt_are_adjacent_with_their_samples(rows_file):
    rows = all_rows(rows_file)
    table = pq.read_table(rows_file).to_pylist()
    assert len(rows) == len(table) == 90
    assert len(rows.prompts) == 30
    assert (np.diff(rows.prompt) >= 0).all()
    expected = {(row["prompt"], row["model"]): row for row in table}
    for at in range(len(rows)):
        row = expected[rows.prompts[rows.prompt[at]], rows.models[rows.model[at] - 1]]
        samples = slice(rows.offsets[at], rows.offsets[at + 1])
        assert rows.lengths[samples].tolist() == row["output_tokens"]
        assert rows.finished[samples].tolist() == row["finished"]
        assert rows.max_tokens[at] == (np.inf if all(row["finished"]) else 300)
        temperature = np.nan if row["temperature"] is None else row["temperature"]
        np.testing.assert_equal(rows.temperature[at], temperature)


def test_prompts_go_to_the_split_of_their_id(rows_file):
    splits = read_split_rows(config(data=str(rows_file), split_seed=4))
    for name in ("train", "validation"):
        assert {split_of(prompt_id, 4) for prompt_id in getattr(splits, name).prompt_ids} == {name}
    assert len(splits.train.prompts) + len(splits.validation.prompts) + splits.num_test_prompts == 30
    assert set(splits.train.prompts).isdisjoint(splits.validation.prompts)


def test_validation_files_weigh_the_same_whatever_their_number_of_rows(rows_file, tmp_path):
    data = write_rows(tmp_path / "data.parquet", num_prompts=60)
    small = write_rows(tmp_path / "small.parquet", models=("new",), num_prompts=3, seed=2)
    splits = read_split_rows(config(data=str(data), validation=[str(rows_file), str(small)]))
    validation = splits.validation
    is_small = validation.model == validation.models.index("new") + 1
    assert 0 < is_small.sum() < (~is_small).sum()
    assert validation.weight[is_small].sum() == pytest.approx(1.0)
    assert validation.weight[~is_small].sum() == pytest.approx(1.0)
    values = torch.from_numpy(np.where(is_small, 3.0, 1.0))
    losses = HeadLoss(values, torch.tensor(validation.weight))
    total, count = losses.sums(weighted=True).tolist()
    assert total / count == pytest.approx(2.0)
    assert losses.sums().tolist() == [float(values.sum()), len(values)]


def test_several_files_share_prompts_and_keep_their_weights(rows_file, tmp_path):
    other = write_rows(tmp_path / "other.parquet", models=("large", "new"), num_prompts=40, seed=1)
    one = read_split_rows(config(data=str(rows_file))).train
    both = read_split_rows(config(data=[str(rows_file), str(other)], data_weights=(1.0, 0.25))).train
    assert both.models == (*SERVED_MODELS, "new")
    assert set(one.prompts) < set(both.prompts)
    prompt, large = both.prompts.index(one.prompts[0]), both.models.index("large") + 1
    assert both.weight[(both.prompt == prompt) & (both.model == large)].tolist() == [1.0, 0.25]


def test_a_validation_file_leaves_all_data_to_training_but_for_shared_texts(rows_file, tmp_path):
    other = write_rows(tmp_path / "other.parquet", num_prompts=6, seed=1)
    splits = read_split_rows(config(data=str(rows_file), validation=str(other)))
    assert (len(splits.validation.prompts), len(splits.train.prompts), splits.num_shared) == (6, 24, 6)


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


def test_one_sample_per_prompt_is_enough_without_fits(tmp_path):
    rows = all_rows(write_lists(tmp_path / "x.parquet", [[5 + row] for row in range(30)]))
    assert rows.counts.tolist() == [1] * 30
    statistics = length_statistics(rows, Normalization())
    assert statistics.mu_mean == pytest.approx(np.log(np.arange(5, 35)).mean())
    assert statistics.sigma_log_std > 0


def test_rows_without_a_served_model_are_of_an_unknown_one(tmp_path):
    names = [str(row // 2) for row in range(40)]
    lengths = [[5 + row, 9, 12] for row in range(40)]
    columns = {"prompt_id": names, "prompt": names}
    rows = all_rows(write_lists(tmp_path / "some.parquet", lengths, model=["m", None] * 20, **columns))
    assert rows.models == ("m",)
    assert sorted(rows.model.tolist()) == [0] * 20 + [1] * 20
    columns["model"] = pa.nulls(40, pa.string())
    rows = all_rows(write_lists(tmp_path / "all.parquet", lengths, **columns))
    assert (rows.models, rows.model.tolist(), rows.counts.tolist()) == ((), [0] * 20, [6] * 20)
    path = tmp_path / "none.parquet"
    pq.write_table(pq.read_table(tmp_path / "all.parquet").drop_columns("model"), path)
    with pytest.raises(InputError, match="also model"):
        all_rows(path)


def test_temperature_names_a_row_where_it_is_a_condition(tmp_path):
    names = [str(row // 2) for row in range(40)]
    columns = {"prompt_id": names, "prompt": names, "temperature": [0.2, 0.9] * 20}
    path = write_lists(tmp_path / "x.parquet", [[5 + row, 9, 12] for row in range(40)], **columns)
    assert len(all_rows(path)) == 20
    apart = all_rows(path, conditioning=ConditioningOptions())
    assert len(apart) == 40
    assert sorted(apart.temperature[:2].tolist()) == [0.2, 0.9]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({}, "usable samples in the .* split"),
        ({"prompt": ["a", None]}, "group prompt_id='p1', model='m', column prompt: got None"),
        ({"temperature": [1.0, -1.0]}, "column temperature, group prompt_id='p1', model='m': got -1.0"),
        ({"temperature": ["a", "b"]}, "column temperature: got '.*string'; allowed: numbers"),
    ],
)
def test_rows_that_cannot_be_used_are_named(columns, message, tmp_path):
    path = write_lists(tmp_path / "x.parquet", [[5, 6, 7], [8, 9, 10]], **columns)
    with pytest.raises(InputError, match=message):
        read_split_rows(config(data=str(path)))


def test_labels_are_split_by_their_text(tmp_path):
    options = {"data": None, "length": None, "urgency": UrgencyTask()}
    path = str(write_labels(tmp_path / "x.parquet"))
    train, validation = read_split_labels(config(urgency_data=path, **options))
    assert {split_of(text, 0) for text in train} == {"train"}
    assert {split_of(text, 0) for text in validation} == {"validation"}
    own = str(write_labels(tmp_path / "own.parquet", count=10))
    train, validation = read_split_labels(config(urgency_data=path, urgency_validation=own, **options))
    assert (len(train), len(validation)) == (30, 10)


def test_a_batch_has_each_prompt_once_for_all_its_rows_and_labels_by_text(rows_file, tmp_path):
    rows, tokenizer = all_rows(rows_file), load_tokenizer(tiny_bert(tmp_path))
    data = SplitData.of(rows, {rows.prompts[2]: (3, 1.0), "the server is down": (0, 2.0)}, tokenizer, READING)
    assert len(data) == 31
    assert data.name(30) == "the server is down"
    conditioning = Conditioning(("other", *rows.models))
    config = SimpleNamespace(conditioning=conditioning, max_length=READING.max_length)
    examples = Examples(data, SimpleNamespace(normalization=Normalization(), config=config))
    batching = Batching(batch_size=4, shuffled=False, by_length=False)
    plans = list(EpochPlans(data.num_tokens, data.row_offsets, batching))
    batch = next(iter(loader(examples, plans)))
    assert batch.inputs[0].shape[0] == 4
    assert batch.row_prompt.tolist() == [prompt for prompt in range(4) for _ in range(3)]
    assert sorted(batch.served_model[:3].tolist()) == [2, 3, 4]
    for row, at in enumerate(batch.row.tolist()):
        own = rows.lengths[rows.offsets[at] : rows.offsets[at + 1]]
        assert batch.samples.tokens[row][batch.samples.present[row]].tolist() == own.tolist()
    assert batch.level[2] == 3
    # Weights are 1 on average.
    assert batch.level_weight.tolist() == pytest.approx([0, 0, 1 / 1.5, 0])


def plans_of(num_tokens, batching, **options):
    counts = np.asarray(num_tokens, dtype=np.int64)
    return EpochPlans(counts, np.arange(len(counts) + 1, dtype=np.int64), batching, **options)


def test_batches_keep_the_budget_of_tokens_and_hold_similar_lengths():
    lengths = np.random.default_rng(0).integers(4, 200, 1000)
    plans = plans_of(lengths, Batching(batch_size=32, batch_tokens=1000), seed=3, num_epochs=4)
    counts, padding = [], 0
    for epoch in range(4):
        plans.set_epoch(epoch)
        batches = [plan.prompts for plan in plans]
        counts.append(len(batches))
        assert sorted(np.concatenate(batches).tolist()) == list(range(1000))
        cells = [lengths[prompts].max() * len(prompts) for prompts in batches]
        assert max(cells) <= 1000
        assert max(map(len, batches)) <= 32
        padding += sum(cells)
    assert set(counts) == {len(plans)}
    again = plans_of(lengths, Batching(batch_size=32, batch_tokens=1000), seed=3, num_epochs=4)
    again.set_epoch(3)
    assert all(np.array_equal(plan.prompts, prompts) for plan, prompts in zip(again, batches, strict=True))
    assert padding / 4 < 1.15 * lengths.sum()


@pytest.mark.parametrize(
    ("longest", "max_length", "width"), [(1, 24, 16), (17, 24, 24), (24, 24, 24), (33, 100, 48), (5, None, 5)]
)
def test_batches_have_few_widths_and_none_beyond_the_maximum(longest, max_length, width):
    ids, mask = pad([np.arange(longest), np.arange(1)], 7, max_length)
    assert ids.shape == mask.shape == (2, width)
    assert mask.sum(1).tolist() == [longest, 1]
    assert (ids[mask == 0] == 7).all()


def test_a_prompt_longer_than_the_budget_is_a_batch_of_its_own():
    batching = Batching(batch_size=8, batch_tokens=20)
    assert batch_ends(np.array([3, 4, 50, 5, 5]), batching) == [2, 3, 5]
    assert batch_ends(np.array([], dtype=np.int64), batching) == []


def test_of_many_rows_others_are_drawn_in_each_epoch():
    offsets = np.array([0, 10, 12], dtype=np.int64)
    plans = EpochPlans(np.array([5, 5]), offsets, Batching(batch_size=2, rows_per_prompt=4))
    drawn = set()
    for epoch in range(6):
        plans.set_epoch(epoch)
        [plan] = list(plans)
        first, second = (plan.rows[plan.prompts[plan.row_prompt] == prompt].tolist() for prompt in (0, 1))
        assert len(set(first)) == 4
        assert second == [10, 11]
        drawn.add(tuple(first))
    assert len(drawn) > 1


def test_draws_with_replacement_follow_the_weights_of_the_last_rule_that_applies():
    rules = ((5.5, 1.0, 1.5), (6.0, 1.3, 2.0))
    mu, sigma = np.array([5.0, 5.6, 6.1, 5.0, 5.0]), np.array([0.2, 0.2, 0.2, 1.1, 0.1])
    rows = SimpleNamespace(mu=mu, sigma=sigma, prompt=np.array([0, 1, 2, 3, 3]))
    split = SplitData(rows, list("abcde"), [], None, None, None)
    assert prompt_weights(split, rules).tolist() == [1.0, 1.5, 2.0, 1.5, 1.0]
    weights = np.array([1.0, 1.0, 2.0] * 1000)
    plans = plans_of([5] * 3000, Batching(batch_size=100, by_length=False), seed=5, weights=weights)
    drawn = np.concatenate([plan.prompts for plan in plans])
    assert len(drawn) == 3000
    assert np.mean(drawn % 3 == 2) == pytest.approx(0.5, abs=3 * np.sqrt(0.25 / 3000))


def test_quantiles_make_buckets_of_equal_size(tmp_path):
    path = write_sample_file(tmp_path / "s.parquet", num_prompts=60, num_samples=20, max_tokens=10_000)
    rows = all_rows(path)
    edges = quantile_edges(rows, 4)
    fractions = np.bincount(np.searchsorted(edges, rows.lengths, side="right")) / len(rows.lengths)
    assert len(edges) == 3
    np.testing.assert_allclose(fractions, 0.25, atol=0.03)


def test_the_learning_rate_rises_and_then_follows_the_schedule():
    factors = [rate_factor(step, 10, 2) for step in range(11)]
    assert factors == pytest.approx([0.5, 1.0, 1.0, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8, 0.0])
    assert [rate_factor(step, 4, 1, "constant") for step in range(4)] == [1.0] * 4


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (TrainConfig, {"batch_size": 0}, "batch_size: got 0"),
        (TrainConfig, {"encoder_dropout": 1.0}, "encoder_dropout"),
        (TrainConfig, {"group_by": "model"}, "including prompt_id"),
        (TrainConfig, {"oversampling": ((5.0, 1.0, 0.5),), "length": MSE}, "oversampling"),
        (TrainConfig, {"length": None}, "at least one of these heads"),
        (TrainConfig, {"data": None}, "data: got None"),
        (TrainConfig, {"urgency": UrgencyTask()}, "urgency_data: got None"),
        (TrainConfig, {"urgency_data": "x"}, "there is no urgency head"),
        (TrainConfig, URGENCY_ALONE, "no head learns from output lengths"),
        (TrainConfig, {"only_conditioning": True}, "a run with init"),
        (TrainConfig, NO_STAGES, "at least one epoch"),
        (LengthTask, {"objective": "crps", "learn_nu": True}, "objective"),
        (LengthTask, {"objective": "mse", "within": True}, "within"),
        (LengthTask, {"weight": 0.0}, "length.weight: got 0.0"),
        (BucketTask, {"num_buckets": 1}, "num_buckets"),
    ],
)
def test_bad_options_are_named(kind, options, message):
    required = {"data": "d", "out": "o"} if kind is TrainConfig else {}
    with pytest.raises(InputError, match=message):
        kind(**required | options)
