"""Every command under hostile options, configuration files and inputs: an exit code and one line, nothing else.

More examples: `HYPOTHESIS_PROFILE=explore .venv/bin/python -m pytest tests/test_fuzz_commands.py`.
"""

import contextlib
import dataclasses
import importlib
import io
import json
import logging
import re
import shutil
import signal
import tempfile
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given
from hypothesis import strategies as st

from tests.hostile import write_good_files, write_hostile_files
from tests.properties import examples

#: No command takes as long with inputs as small as these.
SECONDS = 60
#: What a command that stopped leaves to go on from; everything else is whole or not there.
RESUMABLE = re.compile(r"\.partial(/|$)|/cells/")
#: Options that start processes or connections, of which a test has no use.
LEFT_OUT = {"more_artifacts", "devices", "strategy", "traces", "encoder", "init"}
WORDS = ["fcfs", "tie", "sjf", "trace", "oracle", "none", "cpu", "127.0.0.1", "llama-2-7b", "roofline", "table", "train", "samples", "log", "lengths"]  # fmt: skip


@dataclass(frozen=True)
class Command:
    module: str  # where its `main` is
    config: str  # its configuration, MODULE:CLASS
    # Options with which it ends soon: well, or for lack of a good input. OUT is the folder for results, GOOD and BAD are
    # folders of input files.
    base: dict[str, str]
    words: tuple[str, ...] = ()  # first words of the command line: a sub-command
    positionals: tuple[str, ...] = ()  # fields given by position

    def main(self, args: list[str]) -> int:
        code: int = importlib.import_module(self.module).main(args)
        return code

    @property
    def config_class(self) -> type[Any]:
        module, name = self.config.split(":")
        found: type[Any] = getattr(importlib.import_module(module), name)
        return found


_WORKLOAD = '{"num_requests": 4, "lengths": {"prompt": {"kind": "fixed", "low": 5}, "output": {"kind": "fixed", "low": 3}}}'
_RUN = {"policy": "fcfs", "workload": _WORKLOAD}

