"""The one way a tailcast command starts: frozen dataclass in, exit code out.

A command is a frozen dataclass (each field followed by a docstring, which is its help text) and a
function that takes an instance. From them come `--help`, `--config FILE.yaml`, dotted overrides and
`--print_config` (jsonargparse). Errors the user can cause become one line on stderr and exit code 2.

Ctrl-C during an import prints a traceback unless a handler is there already, so this module and the entry
modules of the commands import next to nothing at module level; `entry_point` is the handler around the rest.
"""

from __future__ import annotations

import os
import sys

from scheduler_core.errors import InputError, MissingExtraError, TailcastError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Any, ParamSpec, TypeVar

    C = TypeVar("C")
    P = ParamSpec("P")

#: Exit codes. A command may also end with 3: it ran, and the check it is for did not pass.
FAILURE, USER_ERROR, INTERRUPTED = 1, 2, 130
#: Set to anything but "" or 0: the traceback of an error is printed before its line.
TRACEBACK_VARIABLE = "TAILCAST_TRACEBACK"
#: Integers of options are stored in 64 bits.
_MAX_INTEGER = 2**63 - 1
#: Collections inside each other in a configuration.
_MAX_DEPTH = 50


def entry_point(prog: str, extra: str) -> Callable[[Callable[P, int]], Callable[P, int]]:
    """Decorator of a `main` that imports what it needs: its errors become one line and an exit code.

    Args:
        prog: Name of the command, shown in errors.
        extra: The extra of `tailcast` that installs what the command needs.
    """

    def decorate(main: Callable[P, int]) -> Callable[P, int]:
        def handled(*args: P.args, **kwargs: P.kwargs) -> int:
            owns_process = not any(value is not None for value in (*args, *kwargs.values()))
            return _exit_code(prog, extra, lambda: main(*args, **kwargs), owns_process=owns_process)

        handled.__doc__ = main.__doc__
        handled.__wrapped__ = main  # type: ignore[attr-defined]
        return handled

    return decorate


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
        0 on success, 2 for bad input or a missing dependency, 130 when interrupted, 1 for a bug of ours.
    """

    def run() -> int:
        import logging

        logging.basicConfig(
            level=logging.INFO, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s"
        )
        words = sys.argv[1:] if args is None else args
        return function(_parsed(prog, config_class, positionals, extra, words)) or 0

    return _exit_code(prog, extra, run, owns_process=args is None)


def _exit_code(prog: str, extra: str, run: Callable[[], int], *, owns_process: bool) -> int:
    """The outermost handler of every command.

    Args:
        prog: Name of the command.
        extra: What a package that is missing comes with.
        run: The command.
        owns_process: The interpreter exits after it: Ctrl-C has no traceback from then on.
    """
    if owns_process:
        _open_missing_streams()
    try:
        try:
            code = run()
        finally:  # also before the SystemExit of --help
            sys.stdout.flush()
        if owns_process:
            _exit_on_interrupt(prog)
    except BaseException as error:
        if owns_process:
            _exit_on_interrupt(prog)
        code = _reported(prog, extra, error)
        if owns_process and code == INTERRUPTED and _has_threads():
            # All is unwound; the interpreter would wait for calls whose results are not needed any more.
            os._exit(code)
    return code


def _reported(prog: str, extra: str, error: BaseException) -> int:
    """The exit code for an error, after its line on stderr; what is none is raised again."""
    if isinstance(error, SystemExit | GeneratorExit):
        raise error
    if _stdout_is_broken() and isinstance(error, BrokenPipeError):
        return 0  # `simulate compare a b | head`: the reader has what it wanted
    if os.environ.get(TRACEBACK_VARIABLE, "") not in ("", "0"):
        import traceback

        _write(traceback.format_exc())
    if _is_interrupt(error):
        _write(f"{prog}: interrupted\n")
        return INTERRUPTED
    message = _message(error, extra)
    if message is not None:
        _write(f"{prog}: error: {_one_line(message)}\n")
        return USER_ERROR
    bug = _one_line(f"{type(error).__name__}: {error}")
    _write(f"{prog}: error: this is a bug in tailcast ({bug}); {TRACEBACK_VARIABLE}=1 prints the traceback\n")
    return FAILURE


def _message(error: BaseException, extra: str) -> str | None:
    """What the user did wrong; None: nothing, the error is a bug."""
    if isinstance(error, TailcastError):
        return str(error)
    if isinstance(error, ModuleNotFoundError) and (name := (error.name or "").partition(".")[0]):
        return None if name in sys.modules else str(MissingExtraError(name, extra))
    if isinstance(error, OSError):
        where = f" ({error.filename})" if error.filename else ""
        return f"{error.strerror or error or type(error).__name__}{where}"
    if isinstance(error, MemoryError):
        return f"not enough memory{_detail(error)}"
    if isinstance(error, RecursionError):
        return "the input is nested too deeply"
    if isinstance(error, UnicodeError):
        return f"text that is not valid Unicode{_detail(error)}"
    if isinstance(error, OverflowError):
        return f"a number is too large{_detail(error)}"
    return None


def _detail(error: BaseException) -> str:
    return f": {error}" if str(error) else ""


def _is_interrupt(error: BaseException) -> bool:
    """Ctrl-C, or what a library made of it: extension modules turn it into an ImportError while they load."""
    if isinstance(error, ImportError | SystemError):
        cause = error.__cause__ or error.__context__
        return cause is not None and _is_interrupt(cause)
    return isinstance(error, KeyboardInterrupt)


def _stdout_is_broken() -> bool:
    """Nobody reads the pipe that standard output is, or it takes no more; what is left goes to the null device."""
    try:
        number = sys.stdout.fileno()
    except (OSError, ValueError):  # a stream in memory
        return False
    try:
        sys.stdout.flush()
        broken = _has_no_reader(number)
    except OSError:
        broken = True
    if broken:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, number)
        os.close(null)
    return broken


def _has_no_reader(number: int) -> bool:
    """Whether the file with this number is a pipe without a reader, as far as the system tells."""
    import select

    if not hasattr(select, "poll"):
        return False
    poll = select.poll()
    poll.register(number, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _open_missing_streams() -> None:
    """A process started with closed standard streams gets the null device, before a file gets their numbers."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115


