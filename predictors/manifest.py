"""The manifest of an artifact: inputs, outputs and origin of the graph, and validation of `manifest.json`.

Inputs and outputs of the graph are derived from the other fields, so a manifest cannot contradict itself.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timedelta
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, computed_field

from predictors.heads import Head, output_tensors
from predictors.tiny import WEIGHTS
from predictors.tokenizer import TruncationSide
from scheduler_core.errors import InputError, suggestion
from scheduler_core.lengths.quantiles import LEVELS
from scheduler_core.prediction.prompt_text import PartTokens, PromptForm

FORMAT_VERSION: Literal[6] = 6
MANIFEST = "manifest.json"
SIGNATURE = "manifest.json.sig"
MODEL = "model.onnx"
TOKENIZER = "tokenizer.json"
NORMALIZATION = "normalization.json"

# Fields of the file that are derived from the others; they are verified, not loaded.
_DERIVED = ("format_version", "tokenizer_files", "inputs", "outputs")
# Not part of the version, so that repeated exports have the same version.
_UNVERSIONED = ("artifact_version", "created")
_RUN = "run.json"
#: Left out of the file if they are unset, for compatibility with files without these fields.
_OPTIONAL = ("quantile_levels", "part_tokens", "amounts")
#: Tables of a calibration; see `predictors.modules.config.Calibration`. Earlier artifacts have only the first two.
_CALIBRATION, _COEFFICIENTS = ("sigma_scale", "mu_shift"), ("location", "log_scale")
#: Maximum number of served models that an error lists.
_MAX_LISTED = 20

Precision = Literal["fp32", "fp16", "int8"]


def _different(values: tuple[Any, ...]) -> tuple[Any, ...]:
    if len(set(values)) < len(values):
        raise ValueError("distinct entries")
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


# Types of JSON values with their ranges.
_NAME, _MAX_NAME_CHARS = r"^[^\x00-\x1f\x7f]*$", 500
Name = Annotated[str, Field(min_length=1, max_length=_MAX_NAME_CHARS, pattern=_NAME)]
Names = Annotated[
    tuple[Name, ...], AfterValidator(_different), Field(json_schema_extra={"uniqueItems": True})
]
Count = Annotated[int, Field(ge=1, le=10**13)]
Edge = Annotated[float, Field(gt=0, le=1e9)]
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$", max_length=255)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_Coefficient = Annotated[float, Field(ge=-1e6, le=1e6)]
CalibrationTable = Annotated[
    tuple[_Coefficient | tuple[_Coefficient, _Coefficient, _Coefficient], ...], Field(min_length=1)
]
_STRICT = ConfigDict(
    strict=True, extra="forbid", frozen=True, json_schema_serialization_defaults_required=True
)


class TensorSpec(BaseModel):
    """One input or output of the graph; a dimension is a size or the name of a dynamic axis."""

    model_config = _STRICT

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    unit: str

    @property
    def datatype(self) -> str:
        """The type's name in the Open Inference Protocol."""
        return {"float32": "FP32", "int64": "INT64", "string": "BYTES"}[self.dtype]


TensorSpecs = Annotated[tuple[TensorSpec, ...], Field(min_length=1)]


class EncoderCard(BaseModel):
    """The encoder of an artifact.

    Attributes:
        architecture: Model type in transformers.
        source: Folder or hub name of the encoder in training.
        num_parameters: Number of weights of the encoder, without heads.
        num_layers: Number of layers, if known.
        width: Width of its hidden states.
    """

    model_config = _STRICT

    architecture: Name
    source: Name
    num_parameters: Count
    num_layers: Annotated[int, Field(ge=1, le=10_000)] | None
    width: Annotated[int, Field(ge=1, le=10**6)]


class Conditions(BaseModel):
    """Inputs of the graph in addition to the prompt.

    The input served_model is 1 + the index of the model in served_models, and 0 for any other model.

    Attributes:
        unknown_models: Whether models that are not in served_models (0) are accepted.
        temperature: Whether there is an input temperature; NaN = unknown.
    """

    model_config = _STRICT

    unknown_models: bool
    temperature: bool


