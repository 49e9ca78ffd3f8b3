"""An artifact that reads whole conversations gets them, one that reads the last user message gets that."""

from __future__ import annotations

from pathlib import Path

import pytest

from predictors.proto import predictor_v1_pb2 as pb
from predictors.runtime import open_runtime
from predictors.service.batcher import BatchingSettings
from predictors.service.messages import RequestReader
from predictors.service.pipeline import PredictionPipeline
from tests.predictors.fakes import write_artifact

CHAT = pb.ChatMessages(
    messages=[
        pb.ChatMessage(role="system", content="name rivers"),
        pb.ChatMessage(role="user", content="the sea"),
    ]
)


@pytest.mark.parametrize(
    ("conversations", "text"), [(True, "system: name rivers\n\nuser: the sea"), (False, "the sea")]
)
async def test_messages_are_read_as_in_training(tmp_path: Path, conversations: bool, text: str) -> None:
    folder = write_artifact(tmp_path / "a", conversations=conversations)
    pipeline = PredictionPipeline(open_runtime(folder, provider="cpu"), BatchingSettings.cpu(1))
    reader = RequestReader(pipeline, None)
    assert reader.read(pb.PredictRequest(messages=CHAT)).prompt == text
