"""The command `tailcast`: its sub-commands, `predict`, completion, and messages about options."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from scheduler_core.simulator.commands.simulate import main as simulate
from tailcast.cli import COMMANDS, main
from tests.predictors.fakes import expected, write_artifact

SCRIPTS = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]["scripts"]
#: Scripts whose sub-command has a shorter name.
SHORT = {"serve-predictor": "serve", "tailcast-proxy": "proxy"}


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_artifact(tmp_path_factory.mktemp("artifacts") / "tiny")


def test_every_script_is_a_sub_command() -> None:
    entries = {SHORT.get(name, name): entry for name, entry in SCRIPTS.items() if name != "tailcast"}
    assert {name: entry for name, (entry, _) in COMMANDS.items() if name in entries} == entries


@pytest.mark.parametrize("name", [*COMMANDS])
def test_sub_commands_explain_themselves(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = COMMANDS[name][0].partition(":")[0]
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not there yet")
    try:
        code = main([name, "--help"])
    except SystemExit as end:
        code = end.code
    assert code == 0
    assert capsys.readouterr().out.lower().startswith("usage: ")


def test_list_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in COMMANDS)
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("tailcast ")
    assert main([]) == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("predikt", "Did you mean predict?"),
        ("simulate rum", "Did you mean run?"),
        ("simulate run --polcy tie --json x", "did you mean --policy?"),
        ("train --out x --stage1.epocs 3", "did you mean --stage1.epochs?"),
        ("train", "missing: --out; see train --help"),
        ("import-lengths log", "missing: FILE, --out; see import-lengths --help"),
        ("proxy http://x --policy tei", "Did you mean tie?"),
        ('proxy http://x --policy tie --policy_parameters {"gama":1}', "Did you mean gamma?"),
        ("train --config minilm-quikstart --out x", "Did you mean minilm-quickstart?"),
        ("serve --provider cpuu", "provider: got 'cpuu'; allowed: auto, cpu, cuda. Did you mean cpu?"),
        ("predict", "PROMPT, data: got (None, None); allowed: one of them"),
        ("predict x --out y.csv", "data, out: got (None, 'y.csv'); allowed: both or none of them"),
    ],
)
def test_wrong_words_get_advice(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    assert message in capsys.readouterr().err


def test_unknown_options_of_a_file_get_advice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.yaml").write_text("polcy: tie")
    assert simulate(["run", "--config", str(tmp_path / "c.yaml")]) == 2
    assert "did you mean --policy?" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--config minilm-quickstart", "--config=minilm-quickstart"])
def test_recipes_are_found_by_name(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([*f"train {option} --out x".split(), "--print_config"])
    assert end.value.code == 0
    assert "pooling:\n" in capsys.readouterr().out


def test_a_prompt_is_printed_in_time(artifact: Path) -> None:
    command = [sys.executable, "-m", "tailcast", "predict", "name three rivers", "--predictor", str(artifact)]
    result = subprocess.run([*command, "--max_tokens", "300"], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    first, *bars = result.stdout.splitlines()
    assert first.startswith("output tokens: median ")
    assert "of at most 300" in first
    assert bars
    assert all(bar.endswith("%") for bar in bars)


ROWS: list[Any] = [
    {"request_id": "a", "prompt": "name three rivers", "max_tokens": 40},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "name three rivers"}]}], "model": "tiny-llm"},
    {"custom_id": 7, "body": {"messages": [{"role": "user", "content": "the sea"}], "max_completion_tokens": 9}},
    "no object",
    {"prompt": ""},
    {"prompt": "the sea", "model": "another"},
    {"prompt": "the sea", "temperature": -1},
]  # fmt: skip


def predict(*words: object) -> int:
    return main(["predict", "--progress", "false", *map(str, words)])


def test_a_file_of_prompts(artifact: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data, out = tmp_path / "prompts.jsonl", tmp_path / "out.parquet"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    words = ("--data", data, "--out", out, "--predictor", artifact)
    with caplog.at_level("INFO"):
        assert predict(*words) == 0
    table = pq.read_table(out).to_pylist()
    rows = [(row["row"], row["request_id"], row["max_tokens"]) for row in table]
    assert rows == [(1, "a", 40), (2, None, 32768), (3, "7", 9)]
    assert table[0]["mu"] == table[1]["mu"] == pytest.approx(expected("name three rivers")[0], rel=1e-5)
    assert table[0]["median_tokens"] == 40
    skipped = "1 for format, 1 for prompt, 1 for temperature, 1 for served_model"
    assert f"3 predictions; rows skipped: {skipped}" in caplog.text
    assert "prompts.jsonl row 5 skipped: prompt: got None" in caplog.text


def test_a_bad_row_stops_the_command_on_request(
    artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = tmp_path / "prompts.jsonl", tmp_path / "out.csv"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    assert predict("--data", data, "--out", out, "--predictor", artifact, "--on_error", "stop") == 2
    assert "prompts.jsonl row 4: " in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_tables_of_prompts(
    artifact: Path, tmp_path: Path, suffix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    table = pa.table({"prompt": ["name three rivers", "the sea"], "max_tokens": [50, None]})
    data, out = tmp_path / f"prompts{suffix}", tmp_path / "out.jsonl"
    pq.write_table(table, data) if suffix == ".parquet" else pa.csv.write_csv(table, data)
    words = ("--data", data, "--out", out, "--predictor", artifact)
    assert predict(*words, "--max_tokens", 60) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["max_tokens"] for row in rows] == [50, 60]
    assert predict(*words) == 2
    assert "--overwrite true replaces this one" in capsys.readouterr().err
    assert predict(*words, "--overwrite", "true") == 0


@pytest.mark.parametrize(
    ("text", "reason"), [("text\nhello\n", "prompt"), ("prompt,model\nhello\n", "format")]
)
def test_a_file_without_usable_rows_is_refused(
    artifact: Path, tmp_path: Path, text: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "p.csv").write_text(text)
    assert predict("--data", tmp_path / "p.csv", "--out", tmp_path / "o.csv", "--predictor", artifact) == 2
    assert f"a file with usable rows (skipped: 1 for {reason})" in capsys.readouterr().err


def test_a_service_that_is_gone_skips_no_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "p.csv").write_text("prompt\nhello\n")
    assert (
        predict(
            "--data", tmp_path / "p.csv", "--out", tmp_path / "o.csv", "--predictor", "grpc://127.0.0.1:1"
        )
        == 2
    )
    assert "UNAVAILABLE" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "completions"),
    [
        ("tailcast pre", {"predict"}),
        ("tailcast simulate c", {"compare", "capacity", "calibrate"}),
        ("tailcast serve --provider ", {"auto", "cpu", "cuda"}),
        ("tailcast predict --over", {"--overwrite"}),
        ("tailcast predict --overwrite ", {"true", "false"}),
    ],
)
def test_the_shell_completes_words(line: str, completions: set[str], tmp_path: Path) -> None:
    pytest.importorskip("argcomplete")
    shell = {"COMP_LINE": line, "COMP_POINT": str(len(line)), "COMP_TYPE": "9", "_ARGCOMPLETE": "1"}
    shell |= {
        "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_SUPPRESS_SPACE": "1",
        "_ARGCOMPLETE_COMP_WORDBREAKS": " ",
    }
    shell["_ARGCOMPLETE_STDOUT_FILENAME"] = str(tmp_path / "words")
    subprocess.run([sys.executable, "-m", "tailcast"], env=os.environ | shell, check=True)
    assert set((tmp_path / "words").read_text().split()) == completions
