"""Options of a command: a frozen dataclass, filled from the command line and YAML files with jsonargparse.

The dataclass defines `--help`, `--config FILE.yaml`, dotted overrides and `--print_config`; the docstring
after each field is its help text.
"""

import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from difflib import get_close_matches
from functools import reduce
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from scheduler_core.errors import InputError, MissingExtraError, TailcastError, unknown_name
from scheduler_core.shell.files import is_stream

C = TypeVar("C")

#: Integers of options are stored in 64 bits.
_MAX_INTEGER = 2**63 - 1
#: Maximum depth of nested collections in a configuration.
_MAX_DEPTH = 50
_YAML_MODE = "tailcast"
#: Numbers that YAML and Python read differently, or users mean differently: 1_000, 017 (15), 0x10 (16), 1:30 (90).
_ODD_NUMBER = re.compile(
    r"[+-]?(?:0[0-9_]+|0x[0-9a-f_]+|0b[01_]+|[0-9][0-9_]*(?::[0-9]+)+|(?=.*_)[0-9.][0-9_.e+-]*)",
    re.IGNORECASE,
)
#: Error messages of jsonargparse: missing required options, values not among the choices, unknown options.
_REQUIRED = "the following arguments are required"
_CHOICE = re.compile(r'Parser key "(.+?)":\s+Expected a typing.Literal\[(.+)\]. Got value: (.*)')
_UNKNOWN = re.compile(
    r"unrecognized arguments: --([^\s=]+)|Group '(.+)' does not accept option '(.+)'|Option '(.+)' is not"
)


def read_config(
    prog: str, config_class: type[C], positionals: Sequence[str], extra: str, args: Sequence[str]
) -> C:
    """The configuration of the command `prog`, parsed from its arguments. `TailcastError` if an option is
    unknown, missing or invalid, or if an output path is also an input.

    Args:
        config_class: Frozen dataclass with one documented field per option. Its optional class attribute
            RECIPES is a folder of YAML files that --config finds by name; SPELLINGS are pairs of a field and
            the name that users write on the command line and in files, beside that of the field.
        positionals: Names of string fields passed by position, in order; the last may be a list. Those
            without a default are required.
        extra: The extra of `tailcast` that installs jsonargparse.
    """
    parser = _parser(prog, config_class, positionals, extra)
    from jsonargparse import ArgumentError

    defaults = {field.name: field.default for field in fields(config_class)}  # type: ignore[arg-type]
    lists = {field.name for field in fields(config_class) if field.default_factory is not MISSING}  # type: ignore[arg-type]
    required = [name for name in positionals if defaults[name] is MISSING and name not in lists]
    for number, word in enumerate(args, start=1):
        _check_value(f"argument {number}", word)
    args = _with_recipes(args, getattr(config_class, "RECIPES", None))
    try:
        options = _parse(parser, args)
        if any(options.get(name) is None for name in required):
            raise ArgumentError(None, _REQUIRED)
    except UnicodeDecodeError as error:
        message = f"--config: not a text in UTF-8 ({error.reason} at byte {error.start})"
        raise TailcastError(message) from error
    except (ArgumentError, ValueError) as error:
        if isinstance(error, ArgumentError) or "null byte" in str(error):
            raise TailcastError(_explained(str(error), prog, parser, required, args)) from error
        raise
    values = _plain(options)
    config_files = values.pop("config") or ()
    for name, value in values.items():
        _check_value(name, value)
    config = from_mapping(config_class, values)
    check_command_paths(config, [str(path) for path in config_files])
    return config


def _parser(prog: str, config_class: type[Any], positionals: Sequence[str], extra: str) -> Any:
    try:
        from docstring_parser import parse_from_object
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
    for name, spelling in getattr(config_class, "SPELLINGS", ()):
        action = parser._option_string_actions[f"--{name}"]
        action.option_strings = [f"--{spelling}", *action.option_strings]
        parser._option_string_actions[f"--{spelling}"] = action
    helps = {field.arg_name: field.description or "" for field in parse_from_object(config_class).params}
    for name in positionals:
        default = config_class.__dataclass_fields__[name].default
        options: dict[str, Any] = {} if default is MISSING else {"default": default}
        nargs = "*" if str(config_class.__dataclass_fields__[name].type).startswith("list") else "?"
        parser.add_argument(
            name, type=str, nargs=nargs, help=helps.get(name, ""), metavar=name.upper(), **options
        )
    if "_ARGCOMPLETE" in os.environ:  # argcomplete requests completions
        _add_completers(parser)
    return parser


