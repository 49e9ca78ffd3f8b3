"""The one way a tailcast command starts: frozen dataclass in, exit code out.

A command is a frozen dataclass (each field followed by a docstring, which is its help text) and a
function that takes an instance. From them come `--help`, `--config FILE.yaml`, dotted overrides and
`--print_config` (jsonargparse). Errors the user can cause become one line on stderr and exit code 2.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any, TypeVar

from scheduler_core.errors import MissingExtraError, TailcastError

C = TypeVar("C")


def _parser(prog: str, config_class: type[Any], positionals: Sequence[str], extra: str) -> Any:
    try:
        from jsonargparse import ActionConfigFile, ArgumentParser, set_parsing_settings  # type: ignore[attr-defined]
    except ImportError as error:
        raise MissingExtraError("jsonargparse", extra) from error
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    summary = (config_class.__doc__ or "").strip().split("\n\n")[0]
    parser = ArgumentParser(prog=prog, description=summary, exit_on_error=False)
    parser.add_argument("--config", action=ActionConfigFile, help="YAML file with any of the options below.")
    parser.add_argument("--version", action="version", version=f"tailcast {metadata.version('tailcast')}")
    parser.add_class_arguments(config_class, skip=set(positionals), fail_untyped=True)
    fields = config_class.__dataclass_fields__
    for name in positionals:
        parser.add_argument(
            name, type=str, nargs="?", help=_field_help(config_class, name), metavar=name.upper()
        )
        assert name in fields
    return parser


def _field_help(config_class: type[Any], name: str) -> str:
    from docstring_parser import parse_from_object

    documented = {
        parameter.arg_name: parameter.description for parameter in parse_from_object(config_class).params
    }
    return documented.get(name) or ""


def run_command(
    prog: str,
    config_class: type[C],
    function: Callable[[C], int | None],
    *,
    positionals: Sequence[str] = (),
    extra: str,
    args: Sequence[str] | None = None,
) -> int:
    """Parses `args` (default: the process's) into `config_class`, runs `function`, returns the exit code.

    Args:
        prog: Name of the command, shown in help and errors.
        config_class: Frozen dataclass with one documented field per option.
        function: The command; its return value is the exit code (None means 0).
        positionals: Names of string fields given by position, in order; all are required.
        extra: The extra of `tailcast` that installs what the command needs.
        args: Command line without the program name.

    Returns:
        0 on success, 2 for bad input or a missing dependency, 130 when interrupted.
    """
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    try:
        parser = _parser(prog, config_class, positionals, extra)
        from jsonargparse import ArgumentError

        try:
            parsed = parser.parse_args(_with_underscores(sys.argv[1:] if args is None else args))
            values = parser.instantiate(parsed)
            for name in positionals:
                if values.get(name) is None:
                    raise TailcastError(f"{name.upper()}: missing; see {prog} --help")
            config = config_class(**{name: values[name] for name in config_class.__dataclass_fields__})  # type: ignore[attr-defined]
        except ArgumentError as error:
            raise TailcastError(_one_line(str(error))) from error
        return function(config) or 0
    except TailcastError as error:
        sys.stderr.write(f"{prog}: error: {_one_line(str(error))}\n")
        return 2
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        sys.stderr.write(f"{prog}: error: {error.strerror or _one_line(str(error))}{where}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write(f"{prog}: interrupted\n")
        return 130


def _with_underscores(args: Sequence[str]) -> list[str]:
    """`--max-tokens 5` means `--max_tokens 5`: option names are fields, and both spellings are natural."""
    words = []
    for word in args:
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            name = "--" + name[2:].replace("-", "_")
        words.append(name + equals + value)
    return words


def _one_line(message: str) -> str:
    return " ".join(message.split())
