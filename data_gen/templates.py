"""Our own prompt templates: nine kinds of request whose outputs differ widely in length.

`templates.json` holds templates by category, and the words for their slots.
"""

from __future__ import annotations

import json
import re
from importlib import resources

import numpy as np

from scheduler_core.errors import InputError

_SLOT = re.compile(r"\{(\w+)\}")
_MAX_ATTEMPTS = 200


def compose(count: int, seed: int) -> list[tuple[str, str]]:
    """`count` different prompts as (category, text), the categories in turn, so that any prefix is a fair mix.

    Args:
        count: How many prompts; at least 1.
        seed: Seed of the choice of templates and words; a longer list starts with the shorter one.

    Raises:
        InputError: If `count` is below 1 or more than the templates can give without repeating.
    """
    if count < 1:
        raise InputError("count", count, "integers > 0")
    content = json.loads(resources.files("data_gen").joinpath("templates.json").read_text(encoding="utf-8"))
    templates, slots = content["templates"], content["slots"]
    rng = np.random.Generator(np.random.PCG64(seed))
    # Insertion-ordered: text -> category.
    prompts: dict[str, str] = {}
    open_categories = list(templates)
    while len(prompts) < count:
        if not open_categories:
            raise InputError(
                "count", count, f"at most {len(prompts)}, all that the templates give with this seed"
            )
        for category in tuple(open_categories):
            for _ in range(_MAX_ATTEMPTS):
                template = str(rng.choice(templates[category]))
                text = _SLOT.sub(lambda match: str(rng.choice(slots[match.group(1)])), template)
                if text not in prompts:
                    break
            else:  # nearly exhausted
                open_categories.remove(category)
                continue
            if len(prompts) < count:
                prompts[text] = category
    return [(category, text) for text, category in prompts.items()]