COMMANDS = {
    "simulate run": Command("scheduler_core.simulator.commands.simulate", "scheduler_core.simulator.commands.run:RunConfig", _RUN | {"json": "OUT/r.json"}, ("run",)),
    "simulate run trace": Command("scheduler_core.simulator.commands.simulate", "scheduler_core.simulator.commands.run:RunConfig", {"policy": "fcfs", "trace": "GOOD/trace.jsonl", "json": "OUT/r.json", "requests": "OUT/r.csv"}, ("run",)),
    "simulate compare": Command("scheduler_core.simulator.commands.simulate", "scheduler_core.simulator.commands.compare:CompareConfig", {"runs": "BAD/list.json BAD/null.json"}, ("compare",), ("runs",)),
    "simulate workload": Command("scheduler_core.simulator.commands.simulate", "scheduler_core.simulator.commands.workload:WorkloadConfig", {"num_requests": "4", "out": "OUT/w.csv"}, ("workload",)),
    "simulate sweep": Command("scheduler_core.simulator.commands.simulate", "scheduler_core.simulator.commands.sweep:SweepConfig", {"out": "OUT/sweep", "workload": _WORKLOAD, "num_seeds": "1"}, ("sweep",), ("out",)),
    "simulate capacity": Command("scheduler_core.simulator.commands.simulate", "scheduler_core.simulator.commands.capacity:CapacityConfig", {"workload": _WORKLOAD, "at_most": "{ttft_s.mean: 0.018}", "json": "OUT/c.json", "tolerance": "0.5", "max_seeds": "2"}, ("capacity",)),
    "simulate replicas": Command("scheduler_core.simulator.commands.simulate", "scheduler_core.simulator.commands.replicas:ReplicasConfig", {"workload": _WORKLOAD, "at_most": "{ttft_s.mean: 0.018}", "json": "OUT/c.json", "max_replicas": "4", "max_seeds": "2"}, ("replicas",)),
    "simulate tiers": Command("scheduler_core.simulator.commands.simulate", "scheduler_core.simulator.commands.tiers:TiersConfig", {"workload": _WORKLOAD[:-1] + ', "tiers": {"mix": "enterprise"}}', "cluster": "{num_replicas: 2}", "tiers": "[1, 2]", "headroom_fractions": "[0.2]", "num_seeds": "1", "json": "OUT/c.json"}, ("tiers",)),
    "simulate calibrate": Command("scheduler_core.simulator.commands.simulate", "scheduler_core.simulator.commands.calibrate:EngineCalibrationConfig", {"measurements": "[GOOD/trace.jsonl]", "json": "OUT/c.json"}, ("calibrate",)),
    "tailcast predict": Command("tailcast.cli", "tailcast.commands.predict:PredictConfig", {"data": "GOOD/prompts.jsonl", "out": "OUT/p.csv", "predictor": "BAD/artifact"}, ("predict",)),
    "tailcast plan": Command("tailcast.cli", "tailcast.commands.plan:PlanCommandConfig", {"log": "GOOD/trace.jsonl", "json": "OUT/p.json", "model": "llama-3-8b", "gpus": "l40s-48gb=1", "target": "ttft_s.p50<9", "tensor_parallel": "[1]", "max_num_seqs": "[4]", "max_num_batched_tokens": "[256]", "orders": "[fcfs]", "max_seeds": "4", "workers": "1"}, ("plan",), ("log",)),
    "adapt": Command("training.commands.adapt", "training.correcting.config:AdaptConfig", {"log": "BAD/list.jsonl", "out": "OUT/a", "artifact": "BAD/artifact"}, (), ("log",)),
    "gen-samples": Command("data_gen.commands.gen_samples", "data_gen.config:GenSamplesConfig", {"prompts": "GOOD/prompts.jsonl", "out": "OUT/s.parquet", "backend": "synthetic", "num_samples": "2"}, (), ("prompts",)),
    "import-lengths": Command("data_gen.commands.import_lengths", "data_gen.importers.config:ImportLengthsConfig", {"kind": "log", "file": "GOOD/samples.parquet", "out": "OUT/i.parquet"}, (), ("kind", "file")),
    "import-urgency": Command("data_gen.commands.import_urgency", "data_gen.commands.import_urgency:ImportUrgencyConfig", {"out": "OUT/u.parquet", "sources": "quiet"}, (), ("out",)),
    "fit-dist": Command("training.commands.fit_dist", "training.commands.fit_dist:FitDistConfig", {"samples": "GOOD/samples.parquet", "out": "OUT/f.parquet", "alternatives": "false"}, (), ("samples",)),
    "train": Command("training.commands.train", "training.network.config:TrainConfig", {"data": "BAD/rowless.parquet", "out": "OUT/t"}),
    "evaluate": Command("training.commands.evaluate", "training.evaluating.config:EvaluateConfig", {"predictor": "BAD/checkpoint", "data": "GOOD/samples.parquet", "json": "OUT/e.json"}, (), ("predictor",)),
    "evaluate-stream": Command("training.commands.evaluate_stream", "training.commands.evaluate_stream:StreamConfig", {"stream": "GOOD/trace.jsonl", "out": "OUT/events.jsonl"}, (), ("stream",)),
    "calibrate": Command("training.commands.calibrate", "training.correcting.config:CalibrateConfig", {"predictor": "BAD/checkpoint", "data": "GOOD/samples.parquet", "out": "OUT/c"}, (), ("predictor",)),
    "evaluate-urgency": Command("training.commands.evaluate_urgency", "training.urgency.config:EvaluateUrgencyConfig", {"predictor": "BAD/checkpoint", "data": "GOOD/labels.parquet", "json": "OUT/u.json", "baselines": "false"}, (), ("predictor",)),
    "export-onnx": Command("export.commands.export_onnx", "export.exporter:ExportConfig", {"checkpoint": "BAD/checkpoint", "out": "OUT/a"}, (), ("checkpoint",)),
    "package-artifact": Command("export.commands.package_artifact", "export.packages:PackageConfig", {"target": "triton", "artifact": "BAD/artifact", "out": "OUT/p"}, (), ("target", "artifact")),
    "export-variants": Command("tailcast.commands.export_variants", "export.variants.run:VariantsConfig", {"artifact": "BAD/artifact", "out": "OUT/v"}, (), ("artifact",)),
    "serve-predictor": Command("predictors.commands.serve_predictor", "predictors.commands.serve_predictor:ServeConfig", {"artifact": "BAD/artifact"}, (), ("artifact",)),
    "tailcast-proxy": Command("predictors.commands.tailcast_proxy", "predictors.commands.tailcast_proxy:ProxyConfig", {"engine_url": "http://127.0.0.1:9"}, (), ("engine_url",)),
    "read-feedback": Command("training.commands.read_feedback", "training.commands.read_feedback:FeedbackConfig", {"log": "BAD/list.jsonl", "json": "OUT/c.json"}, (), ("log",)),
}  # fmt: skip


