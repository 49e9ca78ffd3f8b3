"""Sources of prompts, as streams."""
