"""No command writes over one of its inputs: every pair of options that name an input and an output."""

import importlib
import itertools
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from docstring_parser import parse_from_object

from scheduler_core.simulator.commands.simulate import COMMANDS as SIMULATE
from tests.test_fuzz_commands import COMMANDS as CONFIGURED
from tests.test_fuzz_commands import options

CONTENT = "years of work"
#: Command -> the words it cannot do without; {NAME} is the path of an option.
COMMANDS = {
    "tailcast predict": "--data {data} --out {out}",
    "gen-samples": "{prompts} --out {out}",
    "import-lengths": "log {file} --out {out}",
    "import-urgency": "{out} --sources llm,labels={sources}",
    "fit-dist": "{samples} --out {out}",
    "train": "--data {data} --urgency_data {urgency_data} --urgency {} --out {out}",
    "evaluate": "{predictor} --data {data} --json {json}",
    "evaluate-stream": "{stream} --out {out}",
    "calibrate": "{predictor} --data {data} --out {out}",
    "evaluate-urgency": "{predictor} --data {data} --json {json}",
    "export-onnx": "{checkpoint} --out {out}",
    "package-artifact": "triton {artifact} --out {out}",
    "export-variants": "{artifact} --data {data} --out {out}",
    "serve-predictor": "{artifact} --tls_cert {tls_cert} --tls_key {tls_key}",
    "tailcast-proxy": "http://127.0.0.1:9 --feedback {feedback}",
    "read-feedback": "{log}",
    "simulate run": "--trace {trace} --policy fcfs --json {json}",
    "simulate compare": "{runs} other=nothing.json",
    "simulate workload": "--out {out}",
    "simulate sweep": "{out} --trace {trace}",
    "simulate capacity": "--trace {trace} --json {json} --at_most.ttft_s 1",
    "simulate calibrate": "--url http://127.0.0.1:9/v1 --served_model m --json {json}",
}
#: Options whose value is more than a path.
VALUES = {
    "compare": '["other={}"]',
    "more_artifacts": '["{}"]',
    "vary": '{"trace": ["{}"]}',
    "workload": '{"lengths": {"file": "{}", "output": null}}',
    "lengths": '{"file": "{}", "output": null}',
    "classes": '[{"lengths": {"file": "{}"}}]',
}
#: Refused, or opened, while options are checked.
NOT_POSSIBLE = {
    ("gen-samples", "openai.tokenizer"),
    ("import-lengths", "tokenizer"),
    *((f"simulate {name}", "step_time_parameters") for name in ("run", "sweep", "capacity")),
}
#: Options whose help speaks of files, and which name none.
NOT_PATHS = {"model", "dataset", "splits", "group_by", "artifact_id", "storage_uri"}
#: Command -> module and function.
PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
SCRIPTS = {name: entry.split(":") for name, entry in PROJECT["scripts"].items()}
THREADS = {"threads", "num_workers", "threads_per_worker"}


def config_of(command: str) -> Any:
    return CONFIGURED[command].config_class


