"""Data cards: the content of a set of samples, as JSON, Markdown and figures."""
