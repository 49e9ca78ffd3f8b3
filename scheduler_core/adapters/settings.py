"""Settings of the adapters: predictions, the scheduler inside an engine, and their sources."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self, get_type_hints

from scheduler_core.adapters.live_order import order_policy
from scheduler_core.adapters.prediction_thread import PredictionThread
from scheduler_core.batching import make_former
from scheduler_core.batching.base import BatchFormer
from scheduler_core.errors import InputError, unknown_name
from scheduler_core.policies import POLICIES
from scheduler_core.policies.base import Policy
from scheduler_core.prediction.predictor import PREDICTORS, AsyncPredictor, Predictor
from scheduler_core.prediction.prompt_text import Message
from scheduler_core.prediction.service_access import ACCESS_FILES, ServiceAccess
from scheduler_core.ranges import FINITE, INTEGERS, POSITIVE, check_choice, check_ranges
from scheduler_core.shell.options import check_type

#: Environment variable that names the YAML file.
VARIABLE = "TAILCAST_CONFIG"
#: Key of `--additional-config` that holds the settings, or the name of the YAML file.
KEY = "tailcast"

PROMPT_PARTS = ("user", "whole")


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictorSettings(ServiceAccess):
    """Settings of the predictions inside an engine or a gateway; `of` creates them, or a subclass, from a
    mapping. `InputError` if a value is invalid.

    Attributes:
        predictor: pretrained or tiny (shipped with tailcast) or an artifact folder, in this process;
            grpc://HOST:PORT, grpcs://HOST:PORT; None: no predictions.
        predictor_ca, predictor_cert, predictor_key, predictor_token_file: See `ServiceAccess`.
        model: Name of the served model, for predictors of several models.
        timeout_s: Timeout of a prediction in seconds.
        max_in_flight: Maximum number of concurrent calls.
        max_batch: Maximum number of requests in one call.
    """

    predictor: str | None = None
    model: str = ""
    timeout_s: float = 5.0
    max_in_flight: int = 64
    max_batch: int = 16

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self)).items():
            check_type(name, getattr(self, name), hint)
        counts = dict.fromkeys(("max_in_flight", "max_batch"), (1, INTEGERS))
        check_ranges(self, timeout_s=(POSITIVE, FINITE), **counts)
        if self.predictor == "":
            raise InputError("predictor", self.predictor, f"{PREDICTORS}, or unset")

    @classmethod
    def of(cls, values: object, source: str) -> Self:
        """The settings from a mapping of names to values (None: default); `source` names the mapping in
        errors. `InputError` if it is not a mapping, or a setting is unknown or invalid."""
        if not isinstance(values, Mapping):
            raise InputError(source, values, "names with values, such as {predictor: pretrained}")
        names = sorted((each.name for each in fields(cls)), key=ACCESS_FILES.__contains__)  # those last
        for name in values:
            if name not in names:
                raise unknown_name(f"{source}, setting", name, names)
        return cls(**{name: value for name, value in values.items() if value is not None})

    def start_thread(
        self, predictor: Predictor, decode: Callable[[Sequence[int]], tuple[Message, ...]] | None = None
    ) -> PredictionThread:
        """A `PredictionThread` for the predictor with these limits."""
        limits = {"max_in_flight": self.max_in_flight, "max_batch": self.max_batch}
        return PredictionThread(AsyncPredictor(predictor, **limits, timeout_s=self.timeout_s), decode)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings(PredictorSettings):
    """Settings of the scheduler inside an engine. `InputError` if a value is invalid.

    Attributes:
        policy: Name of an order policy, or package.module:Class.
        policy_parameters: Overrides of the policy's parameters.
        batching: Name of the batch former that plans the engine's steps; None: the engine forms its own batches.
        batching_parameters: Overrides of the former's parameters.
        tbt_slo_s: Target of the time between two tokens in seconds, by tenant; for requests that have none.
        prompt: Text for the predictor. "user": what it reads of the messages of a chat, found by the chat template,
            otherwise the whole text; "whole": always the whole text, as formatted by the chat template.
        online_calibration: Correct predicted lengths with the lengths of ended requests.
        calibration_file: JSON file that keeps the calibration across restarts; None: no file.
    """

    policy: str
    policy_parameters: dict[str, float] = field(default_factory=dict)
    batching: str | None = None
    batching_parameters: dict[str, Any] = field(default_factory=dict)
    tbt_slo_s: dict[str, float] = field(default_factory=dict)
    prompt: str = "user"
    online_calibration: bool = True
    calibration_file: str | None = None

    def __post_init__(self) -> None:
        PredictorSettings.__post_init__(self)
        check_choice("prompt", self.prompt, PROMPT_PARTS)
        for name, value in self.policy_parameters.items():
            if not isinstance(value, int | float) or isinstance(value, bool):
                raise InputError(f"policy_parameters.{name}", value, "numbers")
        for tenant, value in self.tbt_slo_s.items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not POSITIVE <= value <= FINITE:
                raise InputError(f"tbt_slo_s.{tenant}", value, "numbers of seconds above 0")
        if self.batching is None and self.batching_parameters:
            raise InputError("batching_parameters", self.batching_parameters, "unset without batching")
        policy, former = self.make_policy(), self.make_former()
        if former is not None:
            former.check_policy(policy)

    def make_policy(self) -> Policy:
        """A new policy; raises InputError as `order_policy` does."""
        return order_policy(self.policy, self.policy_parameters, planned=self.batching is not None)

    def make_former(self) -> BatchFormer | None:
        """A new batch former; None if the engine forms its own batches. Raises InputError as `make_former` does."""
        return None if self.batching is None else make_former(self.batching, self.batching_parameters)


def read_settings(additional: Mapping[str, Any], environment: Mapping[str, str]) -> EngineSettings:
    """The settings from the entry "tailcast" of vLLM's `additional_config` (a mapping or the name of a file), or from the
    file named by the environment variable TAILCAST_CONFIG. `InputError` for none or both of them, or an invalid value."""
    entry, file = additional.get(KEY), environment.get(VARIABLE)
    if entry is not None and file is not None:
        raise InputError(VARIABLE, file, f"either this variable or the entry {KEY!r} of --additional-config")
    location = f"--additional-config {KEY}" if file is None else VARIABLE
    source = entry if file is None else file
    if source is None:
        allowed = f"the name of a YAML file, or settings in the entry {KEY!r} of --additional-config"
        raise InputError(VARIABLE, None, allowed)
    if isinstance(source, str):
        source = read_yaml(source, location)
    if isinstance(source, Mapping) and "policy" not in source:
        raise InputError(f"{location}, policy", None, ", ".join(POLICIES))
    return EngineSettings.of(source, location)


def check_version(package: str, version: str, supported: Sequence[str]) -> None:
    """Raises InputError unless the package has one of the minor versions that an adapter was tested with."""
    if ".".join(version.split("+")[0].split(".")[:2]) not in supported:
        allowed = ", ".join(f"{minor}.x" for minor in supported)
        allowed += " (the versions that this adapter was tested with)"
        raise InputError(f"version of {package}", version, allowed)


def read_yaml(path: str, location: str) -> Any:
    """Content of a YAML file; InputError, naming `location`, if it cannot be read."""
    import yaml  # a dependency of the engines

    try:
        return yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(location, path, f"a readable YAML file ({error})") from error