def _add_completers(parser: Any) -> None:
    """Makes argcomplete complete choices and, for other options, files; jsonargparse does so for booleans only."""
    from argcomplete.completers import FilesCompleter

    for action in parser._actions:
        hint = getattr(action, "_typehint", None)
        literals = [part for part in (hint, *get_args(hint)) if get_origin(part) is Literal]
        if literals:
            action.choices = get_args(literals[0])
        elif hint is not bool:
            action.completer = FilesCompleter()


def _with_recipes(args: Sequence[str], folder: Path | None) -> list[str]:
    """The arguments with recipe names after --config replaced by paths, unless a file has that name."""
    recipes = {} if folder is None else {path.stem: str(path) for path in sorted(folder.glob("*.yaml"))}
    words = [
        part for word in args for part in (word.split("=", 1) if word.startswith("--config=") else [word])
    ]
    for number, (option, name) in enumerate(pairwise(words), start=1):
        if recipes and option == "--config" and not os.path.exists(name):
            if name not in recipes:
                raise unknown_name("config", name, ["a YAML file", *recipes])
            words[number] = recipes[name]
    return words


def _explained(message: str, prog: str, parser: Any, positionals: Sequence[str], args: Sequence[str]) -> str:
    """The message of an option error, with all missing options, or the option most similar to an unknown one.

    `positionals` are the required positional options.
    """
    if message.startswith(_REQUIRED):
        spellings = {name: name.upper() for name in positionals}
        spellings |= {action.dest: f"--{action.dest}" for action in parser._actions if action.required}
        for action in parser._actions:
            action.required = False
        values = _parse(parser, args)
        missing = [spelling for name, spelling in spellings.items() if values.get(name) is None]
        return f"missing: {', '.join(missing)}; see {prog} --help"
    choice = _CHOICE.fullmatch(message)
    if choice is not None:
        return str(unknown_name(choice[1], choice[3], re.findall("'(.+?)'", choice[2])))
    unknown = _UNKNOWN.search(message)
    options = {key.lstrip("-"): key for key in parser._option_string_actions if key.startswith("--")}
    name = "" if unknown is None else ".".join(filter(None, unknown.groups()))
    similar = get_close_matches(name[:80].replace("-", "_"), options, n=1)
    return message + (f"; did you mean {options[similar[0]]}?" if similar else "")


def _parse(parser: Any, args: Sequence[str]) -> Any:
    """The values of the options and configuration files, as a Namespace of jsonargparse."""
    words = []
    for word, following in pairwise([*args, ""]):
        name, equals, value = word.partition("=")
        if name.startswith("--"):  # `--max-tokens 5` means `--max_tokens 5`
            name = "--" + name[2:].replace("-", "_")
        words.append(name + equals + value)
        hint = getattr(parser._option_string_actions.get(name), "_typehint", None)
        types = {hint, *get_args(hint)}
        value = value if equals else following
        if {int, float} & types and str not in types and _is_odd_number(value.strip()):
            raise InputError(name.removeprefix("--"), value, "decimal numbers in ASCII digits")
    try:
        return parser.parse_args(words)
    except (AttributeError, KeyError, IndexError, TypeError) as error:
        # jsonargparse raises these for some invalid input, such as a configuration file with a key `config`.
        raise TailcastError(f"the options cannot be read ({type(error).__name__}: {error})") from error


def _plain(value: Any) -> Any:
    """A Namespace of jsonargparse as a dict; in lists, jsonargparse wraps groups as {class_path, init_args}."""
    from jsonargparse import Namespace

    if isinstance(value, Namespace):
        members = vars(value)
        return (
            _plain(members["init_args"])
            if "class_path" in members
            else {k: _plain(v) for k, v in members.items()}
        )
    return type(value)(map(_plain, value)) if isinstance(value, list | tuple) else value


