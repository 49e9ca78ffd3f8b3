"""Entry points of the tailcast commands: an error becomes one line on stderr and an exit code.

Ctrl-C during an import prints a traceback unless a handler is installed. Therefore this module and the entry
modules of the commands import almost nothing at module level; `entry_point` installs the handler.
"""

from __future__ import annotations

import os
import sys
from functools import wraps

from scheduler_core.errors import MissingExtraError, TailcastError, unknown_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any, ParamSpec, TypeVar

    C = TypeVar("C")
    P = ParamSpec("P")

#: Exit codes. CHECK_FAILED: the command ran to the end, but its check failed or it left out more than half of its rows.
FAILURE, USER_ERROR, CHECK_FAILED, INTERRUPTED = 1, 2, 3, 130
#: If set to anything but "" or 0, the traceback of an error is printed before its line.
TRACEBACK_VARIABLE = "TAILCAST_TRACEBACK"
#: Set by argcomplete when it requests completions: the number of words that name the command.
COMPLETION_VARIABLE = "_ARGCOMPLETE"


def entry_point(prog: str, extra: str) -> Callable[[Callable[P, int]], Callable[P, int]]:
    """Decorator for a `main` that imports its dependencies itself: prints an error as one line and returns an
    exit code. `extra` is the extra of `tailcast` that installs the dependencies of the command."""

    def decorate(main: Callable[P, int]) -> Callable[P, int]:
        @wraps(main)
        def handled(*args: P.args, **kwargs: P.kwargs) -> int:
            owns_process = not any(value is not None for value in (*args, *kwargs.values()))
            return _exit_code(prog, extra, lambda: main(*args, **kwargs), owns_process=owns_process)

        return handled

    return decorate


def chosen_command(prog: str, commands: Mapping[str, str], words: Sequence[str]) -> str | None:
    """The sub-command named by the first word. Without words or for --help, prints all sub-commands and
    returns None. `InputError` if there is no such sub-command.

    `commands` maps the name of each sub-command to its description.
    """
    if COMPLETION_VARIABLE in os.environ:
        words = _words_to_complete(prog, commands)
    if not words or words[0] in ("-h", "--help"):
        width = max(map(len, commands)) + 2
        lines = [f"  {name:<{width}}{text}" for name, text in commands.items()]
        usage = "\n".join([f"usage: {prog} COMMAND [OPTIONS]", "", "Commands:", *lines, "", ""])
        (sys.stdout if words else sys.stderr).write(f"{usage}{prog} COMMAND --help explains the options.\n")
        return None
    if words[0] not in commands:
        raise unknown_name("COMMAND", words[0], commands)
    return words[0]


def _words_to_complete(prog: str, commands: Mapping[str, str]) -> Sequence[str]:
    """The words before the one to complete, if the first is a sub-command, which then completes its own options.
    Otherwise completes the first word and ends the process. argcomplete runs a command without its arguments."""
    import argparse

    import argcomplete
    from argcomplete.lexers import split_line

    first = int(os.environ[COMPLETION_VARIABLE])
    line, point = os.environ["COMP_LINE"], int(os.environ["COMP_POINT"])
    words: Sequence[str] = split_line(line, point)[3][first:]
    if not words or words[0] not in commands:
        parser = argparse.ArgumentParser(prog)
        parser.add_argument("command", choices=commands)
        argcomplete.autocomplete(parser)
    os.environ[COMPLETION_VARIABLE] = str(first + 1)
    return words


def command(
    prog: str,
    config: type[C] | str,
    function: Callable[[C], object] | str,
    *,
    positionals: Sequence[str] = (),
    extra: str,
    prepare: Callable[[], None] = lambda: None,
) -> Callable[..., int]:
    """The `main` of a command. It takes the arguments (default: `sys.argv`) and returns the exit code: 0 on success (or
    the result of `function`), 2 for bad input or a missing dependency, 130 when interrupted, 1 for a bug in tailcast.

    `config` is the class of the options. As "module:name", `config` is imported when the command is called, `function`
    after the options were parsed and `prepare` was called. `positionals` and `extra`: see `options.read_config`.
    """

    @entry_point(prog, extra)
    def main(args: Sequence[str] | None = None) -> int:
        import logging

        from scheduler_core.shell.options import read_config

        config_class = imported(config)
        logging.basicConfig(
            level=logging.INFO, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s"
        )
        options = read_config(prog, config_class, positionals, extra, sys.argv[1:] if args is None else args)
        prepare()
        code = imported(function)(options)
        return code if isinstance(code, int) else 0

    return main


def report_left_out(reasons: Mapping[str, int], num_rows: int, unit: str = "rows") -> int:
    """Logs, as the last line of a command, how many of its input rows were left out and why; nothing if none were.

    Returns the exit code: `CHECK_FAILED` if more than half of `num_rows` were left out, else 0.
    """
    import logging

    num_left_out = sum(reasons.values())
    if not num_left_out:
        return 0
    ordered = sorted(
        ((reason, count) for reason, count in reasons.items() if count), key=lambda item: -item[1]
    )
    causes = "; ".join(f"{count} x {reason}" for reason, count in ordered)
    is_failure = 2 * num_left_out > num_rows
    log = logging.getLogger(__name__)
    log.log(
        logging.ERROR if is_failure else logging.WARNING,
        "left out %d of %d %s: %s",
        num_left_out,
        num_rows,
        unit,
        _one_line(causes),
    )
    return CHECK_FAILED if is_failure else 0


