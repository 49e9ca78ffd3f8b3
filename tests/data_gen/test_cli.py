from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from data_gen import cli_import_lengths
from data_gen.backend import SamplingSettings, Work, WorkResult
from data_gen.cli_gen_samples import main
from data_gen.samples import read_samples
from data_gen.synthetic_backend import SyntheticBackend
from tests.data_gen.fake_script import GOOD, Fault, Script, error
from tests.data_gen.fake_server import running

SYNTHETIC = ["templates:30", "--backend", "synthetic", "--num-samples", "4", "--progress", "false"]


def test_gen_samples_on_a_users_file(tiny_model: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "mine.txt"
    prompts.write_text("w1 w2\nw3\nw4 w5 w6\n", encoding="utf-8")
    out = tmp_path / "samples.parquet"
    arguments = [
        str(prompts), "--out", str(out), "--model", str(tiny_model), "--num_samples", "3", "--max_tokens", "8",
        "--skip", "1", "--keep_text", "true", "--transformers.device", "cpu", "--progress", "false",
    ]  # fmt: skip
    assert main(arguments) == 0
    table = read_samples(out)
    assert table.num_rows == 6
    assert set(table.column("prompt").to_pylist()) == {"w3", "w4 w5 w6"}
    assert set(table.column("engine").to_pylist()) == {"transformers"}
    assert set(table.column("model").to_pylist()) == {tiny_model.name}
    assert all(isinstance(text, str) for text in table.column("text").to_pylist())
    content = json.loads((tmp_path / "samples.parquet.run.json").read_text())
    assert content["settings"]["max_tokens"] == 8
    assert content["num_samples"] == 6
    assert content["engine_options"] == {"dtype": "float32"}
    assert content["notes"]["skip"] == 1


def test_synthetic_samples_are_labelled_and_summed_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "s.parquet"
    with caplog.at_level(logging.INFO):
        assert main([*SYNTHETIC, "--out", str(out), "--hash-prompts", "true"]) == 0
    table = read_samples(out)
    assert table.num_rows == 120
    assert set(table.column("engine").to_pylist()) == set(table.column("model").to_pylist()) == {"synthetic"}
    assert set(table.column("prompt").to_pylist()) == {None}
    assert "30 prompts, 120 samples" in caplog.text
    assert "samples/s" in caplog.text


def test_sigterm_says_how_to_go_on_and_the_same_command_does(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole, out = tmp_path / "whole.parquet", tmp_path / "s.parquet"
    assert main([*SYNTHETIC, "--out", str(whole)]) == 0
    sample = SyntheticBackend.sample

    def terminated(
        self: SyntheticBackend, work: Iterable[Work], settings: SamplingSettings
    ) -> Iterator[WorkResult]:
        for number, result in enumerate(sample(self, work, settings)):
            if number == 50:
                os.kill(os.getpid(), signal.SIGTERM)
            yield result

    with monkeypatch.context() as patch:
        patch.setattr(SyntheticBackend, "sample", terminated)
        assert main([*SYNTHETIC, "--out", str(out)]) == 130
    assert "stopped: 50 samples are safe" in caplog.text
    assert "interrupted" in capsys.readouterr().err
    assert main([*SYNTHETIC, "--out", str(out), "--seed", "1"]) == 2
    assert "the same settings (it has settings seed=0)" in capsys.readouterr().err
    assert main([*SYNTHETIC, "--out", str(out)]) == 0
    assert read_samples(out).equals(read_samples(whole))
    assert main([*SYNTHETIC, "--out", str(out)]) == 2
    assert main([*SYNTHETIC, "--out", str(out), "--overwrite", "true", "--limit", "3"]) == 0
    assert read_samples(out).num_rows == 12


def test_filters_and_sources_reach_the_run_and_are_summed_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = tmp_path / "mine.jsonl"
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello there"}]
    rows = [
        {"messages": chat},
        {"messages": chat[1:]},
        {"messages": [{"role": "user", "content": "x" * 500}]},
        {"messages": [{"role": "user", "content": "HELLO there"}]},
        {"messages": [{"role": "user", "content": "hello there!"}]},
        {"messages": [{"role": "user", "content": "beyond the limit"}]},
    ]
    prompts.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    out = tmp_path / "s.parquet"
    arguments = [str(prompts), *SYNTHETIC[1:], "--out", str(out), "--filters.max-characters", "100"]
    arguments += ["--filters.deduplicate", "true", "--filters.near-duplicates", "0.8", "--limit", "2"]
    with caplog.at_level(logging.INFO):
        assert main(arguments) == 0
    messages = read_samples(out).column("messages").to_pylist()
    assert messages == [chat] * 4 + [None] * 4
    # The limit is reached before anything is left out.
    assert json.loads((tmp_path / "s.parquet.run.json").read_text())["notes"]["skipped"] == {}
    with caplog.at_level(logging.INFO):
        assert main([*arguments[:-1], "3", "--overwrite", "true"]) == 0
    left_out = {"duplicate text": 1, "more than 100 characters": 1, "near-duplicate text": 1}
    assert json.loads((tmp_path / "s.parquet.run.json").read_text())["notes"]["skipped"] == left_out
    assert "prompts skipped, near-duplicate text: 1" in caplog.text


def test_a_server_of_the_openai_api_and_a_card(tmp_path: Path) -> None:
    out, card = tmp_path / "s.parquet", tmp_path / "card"
    refused: set[str] = set()

    def behave(number: int, body: dict[str, Any]) -> Fault:
        """One prompt is too long for the server."""
        text = body["messages"][-1]["content"]
        if not refused:
            refused.add(text)
        return error(400, "the context length is exceeded") if text in refused else GOOD

    script = Script(behave=behave)
    with running(script) as (server,):
        arguments = [
            "templates:12",
            *SYNTHETIC[3:],
            "--backend",
            "openai",
            "--openai.base-urls",
            f"[{server.url}]",
        ]
        assert (
            main(
                [
                    *arguments,
                    "--out",
                    str(out),
                    "--max-tokens",
                    "40",
                    "--card",
                    str(card),
                    "--openai.max-attempts",
                    "2",
                ]
            )
            == 0
        )
    rows = read_samples(out).to_pylist()
    assert len(rows) == 48
    assert {row["prompt"] for row in rows if row["finish_reason"] == "error"} == refused
    assert {row["model"] for row in rows} == {script.model}
    content = json.loads((tmp_path / "s.parquet.run.json").read_text())
    assert content["failures"]["too_long"]["count"] == 4
    assert "base_urls" in content["notes"]
    assert "base_urls" not in content["engine_options"]
    assert (card / "card.json").exists()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["missing.txt", "--out", "x.parquet"], "prompts"),
        (["templates:3"], "out"),
        (["--out", "x.parquet"], "PROMPTS"),
        (["templates:3", "--out", "x.parquet", "--num_samples", "0"], "num_samples"),
        (["templates:3", "--out", "x.parquet", "--max_tokens", "many"], "max_tokens"),
        (["templates:3", "--out", "x.parquet", "--temperature", "nan"], "temperature"),
        (["templates:3", "--out", "x.parquet", "--top_p", "0"], "top_p"),
        (["templates:3", "--out", "x.parquet", "--skip", "3"], "skip"),
        (["templates:3", "--out", "x.parquet", "--skip", "-1"], "skip"),
        (["templates:3", "--out", "x.parquet", "--limit", "0"], "limit"),
        (["templates:3", "--out", "x.parquet", "--filters.near-duplicates", "0.3"], "near_duplicates"),
        (["templates:3", "--out", "x.parquet", "--model", "package:nothing/here"], "model"),
        (["templates:3", "--out", "x.parquet", "--model", "no/such/folder/at/all"], "model"),
        (["templates:3", "--out", "x.parquet", "--unknown", "1"], "unknown"),
        (["templates:3", "--out", "x.parquet", "--backend", "gpt"], "backend"),
        (["templates:3", "--out", "x.parquet", "--backend", "vllm"], "model"),
        (["templates:3", "--out", "x.parquet", "--backend", "vllm", "--model", "m"], "tailcast[vllm]"),
        (["templates:3", "--out", "x.parquet", "--transformers.max_rows", "0"], "max_rows"),
        (["templates:3", "--out", "x.parquet", "--synthetic.min_alpha", "-1"], "min_alpha"),
        (["templates:3", "--out", "x.parquet", "--backend", "synthetic", "--retries", "-1"], "retries"),
        (["templates:3", "--out", "x.parquet", "--model", "a", "--openai.model", "b"], "openai.model"),
        (["templates:3", "--out", "x.parquet", "--backend", "synthetic", "--card", "file"], "card"),
        (["templates:3", "--out", "folder", "--backend", "synthetic"], "out"),
    ],
)
def test_bad_input_is_one_line_and_code_2(
    arguments: list[str],
    named: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "vllm", None)
    Path("folder").mkdir()
    Path("file").touch()
    assert main(arguments) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line and "sample/s" not in line]
    assert len(lines) == 1
    assert lines[0].startswith("gen-samples: error: ")
    assert named in lines[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


def test_help_explains_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    from dataclasses import fields

    from data_gen.gen_samples import GenSamplesConfig

    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    for field in fields(GenSamplesConfig):
        assert field.name in shown.lower()
    assert "right-censored" in shown
    for option in ("--transformers.max_rows", "--openai.base_urls", "--vllm.dtype", "--synthetic.min_alpha"):
        assert option in shown


@pytest.mark.parametrize("command", [main, cli_import_lengths.main])
def test_every_option_has_a_help_text(
    command: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        command(["--help"])
    listed = capsys.readouterr().out.split("\n\n", 1)[1]
    entries = re.findall(
        r"^  (-\S[^\n]*(?:\n {4,}[^\n]*)*|[A-Z]\S*[^\n]*(?:\n {4,}[^\n]*)*)", listed, re.MULTILINE
    )
    assert len(entries) > 10
    for entry in entries:
        # The name with its value, two spaces or a new line, the text, and what the parser adds.
        name, _, text = re.sub(r"\n +", "  ", entry).partition("  ")
        content = re.sub(r"\((?:required, )?type: .*", "", text).strip()
        assert len(content.split()) >= 2, name


@pytest.mark.parametrize("module", ["data_gen.cli_gen_samples", "data_gen.cli_import_lengths"])
def test_a_command_is_a_module_too(module: str) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", module, *arguments], capture_output=True, text=True)

    shown = run("--help")
    assert (shown.returncode, "--out OUT" in shown.stdout) == (0, True)
    refused = run("--out", "x.parquet")
    assert (refused.returncode, len(refused.stderr.splitlines())) == (2, 1)


def test_config_file_and_overrides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(
        "num_samples: 7\nmax_tokens: 9\nout: from-file.parquet\ntransformers:\n  max_rows: 3\n",
        encoding="utf-8",
    )
    with pytest.raises(SystemExit):
        main(["templates:2", "--config", str(config), "--max_tokens", "11", "--print_config"])
    shown = capsys.readouterr().out
    assert "num_samples: 7" in shown
    assert "max_tokens: 11" in shown
    assert "out: from-file.parquet" in shown
    assert "max_rows: 3" in shown


def test_the_bar_moves_with_every_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "s.parquet"
    assert main([*SYNTHETIC[:-2], "--out", str(out)]) == 0
    assert "120/120" in capsys.readouterr().err
    assert pq.ParquetFile(out).metadata.num_rows == 120
