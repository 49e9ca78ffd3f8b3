"""Settings of the scheduler inside an engine, and where they are read from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from scheduler_core.adapters.live_order import order_policy
from scheduler_core.errors import InputError, unknown_name
from scheduler_core.policies import POLICIES
from scheduler_core.policies.base import Policy
from scheduler_core.predictor import PREDICTORS

#: Environment variable that names the YAML file.
VARIABLE = "TAILCAST_CONFIG"
#: Key of `--additional-config` that holds the settings, or the name of the YAML file.
KEY = "tailcast"

PROMPT_PARTS = ("user", "whole")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Settings of the scheduler inside an engine.

    Attributes:
        policy: Name of an order policy, or package.module:Class.
        policy_parameters: Overrides of the policy's parameters.
        predictor: pretrained or tiny (they come with tailcast) or an artifact folder, in the engine's process; or
            grpc://HOST:PORT; None: no predictions.
        served_model: Name of the served model, for predictors of several.
        timeout_s: A prediction that takes longer has failed, in seconds.
        max_in_flight: Calls under way at the same time.
        max_batch: Maximum number of requests in one call.
        prompt: Text for the predictor: "user": of a chat with nothing but one user message that message only, of others
            the whole text; "whole": always the whole text, as the chat template makes it.
        online_calibration: Correct the predicted lengths by the requests that have ended.
        calibration_file: JSON file that keeps what has been learned over restarts; None: none.

    Raises:
        InputError: A value is not allowed.
    """

    policy: str
    policy_parameters: dict[str, float] = field(default_factory=dict)
    predictor: str | None = None
    served_model: str = ""
    timeout_s: float = 5.0
    max_in_flight: int = 64
    max_batch: int = 16
    prompt: str = "user"
    online_calibration: bool = True
    calibration_file: str | None = None

    def __post_init__(self) -> None:
        parameters = self.policy_parameters
        checks = {
            "policy_parameters": (isinstance(parameters, Mapping), "names with numbers"),
            "predictor": (
                self.predictor is None or (isinstance(self.predictor, str) and self.predictor != ""),
                f"{PREDICTORS}, or unset",
            ),
            "served_model": (isinstance(self.served_model, str), "text"),
            "timeout_s": (_is_number(self.timeout_s) and 0 < self.timeout_s < math.inf, "seconds > 0"),
            "max_in_flight": (type(self.max_in_flight) is int and self.max_in_flight > 0, "integers > 0"),
            "max_batch": (type(self.max_batch) is int and self.max_batch > 0, "integers > 0"),
            "prompt": (self.prompt in PROMPT_PARTS, ", ".join(PROMPT_PARTS)),
            "online_calibration": (isinstance(self.online_calibration, bool), "true, false"),
            "calibration_file": (isinstance(self.calibration_file, str | None), "a path, or unset"),
        }
        for name, (holds, allowed) in checks.items():
            if not holds:
                raise InputError(name, getattr(self, name), allowed)
        for name, value in parameters.items():
            if not _is_number(value):
                raise InputError(f"policy_parameters.{name}", value, "numbers")
        self.make_policy()

    def make_policy(self) -> Policy:
        """A new policy; raises InputError as `order_policy` does."""
        return order_policy(self.policy, self.policy_parameters)


def read_settings(additional: Mapping[str, Any], environment: Mapping[str, str]) -> EngineSettings:
    """The settings from the engine's additional configuration or from the file that the environment names.

    Args:
        additional: vLLM's `additional_config`; its entry "tailcast" is a mapping with the settings, or a file's name.
        environment: Variables of the process; TAILCAST_CONFIG names a file.

    Raises:
        InputError: There are none, there are two, or a value is not allowed.
    """
    entry, file = additional.get(KEY), environment.get(VARIABLE)
    if entry is not None and file is not None:
        raise InputError(VARIABLE, file, f"either this variable or the entry {KEY!r} of --additional-config")
    location = f"--additional-config {KEY}" if file is None else VARIABLE
    source = entry if file is None else file
    if source is None:
        allowed = f"the name of a YAML file there, or settings as the entry {KEY!r} of --additional-config"
        raise InputError(VARIABLE, None, allowed)
    if isinstance(source, str):
        source = read_yaml(source, location)
    if not isinstance(source, Mapping):
        allowed = "names with values, such as {policy: tie}, or the name of a YAML file"
        raise InputError(location, source, allowed)
    names = [item.name for item in fields(EngineSettings)]
    for name in source:
        if name not in names:
            raise unknown_name(f"{location}, setting", name, names)
    if "policy" not in source:
        raise InputError(f"{location}, policy", None, ", ".join(POLICIES))
    return EngineSettings(**{name: value for name, value in source.items() if value is not None})


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def read_yaml(path: str, location: str) -> Any:
    import yaml  # vLLM brings it

    try:
        return yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(location, path, f"a readable YAML file ({error})") from error