def _exit_on_interrupt(prog: str) -> None:
    """From here on Ctrl-C ends the process at once: all is written, and the interpreter only waits for threads."""
    import signal

    def interrupted(*_: object) -> None:
        _write(f"{prog}: interrupted\n")
        os._exit(INTERRUPTED)

    try:
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, interrupted)
    except ValueError:  # not in the main thread, which alone gets signals
        return


def _has_threads() -> bool:
    """Threads are left for which the interpreter waits before it exits."""
    import threading

    return any(not thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread())


def _write(text: str) -> None:
    """Writes to stderr; a closed one is no reason for another error."""
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except (OSError, ValueError):
        return


def _one_line(message: str) -> str:
    """The message without line breaks; what is no Unicode, such as bytes of a path, escaped."""
    return " ".join(message.split()).encode("utf-8", "backslashreplace").decode("utf-8")


def _parsed(
    prog: str, config_class: type[C], positionals: Sequence[str], extra: str, args: Sequence[str]
) -> C:
    """The configuration.

    Raises:
        TailcastError: An option is unknown, missing, or has a value that is not allowed, or an output is an input.
        MissingExtraError: jsonargparse is not installed.
    """
    parser = _parser(prog, config_class, positionals, extra)
    from jsonargparse import ArgumentError

    from scheduler_core.files import check_command_paths

    for place, word in enumerate(args, start=1):
        _check_value(f"argument {place}", word)
    try:
        parsed = _read_options(parser, args)
        for name in positionals:
            if parsed.get(name) is None:
                raise TailcastError(f"{name.upper()}: missing; see {prog} --help")
        for name, value in parsed.items():
            if name != "config":
                _check_value(name, value)
        _check_groups(config_class, parsed, "")
        values = parser.instantiate(parsed)
        config = config_class(**{name: values[name] for name in config_class.__dataclass_fields__})  # type: ignore[attr-defined]
        check_command_paths(config, [str(path) for path in values.get("config") or ()])
        return config
    except (ArgumentError, ValueError) as error:
        if isinstance(error, UnicodeDecodeError):
            told = f"--config: not a text in UTF-8 ({error.reason} at byte {error.start})"
            raise TailcastError(told) from error
        if (cause := _allowed(error)) is not None:
            raise cause from None
        if isinstance(error, ArgumentError) or "null byte" in str(error):
            raise TailcastError(str(error)) from error
        raise


def _read_options(parser: Any, args: Sequence[str]) -> Any:
    """The values of the options and configuration files, not yet in a configuration."""
    try:
        return parser.parse_args(_with_underscores(args))
    except (AttributeError, KeyError, IndexError, TypeError) as error:
        # Nothing of ours runs in there: jsonargparse trips over such things as a configuration file with a key `config`.
        raise TailcastError(f"the options cannot be read ({type(error).__name__}: {error})") from error


