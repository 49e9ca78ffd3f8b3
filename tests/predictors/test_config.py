"""The configuration of a predictor: what it refuses, and that it reads back from JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from typing import get_args, get_type_hints

import pytest
import torch

from predictors.manifest import Head, Manifest
from predictors.modules.config import Conditioning, PredictorConfig, read_config
from predictors.modules.heads import HEADS, BucketHead, Heads, LengthHead, RankHead, UrgencyHead
from predictors.modules.towers import Tower
from predictors.runtime import Predicted
from scheduler_core.errors import InputError
from tests.predictors.predictors import ALL_HEADS, CONDITIONING, predictor
from tests.training.tiny import tiny_bert
from training.config import TrainConfig
from training.losses import head_loss

RANK = Heads(rank=RankHead())


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
    names = ("length", "urgency", "bucket", "regression", "rank")
    assert tuple(HEADS) == get_args(Head) == ALL_HEADS.names == names
    tasks = get_type_hints(TrainConfig)
    assert {get_args(tasks[name])[0] for name in names} == set(head_loss.registry) - {object}
    model = predictor(tiny_bert(tmp_path))
    with torch.no_grad():
        outputs = model(torch.tensor([[2, 5, 3]]), torch.ones(1, 3, dtype=torch.int64))
    manifest = Manifest.model_construct(
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
