import importlib
import json
import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from scheduler_core.errors import InputError
from scheduler_core.shell.command import command, entry_point
from tests.hostile import bomb

Capsys = pytest.CaptureFixture[str]


@dataclass(frozen=True, kw_only=True)
class Inner:
    """Part of a configuration."""

    rate: float = 0.5
    """How fast."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Do one thing well."""

    source: str
    """Where it comes from."""
    out: str
    """Where it goes."""
    count: int = 3
    """How many."""
    max_tokens: int = 1
    """At most."""
    inner: Inner = field(default_factory=Inner)
    """The inner part."""

    def __post_init__(self) -> None:
        if self.count < 1:
            raise InputError("count", self.count, "at least 1")


def call(arguments: list[str], seen: list[Config]) -> int:
    return command("tool", Config, seen.append, positionals=("source",), extra="sim")(arguments)


def test_positionals_options_and_dotted_overrides() -> None:
    seen: list[Config] = []
    assert call(["here", "--out", "there", "--inner.rate", "2"], seen) == 0
    assert seen == [Config(source="here", out="there", inner=Inner(rate=2.0))]


@dataclass(frozen=True, kw_only=True)
class Renamed:
    """Use a model."""

    SPELLINGS = (("served_model", "model"),)

    served_model: str | None = None
    """Its name."""


def test_a_field_has_a_second_spelling_in_options_and_files(tmp_path: Path, capsys: Capsys) -> None:
    (tmp_path / "new.yaml").write_text("model: m")
    (tmp_path / "old.yaml").write_text("served_model: m")
    files = [["--config", str(tmp_path / name)] for name in ("new.yaml", "old.yaml")]
    for words in (["--model", "m"], ["--served_model", "m"], ["--served-model=m"], *files):
        seen: list[Renamed] = []
        assert command("tool", Renamed, seen.append, extra="sim")(words) == 0
        assert seen == [Renamed(served_model="m")]
    with pytest.raises(SystemExit):
        command("tool", Renamed, print, extra="sim")(["--help"])
    assert "--model SERVED_MODEL, --served_model SERVED_MODEL" in capsys.readouterr().out


@pytest.mark.parametrize(
    "path",
    [
        "predictors.proxy.config:ProxyConfig",
        "scheduler_core.simulator.commands.run:RunConfig",
        "scheduler_core.simulator.commands.capacity:CapacityConfig",
        "training.evaluating.config:EvaluateConfig",
        "training.network.config:TrainConfig",
    ],
)
def test_the_served_model_is_model_for_users(path: str, capsys: Capsys) -> None:
    positionals = {"ProxyConfig": ("engine_url",), "EvaluateConfig": ("predictor",)}.get(
        path.partition(":")[2], ()
    )
    with pytest.raises(SystemExit):
        command("tool", path, print, positionals=positionals, extra="sim")(["--help"])
    assert "--model SERVED_MODEL, --served_model SERVED_MODEL" in capsys.readouterr().out


def test_hyphens_and_underscores_are_the_same_in_option_names() -> None:
    seen: list[Config] = []
    for words in (["--max-tokens", "5"], ["--max-tokens=5"], ["--max_tokens", "5"]):
        assert call(["here", "--out=a-b=c-d", *words], seen) == 0
    assert seen == [Config(source="here", out="a-b=c-d", max_tokens=5)] * 3


def test_exit_codes_of_the_function(capsys: Capsys) -> None:
    def run(function: Callable[[Inner], object]) -> int:
        return command("tool", Inner, function, extra="sim")([])

    def interrupted(config: Inner) -> None:
        raise KeyboardInterrupt

    def full_disk(config: Inner) -> None:
        raise OSError(28, "No space left on device", "big.parquet")

    assert (run(lambda config: 7), run(interrupted), run(full_disk)) == (7, 130, 2)
    assert "No space left on device (big.parquet)" in capsys.readouterr().err


def error_of(arguments: list[str], capsys: Capsys) -> str:
    """The one line of a call that is refused."""
    seen: list[Config] = []
    assert (call(arguments, seen), seen) == (2, [])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("tool: error: ")
    return line


