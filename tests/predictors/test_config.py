"""The configuration of a predictor: what it refuses, and that it reads back from JSON."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import get_args

import pytest
import torch

from predictors.manifest import Head, Manifest
from predictors.modules import (
    HEADS,
    BucketHead,
    Conditioning,
    Heads,
    LengthHead,
    PredictorConfig,
    RankHead,
    Tower,
    UrgencyHead,
)
from predictors.runtime import Predicted
from scheduler_core.errors import InputError
from tests.predictors.predictors import ALL_HEADS, CONDITIONING, predictor
from tests.training.tiny import tiny_bert
from training.config import HEADS as TRAINED_HEADS
from training.config import TrainConfig
from training.losses import LOSSES

RANK = Heads(rank=RankHead())


@pytest.mark.parametrize(
    "config",
    [
        PredictorConfig(encoder="x", heads=RANK, served_models=("m",)),
        PredictorConfig(
            encoder="x",
            heads=ALL_HEADS,
            conditioning=CONDITIONING,
            max_length=48,
            truncation_side="left",
            pooling=("last",),
            prompt_length=True,
        ),
    ],
)
def test_it_reads_back_from_json(config):
    assert PredictorConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ((), [], "predictor: got"),
        (("nope",), 1, r"predictor\.nope: got 1"),
        (("encoder",), None, "predictor"),
        (("heads",), None, r"predictor\.heads"),
        (("heads",), {}, "heads: got None; allowed: one or more of length, urgency"),
        (("heads", "nope"), {}, r"predictor\.heads"),
        (("heads", "rank"), {"nope": 1, "tower": {}}, r"predictor\.heads\.rank"),
        (("heads", "rank", "tower", "hidden_sizes"), [4, 0], "hidden_sizes"),
        (("heads", "rank", "tower", "hidden_sizes"), ["4"], r"predictor\.heads\.rank\.tower"),
        (("heads", "bucket", "edges"), [2.0, 1.0], "edges"),
        (("conditioning", "served_models"), [], "served_models"),
    ],
)
def test_wrong_json_is_named(path, value, message):
    content = PredictorConfig(encoder="x", heads=ALL_HEADS, conditioning=CONDITIONING).to_json()
    content = json.loads(json.dumps(content))
    if path:
        part = content
        for name in path[:-1]:
            part = part[name]
        part[path[-1]] = value
        if path == ("encoder",):
            del content["encoder"]
    with pytest.raises(InputError, match=message):
        PredictorConfig.from_json(content if path else value)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("pooling", lambda: PredictorConfig(encoder="x", heads=RANK, pooling=())),
        ("pooling", lambda: PredictorConfig(encoder="x", heads=RANK, pooling=("cls", "cls"))),
        ("pooling", lambda: PredictorConfig(encoder="x", heads=RANK, pooling=("median",))),
        ("max_length", lambda: PredictorConfig(encoder="x", heads=RANK, max_length=2)),
        ("truncation_side", lambda: PredictorConfig(encoder="x", heads=RANK, truncation_side="top")),
        (
            "served_models",
            lambda: PredictorConfig(encoder="x", heads=RANK, served_models=("m",), conditioning=CONDITIONING),
        ),
        (
            "conditioning",
            lambda: PredictorConfig(
                encoder="x", heads=Heads(urgency=UrgencyHead()), conditioning=CONDITIONING
            ),
        ),
        ("dropouts", lambda: Tower((4,), (1.0,))),
        ("dropouts", lambda: Tower((4, 4), (0.1,))),
        ("activation", lambda: Tower(activation="tanh")),
        ("nu", lambda: LengthHead(nu=0.0)),
        ("levels", lambda: UrgencyHead(levels=("one",))),
        ("levels", lambda: UrgencyHead(levels=("one", "one"))),
        ("edges", lambda: BucketHead()),
        ("edges", lambda: BucketHead(edges=(1.0, 1.0))),
        ("edges", lambda: BucketHead(edges=(float("inf"),))),
        ("heads", Heads),
        ("served_models", lambda: Conditioning(("a", "a"))),
        ("width", lambda: Conditioning(("a",), width=0)),
    ],
)
def test_bad_options_are_named(name, make):
    with pytest.raises(InputError, match=f"^{name}: got"):
        make()


def test_numbers_of_served_models():
    assert [CONDITIONING.number_of(name) for name in ("small-llm", "large-llm", "other", None)] == [
        1,
        2,
        0,
        0,
    ]
    assert PredictorConfig(encoder="x", heads=RANK, conditioning=CONDITIONING).known_models == (
        "small-llm",
        "large-llm",
    )
    assert PredictorConfig(encoder="x", heads=RANK, served_models=("m",)).known_models == ("m",)


def test_every_head_is_in_all_registries(tmp_path):
    names = ("length", "urgency", "bucket", "regression", "rank")
    assert tuple(HEADS) == tuple(LOSSES) == get_args(Head) == TRAINED_HEADS == ALL_HEADS.names == names
    assert tuple(field.name for field in fields(Heads)) == names
    assert {field.name for field in fields(TrainConfig)} >= set(names)
    model = predictor(tiny_bert(tmp_path))
    with torch.no_grad():
        outputs = model(torch.tensor([[2, 5, 3]]), torch.ones(1, 3, dtype=torch.int64))
    manifest = Manifest.draft(
        heads=names,
        nu=None,
        within=True,
        urgency_levels=ALL_HEADS.urgency.levels,
        bucket_edges=ALL_HEADS.bucket.edges,
    )
    assert {tensor.name: tensor.shape[1:] for tensor in manifest.outputs} == {
        name: tuple(values.shape[1:]) for name, values in outputs.items()
    }
    assert outputs.keys() == {field.name for field in fields(Predicted)}
