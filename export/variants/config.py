"""Options of `export-variants`."""

from __future__ import annotations

from dataclasses import dataclass, field

from scheduler_core.errors import InputError
from scheduler_core.threads import check_threads

KINDS = ("fused", "int8", "fp16", "fp16-fused")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a variant may lose against the artifact it is made from."""

    r2_drop: float = 0.01
    """Drop of R2 of mu."""
    tau_drop: float = 0.01
    """Drop of Kendall's tau between the predicted order and the fitted medians."""
    coverage_shift: float = 0.01
    """Change of the coverage of P50, P90 or P99, as a share (0.01 is one point)."""
    probability_shift: float = 0.01
    """Mean absolute change of urgency and bucket probabilities."""
    batch_mates: float = 0.01
    """Largest change of an answer by other prompts in its batch, as a share of the output's spread; without rounding to
    8 or 16 bits it may be 1e-5."""

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise InputError(f"limits.{name}", value, "a number in [0, 1]")


@dataclass(frozen=True, kw_only=True)
class VariantsConfig:
    """Makes faster variants of an artifact, keeps those whose answers hold, and says which is best on this machine."""

    INPUTS = ("artifact", "data", "public_key", "sign")
    OUTPUTS = ("out", "markdown")

    artifact: str
    """Artifact folder of export-onnx, with an encoder."""
    data: str
    """Parquet file of answer lengths that evaluate reads (samples/2), with prompts the artifact was not trained on.
    Up to a third of its prompts calibrate int8; the others judge all variants."""
    out: str
    """Folder to write: an artifact folder for each accepted variant, report.json and report.md."""
    overwrite: bool = False
    """Replace an earlier set of variants at `out`, if it holds nothing else; anything else there is never replaced."""
    public_key: str | None = None
    """Public key of minisign, file or base64 line: the artifact must be signed with it."""
    sign: str | None = None
    """Secret key file of minisign: sign the variants, for consumers that verify. Its password, if it has one, is read
    from the environment variable TAILCAST_SIGNING_PASSWORD."""
    variants: list[str] = field(default_factory=lambda: list(KINDS))
    """Which to try: fused (attention in one operator), int8 (for the CPU), fp16 and fp16-fused (for a GPU)."""
    calibration_prompts: int = 128
    """At most so many prompts calibrate the ranges of int8."""
    max_groups: int | None = None
    """Judge on at most so many (prompt, served model) groups; unset: all."""
    group_by: str = "prompt_id,model"
    """Columns that name a group, as in evaluate."""
    max_tokens: int | None = None
    """Cap on all answers, as in evaluate."""
    shapes: list[str] = field(default_factory=lambda: ["1x32", "8x128"])
    """Batches to time, each BATCHxTOKENS; tokens beyond what the artifact reads are left out."""
    repetitions: int = 5
    """Each variant is timed so many times per shape, in turn with the others."""
    threads: int = 1
    """Threads of a model call."""
    limits: Limits = field(default_factory=Limits)
    """What a variant may lose."""
    markdown: str | None = None
    """Also write the Markdown report to this file."""
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
        for name, least in (("calibration_prompts", 1), ("repetitions", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise InputError(name, getattr(self, name), f"a whole number of at least {least}")
        check_threads("threads", self.threads)
        self.timed_shapes  # noqa: B018  (raises for a wrong shape)

    @property
    def timed_shapes(self) -> tuple[tuple[int, int], ...]:
        """(batch, tokens) of each batch to time."""
        found = []
        for shape in self.shapes:
            batch, cross, tokens = shape.partition("x")
            if not cross or not (batch.isdecimal() and tokens.isdecimal()) or not int(batch) * int(tokens):
                raise InputError("shapes", shape, "BATCHxTOKENS, as 8x128")
            found.append((int(batch), int(tokens)))
        if not found:
            raise InputError("shapes", self.shapes, "one or more BATCHxTOKENS")
        return tuple(found)
