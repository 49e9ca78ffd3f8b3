"""Marks of tests: how many examples a dear property sees, and what Ray itself warns of."""

from typing import Any

import pytest
from hypothesis import settings

RAY_WARNINGS = pytest.mark.filterwarnings(
    "ignore:Tip. In future versions of Ray:FutureWarning",
    "ignore:subprocess .* is still running:ResourceWarning",
    "ignore:unclosed:ResourceWarning",
)


def examples(number: int, **options: Any) -> settings:
    """Settings of a property: `number` examples in the profile `ci`, eight times as many in `explore`.

    `options` are further arguments of `hypothesis.settings`.
    """
    many = 8 if settings.get_current_profile_name() == "explore" else 1
    return settings(max_examples=many * number, deadline=None, **options)