@dataclass(frozen=True)
class Option:
    """An option of a command: its dotted name and the type of its field."""

    name: str
    kind: Any


@cache
def options(name: str) -> list[Option]:
    """All options of a command, those of nested configurations too."""
    return list(_options(COMMANDS[name].config_class, ""))


def _options(config: type[Any], prefix: str) -> Iterator[Option]:
    hints = typing.get_type_hints(config)
    for item in dataclasses.fields(config):
        kind = hints[item.name]
        if item.name in LEFT_OUT:
            continue
        yield Option(prefix + item.name, kind)
        for part in _parts(kind):
            if dataclasses.is_dataclass(part) and prefix.count(".") < 2:
                yield from _options(typing.cast(type[Any], part), f"{prefix}{item.name}.")


def _parts(kind: Any) -> tuple[Any, ...]:
    """The members of a union, or the type itself."""
    union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    return typing.get_args(kind) if union else (kind,)


INTEGERS = [-(2**63), -1, 0, 1, 2, 3, 10**12, 2**31, 2**63 - 1, 2**63, 2**64, 10**400]
FLOATS = "nan .nan inf .inf -.inf 1e308 1e-308 5e-324 1e999 -1 0 -0.0 0.5 1 1e18".split()  # noqa: SIM905
TEXTS = [
    *["-", "--", "null", "~", "true", "�", "�.json", "é☃", "*x", "{", "[", "${HOME}", "%s", "{0}", "../..", "0x10", "1:30", "٣", "1_000"], "", " ", "x" * 3000,
    "a\nb", "a\0b", "&x [*x]", "!!python/object:x y",
]  # fmt: skip
COLLECTIONS = ["[]", "{}", "[null]", "[1, [2]]", '["x", "x"]', "{a: 1}", "{a: .nan}", "{a: {b: 1e999}}", "{? [1] : 2}", "[0]", "[-1, 2]", "[" * 60 + "]" * 60, '{"policy": []}', "{seed: [0, 0]}", "{nonsense.name: [1]}"]  # fmt: skip


def _values(kind: Any, files: list[str]) -> st.SearchStrategy[str]:
    """Values for a field of a type, as they stand on a command line."""
    pools: list[st.SearchStrategy[str]] = [st.sampled_from([*TEXTS, *COLLECTIONS, *FLOATS])]
    for part in _parts(kind):
        origin = typing.get_origin(part)
        if part is int:
            pools += [st.sampled_from([str(value) for value in INTEGERS])] * 6
        elif part is float:
            pools += [st.sampled_from(FLOATS), st.floats().map(repr)] * 3
        elif origin is typing.Literal:
            pools = [st.sampled_from([*map(str, typing.get_args(part)), "nonsense", ""])]
        elif part is bool:
            pools += [st.sampled_from(["true", "false", "maybe"])] * 3
        elif part is str:
            pools += [st.sampled_from(files), st.sampled_from(files), st.sampled_from(WORDS)]
        else:
            pools += [st.sampled_from(COLLECTIONS)] * 2
    return st.one_of(pools)


@dataclass(frozen=True)
class Call:
    """One command line: what differs from the base, and whether it stands in a configuration file."""

    changes: dict[str, str]
    config: str | None
    in_file: bool


@st.composite
def calls(draw: st.DrawFn, name: str, files: list[str]) -> Call:
    """Command lines with a few hostile values."""
    some = st.sampled_from(options(name))
    chosen = draw(st.lists(some, min_size=1, max_size=2, unique_by=lambda one: one.name))
    required = [one for one in options(name) if one.name in COMMANDS[name].base]
    if draw(st.booleans()):
        chosen[0] = draw(st.sampled_from(required))
    changes = {one.name: draw(_values(one.kind, files)) for one in chosen}
    if name == "gen-samples" and changes.get("backend") in ("transformers", "openai", "vllm"):
        del changes["backend"]
    # A pipe as configuration is read to its end, as it would be by any program.
    readable = [file for file in files if "pipe" not in file]
    config = draw(st.none() | st.none() | st.none() | st.sampled_from(readable))
    return Call(changes, config, draw(st.booleans()))


