from __future__ import annotations

import importlib
import json
import os
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from scheduler_core.command import entry_point, run_command
from scheduler_core.errors import InputError
from tests.hostile import bomb


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
    inner: Inner = field(default_factory=Inner)
    """The inner part."""

    def __post_init__(self) -> None:
        if self.count < 1:
            raise InputError("count", self.count, "at least 1")


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part."""

    size: int = 1
    """A size."""

    def __post_init__(self) -> None:
        if self.size < 1:
            raise InputError("size", self.size, "at least 1")


@dataclass(frozen=True, kw_only=True)
class Whole:
    """A whole."""

    part: Part | None = None
    """A part, if there is one."""


def call(arguments: list[str], seen: list[Config]) -> int:
    return run_command("tool", Config, seen.append, positionals=("source",), extra="sim", args=arguments)


def test_positionals_options_and_dotted_overrides() -> None:
    seen: list[Config] = []
    assert call(["here", "--out", "there", "--inner.rate", "2"], seen) == 0
    assert seen == [Config(source="here", out="there", inner=Inner(rate=2.0))]


def test_hyphens_and_underscores_are_the_same_in_option_names() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Long:
        """Has a long name."""

        max_tokens: int = 1
        """A number."""
        label: str = ""
        """A text."""

    seen: list[Long] = []
    for arguments in (["--max-tokens", "5"], ["--max-tokens=5"], ["--max_tokens", "5", "--label=a-b=c-d"]):
        assert run_command("tool", Long, seen.append, extra="sim", args=arguments) == 0
    assert [config.max_tokens for config in seen] == [5, 5, 5]
    assert seen[2].label == "a-b=c-d"


def test_a_yaml_file_is_overridden_by_options(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("out: filed\ncount: 9\ninner:\n  rate: 4\n")
    seen: list[Config] = []
    assert call(["here", "--config", str(tmp_path / "c.yaml"), "--count", "5"], seen) == 0
    assert seen == [Config(source="here", out="filed", count=5, inner=Inner(rate=4.0))]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--out", "x"], "SOURCE"),
        (["here"], "out"),
        (["here", "--out", "x", "--count", "few"], "count"),
        (["here", "--out", "x", "--count", "0"], "count: got 0; allowed: at least 1"),
        (["here", "--out", "x", "--config", "no-such.yaml"], "no-such.yaml"),
        (["here", "--out", "x", "--typo", "1"], "--typo"),
    ],
)
def test_user_errors_are_one_line_and_code_2(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Config] = []
    assert call(arguments, seen) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("tool: error: ")
    assert captured.err.count("\n") == 1
    assert named in captured.err
    assert seen == []


def test_exit_codes_of_the_function(capsys: pytest.CaptureFixture[str]) -> None:
    def run(function: object) -> int:
        return run_command("tool", Inner, function, extra="sim", args=[])  # type: ignore[arg-type]

    def interrupted(config: Inner) -> None:
        raise KeyboardInterrupt

    def full_disk(config: Inner) -> None:
        raise OSError(28, "No space left on device", "big.parquet")

    assert run(lambda config: 7) == 7
    assert run(interrupted) == 130
    assert run(full_disk) == 2
    assert "No space left on device (big.parquet)" in capsys.readouterr().err


def test_help_shows_every_field_with_its_text(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        call(["--help"], [])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    for text in (
        "Do one thing well",
        "Where it comes from",
        "Where it goes",
        "How many",
        "How fast",
        "--print_config",
    ):
        assert text in shown


def error_of(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of a call that is refused."""
    seen: list[Config] = []
    assert call(arguments, seen) == 2
    assert seen == []
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("tool: error: ")
    return line


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (bomb(), "alias *a0: aliases are not supported"),
        ("out: x\ncount: 1\ncount: 2\n", "line 3: 'count' is there twice"),
        ("inner:\n  rate: 1\n  rate: 2\n", "'rate' is there twice"),
        ("[" * 200, "nested lists and mappings"),
        ("inner: [1]\n", "inner"),
        ("inner: 5\n", "inner"),
        ("out: null\n", "out"),
        ("count: null\n", "count: got None"),
        ("count: " + "9" * 5000, "Exceeds the limit"),
        ("count: 9223372036854775808", "count: got 9223372036854775808; allowed: integers of 64 bits"),
        ("inner:\n  rate: .nan", "inner.rate: got nan; allowed: finite numbers"),
        ("inner:\n  rate: -.inf", "inner.rate: got -inf; allowed: finite numbers"),
        ('out: "a\\0b"', "out"),
        ("just words", "Unexpected config: just words"),
    ],
)
def test_hostile_configuration_files(
    text: str, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(text)
    assert named in error_of(["here", "--out", "y", "--config", str(path)], capsys)


def test_configuration_files_that_are_no_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.yaml"
    path.write_bytes("out: café".encode("latin-1"))
    assert "not a text in UTF-8" in error_of(["here", "--config", str(path)], capsys)
    assert str(tmp_path) in error_of(["here", "--config", str(tmp_path)], capsys)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--out", "x", "--inner.rate", "nan"], "inner.rate"),
        (["--out", "x", "--inner.rate", "1e999"], "inner.rate: got inf; allowed: finite numbers"),
        (["--out", "x", "--count", str(2**63)], "integers of 64 bits"),
        (["--out", "x", "--count", "9" * 5000], "count"),
        (["--out", "x\udcff"], "'x\\udcff'; allowed: text that is valid UTF-8"),
    ],
)
def test_option_values_that_fit_nowhere(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert named in error_of(["here", *arguments], capsys)


def test_an_error_of_a_nested_configuration_is_told_in_its_own_words(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_command("tool", Whole, lambda _: 0, extra="sim", args=["--part.size", "0"]) == 2
    assert capsys.readouterr().err == "tool: error: size: got 0; allowed: at least 1\n"


def _json_nested_too_deeply() -> object:
    return json.loads("[" * 100_000)


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
    function: Callable[[], object],
    code: int,
    told: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TAILCAST_TRACEBACK", raising=False)

    @entry_point("tool", extra="sim")
    def main(args: list[str]) -> int:
        function()
        return 0

    assert main([]) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"tool: {told}")


def test_the_traceback_is_there_for_who_asks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TAILCAST_TRACEBACK", "1")
    assert call(["here", "--out", "x", "--count", "0"], []) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("Traceback")
    assert lines[-1].startswith("tool: error: count: got 0")


def test_an_interrupt_that_a_library_turned_into_an_import_error(capsys: pytest.CaptureFixture[str]) -> None:
    @entry_point("tool", extra="sim")
    def main(args: list[str]) -> int:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as error:
            raise ImportError("initialization failed") from error

    assert main([]) == 130
    assert capsys.readouterr().err == "tool: interrupted\n"


_WRITER = """
import sys
from scheduler_core.command import entry_point
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
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        ["bash", "-c", shell],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"PYTHONPATH": root},
    )
    assert (done.returncode, done.stderr) == (code, stderr)


def test_all_console_scripts_end_in_the_one_handler() -> None:
    """Every entry point of pyproject.toml, and `python -m` of its module, is `main` around the handler."""
    root = Path(__file__).parents[2]
    scripts = tomllib.loads((root / "pyproject.toml").read_text())["project"]["scripts"]
    for place in scripts.values():
        module, name = place.split(":")
        source = (root / f"{module.replace('.', '/')}.py").read_text()
        assert name == "main"
        assert "@entry_point(" in source or "    return run_command(" in source, module
        assert 'if __name__ == "__main__":' in source, module
