"""The manifest of an artifact: what the graph takes and gives, where it comes from, and the checks of `manifest.json`.

Inputs and outputs of the graph follow from the other fields, so that a manifest cannot contradict itself.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import sys
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, computed_field

from predictors.tiny import WEIGHTS
from scheduler_core.errors import InputError
from scheduler_core.lengths.quantiles import LEVELS

FORMAT_VERSION: Literal[6] = 6
MANIFEST = "manifest.json"
SIGNATURE = "manifest.json.sig"
MODEL = "model.onnx"
TOKENIZER = "tokenizer.json"
NORMALIZATION = "normalization.json"
#: Conformal quantiles that `calibrate` made, where it did.
CONFORMAL = "conformal.json"

# Fields of the file that follow from the others: compared, not read.
_DERIVED = ("format_version", "tokenizer_files", "inputs", "outputs")
# Not part of the version: an export that is repeated elsewhere, at another time, gives the same one.
_UNVERSIONED = ("artifact_version", "created")
_RUN = "run.json"
_CALIBRATION = ("sigma_scale", "mu_shift")

TruncationSide = Literal["left", "right", "middle"]
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


# Ranges of JSON values.
Name = Annotated[str, Field(min_length=1, max_length=500, pattern=r"^[^\x00-\x1f\x7f]*$")]
Names = Annotated[
    tuple[Name, ...], AfterValidator(_different), Field(json_schema_extra={"uniqueItems": True})
]
Count = Annotated[int, Field(ge=1, le=10**13)]
Edge = Annotated[float, Field(gt=0, le=1e9)]
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$", max_length=255)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
CalibrationTable = Annotated[tuple[Annotated[float, Field(ge=-1e6, le=1e6)], ...], Field(min_length=1)]
_STRICT = ConfigDict(
    strict=True, extra="forbid", frozen=True, json_schema_serialization_defaults_required=True
)


class TensorSpec(BaseModel):
    """One input or output of the graph; a dimension is a size or the name of a free axis."""

    model_config = _STRICT

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    unit: str


TensorSpecs = Annotated[tuple[TensorSpec, ...], Field(min_length=1)]


class EncoderCard(BaseModel):
    """The encoder of an artifact.

    Attributes:
        architecture: Model type, as transformers names it.
        source: Where training took it from, as the user named it.
        num_parameters: Weights of the encoder, heads not counted.
        num_layers: Number of layers, if its configuration has it.
        width: Width of its hidden states.
    """

    model_config = _STRICT

    architecture: Name
    source: Name
    num_parameters: Count
    num_layers: Annotated[int, Field(ge=1, le=10_000)] | None
    width: Annotated[int, Field(ge=1, le=10**6)]


class Conditions(BaseModel):
    """Inputs of the graph beside the prompt.

    The input served_model is 1 + the model's position in the manifest's served_models, and 0 for any other model.

    Attributes:
        unknown_models: 0 was trained; without it, models that are not in the list are refused.
        temperature: There is an input temperature; NaN = unknown.
    """

    model_config = _STRICT

    unknown_models: bool
    temperature: bool


class Manifest(BaseModel):
    """Content of `manifest.json`.

    Attributes:
        artifact_id: Name chosen at export.
        artifact_version: Twelve hex digits that change with anything in this manifest but this field, `created` and
            run.json, behind "PREFIX+" where the export named one; `write_manifest` computes them.
        created: Time of export, ISO 8601 in UTC.
        heads: Predicted quantities.
        files: File name -> hex SHA-256 of every file but the manifest and its signature; `write_manifest` fills it in.
        opset: Operator set -> version that `model.onnx` is written in; `write_manifest` fills it in. Of a tiny predictor:
            `predictors.tiny.OPSET`.
        encoder: The encoder.
        precision: Of the weights and activations of `model.onnx`.
        variant: How the graph was made faster, and its cost in accuracy; empty: it was not.
        nu: Degrees of freedom of the log-t length distribution; None: the graph gives them, or predicts no length.
        within: The graph also gives sigma_within, the scale of lengths of the same prompt; sigma holds the predictor's
            own error in mu as well.
        quantile_levels: The graph also gives quantiles of ln tokens at these levels, those of `scheduler_core.lengths.quantiles`;
            mu, sigma and nu are the log-t closest to them. Empty, and not in the file: it does not.
        max_length: Maximum number of tokens of a prompt, special tokens included.
        truncation_side: Where a longer prompt is truncated: at its left or right end, or in the middle (the first
            max_length - max_length // 2 tokens and the last max_length // 2 remain).
        pad_token_id: Token id of padding.
        conversations: A prompt is the `conversation_text` of all messages, not the last user message.
        served_models: LLMs whose lengths the artifact predicts; empty if not declared.
        conditioning: Inputs beside the prompt; None: none.
        urgency_levels: Names of the urgency levels, the most urgent first.
        abstain_threshold: With a highest urgency probability below this the artifact abstains; None: never; 1: always.
        bucket_edges: Bounds of the length buckets in tokens; bucket k holds edges[k-1] <= tokens < edges[k].
        calibration: Changes of mu and sigma after training (they are part of the graph); empty: none.
        training_data: File name and SHA-256 of the training data.
        metrics: Metrics of the checkpoint, as training wrote them.
        parity: Differences between torch and ONNX Runtime.
        versions: Package -> version at export.
        license: Licence of the artifact, if stated.
    """

    model_config = _STRICT

    artifact_id: Name
    created: Annotated[str, AfterValidator(_utc)]
    heads: Annotated[tuple[Head, ...], Field(min_length=1), AfterValidator(_different)]
    encoder: EncoderCard
    max_length: Annotated[int, Field(ge=1, le=10**6)]
    truncation_side: TruncationSide
    pad_token_id: Annotated[int, Field(ge=0, lt=2**31)]
    artifact_version: Name = ""
    files: Mapping[FileName, Sha256] = Field(default_factory=dict)
    opset: Annotated[Mapping[str, Count], Field(min_length=1)] = Field(default_factory=dict)
    precision: Precision = "fp32"
    variant: Mapping[str, Any] = Field(default_factory=dict)
    nu: Annotated[float, Field(ge=0.1, le=1e9)] | None = None
    within: bool = False
    quantile_levels: tuple[float, ...] = ()
    conversations: bool = False
    served_models: Names = ()
    conditioning: Conditions | None = None
    urgency_levels: Names = ()
    abstain_threshold: Annotated[float, Field(ge=0, le=1)] | None = None
    bucket_edges: Annotated[tuple[Edge, ...], AfterValidator(_ascending)] = ()
    calibration: Mapping[str, CalibrationTable] = Field(default_factory=dict)
    training_data: Mapping[str, Any] = Field(default_factory=dict)
    metrics: Mapping[str, Any] = Field(default_factory=dict)
    parity: Mapping[str, Any] = Field(default_factory=dict)
    versions: Mapping[str, str] = Field(default_factory=dict)
    license: Name | None = None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def inputs(self) -> TensorSpecs:
        """Inputs of the graph, in order."""
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
        return tuple(specs)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def outputs(self) -> TensorSpecs:
        """Outputs of the graph, in order; all float32."""
        row: tuple[int | str, ...] = ("batch",)
        length = [("mu", "log tokens", row), ("sigma", "log tokens", row)]
        length += [("nu", "degrees of freedom", row)] if self.nu is None else []
        length += [("sigma_within", "log tokens", row)] if self.within else []
        if self.quantile_levels:
            length.append(("quantiles", "log tokens", (*row, len(self.quantile_levels))))
        tensors = {
            "length": length,
            "urgency": [("urgency", "probability", (*row, len(self.urgency_levels)))],
            "bucket": [("bucket", "probability", (*row, len(self.bucket_edges) + 1))],
            "regression": [("regression_tokens", "tokens", row)],
            "rank": [("rank", "none; larger = longer", row)],
        }
        return tuple(
            TensorSpec(name=name, dtype="float32", shape=shape, unit=unit)
            for head in get_args(Head)
            if head in self.heads
            for name, unit, shape in tensors[head]
        )

    @computed_field  # type: ignore[prop-decorator]
    @property
    def format_version(self) -> Literal[6]:
        """`FORMAT_VERSION`."""
        return FORMAT_VERSION

    @computed_field  # type: ignore[prop-decorator]
    @property
    def tokenizer_files(self) -> tuple[str, ...]:
        """Files that turn text into token ids."""
        return (TOKENIZER,)

    @property
    def accepts_unknown_models(self) -> bool:
        """Whether it also predicts for LLMs that are not in `served_models`."""
        return not self.served_models if self.conditioning is None else self.conditioning.unknown_models

    def served_model_number(self, name: str | None) -> int:
        """Value of the graph's input served_model for a model (None or empty: unknown); 0 where there is no such input.
        InputError if the artifact was not trained on such a model."""
        if name and name in self.served_models:
            return 0 if self.conditioning is None else self.served_models.index(name) + 1
        if self.accepts_unknown_models or (self.conditioning is None and not name):
            return 0
        if self.conditioning is not None and not name and len(self.served_models) == 1:
            return 1
        empty = "empty or " if self.conditioning is None else ""
        raise InputError("served_model", name or "", f"{empty}one of {', '.join(self.served_models)}")

    def to_json(self) -> dict[str, Any]:
        """Content of the file."""
        content = self.model_dump(mode="json", warnings=False)
        if not self.quantile_levels:  # as files were before there were any
            del content["quantile_levels"]
        return content


def checked_temperature(value: float | None) -> float:
    """Value of the graph's input temperature: NaN for None; raises InputError if it is below 0 or infinite."""
    if value is None or math.isnan(value):
        return math.nan
    if not 0 <= value < math.inf:
        raise InputError("temperature", value, "a finite number >= 0, or unset")
    return value


def content_version(content: Mapping[str, Any]) -> str:
    """Twelve hex digits of the SHA-256 of a manifest's canonical JSON (keys sorted, no spaces, ASCII), without its fields
    artifact_version and created, and the hash of run.json."""
    versioned = {name: value for name, value in content.items() if name not in _UNVERSIONED}
    if isinstance(versioned.get("files"), Mapping):
        versioned["files"] = {name: digest for name, digest in versioned["files"].items() if name != _RUN}
    return hashlib.sha256(_canonical(versioned).encode()).hexdigest()[:12]


def parse_manifest(content: Mapping[str, Any]) -> Manifest:
    """The manifest that `content`, the parsed JSON, describes; InputError if the format is of another version, a field is
    missing, unknown, wrong or contradicts another one, or the artifact version is not that of the content."""
    version = content.get("format_version")
    check_format("artifact manifest, format_version", version, FORMAT_VERSION, "export it again")
    fields = {name: value for name, value in content.items() if name not in _DERIVED}
    try:
        # Of JSON text, for which pydantic's strict mode takes an array for a tuple.
        manifest = Manifest.model_validate_json(json.dumps(fields))
    except ValidationError as error:
        raise _input_error(error) from error
    for name, allowed in _contradictions(manifest):
        raise _wrong(name, fields.get(name), allowed)
    _check_derived(content, manifest)
    version = content_version(content)
    if manifest.artifact_version.rpartition("+")[2] != version:
        allowed = f"{version}, which follows from the rest of the manifest: it was changed after the export"
        raise _wrong("artifact_version", manifest.artifact_version, allowed)
    return manifest


def manifest_schema() -> dict[str, Any]:
    """JSON Schema of manifest.json, made from the types; rules between fields are not in it."""
    schema = Manifest.model_json_schema(mode="serialization")
    schema["properties"]["files"]["additionalProperties"] = False  # names of another pattern
    schema["required"].remove("quantile_levels")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:tailcast:artifact-manifest:{FORMAT_VERSION}",
        **schema,
        "title": f"tailcast artifact manifest, format {FORMAT_VERSION}",
    }


