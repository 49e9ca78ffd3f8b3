"""Prompts in, repeated samples out: templates, sampling backends, the sample schema and its durable files."""
