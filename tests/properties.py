"""How many examples an expensive property sees."""

from typing import Any

from hypothesis import settings


def examples(number: int, **options: Any) -> settings:
    """Settings of a property: `number` examples in the profile `ci`, eight times as many in `explore`.

    `options` are further arguments of `hypothesis.settings`.
    """
    many = 8 if settings.get_current_profile_name() == "explore" else 1
    return settings(max_examples=many * number, deadline=None, **options)
