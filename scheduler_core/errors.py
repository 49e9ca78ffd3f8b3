"""The error tree of tailcast: every error a user can cause derives from `TailcastError`."""

from __future__ import annotations

import re
from collections.abc import Iterable

_WORD = re.compile(r"\S+")


class TailcastError(Exception):
    """Base of all errors raised on purpose; a command prints it as one line and exits with 2."""


class InputError(TailcastError, ValueError):
    """Input that is not allowed: `InputError(field, value, allowed)` for ranges, `InputError(sentence)` otherwise.

    `field` is the argument, column or file as the user wrote it; a sentence states the problem and the solution.
    """

    def __init__(self, field: str, value: object = None, allowed: str | None = None) -> None:
        super().__init__(field if allowed is None else f"{field}: got {_repr(value)}; allowed: {allowed}")
        self.field = field
        self.value = value
        self.allowed = allowed

    def __reduce__(self) -> tuple[type[InputError], tuple[str, object, str | None]]:
        return type(self), (self.field, self.value, self.allowed)


def unknown_name(field: str, value: str, names: Iterable[str]) -> InputError:
    """The error for an unknown name. It lists the valid names and suggests the most similar one."""
    choices = [*names]
    return InputError(field, value, ", ".join(choices) + suggestion(str(value), choices, 1))


def suggestion(name: str, names: Iterable[str], limit: int = 3) -> str:
    """A sentence with the names most similar to an unknown one, best first: ". Did you mean A or B?"; empty if there is
    none. Upper case and what is before the last slash (the owner of a model) make no difference."""
    from difflib import get_close_matches

    choices = {_key(each): each for each in names}
    similar = get_close_matches(_key(name)[:80], choices, n=limit)
    return f". Did you mean {' or '.join(choices[each] for each in similar)}?" if similar else ""


def _key(name: str) -> str:
    return name.rpartition("/")[2].lower()


def first_line(error: BaseException) -> str:
    """The first line of an error's message; the name of its class if the message is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _repr(value: object) -> str:
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # nested too deeply, or a number with too many digits
        text = f"a value of type {type(value).__name__}"
    if "://" in text and "@" in text:
        text = _WORD.sub(_without_credentials, text)
    return text if len(text) <= 160 else text[:157] + "..."


def _without_credentials(word: re.Match[str]) -> str:
    """A word without user and password of the URL in it, in linear time: values may be texts of clients."""
    scheme, _, rest = word[0].partition("://")
    host = rest.rpartition("@")
    return f"{scheme}://...@{host[2]}" if host[1] else word[0]


class MissingExtraError(TailcastError, ImportError):
    """An optional dependency is not installed; the message names the extra that installs it."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed; it comes with: pip install 'tailcast[{extra}]'")
