"""A sampling run that survives anything: checksummed append-only shards, a manifest, resume, a sorted merge."""

from data_gen.runs.errors import RunStoppedError
from data_gen.runs.run import Observer, RunOptions, run
from data_gen.runs.summary import RunSummary

__all__ = ["Observer", "RunOptions", "RunStoppedError", "RunSummary", "run"]
