"""Metamorphic tests of predictors: pairs of requests, the second of which asks for a longer output.

For evaluation only. Whatever composes or selects training prompts must not import it or read its pairs.
"""
