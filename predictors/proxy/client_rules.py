"""Rules for what clients may declare: tenant, tier, and hints to the engine."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from multidict import CIMultiDictProxy

from predictors.proxy.config import ProxyConfig
from predictors.proxy.engines import CLIENT_MEMBERS
from scheduler_core.errors import InputError
from scheduler_core.urgency import LEVELS


class ClientRules:
    """What clients may declare; `restricts` where their own hints are replaced, so that none may pass unread."""

    def __init__(self, config: ProxyConfig) -> None:
        self._config = config
        self.restricts = config.client_priority == "replace" or config.most_urgent_tier > 0

    def tenant(self, headers: Mapping[str, str]) -> str:
        """The header's value, else twelve digits of a hash of the API key (keys are in no log), else empty."""
        name = headers.get(self._config.tenant_header, "").strip()
        if name:
            return name
        key = headers.get("Authorization", "") or headers.get("api-key", "")
        return "key-" + hashlib.sha256(key.encode()).hexdigest()[:12] if key else ""

    def tier(self, headers: Mapping[str, str]) -> int:
        """The declared level of urgency, or the default; InputError for one that clients may not declare."""
        config = self._config
        text = headers.get(config.tier_header)
        if text is None:
            return config.default_tier
        levels = range(config.most_urgent_tier, len(LEVELS))
        if text not in map(str, levels):
            raise InputError(config.tier_header, text, f"integers from {levels[0]} to {levels[-1]}")
        return int(text)

    def check_headers(self, headers: CIMultiDictProxy[str]) -> None:
        """Raises InputError for a value that is not UTF-8, and for a repeated header of the tenant or the tier: they could not
        be passed on as they came, or be read in two ways."""
        for name, value in headers.items():
            try:
                value.encode()
            except UnicodeEncodeError:
                raise InputError(name, "other bytes", "UTF-8") from None
        for name in (self._config.tenant_header, self._config.tier_header):
            values = headers.getall(name, ())
            if len(values) > 1:
                raise InputError(name, f"{len(values)} times", "once")

    def allowed_content(self, content: Mapping[str, Any]) -> Mapping[str, Any]:
        """A body's members without the client's hints; `content` itself where there are none."""
        allowed = content
        for path in CLIENT_MEMBERS:
            allowed = _without(allowed, path)
        return content if allowed == content else allowed


def _without(node: Mapping[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    """The object without a member, whatever the case of its name."""
    others: dict[str, Any] = {}
    for name, value in node.items():
        if name.casefold() != path[0]:
            others[name] = value
        elif len(path) > 1:
            others[name] = _without(value, path[1:]) if isinstance(value, dict) else value
    return others