def _nested(changes: dict[str, str]) -> dict[str, Any]:
    """Dotted names as nested mappings; numbers as numbers."""
    tree: dict[str, Any] = {}
    for name, value in changes.items():
        *parents, last = name.split(".")
        inside = tree
        for parent in parents:
            inside = inside.setdefault(parent, {})
            if not isinstance(inside, dict):
                break
        if isinstance(inside, dict):
            try:
                inside[last] = json.loads(value)
            except ValueError:
                inside[last] = value
    return tree


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    folder = tmp_path_factory.mktemp("inputs")
    good = write_good_files(folder / "good")
    return folder, [str(path) for path in (*write_hostile_files(folder / "bad"), *good.values())]


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
    def stop(*_: object) -> None:
        pytest.fail(f"the command takes more than {SECONDS} s", pytrace=True)

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _arguments(command: Command, call: Call, inputs: Path, out: Path) -> list[str]:
    values = dict(command.base)
    for name in [name for name in values if any(name.startswith(f"{other}.") for other in call.changes)]:
        del values[name]
    places = {"OUT": str(out), "GOOD": str(inputs / "good"), "BAD": str(inputs / "bad")}
    values = {
        name: re.sub(r"(?:^|(?<= ))(OUT|GOOD|BAD)(?=/)", lambda match: places[match[0]], value)
        for name, value in values.items()
    }
    positions = [
        word
        for name in command.positionals
        for word in ([call.changes[name]] if name in call.changes else values[name].split(" "))
    ]
    args = [*command.words]
    stream = {"stream": values["stream"]} if command.config.endswith("StreamConfig") else {}
    if call.config is not None:
        args.append(f"--config={call.config}")
    changes = {name: value for name, value in call.changes.items() if name not in command.positionals}
    if call.in_file and changes:
        file = out.parent / "config.yaml"
        file.write_text(json.dumps(_nested(changes)), encoding="utf-8")
        args.append(f"--config={file}")
        kept = {name: value for name, value in values.items() if name not in changes} | stream
        changes = {}
    else:
        kept = values
    for name, value in {**kept, **changes}.items():
        if name not in command.positionals:
            args.append(f"--{name}={value}")
    return [*args, *positions]


@pytest.fixture
def no_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that has been built ends at once."""
    from predictors.hosting import process as hosting
    from predictors.service import process as service

    for module in (hosting, service):
        monkeypatch.setattr(module, "run", lambda work: work.close())


def _left_behind(out: Path) -> list[str]:
    """Files that a command that failed must not leave: half a result, or the temporary file of one."""
    if not out.exists():
        return []
    names = [f"/{path.relative_to(out)}" for path in out.rglob("*") if path.is_file()]
    return [name for name in names if not RESUMABLE.search(name) or "/." in name]


@dataclass(frozen=True)
class Outcome:
    """What a command did: arguments, exit code, what it wrote to stderr, and the files it left."""

    args: list[str]
    code: int
    stderr: str
    left: list[str]

    def __str__(self) -> str:
        args = [word if len(word) < 300 else word[:300] + "..." for word in self.args]
        return f"{args}: {self.code}\n{self.stderr[-3000:]}\n{self.left}"


def outcome(name: str, call: Call, inputs: Path) -> Outcome:
    """Calls a command in an empty folder."""
    folder = Path(tempfile.mkdtemp(dir=inputs))
    (out := folder / "out").mkdir()
    args = _arguments(COMMANDS[name], call, inputs, out)
    stderr = io.StringIO()
    printed, errors = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(stderr)
    with contextlib.chdir(folder), printed, errors, _time_limit():
        logging.disable(logging.CRITICAL)
        try:
            code = COMMANDS[name].main(args)
        finally:
            logging.disable(logging.NOTSET)
    left = _left_behind(out)
    shutil.rmtree(folder)
    return Outcome(args, code, stderr.getvalue(), left)


# Hostile options and files gave tracebacks and partial outputs.
@pytest.mark.mend
@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.usefixtures("no_servers")
def test_a_command_ends_with_an_exit_code_and_one_line(name: str, folders: tuple[Path, list[str]]) -> None:
    inputs, files = folders
    options(name)  # imports outside of the strategies, in which nothing random may be drawn

    # Without shrinking: the message names the arguments, and a smaller example would take minutes.
    @examples(4, phases=[Phase.explicit, Phase.reuse, Phase.generate])
    @given(calls(name, files))
    def check(call: Call) -> None:
        found = outcome(name, call, inputs)
        assert found.code in {0, 2, 3, 130}, found
        assert "Traceback" not in found.stderr, found
        lines = [line for line in found.stderr.splitlines() if re.match(r"\S.*: error: ", line)]
        assert len(lines) == (1 if found.code == 2 else 0), found
        if found.code == 2:
            assert found.left == [], found

    check()
