"""What a user sets for our scheduler inside an engine, and where it is read from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from scheduler_core.batching import BATCH_FORMERS
from scheduler_core.errors import InputError, MissingExtraError
from scheduler_core.policies import POLICIES, make_policy
from scheduler_core.policies.base import Policy

#: Environment variable that names the YAML file.
VARIABLE = "TAILCAST_CONFIG"
#: Key of `--additional-config` that holds the settings, or the name of the YAML file.
KEY = "tailcast"

PROMPT_PARTS = ("user", "whole")


def engine_policies() -> dict[str, type[Policy]]:
    """The policies that only order: all but s3, which reserves memory that the engine's own batch former allocates."""
    return {name: kind for name, kind in POLICIES.items() if kind.admission_tokens is Policy.admission_tokens}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Settings of our scheduler inside an engine.

    Attributes:
        policy: Name of an order policy.
        policy_parameters: Values for parameters of the policy that shall not have their default.
        predictor: SCHEME://ADDRESS of whom to ask about each prompt: grpc://HOST:PORT, or local://FOLDER for an artifact
            in the engine's process; None: nobody.
        served_model: Name of the served model, for predictors that know several.
        timeout_s: A prediction that takes longer has failed, in seconds.
        max_in_flight: Calls under way at the same time.
        max_batch: Most requests in one call.
        prompt: What the predictor reads: "user": of a chat with nothing but one user message that message alone, of
            others the whole text; "whole": always the whole text, as the chat template makes it.

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

    def __post_init__(self) -> None:
        _check_policy(self.policy)
        if not isinstance(self.policy_parameters, Mapping):
            raise InputError("policy_parameters", self.policy_parameters, "names with numbers")
        for name, value in self.policy_parameters.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise InputError(f"policy_parameters.{name}", value, "numbers")
        make_policy(self.policy, self.policy_parameters)
        if self.predictor is not None and (
            not isinstance(self.predictor, str) or "://" not in self.predictor
        ):
            raise InputError("predictor", self.predictor, "SCHEME://ADDRESS, or unset")
        if not isinstance(self.served_model, str):
            raise InputError("served_model", self.served_model, "text")
        if isinstance(self.timeout_s, bool) or not isinstance(self.timeout_s, int | float):
            raise InputError("timeout_s", self.timeout_s, "seconds > 0")
        if not 0 < self.timeout_s < math.inf:
            raise InputError("timeout_s", self.timeout_s, "seconds > 0")
        for name in ("max_in_flight", "max_batch"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
                raise InputError(name, value, "integers > 0")
        if self.prompt not in PROMPT_PARTS:
            raise InputError("prompt", self.prompt, ", ".join(PROMPT_PARTS))

    @property
    def wants_predictions(self) -> bool:
        """Whether the policy uses anything that a predictor says."""
        return bool(POLICIES[self.policy].inputs & {"length", "urgency", "bucket", "rank"})


def read_settings(additional: Mapping[str, Any], environment: Mapping[str, str]) -> EngineSettings:
    """The settings from the engine's additional configuration or from the file that the environment names.

    Args:
        additional: vLLM's `additional_config`; its entry "tailcast" is a mapping with the settings, or a file's name.
        environment: Variables of the process; TAILCAST_CONFIG names a file.

    Raises:
        InputError: There are none, there are two, or a value is not allowed.
        MissingExtraError: A file is to be read, and there is no PyYAML.
    """
    given, named = additional.get(KEY), environment.get(VARIABLE)
    if given is not None and named is not None:
        raise InputError(VARIABLE, named, f"either this variable or the entry {KEY!r} of --additional-config")
    where = f"--additional-config {KEY}" if named is None else VARIABLE
    source = given if named is None else named
    if source is None:
        allowed = f"the name of a YAML file there, or settings as the entry {KEY!r} of --additional-config"
        raise InputError(VARIABLE, None, allowed)
    if isinstance(source, str):
        source = _read_yaml(source, where)
    if not isinstance(source, Mapping):
        raise InputError(
            where, source, "names with values, such as {policy: tie}, or the name of a YAML file"
        )
    known = [item.name for item in fields(EngineSettings)]
    for name in source:
        if name not in known:
            raise InputError(f"{where}, setting", name, ", ".join(known))
    if "policy" not in source:
        raise InputError(f"{where}, policy", None, ", ".join(engine_policies()))
    return EngineSettings(**{name: value for name, value in source.items() if value is not None})


def _check_policy(name: str) -> None:
    known = engine_policies()
    if name in known:
        return
    reason = ""
    if name in POLICIES:
        reason = f" ({name} reserves memory for what it admits; the engine gives out its memory itself)"
    elif name in BATCH_FORMERS:
        reason = f" ({name} forms batches; the engine forms them itself)"
    raise InputError("policy", name, ", ".join(known) + reason)


def _read_yaml(path: str, where: str) -> Any:
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise MissingExtraError("pyyaml", "vllm") from error
    try:
        return yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(where, path, f"a readable YAML file ({error})") from error
