"""What a predictor says about a request before its first token."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler_core.errors import InputError
from scheduler_core.lengths import LogT


@dataclass(frozen=True, slots=True)
class LengthPrediction:
    """Predicted log-t distribution of the output length X = exp(mu + sigma T_nu) in tokens.

    Attributes:
        mu: Location of ln X (ln tokens), in [-50, 50].
        sigma: Scale of ln X, in [1e-9, 50].
        nu: Degrees of freedom, in [0.1, 1e9].
        artifact_id: Which trained artifact said so; empty if none did.
        artifact_version: Version of that artifact.

    Raises:
        InputError: A number is outside its range (NaN included): no scheduler can use such a prediction.
    """

    mu: float
    sigma: float
    nu: float
    artifact_id: str = ""
    artifact_version: str = ""

    def __post_init__(self) -> None:
        for name, low, high in (("mu", -50.0, 50.0), ("sigma", 1e-9, 50.0), ("nu", 0.1, 1e9)):
            value = getattr(self, name)
            if not low <= value <= high:
                raise InputError(f"predicted {name}", value, f"numbers in [{low:g}, {high:g}]")

    def distribution(self) -> LogT:
        """The distribution itself, with quantiles, expectations and the remaining length."""
        return LogT(self.mu, self.sigma, self.nu)
