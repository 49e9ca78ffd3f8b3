"""Predictors that read whole conversations: the same text in training, evaluation and service."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from scheduler_core.errors import InputError
from tests.training.tiny import tiny_bert
from training.config import StageConfig, TowerOptions, TrainConfig
from training.evaluating.cli import EvaluateConfig
from training.evaluating.run import evaluate
from training.fitting.samples import with_conversations
from training.train import train

MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    """The same last messages under two system prompts, of which one makes outputs ten times as long."""
    rng = np.random.default_rng(0)
    rows = [
        {
            "prompt_id": f"p{number}",
            "model": "m",
            "prompt": last,
            "messages": [{"role": "system", "content": system}, {"role": "user", "content": last}],
            "output_tokens": np.ceil(length * np.exp(rng.normal(0, 0.1, 4))).astype(int).tolist(),
        }
        for number in range(60)
        for last in [f"the list of {number % 30}"]
        for system, length in [(("write a short essay", 20.0), ("write a long story", 200.0))[number // 30]]
    ]
    path = tmp_path / "chats.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def test_the_system_prompt_is_learnt_from_where_it_is_read(chats: Path, tmp_path: Path) -> None:
    encoder, out = tiny_bert(tmp_path / "encoder"), tmp_path / "checkpoint"
    train(
        TrainConfig(
            data=str(chats),
            out=str(out),
            encoder=encoder,
            max_length=32,
            conversations=True,
            tower=TowerOptions(hidden_sizes=(16,), dropouts=(0.0,), layer_norm=False),
            stage1=StageConfig(epochs=0, learning_rate=1e-3),
            stage2=StageConfig(epochs=100, learning_rate=1e-2, batch_size=8),
            accelerator="cpu",
            progress=False,
        )
    )
    options = {"predictor": str(out), "json": str(tmp_path / "e.json"), "ceiling": False, "progress": False}
    whole = evaluate(EvaluateConfig(data=str(chats), **options))["model"]["mu"]["r2"]
    table = pq.read_table(chats)
    pq.write_table(table.drop_columns(["messages"]), tmp_path / "last.parquet")
    last = evaluate(EvaluateConfig(data=str(tmp_path / "last.parquet"), **options))["model"]["mu"]["r2"]
    assert whole > 0.8
    assert last < 0.5  # without the system prompt nothing tells long answers from short ones


def test_rows_without_messages_are_lone_user_messages_and_fits_have_none() -> None:
    messages = [[{"role": "system", "content": "x"}, {"role": "user", "content": "b"}], None]
    table = pa.table({"prompt": ["b", "c"], "messages": pa.array(messages, MESSAGES)})
    assert with_conversations(table, Path("t")).column("prompt").to_pylist() == ["system: x\n\nuser: b", "c"]
    plain = pa.table({"prompt": ["b"]})
    assert with_conversations(plain, Path("t")) is plain
    fits = pa.table({"prompt": ["a"], "mu": [1.0], "sigma": [1.0], "nu": [3.5]})
    with pytest.raises(InputError, match="fits keep no conversations"):
        with_conversations(fits, Path("fits.parquet"))