class Manifest(BaseModel):
    """Content of `manifest.json`.

    Attributes:
        artifact_id: Name chosen at export.
        artifact_version: Twelve hex digits, a hash of the manifest except this field, `created` and run.json;
            after "PREFIX+" if the export set a prefix. `write_manifest` computes it.
        created: Time of export, ISO 8601 in UTC.
        heads: Predicted quantities.
        files: File name -> hex SHA-256 of all files except the manifest and its signature.
        opset: Operator set -> version in `model.onnx`; tiny predictors: `predictors.tiny.OPSET`.
        encoder: Encoder of the predictor.
        precision: Precision of the weights and activations of `model.onnx`.
        variant: Rewrites of the graph by `export-variants` and their effect on quality; empty: none.
        nu: Degrees of freedom of the log-t distribution; None: an output of the graph, or no length head.
        within: Whether the graph has the output sigma_within, the scale of lengths of one prompt; sigma also
            includes the error of the predictor in mu.
        quantile_levels: `scheduler_core.lengths.quantiles.LEVELS` if the graph has the output quantiles (ln
            tokens); mu, sigma and nu are then the closest log-t. Otherwise empty, and not in the file.
        max_length: Maximum number of tokens of a prompt, including special tokens.
        truncation_side: Part of a longer prompt that is dropped: its left or right end, or its middle (the
            first max_length - max_length // 2 and the last max_length // 2 tokens are kept).
        pad_token_id: Token id of padding.
        conversations: Whether a prompt is the text of the conversation, not the last one of the user.
        part_tokens: Tokens of the parts of a conversation; None: the whole `conversation_text`, and not in the file.
        amounts: Whether texts are tokenized `with_amount`, the amount of output that they ask for; false: not in the file.
        served_models: LLMs whose lengths the artifact predicts; empty if not declared.
        conditioning: Inputs in addition to the prompt; None: none.
        urgency_levels: Names of the urgency levels, most urgent first.
        abstain_threshold: The artifact abstains if the highest urgency probability is lower, or nearly uniform
            (`scheduler_core.prediction.urgency.abstains`).
        bucket_edges: Bounds of the length buckets; bucket k contains edges[k-1] <= tokens < edges[k].
        calibration: Calibration of mu and sigma, which the graph includes; empty: none.
        training_data: File name and SHA-256 of the training data.
        metrics: Metrics of the checkpoint, written by training.
        parity: Differences between torch and ONNX Runtime.
        versions: Package -> version at export.
        license: SPDX license identifier, if known.
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
    part_tokens: PartTokens | None = None
    amounts: bool = False
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
        return tuple(
            TensorSpec(name=name, dtype="float32", shape=("batch", *shape), unit=unit)
            for name, unit, shape in output_tensors(self)
        )

    @computed_field  # type: ignore[prop-decorator]
    @property
    def format_version(self) -> Literal[6]:
        """`FORMAT_VERSION`."""
        return FORMAT_VERSION

    @computed_field  # type: ignore[prop-decorator]
    @property
    def tokenizer_files(self) -> tuple[str, ...]:
        """Files of the tokenizer."""
        return (TOKENIZER,)

    @property
    def form(self) -> PromptForm:
        """What is read of a request."""
        return PromptForm(conversations=self.conversations, part_tokens=self.part_tokens)

    @property
    def accepts_unknown_models(self) -> bool:
        """Whether LLMs that are not in `served_models` are accepted."""
        return not self.served_models if self.conditioning is None else self.conditioning.unknown_models

    def served_model_number(self, name: str | None) -> int:
        """Value of the input served_model for a model (None or empty: unknown); 0 if the graph has no such
        input. InputError if the artifact does not support the model."""
        if name and name in self.served_models:
            return 0 if self.conditioning is None else self.served_models.index(name) + 1
        if self.accepts_unknown_models or (self.conditioning is None and not name):
            return 0
        if self.conditioning is not None and not name and len(self.served_models) == 1:
            return 1
        allowed = f"{'empty or ' if self.conditioning is None else ''}one of "
        similar = suggestion(name or "", self.served_models)
        if len(self.served_models) > _MAX_LISTED:
            allowed += f"{len(self.served_models)} names in served_models of the artifact"
        else:
            allowed += ", ".join(self.served_models)
        raise InputError("served_model", name or "", allowed + similar)

    def to_json(self) -> dict[str, Any]:
        """Content of the file."""
        content = self.model_dump(mode="json", warnings=False)
        for name in _OPTIONAL:
            if not content[name]:
                del content[name]
        if self.part_tokens is not None and not self.part_tokens.format_size:
            del content["part_tokens"]["format_size"]
        return content


def checked_temperature(value: float | None) -> float:
    """Value of the input temperature, NaN for None; InputError if it is below 0 or infinite."""
    if value is None or math.isnan(value):
        return math.nan
    if not 0 <= value < math.inf:
        raise InputError("temperature", value, "a finite number >= 0, or unset")
    return value


def check_model_names(names: Iterable[str]) -> None:
    """Raises InputError for the name of a served model that no manifest may have; to call before long work."""
    for name in names:
        if not 1 <= len(name) <= _MAX_NAME_CHARS or not re.fullmatch(_NAME, name):
            allowed = f"names of 1 to {_MAX_NAME_CHARS} characters without control characters"
            raise InputError("served_models", name, allowed)


def content_version(content: Mapping[str, Any]) -> str:
    """First twelve hex digits of the SHA-256 of a manifest's canonical JSON (sorted keys, no spaces, ASCII),
    without the fields artifact_version and created and the hash of run.json."""
    versioned = {name: value for name, value in content.items() if name not in _UNVERSIONED}
    if isinstance(versioned.get("files"), Mapping):
        versioned["files"] = {name: digest for name, digest in versioned["files"].items() if name != _RUN}
    return hashlib.sha256(_canonical(versioned).encode()).hexdigest()[:12]


def parse_manifest(content: Mapping[str, Any]) -> Manifest:
    """The manifest from the parsed JSON `content`; InputError if the format version differs, a field is
    missing, unknown, wrong or contradicts another one, or the artifact version does not match the content."""
    version = content.get("format_version")
    check_format("artifact manifest, format_version", version, FORMAT_VERSION, "export it again")
    fields = {name: value for name, value in content.items() if name not in _DERIVED}
    try:
        # From JSON text, because in strict mode pydantic accepts a list as a tuple only there.
        manifest = Manifest.model_validate_json(json.dumps(fields))
    except ValidationError as error:
        raise _input_error(error) from error
    for name, allowed in _contradictions(manifest):
        raise _wrong(name, fields.get(name), allowed)
    _check_derived(content, manifest)
    version = content_version(content)
    if manifest.artifact_version.rpartition("+")[2] != version:
        allowed = f"{version}, the hash of the manifest; the artifact was changed after the export"
        raise _wrong("artifact_version", manifest.artifact_version, allowed)
    return manifest


def manifest_schema() -> dict[str, Any]:
    """JSON Schema of manifest.json, generated from the types; it does not contain rules between fields."""
    schema = Manifest.model_json_schema(mode="serialization")
    schema["properties"]["files"]["additionalProperties"] = False  # no names that do not match the pattern
    schema["required"] = [name for name in schema["required"] if name not in _OPTIONAL]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:tailcast:artifact-manifest:{FORMAT_VERSION}",
        **schema,
        "title": f"tailcast artifact manifest, format {FORMAT_VERSION}",
    }


def check_format(field: str, version: object, expected: int, advice: str) -> None:
    """Raises InputError about `field` for another format version, with `advice` if the version is older."""
    if version == expected and type(version) is int:
        return
    if type(version) is int and version > 0:
        is_older = version < expected
        reason = f"from an older tailcast: {advice}" if is_older else "from a newer tailcast: upgrade"
        raise InputError(field, version, f"{expected}; {reason}")
    raise InputError(field, version, str(expected))


def _contradictions(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Names of fields that contradict other fields, and the allowed values."""
    heads = manifest.heads
    for name in ("nu", "within"):
        if "length" not in heads and getattr(manifest, name):
            yield name, "null or false, because there is no length head"
    if manifest.part_tokens is not None and not manifest.conversations:
        yield "part_tokens", "unset, because conversations is false"
    if manifest.quantile_levels not in ((), LEVELS) or (manifest.quantile_levels and manifest.nu is None):
        yield "quantile_levels", f"none, or {LEVELS} if nu is fixed"
    if "urgency" not in heads and manifest.abstain_threshold is not None:
        yield "abstain_threshold", "null, because there is no urgency head"
    if len(manifest.urgency_levels) < 2 if "urgency" in heads else manifest.urgency_levels:
        yield "urgency_levels", "two or more names with an urgency head, otherwise none"
    if bool(manifest.bucket_edges) is not ("bucket" in heads):
        yield "bucket_edges", "one or more numbers of tokens with a bucket head, otherwise none"
    if manifest.conditioning is not None and not manifest.served_models:
        yield "served_models", "one or more names, because conditioning is set"
    tables = manifest.calibration
    rows = 1 if manifest.conditioning is None else len(manifest.served_models) + 1
    forms = [dict.fromkeys(names, rows) for names in (_CALIBRATION, (*_CALIBRATION, *_COEFFICIENTS))]
    if tables and not (
        {name: len(table) for name, table in tables.items()} in forms
        and all(isinstance(value, float) for name in _CALIBRATION for value in tables[name])
        and all(isinstance(row, tuple) for name in _COEFFICIENTS for row in tables.get(name, ()))
        and all(isinstance(factor, float) and factor > 0 for factor in tables["sigma_scale"])
    ):
        yield (
            "calibration",
            f"empty, or {rows} numbers each: sigma_scale, all above 0, and mu_shift; with or without {rows} rows of three "
            "numbers each: location and log_scale",
        )
    for name in (TOKENIZER, *(() if WEIGHTS in manifest.files else (MODEL, NORMALIZATION))):
        if name not in manifest.files:
            yield "files", f"an object with the key {name}"
    if {MANIFEST, SIGNATURE} & manifest.files.keys():
        yield "files", "neither the manifest nor its signature"


def _check_derived(content: Mapping[str, Any], manifest: Manifest) -> None:
    for name, value in manifest.to_json().items():
        if name not in content:
            raise _wrong(name, "no such field", "a value: the field is required")
        if name in _DERIVED and _canonical(content[name]) != _canonical(value):
            raise _wrong(name, content[name], f"{_canonical(value)}, derived from the other fields")


def _canonical(content: object) -> str:
    return json.dumps(content, sort_keys=True, separators=(",", ":"))


def _input_error(invalid: ValidationError) -> InputError:
    """Converts a pydantic error to an InputError with the path of the field and its allowed values."""
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
        return InputError("artifact manifest", "its JSON", f"valid JSON for pydantic ({error['msg']})")
    return _wrong(name, error["input"], re.sub(r"^\w+ should (be|have|match) ", "", error["msg"]))


def _wrong(name: str, value: object, allowed: str) -> InputError:
    return InputError(f"artifact manifest, {name}", value, allowed)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(manifest_schema(), indent=2, sort_keys=True) + "\n")
