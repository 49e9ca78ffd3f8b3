"""Where prompts come from: files, `datasets` folders, sets on the hub, templates; as streams."""

from data_gen.sources.open import open_prompts
from data_gen.sources.options import SourceOptions

__all__ = ["SourceOptions", "open_prompts"]
