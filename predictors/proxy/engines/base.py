"""What is told to an engine about a request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from scheduler_core.request import RequestState


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What the proxy knows of a request when it is sent.

    Attributes:
        key: The policy's key, smaller first.
        state: The request with its predictions, if there are any.
    """

    key: float
    state: RequestState


@dataclass(frozen=True, slots=True, kw_only=True)
class Hint:
    """What is added to a request.

    Attributes:
        members: Members of the body's outermost object.
        headers: Headers.
    """

    members: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)


class Engine(Protocol):
    """How one engine is told."""

    def hint(self, content: Mapping[str, Any], outlook: Outlook) -> Hint:
        """What to add to a request.

        Args:
            content: The parsed body, to be looked at only.
            outlook: What is known.

        Raises:
            InputError: The key has no integer in the engine's range.
        """
        ...
