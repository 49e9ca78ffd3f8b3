"""What `calibrate` works on: a checkpoint of `train` or an artifact of `train-lexical`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from predictors.modules import Calibration
from scheduler_core.errors import InputError
from training.calibrating.conformal import ConformalQuantiles
from training.evaluating.predictors import CONFIG, MANIFEST, Predict, RunOptions

#: (folder to write, whether to replace an earlier one, calibration, conformal quantiles, summary for the record).
Write = Callable[[Path, bool, Calibration, ConformalQuantiles, Mapping[str, Any]], None]


@dataclass(frozen=True, slots=True)
class Subject:
    """A predictor that can be calibrated.

    Attributes:
        served_models: Those it tells apart; empty: it does not see the served model.
        nu: Degrees of freedom that answers are fitted with.
        split: How training split its prompts, as `seed` and `fractions`; None where it does not say.
        predict: Predictions before any calibration.
        kind: Of the folder that is written.
        write: Writes the calibrated predictor.
        conversations: It reads whole conversations, not the last user message alone.
    """

    served_models: tuple[str, ...]
    nu: float
    split: Mapping[str, Any] | None
    predict: Predict
    kind: str
    write: Write
    conversations: bool = False

    def number_of(self, served_model: str | None) -> int:
        """1 + position in `served_models`; 0 for any other."""
        known = served_model is not None and served_model in self.served_models
        return self.served_models.index(served_model) + 1 if known and served_model is not None else 0


def open_subject(folder: str | Path, options: RunOptions) -> Subject:
    """Opens a folder as what it is: an artifact has a manifest, a checkpoint has none.

    Raises:
        InputError: It is neither, it predicts no length, or its graph holds no tables to calibrate.
    """
    path = Path(folder)
    if (path / MANIFEST).is_file():
        from training.calibrating.of_lexical import lexical_subject

        return lexical_subject(path, options)
    if (path / CONFIG).is_file():
        from training.calibrating.of_checkpoint import checkpoint_subject

        return checkpoint_subject(path, options)
    raise InputError(
        "predictor", str(path), "a checkpoint folder of train or an artifact folder of train-lexical"
    )


def split_in(data: object) -> Mapping[str, Any] | None:
    """The entry `split` of what a predictor says of its training data."""
    split = data.get("split") if isinstance(data, Mapping) else None
    return split if isinstance(split, Mapping) else None
