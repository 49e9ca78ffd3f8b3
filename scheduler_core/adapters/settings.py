"""Settings of the adapters: of predictions, of the scheduler inside an engine, and where they are read from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from scheduler_core.adapters.live_order import order_policy
from scheduler_core.adapters.prediction_thread import PredictionThread
from scheduler_core.errors import InputError, unknown_name
from scheduler_core.policies import POLICIES
from scheduler_core.policies.base import Policy
from scheduler_core.predictor import PREDICTORS, AsyncPredictor, Predictor
from scheduler_core.ranges import FINITE, INTEGERS, POSITIVE, check_choice, check_ranges

#: Environment variable that names the YAML file.
VARIABLE = "TAILCAST_CONFIG"
#: Key of `--additional-config` that holds the settings, or the name of the YAML file.
KEY = "tailcast"

PROMPT_PARTS = ("user", "whole")


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictorSettings:
    """Settings of the predictions inside an engine or a router; `of` reads them, and those of a subclass, from a mapping.
    `InputError` if a value is not allowed.

    Attributes:
        predictor: pretrained or tiny (they come with tailcast) or an artifact folder, in this process; or grpc://HOST:PORT;
            None: no predictions.
        served_model: Name of the served model, for predictors of several.
        timeout_s: A prediction that takes longer has failed, in seconds.
        max_in_flight: Calls under way at the same time.
        max_batch: Maximum number of requests in one call.
    """

    predictor: str | None = None
    served_model: str = ""
    timeout_s: float = 5.0
    max_in_flight: int = 64
    max_batch: int = 16

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            types, allowed = _TYPES[str(each.type)]
            if not isinstance(value, types) or (isinstance(value, bool) and types is not bool):
                raise InputError(each.name, value, allowed)
        counts = dict.fromkeys(("max_in_flight", "max_batch"), (1, INTEGERS))
        check_ranges(self, timeout_s=(POSITIVE, FINITE), **counts)
        if self.predictor == "":
            raise InputError("predictor", self.predictor, f"{PREDICTORS}, or unset")

    @classmethod
    def of(cls, values: object, source: str) -> Self:
        """The settings in a mapping of names to values, None for a default; `source` is how errors call it. `InputError` if it
        is no mapping, or a setting is unknown or not allowed."""
        if not isinstance(values, Mapping):
            raise InputError(source, values, "names with values, such as {predictor: pretrained}")
        names = [each.name for each in fields(cls)]
        for name in values:
            if name not in names:
                raise unknown_name(f"{source}, setting", name, names)
        return cls(**{name: value for name, value in values.items() if value is not None})

    def start_thread(
        self, predictor: Predictor, decode: Callable[[Sequence[int]], str] | None = None
    ) -> PredictionThread:
        """A thread for the predictor within these limits; see `PredictionThread`."""
        limits = {"max_in_flight": self.max_in_flight, "max_batch": self.max_batch}
        return PredictionThread(AsyncPredictor(predictor, **limits, timeout_s=self.timeout_s), decode)


#: Annotation of a setting -> its types, and how errors call them.
_TYPES: Mapping[str, tuple[Any, str]] = {
    "str": (str, "text"),
    "str | None": (str | None, "text, or unset"),
    "bool": (bool, "true, false"),
    "int": (int, "integers"),
    "float": (int | float, "numbers"),
    "dict[str, float]": (Mapping, "names with numbers"),
    "dict[str, Any]": (Mapping, "names with values"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings(PredictorSettings):
    """Settings of the scheduler inside an engine. `InputError` if a value is not allowed.

    Attributes:
        policy: Name of an order policy, or package.module:Class.
        policy_parameters: Overrides of the policy's parameters.
        prompt: Text for the predictor: "user": of a chat with nothing but one user message that message only, of others
            the whole text; "whole": always the whole text, as the chat template makes it.
        online_calibration: Correct the predicted lengths by the requests that have ended.
        calibration_file: JSON file that keeps what has been learned over restarts; None: none.
    """

    policy: str
    policy_parameters: dict[str, float] = field(default_factory=dict)
    prompt: str = "user"
    online_calibration: bool = True
    calibration_file: str | None = None

    def __post_init__(self) -> None:
        PredictorSettings.__post_init__(self)
        check_choice("prompt", self.prompt, PROMPT_PARTS)
        for name, value in self.policy_parameters.items():
            if not isinstance(value, int | float) or isinstance(value, bool):
                raise InputError(f"policy_parameters.{name}", value, "numbers")
        self.make_policy()

    def make_policy(self) -> Policy:
        """A new policy; raises InputError as `order_policy` does."""
        return order_policy(self.policy, self.policy_parameters)


def read_settings(additional: Mapping[str, Any], environment: Mapping[str, str]) -> EngineSettings:
    """The settings from the entry "tailcast" of vLLM's `additional_config`, a mapping or the name of a file, or from the file
    that TAILCAST_CONFIG names in the environment. `InputError` if there are none, there are two, or a value is not allowed."""
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
    if isinstance(source, Mapping) and "policy" not in source:
        raise InputError(f"{location}, policy", None, ", ".join(POLICIES))
    return EngineSettings.of(source, location)


def check_version(package: str, version: str, supported: Sequence[str]) -> None:
    """Raises InputError unless the package is of one of these minor versions, which an adapter was tested with."""
    if ".".join(version.split("+")[0].split(".")[:2]) not in supported:
        allowed = ", ".join(f"{minor}.x" for minor in supported)
        allowed += ": those that this adapter was tested with"
        raise InputError(f"version of {package}", version, allowed)


def read_yaml(path: str, location: str) -> Any:
    """Content of a YAML file; InputError, naming `location`, if it cannot be read."""
    import yaml  # vLLM brings it

    try:
        return yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(location, path, f"a readable YAML file ({error})") from error
