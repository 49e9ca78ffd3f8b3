"""Options of `export-variants`."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from scheduler_core.errors import InputError
from scheduler_core.ranges import INTEGERS, check_ranges
from scheduler_core.threads import check_threads

KINDS = ("fused", "int8", "fp16", "fp16-fused")


@dataclass(frozen=True, kw_only=True)
class AcceptanceLimits:
    """Maximum losses of a variant against the artifact."""

    r2_drop: float = 0.01
    """Drop of R2 of mu."""
    tau_drop: float = 0.01
    """Drop of Kendall's tau between the predicted order and the fitted medians."""
    coverage_shift: float = 0.01
    """Change of the coverage of P50, P90 or P99, as a fraction (0.01 is one point)."""
    probability_shift: float = 0.01
    """Mean absolute change of urgency and bucket probabilities."""
    batch_mates: float = 0.01
    """Largest change of an output by other prompts in its batch, relative to its standard deviation; 1e-5 for variants
    in single precision."""

    def __post_init__(self) -> None:
        check_ranges(self, **dict.fromkeys(self.__dataclass_fields__, (0.0, 1.0)))


@dataclass(frozen=True, kw_only=True)
class VariantsConfig:
    """Make faster variants of an artifact, keep those whose quality holds, and choose the fastest on this machine."""

    INPUTS = ("artifact", "data", "public_key", "sign")
    OUTPUTS = ("out",)

    artifact: str
    """Artifact folder of export-onnx, with an encoder."""
    data: str
    """Parquet file of output lengths, as evaluate takes it (samples/2), with prompts the artifact was not trained on.
    Up to a third of its prompts calibrate int8; the others evaluate all variants."""
    out: str
    """Folder to write: an artifact folder for each accepted variant, report.json and report.md."""
    overwrite: bool = False
    """Replace an earlier set of variants at `out`, if it holds nothing else; anything else there is never replaced."""
    public_key: str | None = None
    """PEM file of an Ed25519 public key that the artifact has to be signed with."""
    sign: str | None = None
    """PEM file with an Ed25519 private key: sign the variants. The key's password, if it has one, is read from the
    environment variable TAILCAST_SIGNING_PASSWORD."""
    variants: list[str] = field(default_factory=lambda: list(KINDS))
    """Variants to make: fused (attention in one operator), int8 (for the CPU), fp16 and fp16-fused (for a GPU)."""
    calibration_prompts: int = 128
    """Maximum number of prompts that calibrate the ranges of int8."""
    max_groups: int | None = None
    """Maximum number of (prompt, served model) groups of the evaluation; unset: all."""
    group_by: str = "prompt_id,model"
    """Columns that name a group, as in evaluate."""
    max_tokens: int | None = None
    """Limit of all outputs, as in evaluate."""
    shapes: list[str] = field(default_factory=lambda: ["1x32", "8x128"])
    """Batches to measure, each BATCHxTOKENS; those beyond the max_length of the artifact are skipped."""
    repetitions: int = 5
    """Calls of each variant at each shape, interleaved with the others."""
    threads: int = 1
    """Threads of a model call."""
    limits: AcceptanceLimits = field(default_factory=AcceptanceLimits)
    """Maximum losses of a variant."""
    seed: int = 0
    """Seed of the prompts that calibrate and of random tokens."""
    progress: bool = True
    """Show progress bars on a terminal, a line now and then elsewhere."""

    def __post_init__(self) -> None:
        for name in ("artifact", "data", "out"):
            if not getattr(self, name):
                raise InputError(name, getattr(self, name), "a path")
        unknown = [name for name in self.variants if name not in KINDS]
        if unknown or not self.variants or len(set(self.variants)) < len(self.variants):
            raise InputError("variants", self.variants, f"one or more of {', '.join(KINDS)}, each once")
        positive = (1, INTEGERS)
        check_ranges(self, calibration_prompts=positive, repetitions=positive, seed=(0, INTEGERS))
        check_threads("threads", self.threads)
        if not self.shapes or not all(
            re.fullmatch("[1-9][0-9]*x[1-9][0-9]*", shape) for shape in self.shapes
        ):
            raise InputError("shapes", self.shapes, "one or more BATCHxTOKENS, as 8x128")
