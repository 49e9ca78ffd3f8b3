"""Measurements of an engine: readers of what people have, the record of a step, and the fit of step times to them."""