def _allowed(error: BaseException) -> TailcastError | None:
    """What a configuration said of its values, inside what jsonargparse made of it."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, TailcastError):
        cause = cause.__cause__
    return cause


def _check_groups(config_class: type[Any], values: Any, prefix: str) -> None:
    """A configuration inside another one has options, and is no number or list; null is what may be unset.

    Raises:
        InputError: Names the option.
    """
    from dataclasses import is_dataclass
    from typing import Any, get_args, get_type_hints

    from jsonargparse import Namespace

    for name, hint in get_type_hints(config_class).items():
        members = get_args(hint) or (hint,)
        value = values.get(name)
        if isinstance(value, Namespace):
            for member in members:
                if isinstance(member, type) and is_dataclass(member):
                    _check_groups(member, value, f"{prefix}{name}.")
        elif is_dataclass(hint):
            raise InputError(prefix + name, value, "a mapping of its options")
        elif value is None and name in values and not {type(None), Any} & set(members):
            raise InputError(prefix + name, None, "a value; leave it out for the default")


def _parser(prog: str, config_class: type[Any], positionals: Sequence[str], extra: str) -> Any:
    from importlib import metadata

    try:
        from jsonargparse import (  # type: ignore[attr-defined]
            ActionConfigFile,
            ArgumentParser,
            set_loader,
            set_parsing_settings,
        )
        from yaml import YAMLError
    except ImportError as error:
        raise MissingExtraError("jsonargparse", extra) from error
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    set_loader(_YAML_MODE, _load_yaml, exceptions=(YAMLError,))
    summary = (config_class.__doc__ or "").strip().split("\n\n")[0]
    parser = ArgumentParser(prog=prog, description=summary, exit_on_error=False, parser_mode=_YAML_MODE)
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


_YAML_MODE = "tailcast"


def _load_yaml(text: str) -> Any:
    """The value of a YAML text, as jsonargparse loads it, without what makes a small text a huge or another value.

    Raises:
        YAMLError: It is not valid, has an alias, the same key twice, or is nested too deeply.
    """
    from jsonargparse import get_loader
    from yaml import YAMLError

    _check_yaml(text)
    try:
        return get_loader("yaml")(text)
    except (ValueError, OverflowError) as error:  # such as an integer of 5,000 digits
        raise YAMLError(str(error)) from error


def _check_yaml(text: str) -> None:
    """Looks at the events of the parser alone, as to build the values of such a text is what must not be tried."""
    import yaml

    keys: list[set[str] | None] = []  # of each open collection; None: a sequence
    is_key: list[bool] = []  # of each open collection: the next node is a key
    for event in yaml.parse(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        if isinstance(event, yaml.AliasEvent):
            raise yaml.YAMLError(f"alias *{event.anchor}: aliases are not supported; write the value out")
        if isinstance(event, yaml.CollectionEndEvent):
            keys.pop()
            is_key.pop()
        elif isinstance(event, yaml.NodeEvent):
            if keys and (names := keys[-1]) is not None:
                if is_key[-1] and isinstance(event, yaml.ScalarEvent):
                    if event.value in names:
                        raise yaml.YAMLError(
                            f"line {event.start_mark.line + 1}: {event.value!r} is there twice"
                        )
                    names.add(event.value)
                is_key[-1] = not is_key[-1]
            if isinstance(event, yaml.CollectionStartEvent):
                keys.append(set() if isinstance(event, yaml.MappingStartEvent) else None)
                is_key.append(True)
                if len(keys) > _MAX_DEPTH:
                    raise yaml.YAMLError(f"more than {_MAX_DEPTH} lists and mappings inside each other")


def _check_value(name: str, value: object) -> None:
    """No option takes what fits no file: a number that is none or infinite, an integer beyond 64 bits, broken text.

    Raises:
        InputError: Names the option.
    """
    if isinstance(value, float) and not -float("inf") < value < float("inf"):
        raise InputError(name, value, "finite numbers")
    if isinstance(value, int) and not -_MAX_INTEGER <= value <= _MAX_INTEGER:
        raise InputError(name, _Digits(value), "integers of 64 bits")
    if isinstance(value, str):
        if "\0" in value:
            raise InputError(name, value, "text without NUL characters")
        if any("\ud800" <= character <= "\udfff" for character in value):
            raise InputError(name, value, "text that is valid UTF-8")
    for inner, item in _items(name, value):
        _check_value(inner, item)


def _items(name: str, value: object) -> Iterator[tuple[str, object]]:
    """The parts of a collection with their names."""
    from collections.abc import Mapping

    if isinstance(value, Mapping):
        for key, item in value.items():
            yield f"{name} key", key
            yield f"{name}.{key}", item
    elif isinstance(value, list | tuple | set):
        for place, item in enumerate(value):
            yield f"{name}[{place}]", item


class _Digits:
    """An integer of any size in an error message: Python refuses to write out more than 4,300 digits."""

    def __init__(self, value: int) -> None:
        self._value = value

    def __repr__(self) -> str:
        return hex(self._value) if self._value.bit_length() > 512 else str(self._value)


def _field_help(config_class: type[Any], name: str) -> str:
    from docstring_parser import parse_from_object

    documented = {
        parameter.arg_name: parameter.description for parameter in parse_from_object(config_class).params
    }
    return documented.get(name) or ""


def _with_underscores(args: Sequence[str]) -> list[str]:
    """`--max-tokens 5` means `--max_tokens 5`: option names are fields, and both spellings are natural."""
    words = []
    for word in args:
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            name = "--" + name[2:].replace("-", "_")
        words.append(name + equals + value)
    return words
