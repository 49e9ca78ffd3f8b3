"""Urgency labels: texts with a level, read from files and split by text."""

from __future__ import annotations

from data_gen.splits import split_of
from data_gen.urgency.labels import read_labels
from scheduler_core.errors import InputError
from training.config import TrainConfig

#: Text -> its level, 0 the most urgent, and its weight in the loss, above 0.
UrgencyLabels = dict[str, tuple[int, float]]


def read_split_labels(config: TrainConfig) -> tuple[UrgencyLabels, UrgencyLabels]:
    """Labels of the training and of the validation split; both empty without an urgency head.

    Raises:
        InputError: A file cannot be used, or a split is empty.
    """
    if config.urgency is None:
        return {}, {}
    labels: dict[str, UrgencyLabels] = {"urgency_data": {}, "urgency_validation": {}}
    for field, joined in labels.items():
        for path in config.files[field]:
            texts = read_labels(path, field, levels=config.urgency.levels)
            # Of several labels of a text the first.
            joined |= {text.text: (text.level, text.weight) for text in reversed(texts)} | joined
    train, validation = labels.values()
    if config.files["urgency_validation"]:
        train = {text: label for text, label in train.items() if text not in validation}
    else:
        split = {text: split_of(text, config.split_seed, config.fractions) for text in train}
        train, validation = (
            {text: label for text, label in train.items() if split[text] == name}
            for name in ("train", "validation")
        )
    for name, part in (("train", train), ("validation", validation)):
        if not part:
            allowed = "at least one; other fractions or split_seed may help"
            raise InputError(f"labelled texts in the {name} split", 0, allowed)
    return train, validation
