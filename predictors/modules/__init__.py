"""The torch side of a predictor: encoder, pooling, towers, checkpoint folder.

This is the only place of `predictors` that needs torch; serving runs the exported graph.
"""

from predictors.modules.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from predictors.modules.encoder import load_encoder, load_tokenizer, resolve_encoder
from predictors.modules.normalization import Normalization
from predictors.modules.predictor import (
    LengthParameters,
    LengthPredictor,
    NormalizedParameters,
    PredictorConfig,
)

__all__ = [
    "Checkpoint",
    "LengthParameters",
    "LengthPredictor",
    "Normalization",
    "NormalizedParameters",
    "PredictorConfig",
    "load_checkpoint",
    "load_encoder",
    "load_tokenizer",
    "resolve_encoder",
    "save_checkpoint",
]
