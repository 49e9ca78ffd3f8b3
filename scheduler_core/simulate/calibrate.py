"""`simulate calibrate`: step times of a live engine."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, fields

from scheduler_core.files import writable_target
from scheduler_core.simulate.progress import progress_bar
from scheduler_core.simulator.calibrate import CalibrateConfig, run_calibration

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class CalibrateCommand(CalibrateConfig):
    """Measure a live OpenAI-compatible engine at one load, fit step times, and predict another load.

    An API key is taken from the environment, OPENAI_API_KEY.
    """

    OUTPUTS = ("json",)

    json: str
    """Where to write the result: the model and its parameters for simulate run, and the errors on both loads."""

    def measurement(self) -> CalibrateConfig:
        """The part that is not about files to write."""
        return CalibrateConfig(**{item.name: getattr(self, item.name) for item in fields(CalibrateConfig)})


def run(config: CalibrateCommand) -> None:
    """Carries out `simulate calibrate`."""
    target = writable_target(config.json, "json")
    with progress_bar(2 * config.num_requests, "measuring") as bar:
        key = os.environ.get("OPENAI_API_KEY")
        result = run_calibration(config.measurement(), api_key=key, progress=bar.update)
    result.write(target)
    error = result.held_out.error["ttlt_s"]
    logger.info("%s: mean ttlt of the held-out load off by %+.1f %%", config.model, 100 * error)
