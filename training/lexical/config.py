"""Options of `train-lexical`."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler_core.errors import InputError


@dataclass(frozen=True, kw_only=True)
class TrainLexicalConfig:
    """Train gradient-boosted trees on lexical features of the prompt, served model and temperature, and write them as an artifact (ONNX)."""

    INPUTS = ("data", "validation")
    OUTPUTS = ("out",)

    data: list[str]
    """Files with fits (fits/2) or answer lengths (samples/2 or lists, CASTILLO's too), with prompts; several are joined."""
    out: str
    """Artifact folder to write."""
    overwrite: bool = False
    """Replace an earlier artifact at `out`, if it holds nothing else; anything else there is never replaced."""
    validation: str | None = None
    """File that decides the number of trees and how sigma is made; unset: a share of the prompts of data, by hash."""
    validation_share: float = 0.15
    """Share of the prompts kept back for validation, where no file is given."""
    artifact_id: str = "lexical"
    """Name in the manifest."""
    nu: float = 3.5
    """Degrees of freedom of the log-t distribution."""
    num_trees: int = 500
    """Most trees of each of the two ensembles; validation decides how many are kept."""
    learning_rate: float = 0.05
    """Shrinkage of each tree."""
    max_leaf_nodes: int = 31
    """Leaves of a tree."""
    min_samples_leaf: int = 30
    """Fewest rows in a leaf."""
    l2: float = 1.0
    """Penalty on leaf values."""
    folds: int = 3
    """Folds, by prompt, for the residuals that sigma is learnt from."""
    max_chars: int = 20_000
    """Most characters of a prompt that are read."""
    max_tokens: int | None = None
    """Cap on all answers, where data are answer lengths; unset, a file with CASTILLO's columns gets its 15000."""
    group_by: str = "prompt_id,model"
    """Columns that name a group, separated by commas."""
    seed: int = 0
    """Seed of the trees and of the split."""
    license: str | None = None
    """Licence of the artifact, for the manifest."""

    def __post_init__(self) -> None:
        if not self.data:
            raise InputError("data", self.data, "at least one file")
        for name in ("num_trees", "min_samples_leaf"):
            if getattr(self, name) < 1:
                raise InputError(name, getattr(self, name), "a whole number of at least 1")
        for name in ("folds", "max_leaf_nodes", "max_chars"):
            if getattr(self, name) < 2:
                raise InputError(name, getattr(self, name), "a whole number of at least 2")
        if not 0 < self.validation_share < 1:
            raise InputError("validation_share", self.validation_share, "a number between 0 and 1")
        if not 0 < self.learning_rate <= 1:
            raise InputError("learning_rate", self.learning_rate, "a number above 0, at most 1")
        if not 0 < self.nu < float("inf"):
            raise InputError("nu", self.nu, "a finite number above 0")
        if self.l2 < 0 or self.seed < 0:
            raise InputError("l2, seed", (self.l2, self.seed), "numbers of at least 0")

    @property
    def keys(self) -> tuple[str, ...]:
        """Columns that name a group."""
        return tuple(name.strip() for name in self.group_by.split(","))