# Results were replaced without a word.
@pytest.mark.mend
@pytest.mark.parametrize(
    ("command", "output"),
    [
        (command, output)
        for command in COMMANDS
        if "overwrite" in CONFIGURED[command].config_class.__dataclass_fields__
        for output in CONFIGURED[command].config_class.OUTPUTS
        if "{" not in output
    ],
)
def test_no_command_replaces_a_result_unless_it_is_told_to(
    command: str, output: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "output"
    target.write_text(CONTENT)
    main = importlib.import_module(SCRIPTS[command.split()[0]][0])
    assert main.main(words_of(command, {output: target}, tmp_path)) == 2
    message = f"error: {output}: got '{target}'; allowed: a new file; --overwrite true replaces this one"
    assert message in capsys.readouterr().err
    assert target.read_text() == CONTENT


def options_of(names: tuple[str, ...]) -> list[str]:
    """Outputs as options or patterns of them -> the options."""
    return [option for name in names for option in (re.findall("{(.+?)}", name) or [name])]


def pairs() -> Iterator[tuple[str, str, str, str]]:
    """Every command with each of its inputs and each of its outputs; all ways of naming the same file in turn."""
    ways = itertools.cycle(["same path", "symbolic link", "hard link"])
    for command in COMMANDS:
        config = config_of(command)
        sources = ["config"] + [
            name
            for name in getattr(config, "INPUTS", ())
            if name.partition(".")[0] in config.__dataclass_fields__ and (command, name) not in NOT_POSSIBLE
        ]
        for source, output in itertools.product(sources, config.OUTPUTS):
            if source == sources[-1] or output == config.OUTPUTS[0]:
                yield command, source, output, next(ways)


def words_of(command: str, paths: dict[str, Path], folder: Path) -> list[str]:
    """The command line: what the command cannot do without, and the options of `paths`."""
    rest = command.split()[1:]
    template = COMMANDS[command]
    if "workload" in paths:
        template = template.replace("--trace {trace}", "")
    words = shlex.split(template)
    stated = [name for word in words for name in re.findall("{(.+?)}", word)]
    for name in paths:
        if name not in stated:
            words += [f"--{name}", f"{{{name}}}"]
    for name in {*stated, *paths}:
        value = str(paths.get(name, folder / f"no-{name}"))
        form = VALUES.get(f"{command} {name}", VALUES.get(name, "{}"))
        words = [word.replace(f"{{{name}}}", form.replace("{}", value)) for word in words]
    return [*rest, *words]


# import-lengths and evaluate --json wrote over their inputs.
@pytest.mark.mend
@pytest.mark.parametrize(("command", "source", "output", "way"), list(pairs()))
def test_no_command_writes_over_its_input(
    command: str, source: str, output: str, way: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    [option] = options_of((output,))
    paths = {option: tmp_path / "output"}
    target = Path(output.format(**paths) if "{" in output else paths[option])
    target.parent.mkdir(exist_ok=True)
    paths[source] = target if way == "same path" else tmp_path / "input"
    paths[source].write_text("{}" if source == "config" else CONTENT)
    before = paths[source].read_text()
    if way == "symbolic link":
        target.symlink_to(paths[source])
    elif way == "hard link":
        target.hardlink_to(paths[source])
    listing = sorted(tmp_path.rglob("*"))
    main = importlib.import_module(SCRIPTS[command.split()[0]][0])
    assert main.main(words_of(command, paths, tmp_path)) == 2
    error = capsys.readouterr().err
    assert f"error: {output}: got " in error
    assert f"another path than that of {source}, which is read" in error
    assert paths[source].read_text() == before
    assert sorted(tmp_path.rglob("*")) == listing


def test_every_command_is_here() -> None:
    assert {command.split()[0] for command in COMMANDS} == set(SCRIPTS)
    assert {command.split()[1] for command in COMMANDS if command.startswith("simulate ")} == set(SIMULATE)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_with_a_path_is_an_input_or_an_output(command: str) -> None:
    config = config_of(command)
    inputs = {name.partition(".")[0] for name in getattr(config, "INPUTS", ())}
    options = inputs | set(options_of(config.OUTPUTS))
    assert options <= set(config.__dataclass_fields__) | {"vary"}
    undeclared = [
        parameter.arg_name
        for parameter in parse_from_object(config).params
        if parameter.arg_name not in options | NOT_PATHS
        and "str" in (parameter.type_name or "")
        and re.search(r"\b(files?|folder|page|write)\b", parameter.description or "", re.IGNORECASE)
    ]
    assert not undeclared


@pytest.mark.parametrize(
    ("command", "option"),
    [(name, one.name) for name in COMMANDS for one in options(name) if one.name.split(".")[-1] in THREADS],
)
def test_more_threads_than_libraries_can_start_are_refused(
    command: str, option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main = importlib.import_module(SCRIPTS[command.split()[0]][0]).main
    for value in (0, 1025, 2**31):
        assert main([*words_of(command, {}, tmp_path), f"--{option}={value}"]) == 2
        name = option.split(".")[-1]
        assert f"{name}: got {value}; allowed: integers from 1 to 1024" in capsys.readouterr().err


def test_commands_with_unfinished_runs_write_through_links(tmp_path: Path) -> None:
    lengths = pa.table({"prompt_id": ["a", "b"], "model": ["m"] * 2, "output_tokens": [[3, 5, 9, 7]] * 2})
    pq.write_table(lengths, tmp_path / "lists.parquet")
    (tmp_path / "disk").mkdir()
    for name in ("fits", "samples"):
        (tmp_path / name).symlink_to(f"disk/{name}")
    out = ["--progress", "false", "--out"]
    data = [str(tmp_path / "lists.parquet"), "--max_tokens", "10"]
    assert importlib.import_module("training.cli_fit_dist").main([*data, *out, str(tmp_path / "fits")]) == 0
    source = ["templates:2", "--backend", "synthetic"]
    gen_samples = importlib.import_module("data_gen.cli_gen_samples").main
    assert gen_samples([*source, *out, str(tmp_path / "samples")]) == 0
    assert pq.read_table(tmp_path / "disk" / "fits").num_rows == 2
    assert pq.read_table(tmp_path / "disk" / "samples").num_rows == 40
    assert all((tmp_path / name).is_symlink() for name in ("fits", "samples"))
