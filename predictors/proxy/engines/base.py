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


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientHints:
    """Where engines read a request's place in the order, so that a client could set it past the proxy.

    Attributes:
        members: Paths of members of the body, in lower case.
        priorities: Those paths in or below them that are integer priorities.
        headers: Beginnings of header names, in lower case.
    """

    members: tuple[tuple[str, ...], ...] = ()
    priorities: tuple[tuple[str, ...], ...] = ()
    headers: tuple[str, ...] = ()


class Engine(Protocol):
    """How one engine is told."""

    @property
    def endpoints(self) -> frozenset[str] | None:
        """Paths whose bodies may carry the hint's members; None: the hint has headers only, for all paths."""
        ...

    def hint(self, content: Mapping[str, Any], outlook: Outlook) -> Hint:
        """What to add to a request.

        Args:
            content: The parsed body, to be looked at only.
            outlook: What is known.

        Raises:
            InputError: The key has no integer in the engine's range.
        """
        ...
