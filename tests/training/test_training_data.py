"""Splits, batches, sampling and options of a training run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from data_gen.splits import split_of
from predictors.modules import Normalization, load_tokenizer
from scheduler_core.errors import InputError
from tests.training.data import write_lists, write_sample_file
from tests.training.tiny import tiny_bert
from training.config import StageConfig, TrainConfig
from training.data import (
    EpochSampler,
    Examples,
    length_ordered_batches,
    loader,
    pad,
    sampling_weights,
    split_fits,
    tokenize,
)
from training.fitting.fits_file import read_fits_or_fit
from training.fitting.options import FitOptions
from training.stage import rate_factor


def config(**options):
    return TrainConfig(**({"data": "d", "out": "o"} | options))


def test_groups_go_to_the_split_of_their_prompt(tmp_path):
    fits = read_fits_or_fit(write_sample_file(tmp_path / "s.parquet", num_prompts=60), FitOptions())
    splits = split_fits(fits, config(split_seed=4))
    for name, part in splits.targets.items():
        for prompt_id in part.groups.column("prompt_id"):
            assert split_of(prompt_id, 4) == name
    assert sum(map(len, splits.targets.values())) == 60


def test_flagged_fits_are_no_targets_but_stay_in_the_test_split(tmp_path):
    lengths = [[100, 100, 100] if row % 3 == 0 else [5 + row, 9, 12] for row in range(60)]
    finished = [[row % 3 != 0] * 3 for row in range(60)]
    path = write_lists(tmp_path / "x.parquet", lengths, finished=finished)
    splits = split_fits(read_fits_or_fit(path, FitOptions()), config())
    assert sum(splits.num_excluded.values()) == 20
    assert not any(part.has_flag("all_censored").any() for part in splits.targets.values())
    assert len(splits.test) == len(splits.targets["test"]) + splits.num_excluded["test"]


def test_too_few_prompts_are_refused(tmp_path):
    path = write_lists(tmp_path / "x.parquet", [[5, 6, 7], [8, 9, 10]])
    with pytest.raises(InputError, match="usable fit in the .* split"):
        split_fits(read_fits_or_fit(path, FitOptions()), config())


def test_tokens_are_cut_and_padded_to_the_longest_of_the_batch(tmp_path):
    tokenizer = load_tokenizer(tiny_bert(tmp_path))
    ids = tokenize(tokenizer, ["write a story", "a", "the " * 90], 20)
    assert [len(tokens) for tokens in ids] == [5, 3, 20]
    input_ids, mask = pad(ids[:2], 0)
    assert input_ids.shape == (2, 5)
    assert mask.sum(dim=1).tolist() == [5, 3]
    assert input_ids[1, 3:].tolist() == [0, 0]
    assert list(length_ordered_batches(ids, 2)) == [[1, 0], [2]]


def test_a_batch_has_the_targets_of_its_prompts(tmp_path):
    fits = read_fits_or_fit(write_sample_file(tmp_path / "s.parquet", num_prompts=6), FitOptions())
    normalization = Normalization.of(fits.mu, fits.sigma)
    examples = Examples(fits, normalization, token_ids=[np.arange(1, 3 + row) for row in range(6)])
    batch = examples.batch([4, 1])
    assert batch.inputs[0].shape == (2, 6)
    assert batch.position.tolist() == [4, 1]
    mu_z, sigma_z = normalization.normalize(fits.mu, fits.sigma)
    np.testing.assert_allclose(batch.mu, mu_z[[4, 1]], rtol=1e-6)
    np.testing.assert_allclose(batch.sigma, sigma_z[[4, 1]], rtol=1e-6)
    assert [len(part.mu) for part in loader(examples, 4)] == [4, 2]
    assert examples.prompt_ids[4] == "p004"


def test_sampling_follows_the_last_rule_that_applies(tmp_path):
    fits = read_fits_or_fit(write_sample_file(tmp_path / "s.parquet", num_prompts=3), FitOptions())

    def weights(mu, sigma):
        changed = replace(fits, parameters=fits.parameters | {"mu": np.array(mu), "sigma": np.array(sigma)})
        return sampling_weights(changed, config().oversampling).tolist()

    assert weights([5.0, 5.6, 6.1], [0.2, 0.2, 0.2]) == [1.0, 1.5, 2.0]
    assert weights([5.0, 5.6, 6.1], [1.1, 1.4, 0.2]) == [1.5, 2.0, 2.0]


def test_draws_follow_from_seed_and_epoch_and_weights():
    sampler = EpochSampler(np.array([1.0, 1.0, 2.0] * 1000), 5)
    first = list(sampler)
    assert first == list(sampler)
    assert len(first) == len(sampler) == 3000
    drawn_heavy = np.mean([position % 3 == 2 for position in first])
    assert drawn_heavy == pytest.approx(0.5, abs=3 * np.sqrt(0.25 / 3000))
    sampler.set_epoch(1)
    second = list(sampler)
    assert first != second
    sampler.set_epoch(0)
    assert list(sampler) == first


def test_the_learning_rate_rises_and_falls_linearly():
    factors = [rate_factor(step, 10, 2) for step in range(11)]
    assert factors == pytest.approx([0.5, 1.0, 1.0, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8, 0.0])
    assert [rate_factor(step, 4, 0) for step in range(5)] == [1.0, 0.75, 0.5, 0.25, 0.0]


def test_the_weight_of_sigma_rises_over_both_stages():
    stages = {
        "stage1": StageConfig(epochs=2, learning_rate=1.0),
        "stage2": StageConfig(epochs=3, learning_rate=1.0),
    }
    assert [config(**stages).sigma_weight(epoch) for epoch in range(5)] == [3.0, 3.25, 3.5, 3.75, 4.0]
    one = {
        "stage1": StageConfig(epochs=1, learning_rate=1.0),
        "stage2": StageConfig(epochs=0, learning_rate=1.0),
    }
    assert config(**one).sigma_weight(0) == 3.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"clip_norm": 0.0}, "clip_norm"),
        ({"weight_decay": -1.0}, "weight_decay"),
        ({"seed": -1}, "seed"),
        ({"group_by": "model"}, "prompt_id among them"),
        ({"out": ""}, "out"),
        ({"oversampling": ((5.0, 1.0, 0.0),)}, "oversampling"),
        (
            {
                "stage1": StageConfig(epochs=0, learning_rate=1.0),
                "stage2": StageConfig(epochs=0, learning_rate=1.0),
            },
            "at least one epoch",
        ),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(InputError, match=message):
        config(**options)


@pytest.mark.parametrize("options", [{"epochs": -1}, {"learning_rate": 0.0}, {"warmup_fraction": 1.0}])
def test_bad_options_of_a_stage_are_named(options):
    [name] = options
    with pytest.raises(InputError, match=name):
        StageConfig(**({"epochs": 1, "learning_rate": 1e-3} | options))