def check_format(field: str, version: object, expected: int, advice: str) -> None:
    """Raises InputError, naming `field`, for another format version; `advice` is what to do about an older one."""
    if version == expected and type(version) is int:
        return
    if type(version) is int and version > 0:
        is_older = version < expected
        reason = f"an older tailcast wrote it: {advice}" if is_older else "it is newer: upgrade tailcast"
        raise InputError(field, version, f"{expected}; {reason}")
    raise InputError(field, version, str(expected))


def _contradictions(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Fields that others do not allow, and what they allow."""
    heads = manifest.heads
    for name in ("nu", "within"):
        if "length" not in heads and getattr(manifest, name):
            yield name, "null or false, because no length is predicted"
    if manifest.quantile_levels not in ((), LEVELS) or (manifest.quantile_levels and manifest.nu is None):
        yield "quantile_levels", f"none, or {LEVELS} where nu is fixed"
    if "urgency" not in heads and manifest.abstain_threshold is not None:
        yield "abstain_threshold", "null, because no urgency is predicted"
    if len(manifest.urgency_levels) < 2 if "urgency" in heads else manifest.urgency_levels:
        yield "urgency_levels", "two or more names with an urgency head, else none"
    if bool(manifest.bucket_edges) is not ("bucket" in heads):
        yield "bucket_edges", "one or more numbers of tokens with a bucket head, else none"
    if manifest.conditioning is not None and not manifest.served_models:
        yield "served_models", "one or more names, because of conditioning"
    tables = manifest.calibration
    rows = 1 if manifest.conditioning is None else len(manifest.served_models) + 1
    if tables and (
        {name: len(table) for name, table in tables.items()} != dict.fromkeys(_CALIBRATION, rows)
        or min(tables["sigma_scale"]) <= 0
    ):
        yield "calibration", f"empty, or {rows} numbers each: sigma_scale, all above 0, and mu_shift"
    for name in (TOKENIZER, *(() if WEIGHTS in manifest.files else (MODEL, NORMALIZATION))):
        if name not in manifest.files:
            yield "files", f"an object with {name}"
    if {MANIFEST, SIGNATURE} & manifest.files.keys():
        yield "files", "neither the manifest nor its signature"


def _check_derived(content: Mapping[str, Any], manifest: Manifest) -> None:
    for name, value in manifest.to_json().items():
        if name not in content:
            raise _wrong(name, "no such field", "a value: the field is required")
        if name in _DERIVED and _canonical(content[name]) != _canonical(value):
            raise _wrong(name, content[name], f"{_canonical(value)}, as the other fields imply")


def _canonical(content: object) -> str:
    return json.dumps(content, sort_keys=True, separators=(",", ":"))


def _input_error(invalid: ValidationError) -> InputError:
    """A pydantic error as the project's: the field by its path, and what is allowed there."""
    error = invalid.errors(include_url=False)[0]
    path = [str(step) for step in error["loc"] if step != "[key]"]
    name, kind = ", ".join(path), error["type"]
    if kind == "extra_forbidden":
        return _wrong(name, error["input"], f"no field of this name in format {FORMAT_VERSION}")
    if kind == "missing":
        return _wrong(name, "no such field", "a value: the field is required")
    if kind == "value_error":
        return _wrong(name, error["input"], str(error["ctx"]["error"]))
    if kind == "json_invalid":
        return InputError("artifact manifest", "its JSON", f"JSON that pydantic reads ({error['msg']})")
    return _wrong(name, error["input"], re.sub(r"^\w+ should (be|have|match) ", "", error["msg"]))


def _wrong(name: str, value: object, allowed: str) -> InputError:
    return InputError(f"artifact manifest, {name}", value, allowed)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(manifest_schema(), indent=2, sort_keys=True) + "\n")
