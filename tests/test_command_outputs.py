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
from tailcast.cli import COMMANDS as SUBCOMMANDS
from tests.hostile import write_good_files
from tests.predictors.fakes import write_artifact
from tests.test_fuzz_commands import COMMANDS as CONFIGURED
from tests.test_fuzz_commands import options

CONTENT = "years of work"
#: Command -> the words it cannot do without; {NAME} is the path of an option.
COMMANDS = {
    "tailcast predict": "--data {data} --out {out}",
    "tailcast plan": "{log} --model llama-3-8b --num_kv_blocks 9 --gpus l40s-48gb=1 --target ttft_s.p50<1 --json {json}",
    "adapt": "{log} --out {out}",
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
    "tailcast-proxy": "https://127.0.0.1:9 --feedback {feedback} --tls_cert {tls_cert} --tls_key {tls_key}",
    "read-feedback": "{log}",
    "simulate run": "--trace {trace} --policy fcfs --json {json}",
    "simulate compare": "{runs} other=nothing.json",
    "simulate workload": "--out {out}",
    "simulate sweep": "{out} --trace {trace}",
    "simulate capacity": "--trace {trace} --json {json} --at_most.ttft_s 1",
    "simulate replicas": "--trace {trace} --json {json} --at_most.ttft_s 1",
    "simulate tiers": "--workload.tiers.num_tiers 2 --cluster.num_replicas 2 --json {json}",
    "simulate calibrate": "--measurements {measurements} --json {json}",
}
#: Options whose value is more than a path.
VALUES = {
    "compare": '["other={}"]',
    "more_artifacts": '["{}"]',
    "measurements": '["{}"]',
    "vary": '{"trace": ["{}"]}',
    "workload": '{"lengths": {"file": "{}", "output": null}}',
    "lengths": '{"file": "{}", "output": null}',
    "classes": '[{"lengths": {"file": "{}"}}]',
    "agents": '{"file": "{}"}',
}
#: Refused, or opened, while options are checked.
NOT_POSSIBLE = {
    ("import-lengths", "tokenizer"),
}
#: Options whose help speaks of files, and which name none, or an artifact that may be replaced.
NOT_PATHS = {"model", "dataset", "splits", "group_by", "artifact_id", "storage_uri"}
#: Command -> module and function.
PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
ENTRIES = PROJECT["scripts"].items() | {(name, entry) for name, (entry, _) in SUBCOMMANDS.items()}
SCRIPTS = {name: entry.split(":") for name, entry in ENTRIES if name not in ("serve", "proxy")}
THREADS = {"threads", "num_workers"}


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
        if "}/" not in output  # in a folder that records its files
    ],
)
def test_no_command_replaces_a_result_unless_it_is_told_to(
    command: str, output: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    [option] = options_of((output,))
    paths = {option: tmp_path / "output"}
    target = Path(output.format(**paths) if "{" in output else paths[option])
    target.write_text(CONTENT)
    main = importlib.import_module(SCRIPTS[command.split()[0]][0])
    assert main.main(words_of(command, paths, tmp_path)) == 2
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


# `adapt --out NEW` replaced NEW.html, whatever it was.
@pytest.mark.mend
def test_a_path_that_follows_from_another_one_is_an_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "new.html"
    page.write_text(CONTENT)
    main = importlib.import_module("training.commands.adapt").main
    for log in (tmp_path / "log.jsonl", page):
        for out in (tmp_path / "new", f"{tmp_path}/new/"):
            assert main([str(log), "--out", str(out)]) == 2
            assert "error: report: got " in capsys.readouterr().err
    assert page.read_text() == CONTENT
    artifact = write_artifact(tmp_path / "artifact")
    words = [str(tmp_path / "log.jsonl"), "--artifact", str(artifact), "--overwrite", "true"]
    assert main([*words, "--out", str(tmp_path / "new"), "--report", str(artifact / "model.onnx")]) == 2
    assert "a path outside the folder of artifact, which is read" in capsys.readouterr().err


_DRAWN = '{"num_requests": 4, "lengths": {"prompt": {"kind": "fixed", "low": 5}, "output": {"kind": "fixed", "low": 3}}}'
_SIMULATED = f"--workload '{_DRAWN}' --policy fcfs"
#: Command -> words with which it succeeds; OUT is a folder for all it writes, GOOD one of inputs.
SUCCEEDS = {
    "tailcast predict": "--data GOOD/prompts.jsonl --predictor tiny --out OUT/p.csv",
    "gen-samples": "GOOD/prompts.jsonl --backend synthetic --num_samples 2 --out OUT/s.parquet --card OUT/card",
    "import-lengths": "log GOOD/samples.parquet --out OUT/i.parquet",
    "fit-dist": "GOOD/samples.parquet --alternatives false --out OUT/f.parquet --json OUT/f.json --figure OUT/f.svg",
    "evaluate-stream": "GOOD/stream.jsonl --out OUT/events.jsonl",
    "package-artifact": "kserve GOOD/tiny --storage_uri s3://x --out OUT/k",
    "simulate run": f"{_SIMULATED} --json OUT/r.json --requests OUT/r.csv --steps OUT/s.csv --decisions OUT/d.jsonl --report OUT/r.html",
    "simulate workload": "--num_requests 4 --out OUT/w.csv",
    "simulate sweep": f"OUT/sweep --workload '{_DRAWN}' --policies '[fcfs]' --num_seeds 1",
}  # fmt: skip


# Each file that a command writes is checked before its work starts, so each has to be declared.
@pytest.mark.mend
@pytest.mark.parametrize("command", SUCCEEDS)
def test_every_path_that_is_written_is_a_declared_output(command: str, tmp_path: Path) -> None:
    good, out = tmp_path / "good", tmp_path / "out"
    write_good_files(good)
    (good / "stream.jsonl").write_text('{"mu": 1.0, "sigma": 0.5, "output_tokens": 4}\n' * 2)
    write_artifact(good / "tiny")
    out.mkdir()
    words = shlex.split(SUCCEEDS[command].replace("GOOD", str(good)).replace("OUT", str(out)))
    main = importlib.import_module(SCRIPTS[command.split()[0]][0]).main
    assert main([*command.split()[1:], *words]) in (0, 3)
    options = {
        word.removeprefix("--"): value for word, value in itertools.pairwise(words) if "--" in word[:2]
    }
    if command == "simulate sweep":
        options["out"] = words[0]
    declared = [
        Path(name.format(**options) if "{" in name else options[name])
        for name in config_of(command).OUTPUTS
        if all(option in options for option in options_of((name,)))
    ]
    records = {path.parent / ".tailcast.json" for path in declared}
    written = {path for path in out.rglob("*") if path.is_file()}
    assert [path for path in declared if path.exists()]
    assert not [path for path in written - records if not {path, *path.parents} & set(declared)]


def test_every_command_is_here() -> None:
    assert {command.split()[0] for command in COMMANDS} == set(SCRIPTS) - {"predict", "plan"}  # of tailcast
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
        if parameter.arg_name not in options | NOT_PATHS | ({"artifact"} if command == "adapt" else set())
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
    assert (
        importlib.import_module("training.commands.fit_dist").main([*data, *out, str(tmp_path / "fits")]) == 0
    )
    source = ["templates:2", "--backend", "synthetic"]
    gen_samples = importlib.import_module("data_gen.commands.gen_samples").main
    assert gen_samples([*source, *out, str(tmp_path / "samples")]) == 0
    assert pq.read_table(tmp_path / "disk" / "fits").num_rows == 2
    assert pq.read_table(tmp_path / "disk" / "samples").num_rows == 40
    assert all((tmp_path / name).is_symlink() for name in ("fits", "samples"))