def imported(path: Any) -> Any:
    """The object at "module:name"; anything but a string is returned unchanged."""
    if not isinstance(path, str):
        return path
    from importlib import import_module

    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def _exit_code(prog: str, extra: str, run: Callable[[], int], *, owns_process: bool) -> int:
    """Outermost handler of a command. `owns_process`: the process ends after it; Ctrl-C prints no traceback."""
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
        code = _report(prog, extra, error)
    if owns_process and code == INTERRUPTED:
        import threading

        main_thread = threading.main_thread()
        if any(not thread.daemon for thread in threading.enumerate() if thread is not main_thread):
            # At its exit the interpreter would wait for threads whose results are no longer needed.
            os._exit(code)
    return code


def _report(prog: str, extra: str, error: BaseException) -> int:
    """Prints an error as one line and returns the exit code; raises `SystemExit` and `GeneratorExit` again."""
    if isinstance(error, SystemExit | GeneratorExit):
        raise error
    if _discard_broken_stdout() and isinstance(error, BrokenPipeError):
        return 0  # `simulate compare a b | head`: the reader has closed the pipe
    if os.environ.get(TRACEBACK_VARIABLE, "") not in ("", "0"):
        import traceback

        _write(traceback.format_exc())
    if _is_interrupt(error):
        _write(f"{prog}: interrupted\n")
        return INTERRUPTED
    message = None if isinstance(error, TailcastError) else user_code_message(error)
    message = message or _user_message(error, extra)
    if message is not None:
        _write(f"{prog}: error: {_one_line(message)}\n")
        return USER_ERROR
    bug = _one_line(f"{type(error).__name__}: {error}")
    _write(f"{prog}: error: this is a bug in tailcast ({bug}); {TRACEBACK_VARIABLE}=1 prints the traceback\n")
    return FAILURE


def user_code_message(error: BaseException) -> str | None:
    """The message about an error in the code of a user, such as a policy, with its place there; None if there is none.

    Code of a user is what tailcast calls and is neither in the standard library nor an installed package, unless that
    provides an entry point of tailcast. What it calls itself belongs to it.
    """
    import site
    import sysconfig
    from importlib import metadata
    from pathlib import Path
    from traceback import walk_tb

    root = Path(__file__).resolve().parents[2]
    own = [
        root / name for name in ("scheduler_core", "predictors", "data_gen", "training", "export", "tailcast")
    ]
    paths = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    installed = [
        Path(path).resolve() for path in (*paths, *site.getsitepackages(), site.getusersitepackages())
    ]
    plugins = {
        point.value.partition(":")[0].partition(".")[0]
        for group in ("tailcast.policies", "tailcast.predictors")
        for point in metadata.entry_points(group=group)
    }
    is_called, location = False, None
    for frame, line in walk_tb(error.__traceback__):
        file = Path(frame.f_code.co_filename).resolve()
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        is_installed = any(file.is_relative_to(folder) for folder in installed) and package not in plugins
        if any(file.is_relative_to(folder) for folder in own):
            is_called = is_called or file != Path(__file__).resolve()
        elif is_called and not is_installed and file.is_file():
            location = f"{file}, line {line}, in {frame.f_code.co_name}"
    return None if location is None else f"{location}: {type(error).__name__}: {error}"


def _user_message(error: BaseException, extra: str) -> str | None:
    """The message about invalid input or a failure of the machine; None if the error is a bug."""
    detail = f": {error}" if str(error) else ""
    match error:
        case TailcastError():
            return str(error)
        case ModuleNotFoundError() if error.name:
            package = error.name.partition(".")[0]
            return None if package in sys.modules else str(MissingExtraError(package, extra))
        case OSError():
            location = f" ({error.filename})" if error.filename else ""
            return f"{error.strerror or error or type(error).__name__}{location}"
        case MemoryError():
            return f"not enough memory{detail}"
        case RecursionError():
            return "the input is nested too deeply"
        case UnicodeError():
            return f"text that is not valid Unicode{detail}"
        case OverflowError():
            return f"a number is too large{detail}"
    return None


def _is_interrupt(error: BaseException) -> bool:
    """Whether Ctrl-C caused the error. Extension modules raise an ImportError instead while they load, and an interrupted
    wait for a lock of `threading` a RuntimeError ("release unlocked lock")."""
    if isinstance(error, ImportError | SystemError | RuntimeError):
        cause = error.__cause__ or error.__context__
        return cause is not None and _is_interrupt(cause)
    return isinstance(error, KeyboardInterrupt)


def _discard_broken_stdout() -> bool:
    """Whether standard output is a pipe without a reader. If so, redirects it to the null device."""
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
    """Whether the file with this number is a pipe without a reader, where the system can tell."""
    import select

    if not hasattr(select, "poll"):
        return False
    poll = select.poll()
    poll.register(number, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _open_missing_streams() -> None:
    """Opens the null device for closed standard streams, so that no other file gets their descriptors."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115


def _exit_on_interrupt(prog: str) -> None:
    """Makes Ctrl-C end the process at once: the output is complete, only threads are still running."""
    import signal

    def interrupted(*_: object) -> None:
        _write(f"{prog}: interrupted\n")
        os._exit(INTERRUPTED)

    try:
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, interrupted)
    except ValueError:  # only the main thread can install signal handlers
        return


def _write(text: str) -> None:
    """Writes to stderr; ignores errors such as a closed stream."""
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except (OSError, ValueError):
        return


def _one_line(message: str) -> str:
    """The message without line breaks; invalid Unicode, such as bytes of a path, is escaped."""
    return " ".join(message.split()).encode("utf-8", "backslashreplace").decode("utf-8")
