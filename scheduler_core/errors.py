"""The error tree of tailcast: every error a user can cause derives from `TailcastError`."""

from __future__ import annotations


class TailcastError(Exception):
    """Base of all errors raised on purpose; a command prints it as one line and exits with 2."""


class InputError(TailcastError, ValueError):
    """A value given by the user is not allowed.

    Args:
        field: Name of the argument, column or file, as the user wrote it.
        value: What was found there.
        allowed: What would have been accepted.
    """

    def __init__(self, field: str, value: object, allowed: str) -> None:
        try:
            shown = repr(value)
        except (RecursionError, ValueError):  # nested too deeply, a number of too many digits
            shown = f"a value of type {type(value).__name__}"
        if len(shown) > 160:
            shown = shown[:157] + "..."
        super().__init__(f"{field}: got {shown}; allowed: {allowed}")
        self.field = field
        self.value = value
        self.allowed = allowed

    def __reduce__(self) -> tuple[type[InputError], tuple[str, object, str]]:
        return type(self), (self.field, self.value, self.allowed)


class MissingExtraError(TailcastError, ImportError):
    """An optional dependency is not installed; the message names the extra that carries it."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed; it comes with: pip install 'tailcast[{extra}]'")
