"""The torch side of a predictor: encoder, pooling, heads, conditioning, calibration, checkpoint folder.

This is the only place of `predictors` that needs torch; serving runs the exported graph.
"""

from predictors.modules.calibration import Calibration
from predictors.modules.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from predictors.modules.config import (
    URGENCY_LEVELS,
    BucketHead,
    Conditioning,
    Heads,
    LengthHead,
    PredictorConfig,
    RankHead,
    RegressionHead,
    Tower,
    UrgencyHead,
)
from predictors.modules.encoder import load_encoder, load_tokenizer, resolve_encoder
from predictors.modules.normalization import Normalization
from predictors.modules.predictor import PromptPredictor
from predictors.modules.reading import read_lexical, read_tokens

__all__ = [
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
    "read_lexical",
    "read_tokens",
    "resolve_encoder",
    "save_checkpoint",
]