# Digits of other scripts and 1_000 were numbers; 017 was 17 on the command line and 15 in a file, 1:30 was 90.
@pytest.mark.mend
@pytest.mark.parametrize(
    "text", ["1_000", "\u0663", "\uff11\uff12", "017", "0x10", "0b1", "1:30", "1_0.5", "1_0e1"]
)
def test_options_take_decimal_numbers_in_ascii_digits(text: str, tmp_path: Path, capsys: Capsys) -> None:
    for words in (["--count", text], [f"--count={text}"], [f"--inner.rate={text}"]):
        assert "decimal numbers in ASCII digits" in error_of(["--out", "x", *words], capsys)
    file = tmp_path / "c.yaml"
    for content in (f"count: {text}\n", f"inner: {{rate: {text}}}\n"):
        file.write_text(content)
        assert "is no decimal number; quote a text" in error_of(["--out", "x", "--config", str(file)], capsys)
    seen: list[Config] = []
    assert call(["here", "--out", text, "--count", "+7"], seen) == 0
    assert (seen[0].out, seen[0].count) == (text, 7)


# YAML alias bombs and deep nesting took all memory or gave tracebacks.
@pytest.mark.mend
@pytest.mark.parametrize(
    ("text", "named"),
    [
        (bomb(), "alias *a0: aliases are not supported"),
        ("out: x\ncount: 1\ncount: 2\n", "line 3: repeated key 'count'"),
        ("inner:\n  rate: 1\n  rate: 2\n", "repeated key 'rate'"),
        ("[" * 200, "nested lists and mappings"), ("inner: [1]\n", "inner"),
        ("count: null\n", "count: got None"), ("count: " + "9" * 5000, "Exceeds the limit"),
        ("count: 9223372036854775808", "count: got 9223372036854775808; allowed: integers of 64 bits"),
        ("inner:\n  rate: .nan", "inner.rate: got nan; allowed: finite numbers"), ('out: "a\\0b"', "out"),
        ("just words", "Unexpected config: just words"),
    ],
)  # fmt: skip
def test_hostile_configs(text: str, named: str, tmp_path: Path, capsys: Capsys) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(text)
    assert named in error_of(["here", "--out", "y", "--config", str(path)], capsys)


# A configuration that is not UTF-8 gave a traceback.
@pytest.mark.mend
def test_configuration_files_that_are_no_text(tmp_path: Path, capsys: Capsys) -> None:
    path = tmp_path / "x.yaml"
    path.write_bytes("out: café".encode("latin-1"))
    assert "not a text in UTF-8" in error_of(["here", "--config", str(path)], capsys)
    assert str(tmp_path) in error_of(["here", "--config", str(tmp_path)], capsys)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--out", "x", "--count", "few"], "count"),
        (["--out", "x", "--count", "0"], "count: got 0; allowed: at least 1"),
        (["--out", "x", "--config", "no-such.yaml"], "no-such.yaml"),
        (["--out", "x", "--typo", "1"], "--typo"), ([], "out"),
        (["--out", "x", "--inner.rate", "1e999"], "inner.rate: got inf; allowed: finite numbers"),
        (["--out", "x", "--count", str(2**63)], "integers of 64 bits"),
        (["--out", "x\udcff"], "'x\\udcff'; allowed: text that is valid UTF-8"),
    ],
)  # fmt: skip
def test_user_errors_are_named(arguments: list[str], named: str, capsys: Capsys) -> None:
    assert named in error_of(["here", *arguments], capsys)


def _json_nested_too_deeply() -> object:
    return json.loads("[" * 100_000)


# RecursionError and MemoryError gave tracebacks.
@pytest.mark.mend
@pytest.mark.parametrize(
    ("function", "code", "told"),
    [
        (lambda: _json_nested_too_deeply(), 2, "error: the input is nested too deeply"),
        (lambda: [0] * 10**15, 2, "error: not enough memory"),
        (lambda: b"\xff".decode(), 2, "error: text that is not valid Unicode: 'utf-8' codec"),
        (lambda: float(10**400), 2, "error: a number is too large: int too large"),
        (lambda: importlib.import_module("no_such_package.part"), 2, "error: no_such_package is not installed; it comes with: pip install 'tailcast[sim]'"),
        (lambda: importlib.import_module("scheduler_core.no_such"), 1, "error: this is a bug in tailcast (ModuleNotFoundError"),
        (lambda: {}["key"], 1, "error: this is a bug in tailcast (KeyError: 'key'); TAILCAST_TRACEBACK=1 prints the traceback"),
    ],
)  # fmt: skip
def test_errors_that_no_part_of_a_command_has_foreseen(
    function: Callable[[], object], code: int, told: str, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TAILCAST_TRACEBACK", raising=False)

    @entry_point("tool", extra="sim")
    def main(args: list[str]) -> int:
        function()
        return 0

    assert main([]) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"tool: {told}")


