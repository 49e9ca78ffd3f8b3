"""Prediction of LLM output lengths, and scheduling with the predictions.

    import tailcast

    length = tailcast.predict("Write a haiku about rivers.", max_tokens=512)
    length.median, length.quantile(0.9), length.expected_tokens, length.probability_longer_than(100)

Names are imported at their first use. `LogT`, `Scheduler`, `simulate` and `read_trace` need only numpy;
`predict` and `load` need the extra `predict`, `plan` the extra `sim`, `connect` the extra `client`, `fit` the extra `train`.
"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False
if TYPE_CHECKING:
    __version__: str
    from scheduler_core.lengths import LogT
    from scheduler_core.scheduler import Scheduler
    from scheduler_core.simulator.trace import load_trace as read_trace
    from tailcast.fitting import fit
    from tailcast.length_predictor import LengthPredictor, connect, load, predict
    from tailcast.output_length import OutputLength
    from tailcast.planning import plan
    from tailcast.simulation import simulate

#: Name -> module and attribute.
_LOCATIONS = {
    "LengthPredictor": "tailcast.length_predictor:LengthPredictor",
    "LogT": "scheduler_core.lengths:LogT",
    "OutputLength": "tailcast.output_length:OutputLength",
    "Scheduler": "scheduler_core.scheduler:Scheduler",
    "connect": "tailcast.length_predictor:connect",
    "fit": "tailcast.fitting:fit",
    "load": "tailcast.length_predictor:load",
    "plan": "tailcast.planning:plan",
    "predict": "tailcast.length_predictor:predict",
    "read_trace": "scheduler_core.simulator.trace:load_trace",
    "simulate": "tailcast.simulation:simulate",
}

__all__ = [
    "LengthPredictor",
    "LogT",
    "OutputLength",
    "Scheduler",
    "connect",
    "fit",
    "load",
    "plan",
    "predict",
    "read_trace",
    "simulate",
]


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib import metadata

        return metadata.version("tailcast")
    if name not in _LOCATIONS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = _LOCATIONS[name].partition(":")
    value = getattr(import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