def from_mapping(kind: type[C], values: Mapping[str, Any], prefix: str = "") -> C:
    """A configuration from values by name, where a group of options may be a mapping too. `InputError`, with the name after
    `prefix`, if a name is unknown, a required one is missing, or a value has the wrong type or is outside its range."""
    hints = {name: hint for name, hint in get_type_hints(kind).items() if name in kind.__dataclass_fields__}  # type: ignore[attr-defined]
    for name in values:
        if name not in hints:
            raise unknown_name(f"option {prefix}{name}", name, hints)
    for field in fields(kind):  # type: ignore[arg-type]
        if field.name not in values and field.default is MISSING and field.default_factory is MISSING:
            raise InputError(prefix + field.name, None, "a value")
    return kind(**{name: _converted(prefix + name, value, hints[name]) for name, value in values.items()})


def _converted(name: str, value: Any, hint: Any) -> Any:
    """The value of an option with mappings converted to its dataclasses, and numpy numbers to those of Python."""
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        value = value.item()
    for member in _members(hint):
        if is_dataclass(member) and isinstance(member, type):
            if isinstance(value, Mapping):
                return from_mapping(member, value, f"{name}.")
            if not isinstance(value, member) and not (value is None and type(None) in _members(hint)):
                raise InputError(name, value, f"a mapping of options, or a {member.__name__}")
        elif get_origin(member) in (list, tuple) and isinstance(value, list | tuple):
            item = get_args(member)[0]
            return type(value)(
                _converted(f"{name}[{number}]", each, item) for number, each in enumerate(value)
            )
    check_type(name, value, hint)
    return value


