"""Sources of prompts: files, data sets and templates."""