def test_tracebacks_for_who_asks(capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAILCAST_TRACEBACK", "1")
    assert call(["here", "--out", "x", "--count", "0"], []) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("Traceback")
    assert lines[-1].startswith("tool: error: count: got 0")


def test_an_interrupt_that_a_library_turned_into_an_import_error(capsys: Capsys) -> None:
    @entry_point("tool", extra="sim")
    def main(args: list[str]) -> int:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as error:
            raise ImportError("initialization failed") from error

    assert (main([]), capsys.readouterr().err) == (130, "tool: interrupted\n")


def test_an_interrupt_while_a_lock_is_acquired_again(capsys: Capsys) -> None:
    @entry_point("tool", extra="sim")
    def main(args: list[str]) -> int:
        lock = threading.Lock()
        with lock:
            lock.release()
            raise KeyboardInterrupt  # as in Condition.wait; the end of the block raises a RuntimeError

    assert (main([]), capsys.readouterr().err) == (130, "tool: interrupted\n")


def test_a_runtime_error_without_an_interrupt_is_a_bug(capsys: Capsys) -> None:
    @entry_point("tool", extra="sim")
    def main(args: list[str]) -> int:
        raise RuntimeError("release unlocked lock")

    assert main([]) == 1
    assert "this is a bug in tailcast" in capsys.readouterr().err


_WRITER = """
import sys
from scheduler_core.shell.command import entry_point
@entry_point("tool", extra="sim")
def main(args=None):
    for _ in range(10_000):
        sys.stdout.write("x" * 100 + "\\n")
    return 0
sys.exit(main())
"""


@pytest.mark.parametrize(
    ("target", "code", "stderr"),
    [("| head -c 1 > /dev/null", 0, ""), ("> /dev/full", 2, "tool: error: No space left on device\n"), (">&-", 0, "")],
)  # fmt: skip
def test_standard_output_that_takes_nothing(target: str, code: int, stderr: str, tmp_path: Path) -> None:
    script = tmp_path / "writer.py"
    script.write_text(_WRITER)
    shell = f"set -o pipefail; {shlex.quote(sys.executable)} {script} {target}"
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=60, env=env)
    assert (done.returncode, done.stderr) == (code, stderr)


_ONLY_NUMPY = """
import importlib, pkgutil, sys

class OnlyNumpy:
    allowed = {"numpy", "scheduler_core", *sys.stdlib_module_names}

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in self.allowed:
            raise ModuleNotFoundError(f"{name} is not here", name=name)
        return None

sys.meta_path.insert(0, OnlyNumpy())
import scheduler_core
for module in pkgutil.walk_packages(scheduler_core.__path__, "scheduler_core."):
    importlib.import_module(module.name)

from pathlib import Path
from scheduler_core.shell.files import write_json
from scheduler_core.simulator.commands.simulate import main
from scheduler_core.simulator.config import SimulationConfig
from scheduler_core.simulator.run import run_simulation

folder = Path(sys.argv[1])
trace = folder / "trace.jsonl"
trace.write_text('{"request_id": "a", "arrival_s": 0, "prompt_tokens": 3, "output_tokens": 2, "max_tokens": 4}\\n')
result = run_simulation(SimulationConfig(trace=str(trace), policy="sjf"))
write_json(folder / "result.json", result.to_json())
assert result.metrics["num_finished"] == 1
assert main(["run", "--trace", str(trace)]) == 2
"""


def test_everything_imports_and_simulates_with_numpy_alone(tmp_path: object) -> None:
    command = [sys.executable, "-c", _ONLY_NUMPY, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "pip install 'tailcast[sim]'" in done.stderr
