"""How groups are made and fitted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from scheduler_core.errors import InputError
from training.fitting.estimate import Solver
from training.fitting.families import Family, FamilyName, family_of

Censoring = Literal["right", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FitOptions:
    """How groups are made and fitted.

    Attributes:
        family: What to fit.
        nu: Degrees of freedom of the log-t distribution; None = free, by profile likelihood.
        censoring: "right" counts cut answers as at least as long, "none" as ended (the paper's way, biased low).
        integers: Take a finished length x for [x - 1/2, x + 1/2], whose probability is the likelihood.
        solver: See `estimate.estimate`.
        keys: Columns that name a group.
        max_tokens: Cap on all answers, see `group_table`.
        weights: Column with how many answers each one counts as; None = 1.
        alternatives: Compare with the other families.
        bootstrap: Replicates of the parametric bootstrap for each group; 0 = none.
        confidence: Of the bootstrap's intervals.
        seed: Of the bootstrap.
    """

    family: FamilyName = "log-t"
    nu: float | None = 3.5
    censoring: Censoring = "right"
    integers: bool = False
    solver: Solver = "batched"
    keys: tuple[str, ...] = ("prompt_id", "model")
    max_tokens: int | None = None
    weights: str | None = None
    alternatives: bool = False
    bootstrap: int = 0
    confidence: float = 0.9
    seed: int = 0

    def __post_init__(self) -> None:
        self.fitted_family  # noqa: B018  (raises for a bad family or nu)
        if self.censoring not in get_args(Censoring):
            raise InputError("censoring", self.censoring, "right or none")
        if self.solver not in get_args(Solver):
            raise InputError("solver", self.solver, "batched or lbfgsb")
        if self.solver == "lbfgsb" and self.family == "log-t" and self.nu is None:
            raise InputError("solver", self.solver, "batched, where nu is free")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise InputError("max_tokens", self.max_tokens, "a whole number of at least 1, or unset")
        if self.bootstrap and not 19 <= self.bootstrap <= 100_000:
            raise InputError("bootstrap", self.bootstrap, "0 for none, or 19 to 100000 replicates")
        if not 0 < self.confidence < 1:
            raise InputError("confidence", self.confidence, "a number between 0 and 1")

    @property
    def fitted_family(self) -> Family:
        """The family to fit."""
        return family_of(self.family, self.nu)
