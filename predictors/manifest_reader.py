"""Reading a manifest: every field is checked before anything uses it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any, cast

from predictors.manifest import (
    CAPPED_MODEL,
    FORMAT_VERSION,
    HEADS,
    PRECISIONS,
    REQUIRED_FILES,
    TRUNCATION_SIDES,
    CappedLengths,
    Conditions,
    EncoderCard,
    Kind,
    LexicalInput,
    Manifest,
    Precision,
    TruncationSide,
)
from predictors.onnx_header import check_opset
from scheduler_core.errors import InputError

MANIFEST = "manifest.json"
SIGNATURE = "manifest.json.minisig"


def parse_manifest(content: object) -> Manifest:
    """The manifest that `content`, the parsed JSON, describes.

    Raises:
        InputError: The format is of another version, or a field is missing, wrong, or contradicts another one.
    """
    if not isinstance(content, dict):
        raise InputError("artifact manifest", content, "a JSON object")
    _check_format(content.get("format_version"))
    kind = content.get("kind")
    if kind not in REQUIRED_FILES:
        raise _wrong("kind", kind, " or ".join(REQUIRED_FILES))
    licence = content.get("license")
    if licence is not None and not isinstance(licence, str):
        raise _wrong("license", licence, "a string or null")
    is_encoder = kind == "encoder"
    heads = _heads(content)
    nu = _nu(content.get("nu"), heads)
    files = _files(content.get("files"), REQUIRED_FILES[cast(Kind, kind)])
    manifest = Manifest(
        artifact_id=_text(content, "artifact_id"),
        artifact_version=_text(content, "artifact_version"),
        created=_text(content, "created"),
        kind=cast(Kind, kind),
        heads=heads,
        files=files,
        opset=_opset(content.get("opset")),
        encoder=_encoder(content.get("encoder")) if is_encoder else None,
        precision=_precision(content.get("precision")),
        variant=_mapping(content, "variant"),
        capped=_capped(content.get("capped"), heads, has_nu=nu is None, files=files),
        nu=nu,
        max_length=_integer(content, "max_length", minimum=1) if is_encoder else None,
        truncation_side=_side(content.get("truncation_side")) if is_encoder else None,
        pad_token_id=_integer(content, "pad_token_id", minimum=0) if is_encoder else None,
        conversations=_flag(content, "conversations"),
        lexical=_lexical(content.get("lexical"), required=not is_encoder),
        served_models=_names(content, "served_models"),
        within=_within(content.get("within", False), heads),
        conditioning=_conditions(content),
        urgency_levels=_urgency_levels(content, heads),
        abstain_threshold=_abstain_threshold(content.get("abstain_threshold"), heads),
        bucket_edges=_bucket_edges(content.get("bucket_edges", []), heads),
        calibration=_mapping(content, "calibration"),
        training_data=_mapping(content, "training_data"),
        metrics=_mapping(content, "metrics"),
        parity=_mapping(content, "parity"),
        versions=_mapping(content, "versions"),
        license=licence,
    )
    if content.get("tokenizer_files") != list(manifest.tokenizer_files):
        wanted_files = ", ".join(manifest.tokenizer_files) or "nothing"
        raise _wrong("tokenizer_files", content.get("tokenizer_files"), f"a list of {wanted_files}")
    for name, tensors in (("inputs", manifest.inputs), ("outputs", manifest.outputs)):
        wanted = [tensor.name for tensor in tensors]
        if _tensor_names(content.get(name)) != wanted:
            raise _wrong(name, content.get(name), f"a list of objects named {', '.join(wanted)}")
    return manifest


def _check_format(version: object) -> None:
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise _wrong("format_version", version, str(FORMAT_VERSION))
    if version != FORMAT_VERSION:
        older = "an older tailcast wrote this artifact: export it again"
        newer = "a newer tailcast wrote this artifact: upgrade"
        reason = older if version < FORMAT_VERSION else newer
        raise _wrong("format_version", version, f"{FORMAT_VERSION}; {reason}")


def _wrong(name: str, value: object, allowed: str) -> InputError:
    return InputError(f"artifact manifest, {name}", value, allowed)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _text(content: Mapping[str, Any], name: str) -> str:
    value = content.get(name)
    if not isinstance(value, str) or not value:
        raise _wrong(name, value, "a string that is not empty")
    return value


def _integer(content: Mapping[str, Any], name: str, minimum: int) -> int:
    value = content.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise _wrong(name, value, f"an integer >= {minimum}")
    return value


def _mapping(content: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = content.get(name, {})
    if not isinstance(value, dict):
        raise _wrong(name, value, "a JSON object")
    return value


def _flag(content: Mapping[str, Any], name: str) -> bool:
    value = content.get(name)
    if not isinstance(value, bool):
        raise _wrong(name, value, "true or false")
    return value


def _names(content: Mapping[str, Any], name: str) -> tuple[str, ...]:
    value = content.get(name, [])
    if not isinstance(value, list) or not all(isinstance(entry, str) and entry for entry in value):
        raise _wrong(name, value, "a list of names")
    if len(set(value)) < len(value):
        raise _wrong(name, value, "a list of different names")
    return tuple(value)


def _heads(content: Mapping[str, Any]) -> tuple[str, ...]:
    heads = _names(content, "heads")
    if not heads or not set(heads) <= set(HEADS):
        raise _wrong("heads", list(heads), f"one or more of {', '.join(HEADS)}")
    return heads


def _nu(value: object, heads: tuple[str, ...]) -> float | None:
    if value is None:
        return None
    if "length" not in heads:
        raise _wrong("nu", value, "null, because no length is predicted")
    if not _is_number(value) or not cast(float, value) > 0:
        raise _wrong("nu", value, "a finite number > 0, or null where the graph gives it")
    return float(cast(float, value))


def _side(value: object) -> TruncationSide:
    if value not in TRUNCATION_SIDES:
        raise _wrong("truncation_side", value, ", ".join(TRUNCATION_SIDES))
    return cast(TruncationSide, value)


def _precision(value: object) -> Precision:
    if value not in PRECISIONS:
        raise _wrong("precision", value, ", ".join(PRECISIONS))
    return cast(Precision, value)


def _opset(value: object) -> dict[str, int]:
    if not isinstance(value, dict) or not value:
        raise _wrong("opset", value, "an object of operator set: version")
    for name, version in value.items():
        if not isinstance(version, int) or isinstance(version, bool):
            raise _wrong(f"opset {name}", version, "a version, an integer")
    check_opset(value, "artifact manifest")
    return value


def _encoder(value: object) -> EncoderCard:
    names = ("architecture", "source", "num_parameters", "num_layers", "width")
    if not isinstance(value, dict):
        raise _wrong("encoder", value, f"an object with {', '.join(names)}")
    for name in ("architecture", "source"):
        if not isinstance(value.get(name), str) or not value[name]:
            raise _wrong(f"encoder, {name}", value.get(name), "a string that is not empty")
    for name in ("num_parameters", "num_layers", "width"):
        number = value.get(name)
        if name == "num_layers" and number is None:
            continue
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise _wrong(f"encoder, {name}", number, "an integer >= 1")
    return EncoderCard(**{name: cast(Any, value.get(name)) for name in names})


def _capped(
    value: object, heads: tuple[str, ...], *, has_nu: bool, files: Mapping[str, str]
) -> CappedLengths | None:
    if value is None:
        return None
    if not isinstance(value, dict) or "length" not in heads or CAPPED_MODEL not in files:
        raise _wrong("capped", value, f"null, or an object beside a length head and a file {CAPPED_MODEL}")
    level, quantiles = value.get("cvar_level"), value.get("quantile_levels")
    if not _is_number(level) or not 0 < cast(float, level) < 1:
        raise _wrong("capped, cvar_level", level, "a number in (0, 1)")
    if not isinstance(quantiles, list) or not all(_is_number(each) and 0 < each < 1 for each in quantiles):
        raise _wrong("capped, quantile_levels", quantiles, "a list of numbers in (0, 1)")
    if not quantiles or not all(low < high for low, high in itertools.pairwise(quantiles)):
        raise _wrong("capped, quantile_levels", quantiles, "one or more ascending numbers")
    if value.get("has_nu") is not has_nu:
        raise _wrong("capped, has_nu", value.get("has_nu"), "true where nu is null, else false")
    capped = CappedLengths(
        cvar_level=float(cast(float, level)),
        quantile_levels=tuple(float(each) for each in quantiles),
        has_nu=has_nu,
    )
    for name, tensors in (("inputs", capped.inputs), ("outputs", capped.outputs)):
        wanted = [tensor.name for tensor in tensors]
        if _tensor_names(value.get(name)) != wanted:
            raise _wrong(f"capped, {name}", value.get(name), f"a list of objects named {', '.join(wanted)}")
    return capped


def _lexical(value: object, *, required: bool) -> LexicalInput | None:
    if value is None and not required:
        return None
    if not isinstance(value, dict):
        raise _wrong("lexical", value, "an object with feature_names, feature_version and max_chars")
    names = value.get("feature_names")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise _wrong("lexical, feature_names", names, "a list of names")
    for name in ("feature_version", "max_chars"):
        number = value.get(name)
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise _wrong(f"lexical, {name}", number, "an integer >= 1")
    return LexicalInput(
        feature_names=tuple(names),
        feature_version=value["feature_version"],
        max_chars=value["max_chars"],
    )


def _conditions(content: Mapping[str, Any]) -> Conditions | None:
    value = content.get("conditioning")
    if value is None:
        return None
    names = ("unknown_models", "temperature")
    if not isinstance(value, dict) or not all(isinstance(value.get(name), bool) for name in names):
        raise _wrong("conditioning", value, f"null or an object with {' and '.join(names)}: true or false")
    if not content.get("served_models"):
        raise _wrong(
            "served_models", content.get("served_models"), "a list of names, because of conditioning"
        )
    return Conditions(**{name: value[name] for name in names})


def _urgency_levels(content: Mapping[str, Any], heads: tuple[str, ...]) -> tuple[str, ...]:
    levels = _names(content, "urgency_levels")
    if "urgency" in heads and len(levels) < 2:
        raise _wrong("urgency_levels", list(levels), "two or more names, the most urgent first")
    return levels


def _within(value: object, heads: tuple[str, ...]) -> bool:
    if not isinstance(value, bool) or (value and "length" not in heads):
        raise _wrong("within", value, "true with a length head, or false")
    return value


def _abstain_threshold(value: object, heads: tuple[str, ...]) -> float | None:
    if value is None:
        return None
    if "urgency" not in heads:
        raise _wrong("abstain_threshold", value, "null, because no urgency is predicted")
    if not _is_number(value) or not 0 <= cast(float, value) <= 1:
        raise _wrong("abstain_threshold", value, "a number in [0, 1], or null")
    return float(cast(float, value))


def _bucket_edges(value: object, heads: tuple[str, ...]) -> tuple[float, ...]:
    if not isinstance(value, list) or not all(_is_number(edge) and edge > 0 for edge in value):
        raise _wrong("bucket_edges", value, "a list of numbers of tokens > 0")
    if not all(low < high for low, high in itertools.pairwise(value)):
        raise _wrong("bucket_edges", value, "ascending numbers of tokens")
    if "bucket" in heads and not value:
        raise _wrong("bucket_edges", value, "one or more numbers of tokens")
    return tuple(float(edge) for edge in value)


def _files(value: object, required: tuple[str, ...]) -> dict[str, str]:
    if not isinstance(value, dict):
        raise _wrong("files", value, "an object of file name: SHA-256")
    for name in required:
        if name not in value:
            raise _wrong("files", sorted(value), f"a list with {name}")
    for name, digest in value.items():
        if not name or name in (".", "..", MANIFEST, SIGNATURE) or "/" in name or "\\" in name:
            raise _wrong("files", name, "names of files inside the artifact folder, without a path")
        if not isinstance(digest, str) or len(digest) != 64 or set(digest) - set("0123456789abcdef"):
            raise _wrong(f"files, {name}", digest, "a SHA-256 in lower-case hex")
    return value


def _tensor_names(value: object) -> list[str] | None:
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        return None
    return [entry.get("name") for entry in value]
