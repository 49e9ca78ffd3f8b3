"""The torch side of a predictor: encoder, heads, calibration, checkpoint folder.

This is the only part of `predictors` that needs torch; serving runs the exported graph.
"""

from predictors.modules.calibration import Calibration
from predictors.modules.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from predictors.modules.config import Conditioning, PredictorConfig
from predictors.modules.encoder import load_encoder, load_tokenizer, resolve_encoder, tokenize
from predictors.modules.heads import (
    HEADS,
    URGENCY_LEVELS,
    BucketHead,
    Heads,
    LengthHead,
    RankHead,
    RegressionHead,
    UrgencyHead,
)
from predictors.modules.normalization import Normalization
from predictors.modules.predictor import PromptPredictor
from predictors.modules.towers import Tower

__all__ = [
    "HEADS",
    "URGENCY_LEVELS",
    "BucketHead",
    "Calibration",
    "Checkpoint",
    "Conditioning",
    "Heads",
    "LengthHead",
    "Normalization",
    "PredictorConfig",
    "PromptPredictor",
    "RankHead",
    "RegressionHead",
    "Tower",
    "UrgencyHead",
    "load_checkpoint",
    "load_encoder",
    "load_tokenizer",
    "resolve_encoder",
    "save_checkpoint",
    "tokenize",
]
