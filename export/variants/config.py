"""Options of `export-variants`."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from scheduler_core.errors import InputError
from scheduler_core.ranges import INTEGERS, check_ranges
from scheduler_core.shell.threads import check_threads

KINDS = ("fused", "int8", "fp16", "fp16-fused")


@dataclass(frozen=True, kw_only=True)
class AcceptanceLimits:
    """Maximum losses of quality of a variant compared with the artifact."""

    r2_drop: float = 0.01
    """Maximum drop of R2 of mu."""
    tau_drop: float = 0.01
    """Maximum drop of Kendall's tau between predicted and fitted medians."""
    coverage_shift: float = 0.01
    """Maximum change of the coverage of P50, P90 or P99, as a fraction (0.01 is one percentage point)."""
    probability_shift: float = 0.01
    """Maximum of the mean absolute change of urgency and bucket probabilities."""
    batch_mates: float = 0.01
    """Maximum change of an output due to other prompts in the batch, relative to the standard deviation of
    the output; at most 1e-5 for variants in single precision."""

    def __post_init__(self) -> None:
        check_ranges(self, **dict.fromkeys(self.__dataclass_fields__, (0.0, 1.0)))


@dataclass(frozen=True, kw_only=True)
class VariantsConfig:
    """Build faster variants of an artifact, reject those that lose quality, and measure their latency."""

    INPUTS = ("artifact", "data", "public_key", "sign")
    OUTPUTS = ("out",)

    artifact: str
    """Artifact folder written by export-onnx; it must have an encoder."""
    data: str
    """Parquet file of output lengths (samples/2, the input of evaluate) with prompts that were not used for
    training. Up to a third of the prompts calibrate int8; the others are used to evaluate all variants."""
    out: str
    """Folder to write: an artifact folder per accepted variant, report.json and report.md."""
    overwrite: bool = False
    """Replace an existing set of variants at `out`; a folder with other content is kept."""
    public_key: str | None = None
    """PEM file of an Ed25519 public key; the artifact must be signed with the matching private key."""
    sign: str | None = None
    """PEM file with an Ed25519 private key that signs the variants. The password of the key, if any, is read
    from the environment variable TAILCAST_SIGNING_PASSWORD."""
    variants: list[str] = field(default_factory=lambda: list(KINDS))
    """Variants to build: fused (attention as one operator), int8 (CPU), fp16 and fp16-fused (GPU)."""
    calibration_prompts: int = 128
    """Maximum number of prompts that calibrate int8."""
    max_groups: int | None = None
    """Maximum number of (prompt, served model) groups to evaluate; default: all."""
    group_by: str = "prompt_id,model"
    """Columns that identify a group, as in evaluate."""
    max_tokens: int | None = None
    """max_tokens of all outputs, as in evaluate."""
    shapes: list[str] = field(default_factory=lambda: ["1x32", "8x128"])
    """Batch shapes to measure, each BATCHxTOKENS; shapes above the max_length of the artifact are skipped."""
    repetitions: int = 5
    """Number of calls of each variant at each shape; calls of the variants are interleaved."""
    threads: int = 1
    """Number of threads of a model call."""
    limits: AcceptanceLimits = field(default_factory=AcceptanceLimits)
    """Maximum losses of quality of a variant."""
    seed: int = 0
    """Seed of the choice of calibration prompts and of random tokens."""
    progress: bool = True
    """Show progress bars on a terminal, or log lines elsewhere."""

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
