from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from scheduler_core.command import run_command
from scheduler_core.errors import InputError


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
