"""Streams of prompts from files, data sets and templates."""
