"""The manifest of an artifact: what the graph takes and gives, and where it comes from.

Inputs and outputs of the graph follow from the other fields, so that a manifest cannot contradict itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import AfterValidator, ConfigDict, Field

from scheduler_core.errors import InputError

FORMAT_VERSION = 5
MODEL = "model.onnx"
CAPPED_MODEL = "length.onnx"
TOKENIZER = "tokenizer.json"
NORMALIZATION = "normalization.json"
#: Conformal quantiles that `calibrate` made, where it did.
CONFORMAL = "conformal.json"
#: The optional input of an encoder's graph that takes lexical features.
LEXICAL_INPUT = "lexical"

TruncationSide = Literal["left", "right", "middle"]
Kind = Literal["encoder", "lexical"]
Precision = Literal["fp32", "fp16", "int8"]
Head = Literal["length", "urgency", "bucket", "regression", "rank"]
TRUNCATION_SIDES: tuple[str, ...] = get_args(TruncationSide)


def _different(values: tuple[Any, ...]) -> tuple[Any, ...]:
    if len(set(values)) < len(values):
        raise ValueError("different entries")
    return values


def _ascending(values: tuple[float, ...]) -> tuple[float, ...]:
    if sorted(set(values)) != list(values):
        raise ValueError("ascending numbers")
    return values


def _utc(value: str) -> str:
    try:
        offset = datetime.fromisoformat(value).utcoffset()
    except ValueError:
        offset = None
    if offset != timedelta(0):
        raise ValueError("a time in ISO 8601, UTC")
    return value


# What a JSON value may be; `predictors.manifest_reader` checks it, a manifest under construction is a draft.
Name = Annotated[str, Field(min_length=1, max_length=500, pattern=r"^[^\x00-\x1f\x7f]*$")]
Names = Annotated[
    tuple[Name, ...], AfterValidator(_different), Field(json_schema_extra={"uniqueItems": True})
]
Count = Annotated[int, Field(ge=1, le=10**13)]
Level = Annotated[float, Field(gt=0, lt=1)]
Levels = Annotated[tuple[Level, ...], Field(min_length=1), AfterValidator(_ascending)]
Edge = Annotated[float, Field(gt=0, le=1e9)]
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$", max_length=255)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
CalibrationTable = Annotated[tuple[Annotated[float, Field(ge=-1e6, le=1e6)], ...], Field(min_length=1)]
_STRICT = ConfigDict(strict=True, extra="forbid", json_schema_serialization_defaults_required=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One input or output of the graph; a dimension is a size or the name of a free axis.

    An optional input has a default inside the graph and may be left out.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    unit: str
    optional: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LexicalInput:
    """What is computed from a prompt's text before the graph runs (`predictors.lexical`).

    Attributes:
        feature_names: Columns of the input, in order.
        feature_version: Version of their definition.
        max_chars: Most characters of a prompt that are read.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    feature_names: Annotated[Names, Field(min_length=1)]
    feature_version: Annotated[int, Field(ge=1, le=1000)]
    max_chars: Annotated[int, Field(ge=1, le=10**9)]


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderCard:
    """What the encoder of an artifact is.

    Attributes:
        architecture: Model type, as transformers names it.
        source: Where training took it from, as the user named it.
        num_parameters: Weights of the encoder, heads not counted.
        num_layers: Its layers, where its configuration says.
        width: Width of its hidden states.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    architecture: Name
    source: Name
    num_parameters: Count
    num_layers: Annotated[int, Field(ge=1, le=10_000)] | None
    width: Annotated[int, Field(ge=1, le=10**6)]


@dataclass(frozen=True, slots=True, kw_only=True)
class CappedLengths:
    """A second graph, `length.onnx`: numbers of the capped length min(X, max_tokens), X log-t distributed.

    It takes what the first graph gives and max_tokens, so that who does not need it does not pay for it.

    Attributes:
        cvar_level: alpha of CVaR_alpha, the mean of the worst 1 - alpha share.
        quantile_levels: Levels of the quantiles, ascending.
        has_nu: nu is an input too, because it is predicted.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    cvar_level: Level
    quantile_levels: Levels
    has_nu: bool

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """Inputs of the graph, in order."""
        named = [("mu", "log tokens"), ("sigma", "log tokens")]
        named += [("nu", "degrees of freedom")] if self.has_nu else []
        floats = [TensorSpec(name=name, dtype="float32", shape=("batch",), unit=unit) for name, unit in named]
        cap = TensorSpec(name="max_tokens", dtype="int64", shape=("batch",), unit="tokens, >= 1")
        return (*floats, cap)

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """Outputs of the graph, in order; NaN in a row whose max_tokens is below 1."""
        quantiles = ("batch", len(self.quantile_levels))
        return (
            TensorSpec(name="expected_tokens", dtype="float32", shape=("batch",), unit="tokens"),
            TensorSpec(name="cvar_tokens", dtype="float32", shape=("batch",), unit="tokens"),
            TensorSpec(name="quantile_tokens", dtype="float32", shape=quantiles, unit="tokens"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """What the graph sees beside the prompt.

    The input served_model is 1 + the model's position in the manifest's served_models, and 0 for any other model.

    Attributes:
        unknown_models: 0 was trained; without it, models that are not in the list are refused.
        temperature: There is an input temperature; NaN = unknown.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    unknown_models: bool
    temperature: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Content of `manifest.json`.

    Attributes:
        artifact_id: Name of what is predicted with, chosen at export.
        artifact_version: Twelve hex digits that change with anything in this manifest but this field, `created` and
            run.json, behind "PREFIX+" where the export named one; `write_manifest` computes them.
        created: Time of export, ISO 8601 in UTC.
        kind: "encoder" reads token ids (and features of the text, where `lexical` is set), "lexical" features alone.
        heads: What is predicted, out of length, urgency, bucket, regression, rank.
        files: File name -> hex SHA-256 of every file but the manifest and its signature; `write_manifest` fills it in.
        opset: Operator set -> version that `model.onnx` is written in; `write_manifest` fills it in.
        encoder: What the encoder is; None for a lexical artifact.
        precision: Of the weights and activations of `model.onnx`.
        variant: How the graph was made faster, and what it costs in accuracy; empty: not at all.
        capped: The second graph, of numbers of the capped length; None: there is none.
        nu: Degrees of freedom of the log-t length distribution; None: the graph gives them, or predicts no length.
        within: The graph also gives sigma_within, how far answers to the same prompt lie from each other; sigma holds the
            predictor's own error in mu as well.
        max_length: Most tokens the model reads, special tokens included; None for a lexical artifact.
        truncation_side: What of a longer prompt is dropped: its left or right end, or its middle (kept are the first
            max_length - max_length // 2 tokens and the last max_length // 2); None for a lexical artifact.
        pad_token_id: Token id of padding; None for a lexical artifact.
        lexical: Features of the text that the graph takes; None: none.
        conversations: A prompt is the text of a whole conversation (`predictors.conversation`), not its last user message.
        served_models: LLMs whose lengths the artifact predicts; empty if not declared.
        conditioning: What the graph sees beside the prompt; None: nothing.
        urgency_levels: Names of the urgency levels, the most urgent first.
        abstain_threshold: A highest urgency probability below this means that the artifact does not know; None: it
            always answers; 1: it never does.
        bucket_edges: Bounds of the length buckets in tokens; bucket k holds edges[k-1] <= tokens < edges[k].
        calibration: What was done to mu and sigma after training (it is inside the graph); empty: nothing.
        training_data: What it was trained on: file name and SHA-256.
        metrics: Metrics of the checkpoint, as training wrote them.
        parity: How far torch and ONNX Runtime differ.
        versions: Package -> version at export.
        license: Licence of the artifact, if stated.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    artifact_id: Name
    created: Annotated[str, AfterValidator(_utc)]
    heads: Annotated[tuple[Head, ...], Field(min_length=1), AfterValidator(_different)]
    artifact_version: Name = ""
    files: Mapping[FileName, Sha256] = field(default_factory=dict)
    opset: Mapping[str, int] = field(default_factory=dict)
    kind: Kind = "encoder"
    encoder: EncoderCard | None = None
    precision: Precision = "fp32"
    variant: Mapping[str, Any] = field(default_factory=dict)
    capped: CappedLengths | None = None
    nu: Annotated[float, Field(ge=0.1, le=1e9)] | None = None
    within: bool = False
    max_length: Annotated[int, Field(ge=1, le=10**6)] | None = None
    truncation_side: TruncationSide | None = None
    pad_token_id: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    lexical: LexicalInput | None = None
    conversations: bool = False
    served_models: Names = ()
    conditioning: Conditions | None = None
    urgency_levels: Names = ()
    abstain_threshold: Annotated[float, Field(ge=0, le=1)] | None = None
    bucket_edges: Annotated[tuple[Edge, ...], AfterValidator(_ascending)] = ()
    calibration: Mapping[str, CalibrationTable] = field(default_factory=dict)
    training_data: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, Any] = field(default_factory=dict)
    parity: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    license: Name | None = None

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """Inputs of the graph, in order."""
        width = 0 if self.lexical is None else len(self.lexical.feature_names)
        if self.kind == "lexical":
            specs = [TensorSpec(name="features", dtype="float32", shape=("batch", width), unit="see lexical")]
        else:
            tokens = ("batch", "seq")
            specs = [
                TensorSpec(name="input_ids", dtype="int64", shape=tokens, unit="token id"),
                TensorSpec(name="attention_mask", dtype="int64", shape=tokens, unit="1 = token, 0 = padding"),
            ]
        if self.conditioning is not None:
            unit = "1 + position in served_models, 0 = another"
            specs.append(TensorSpec(name="served_model", dtype="int64", shape=("batch",), unit=unit))
            if self.conditioning.temperature:
                unit = "sampling temperature, NaN = unknown"
                specs.append(TensorSpec(name="temperature", dtype="float32", shape=("batch",), unit=unit))
        if self.kind == "encoder" and self.lexical is not None:
            unit = "see lexical, a row of NaN = unknown"
            specs.append(
                TensorSpec(
                    name=LEXICAL_INPUT, dtype="float32", shape=("batch", width), unit=unit, optional=True
                )
            )
        return tuple(specs)

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """Outputs of the graph, in order; all float32."""
        found: list[tuple[str, str, int | None]] = []
        if "length" in self.heads:
            found += [("mu", "log tokens", None), ("sigma", "log tokens", None)]
            if self.nu is None:
                found.append(("nu", "degrees of freedom", None))
            if self.within:
                found.append(("sigma_within", "log tokens", None))
        if "urgency" in self.heads:
            found.append(("urgency", "probability", len(self.urgency_levels)))
        if "bucket" in self.heads:
            found.append(("bucket", "probability", len(self.bucket_edges) + 1))
        if "regression" in self.heads:
            found.append(("regression_tokens", "tokens", None))
        if "rank" in self.heads:
            found.append(("rank", "none; larger = longer", None))
        return tuple(
            TensorSpec(
                name=name, dtype="float32", shape=("batch",) if width is None else ("batch", width), unit=unit
            )
            for name, unit, width in found
        )

    @property
    def tokenizer_files(self) -> tuple[str, ...]:
        """Files that turn text into token ids; none for a lexical artifact."""
        return (TOKENIZER,) if self.kind == "encoder" else ()

    @property
    def accepts_unknown_models(self) -> bool:
        """Whether it also predicts for LLMs that are not in `served_models`."""
        return not self.served_models if self.conditioning is None else self.conditioning.unknown_models

    def served_model_number(self, name: str | None) -> int:
        """What the graph's input served_model gets for a served model; 0 where there is no such input.

        Args:
            name: The LLM's name; None or empty: not told.

        Raises:
            InputError: The artifact has not learnt lengths of such a model.
        """
        named = ", ".join(self.served_models)
        if name and name in self.served_models:
            return 0 if self.conditioning is None else self.served_models.index(name) + 1
        if self.accepts_unknown_models:
            return 0
        if self.conditioning is None:
            if name:
                raise InputError("served_model", name, f"empty or one of {named}")
            return 0
        if not name and len(self.served_models) == 1:
            return 1
        raise InputError("served_model", name or "", f"one of {named}")

    def to_json(self) -> dict[str, Any]:
        """Content of the file."""
        tensors = {
            "inputs": [asdict(tensor) for tensor in self.inputs],
            "outputs": [asdict(tensor) for tensor in self.outputs],
        }
        content = asdict(self)
        if self.capped is not None:
            content["capped"] |= {
                "inputs": [asdict(tensor) for tensor in self.capped.inputs],
                "outputs": [asdict(tensor) for tensor in self.capped.outputs],
            }
        derived = {"format_version": FORMAT_VERSION, "tokenizer_files": list(self.tokenizer_files)}
        return {**derived, **content, **tensors}


def checked_temperature(value: float | None) -> float:
    """What the graph's input temperature gets: NaN for None.

    Raises:
        InputError: Below 0 or infinite.
    """
    if value is None or math.isnan(value):
        return math.nan
    if not 0 <= value < math.inf:
        raise InputError("temperature", value, "a finite number >= 0, or unset")
    return value
