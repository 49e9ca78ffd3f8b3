"""The file with limits by tenant name: `tailcast-proxy --tenants FILE.yaml`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from predictors.proxy.tenants import OTHERS, TenantBook, TenantLimits
from scheduler_core.errors import InputError, MissingExtraError

#: Entries of a file at most: each has metrics of its own.
MAX_ENTRIES = 1000
_WHOLE = frozenset({"max_concurrent", "burst", "max_waiting", "most_urgent_tier"})


def read_tenants(path: str | Path, default: TenantLimits) -> TenantBook:
    """The limits that a YAML file gives.

        default: {rate_per_s: 5, burst: 10, max_concurrent: 8, most_urgent_tier: 2}
        tenants:
          lab: {rate_per_s: 50, max_concurrent: 64, most_urgent_tier: 0}

    What an entry does not say is as in the file's default, and what that does not say as in `default`. A null means
    no limit.

    Args:
        path: The file.
        default: What the file's default leaves out.

    Raises:
        InputError: It is not readable, or a name or value is not allowed; the field says where.
        MissingExtraError: PyYAML is missing.
    """
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise MissingExtraError("pyyaml", "serve") from error
    try:
        found = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError("tenants", str(path), f"a readable YAML file ({error})") from error
    content = _mapping(found, "tenants")
    for name in content:
        if name not in ("default", "tenants"):
            raise InputError("tenants, section", name, "default, tenants")
    common = _limits(content.get("default") or {}, default, "tenants.default")
    entries = _mapping(content.get("tenants") or {}, "tenants.tenants")
    if len(entries) > MAX_ENTRIES:
        raise InputError("tenants.tenants", f"{len(entries)} entries", f"at most {MAX_ENTRIES}")
    named = {}
    for name, entry in entries.items():
        if not isinstance(name, str) or name != name.strip() or name in ("", OTHERS):
            raise InputError("tenants.tenants, name", name, f"text without spaces around it, not {OTHERS!r}")
        named[name] = _limits(entry or {}, common, f"tenants.{name}")
    return TenantBook(default=common, named=named)


def _limits(entry: Any, default: TenantLimits, where: str) -> TenantLimits:
    known = {item.name for item in fields(TenantLimits)}
    content = _mapping(entry, where)
    for name, value in content.items():
        if name not in known:
            raise InputError(f"{where}, limit", name, ", ".join(sorted(known)))
        if value is None and name != "burst":
            continue
        kinds = int if name in _WHOLE else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise InputError(f"{where}.{name}", value, "an integer" if name in _WHOLE else "a number")
    try:
        return replace(default, **content)
    except InputError as error:
        field = f"{where}.{error.field.removeprefix('tenant_')}"
        raise InputError(field, error.value, error.allowed) from error


def _mapping(found: Any, where: str) -> Mapping[Any, Any]:
    if not isinstance(found, Mapping):
        raise InputError(where, found, "names with values")
    return found
