"""No command writes over one of its inputs: every pair of options that name an input and an output."""

from __future__ import annotations

import importlib
import itertools
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from docstring_parser import parse_from_object

from scheduler_core.simulator.commands.simulate import COMMANDS as SIMULATE

CONTENT = "years of work"
#: Command -> configuration, and the words it cannot do without; {NAME} is the path of an option.
COMMANDS = {
    "gen-samples": ("data_gen.gen_samples:GenSamplesConfig", "{prompts} --out {out}"),
    "import-lengths": ("data_gen.cli_import_lengths:ImportLengthsConfig", "log {file} --out {out}"),
    "import-urgency": (
        "data_gen.cli_import_urgency:ImportUrgencyConfig",
        "{out} --sources llm,labels={sources}",
    ),
    "fit-dist": ("training.cli_fit_dist:FitDistConfig", "{samples} --out {out}"),
    "train": (
        "training.config:TrainConfig",
        "--data {data} --urgency_data {urgency_data} --urgency {} --out {out}",
    ),
    "evaluate": ("training.evaluating.config:EvaluateConfig", "{predictor} --data {data} --json {json}"),
    "evaluate-stream": ("training.drift.cli:StreamConfig", "{stream} --out {out}"),
    "calibrate": ("training.calibrating.config:CalibrateConfig", "{predictor} --data {data} --out {out}"),
    "evaluate-urgency": (
        "training.urgency.cli:EvaluateUrgencyConfig",
        "{predictor} --data {data} --json {json}",
    ),
    "export-onnx": ("export.exporter:ExportConfig", "{checkpoint} --out {out}"),
    "package-artifact": ("export.packages:PackageConfig", "triton {artifact} --out {out}"),
    "export-variants": ("export.variants.config:VariantsConfig", "{artifact} --data {data} --out {out}"),
    "serve-predictor": (
        "predictors.cli:ServeConfig",
        "{artifact} --tls_cert {tls_cert} --tls_key {tls_key}",
    ),
    "tailcast-proxy": ("predictors.cli_proxy:ProxyConfig", "http://127.0.0.1:9 --feedback {feedback}"),
    "read-feedback": ("training.cli_read_feedback:FeedbackConfig", "{log}"),
    "simulate run": (
        "scheduler_core.simulator.commands.run:RunConfig",
        "--trace {trace} --policy fcfs --json {json}",
    ),
    "simulate compare": ("scheduler_core.simulator.commands.compare:CompareConfig", "{a} {b}"),
    "simulate workload": ("scheduler_core.simulator.commands.workload:WorkloadConfig", "--out {out}"),
    "simulate sweep": ("scheduler_core.simulator.commands.sweep:SweepConfig", "{out} --trace {trace}"),
    "simulate capacity": (
        "scheduler_core.simulator.commands.capacity:CapacityConfig",
        "--trace {trace} --json {json} --at_most.ttft_s 1",
    ),
    "simulate calibrate": (
        "scheduler_core.simulator.commands.calibrate:EngineCalibrationConfig",
        "--url http://127.0.0.1:9/v1 --served_model m --json {json}",
    ),
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
    *((f"simulate {name}", "step_time_parameters") for name in ("run", "sweep", "capacity")),
}
#: Options whose help speaks of files, and which name none.
NOT_PATHS = {"model", "dataset", "splits", "group_by", "artifact_id", "storage_uri"}
#: Command -> module and function.
SCRIPTS = {
    name: entry.split(":")
    for name, entry in tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())[
        "project"
    ]["scripts"].items()
}


def config_of(command: str) -> Any:
    module, _, name = COMMANDS[command][0].partition(":")
    return getattr(importlib.import_module(module), name)


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
    template = COMMANDS[command][1]
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
    options = {name.partition(".")[0] for name in getattr(config, "INPUTS", ())} | {
        *options_of(config.OUTPUTS)
    }
    assert options <= set(config.__dataclass_fields__) | {"vary"}
    undeclared = [
        parameter.arg_name
        for parameter in parse_from_object(config).params
        if parameter.arg_name not in options | NOT_PATHS
        and "str" in (parameter.type_name or "")
        and re.search(r"\b(files?|folder|page|write)\b", parameter.description or "", re.IGNORECASE)
    ]
    assert not undeclared


FULL_DISK = """
import contextlib, io, os, pathlib, sys
from importlib import import_module

mount, data, commands = sys.argv[1], sys.argv[2], sys.argv[3:]
os.chdir(mount)
pathlib.Path("filler").write_bytes(bytes(os.statvfs(".").f_bavail * os.statvfs(".").f_frsize - 8192))
for command in commands:
    module, *words = command.split()
    error = io.StringIO()
    with contextlib.redirect_stderr(error):
        code = import_module(module).main([word.replace("DATA", data) for word in words])
    lines = [line for line in error.getvalue().splitlines() if "error: " in line]
    print(code, sorted(os.listdir()), len(lines), "space" in " ".join(lines), lines, sep="|")
"""


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="mounts a tiny disk")
def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    lengths = np.random.default_rng(0).integers(1, 900, (3000, 4))
    names = {"prompt_id": [f"p{number}" for number in range(3000)], "model": ["m"] * 3000}
    pq.write_table(pa.table(names | {"output_tokens": lengths.tolist()}), tmp_path / "lists.parquet")
    pq.write_table(pa.table(names | {"output_tokens": lengths[:, 0]}), tmp_path / "rows.parquet")
    commands = [
        "data_gen.cli_import_lengths log DATA/rows.parquet --schema trace --out lengths.parquet",
        "training.cli_fit_dist DATA/lists.parquet --out fits.parquet --max_tokens 1000 --progress false --alternatives false",
        "scheduler_core.simulator.commands.simulate workload --out trace.parquet --num_requests 5000",
        "data_gen.cli_gen_samples templates:400 --out samples.parquet --backend synthetic --num_samples 40 --progress false",
    ]
    (tmp_path / "disk").mkdir()
    script = 'mount -t tmpfs -o size=64k none "$1" && shift && exec "$@"'
    words = [
        sys.executable,
        "-c",
        FULL_DISK,
        str(tmp_path / "disk"),
        str(tmp_path),
        *commands,
    ]
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, "sh", str(tmp_path / "disk"), *words],
        capture_output=True,
        text=True,
        timeout=300,
    )
    if "mount" in done.stderr and not done.stdout:
        pytest.skip("no tiny disk can be mounted")
    results = [line.split("|") for line in done.stdout.splitlines()]
    assert len(results) == len(commands), done.stderr
    for command, result in zip(commands, results, strict=True):
        assert result[:4] == ["2", "['filler']", "1", "True"], (command, result)


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
    assert (
        importlib.import_module("data_gen.cli_gen_samples").main([*source, *out, str(tmp_path / "samples")])
        == 0
    )
    assert pq.read_table(tmp_path / "disk" / "fits").num_rows == 2
    assert pq.read_table(tmp_path / "disk" / "samples").num_rows == 40
    assert all((tmp_path / name).is_symlink() for name in ("fits", "samples"))