def _members(hint: Any) -> tuple[Any, ...]:
    """The members of a union, or the type itself."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def check_type(name: str, value: Any, hint: Any) -> None:
    """Raises `InputError` if a value has not the type of its option, where that is a number, a text, a boolean or a
    mapping, or if it is None and may not be."""
    types = {get_origin(member) or member for member in _members(hint)}
    if float in types:
        types.add(int)
    if value is None and not types & {type(None), Any}:
        raise InputError(name, None, "a value; leave it out for the default")
    if types == {dict} and not isinstance(value, Mapping):
        raise InputError(name, value, "names with values")
    if types <= {int, float, str, bool, type(None)} and type(value) not in types:
        names = sorted("unset" if kind is type(None) else kind.__name__ for kind in types)
        raise InputError(name, value, " or ".join(names))


def _load_yaml(text: str) -> Any:
    """The value of a YAML text, as jsonargparse loads it. `YAMLError` if it is invalid, has an alias or a
    repeated key, or is nested too deeply."""
    from jsonargparse import get_loader
    from yaml import YAMLError

    _check_yaml(text)
    try:
        return get_loader("yaml")(text)
    except (ValueError, OverflowError) as error:  # such as an integer of 5,000 digits
        raise YAMLError(str(error)) from error


def _is_odd_number(text: str) -> bool:
    """Whether libraries read a text as a number although it is not a plain decimal number in ASCII digits."""
    if text.isascii():
        return _ODD_NUMBER.fullmatch(text) is not None
    try:
        float(text)
    except ValueError:
        return False
    return True


def _check_yaml(text: str) -> None:
    """Rejects aliases (small texts may expand to huge values), repeated keys and deep nesting before loading."""
    import yaml

    keys: list[set[str] | None] = []  # for each open collection: its keys so far; None: a sequence
    is_key: list[bool] = []  # for each open collection: whether the next node is a key
    for event in yaml.parse(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        if isinstance(event, yaml.AliasEvent):
            raise yaml.YAMLError(f"alias *{event.anchor}: aliases are not supported; write the value out")
        if isinstance(event, yaml.CollectionEndEvent):
            keys.pop()
            is_key.pop()
        elif isinstance(event, yaml.NodeEvent):
            if isinstance(event, yaml.ScalarEvent) and event.implicit[0] and _is_odd_number(event.value):
                line = event.start_mark.line + 1
                raise yaml.YAMLError(f"line {line}: {event.value!r} is no decimal number; quote a text")
            if keys and (names := keys[-1]) is not None:
                if is_key[-1] and isinstance(event, yaml.ScalarEvent):
                    if event.value in names:
                        line = event.start_mark.line + 1
                        raise yaml.YAMLError(f"line {line}: repeated key {event.value!r}")
                    names.add(event.value)
                is_key[-1] = not is_key[-1]
            if isinstance(event, yaml.CollectionStartEvent):
                keys.append(set() if isinstance(event, yaml.MappingStartEvent) else None)
                is_key.append(True)
                if len(keys) > _MAX_DEPTH:
                    raise yaml.YAMLError(f"more than {_MAX_DEPTH} nested lists and mappings")


def _check_value(name: str, value: object) -> None:
    """Raises InputError for values that files cannot store: NaN, infinity, large integers, invalid text."""
    if isinstance(value, float) and not math.isfinite(value):
        raise InputError(name, value, "finite numbers")
    if isinstance(value, int) and not -_MAX_INTEGER <= value <= _MAX_INTEGER:
        raise InputError(name, value, "integers of 64 bits")
    if isinstance(value, str):
        if "\0" in value:
            raise InputError(name, value, "text without NUL characters")
        if any("\ud800" <= character <= "\udfff" for character in value):
            raise InputError(name, value, "text that is valid UTF-8")
    if isinstance(value, Mapping):
        for key, item in value.items():
            _check_value(f"{name} key", key)
            _check_value(f"{name}.{key}", item)
    elif isinstance(value, list | tuple | set):
        for index, item in enumerate(value):
            _check_value(f"{name}[{index}]", item)


def check_command_paths(config: object, config_files: Sequence[str] = ()) -> None:
    """`check_outputs` for the options of a command and its --config files. If there is an option `overwrite`
    and it is false, existing output files are an `InputError` as well, those of patterns too.

    The class attributes INPUTS and OUTPUTS of `config` are names of options, dotted for those of a group. An
    output may also be a pattern such as "{out}.run.json". Without them nothing is checked.
    """
    inputs = {
        name: _input_paths(reduce(lambda part, word: getattr(part, word, None), name.split("."), config))
        for name in getattr(config, "INPUTS", ())
    }
    outputs: dict[str, str | Path | None] = {}
    for name in getattr(config, "OUTPUTS", ()):
        options = re.findall(r"{(.+?)}", name) or [name]
        values = {option: getattr(config, option) for option in options}
        if None not in values.values():
            paths = {option: Path(value) for option, value in values.items()}
            outputs[name] = name.format(**paths) if "{" in name else values[name]
    check_outputs(inputs | {"config": config_files}, outputs)
    if not getattr(config, "overwrite", True):
        for name, path in outputs.items():
            # Files in a folder that is shared with other files are recorded there, see `files.shared_folder`.
            if "}/" not in name and path and Path(path).is_file() and not is_stream(Path(path)):
                raise InputError(name, str(path), "a new file; --overwrite true replaces this one")


def check_outputs(
    inputs: Mapping[str, Iterable[str | Path]], outputs: Mapping[str, str | Path | None]
) -> None:
    """Raises InputError if an output would replace an input or another output: it is the same file, possibly
    through a link, or a folder that contains the other or is contained in it. `inputs` and `outputs` are
    paths by option. Ignores inputs that do not exist, and outputs that are None, "-", devices or pipes."""
    targets = {
        field: Path(path)
        for field, path in outputs.items()
        if path is not None and str(path) != "-" and not is_stream(Path(path))
    }
    others = [
        (field, Path(path), "read")
        for field, paths in inputs.items()
        for path in paths
        if os.path.exists(path)
    ]
    others += [(field, target, "written too") for field, target in targets.items()]
    for field, target in targets.items():
        for other_field, other, use in others:
            relation = None if field == other_field else _overlap(target, other)
            if relation is not None:
                raise InputError(field, str(target), f"{relation} of {other_field}, which is {use}")


def _overlap(target: Path, other: Path) -> str | None:
    """Description of allowed targets if writing `target` would change `other`, for the error; else None."""
    real, other_real = Path(os.path.realpath(target)), Path(os.path.realpath(other))
    if real == other_real or (target.exists() and other.exists() and target.samefile(other)):
        return "another path than that"
    if real.is_relative_to(other_real):
        return "a path outside the folder"
    return "a path that does not contain that" if other_real.is_relative_to(real) else None


def _input_paths(value: object) -> list[str]:
    """Possible paths in the value of an option: all strings, and PATH of each comma-separated NAME=PATH."""
    if is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, field.name) for field in fields(value)]
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [path for each in value for path in _input_paths(each)]
    if not isinstance(value, str | Path) or str(value) in ("", "-"):
        return []
    named = [part.partition("=")[2] for part in str(value).split(",")]
    return [str(value), *filter(None, named)]
