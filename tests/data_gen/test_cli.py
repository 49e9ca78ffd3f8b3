"""The command `gen-samples`."""

import json
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from data_gen.backend import WorkResult
from data_gen.commands.gen_samples import main
from data_gen.samples import read_samples
from data_gen.synthetic_backend import SyntheticBackend
from tests.fake_openai import GOOD, Completions, Fault, error, running

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


def test_synthetic_samples_are_labeled_and_summed_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "s.parquet"
    with caplog.at_level(logging.INFO):
        assert main([*SYNTHETIC[:-2], "--out", str(out), "--hash-prompts", "true"]) == 0
    table = read_samples(out)
    assert table.num_rows == 120
    assert set(table.column("engine").to_pylist()) == set(table.column("model").to_pylist()) == {"synthetic"}
    assert set(table.column("prompt").to_pylist()) == {None}
    assert "30 prompts, 120 samples" in caplog.text
    assert "samples/s" in caplog.text
    assert "120/120" in capsys.readouterr().err, "the bar"


def test_sigterm_says_how_to_go_on_and_the_same_command_does(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole, out = tmp_path / "whole.parquet", tmp_path / "s.parquet"
    assert main([*SYNTHETIC, "--out", str(whole)]) == 0
    sample = SyntheticBackend.sample

    def terminated(*arguments: Any) -> Iterator[WorkResult]:
        for number, result in enumerate(sample(*arguments)):
            if number == 50:
                os.kill(os.getpid(), signal.SIGTERM)
            yield result

    with monkeypatch.context() as patch:
        patch.setattr(SyntheticBackend, "sample", terminated)
        assert main([*SYNTHETIC, "--out", str(out)]) == 130
    assert "stopped: 50 samples are stored" in caplog.text
    assert "interrupted" in capsys.readouterr().err
    assert main([*SYNTHETIC, "--out", str(out), "--seed", "1"]) == 2
    assert "the same settings (it has settings seed=0)" in capsys.readouterr().err
    assert main([*SYNTHETIC, "--out", str(out)]) == 0
    assert read_samples(out).equals(read_samples(whole))
    assert main([*SYNTHETIC, "--out", str(out)]) == 2
    assert main([*SYNTHETIC, "--out", str(out), "--overwrite", "true", "--limit", "3"]) == 0
    assert read_samples(out).num_rows == 12


def test_filters_and_sources_reach_run_and_summary(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    prompts = tmp_path / "mine.jsonl"
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello there"}]
    others = ("x" * 500, "HELLO there", "hello there!", "beyond the limit")
    chats = [chat, chat[1:], *([chat[1] | {"content": text}] for text in others)]
    prompts.write_text("\n".join(json.dumps({"messages": each}) for each in chats), encoding="utf-8")
    out = tmp_path / "s.parquet"
    arguments = [str(prompts), *SYNTHETIC[1:], "--out", str(out), "--filters.max-characters", "100"]
    arguments += ["--filters.deduplicate", "true", "--filters.near-duplicates", "0.8", "--limit", "2"]
    with caplog.at_level(logging.INFO):
        assert main(arguments) == 0
    assert read_samples(out).column("messages").to_pylist() == [chat] * 4 + [None] * 4
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

    script = Completions(behave=behave)
    with running(script) as (server,):
        arguments = ["templates:12", *SYNTHETIC[3:], "--out", str(out), "--card", str(card)]
        arguments += ["--max-tokens", "40"]
        arguments += ["--backend", "openai", "--openai.base-urls", f"[{server.url}/v1]"]
        arguments += ["--openai.headers", '{"X-Team": "team-secret"}']
        assert main([*arguments, "--openai.max-attempts", "2"]) == 0
    rows = read_samples(out).to_pylist()
    assert len(rows) == 48
    assert {row["prompt"] for row in rows if row["finish_reason"] == "error"} == refused
    assert {row["model"] for row in rows} == {script.model}
    content = json.loads((tmp_path / "s.parquet.run.json").read_text())
    assert content["failures"]["too_long"]["count"] == 4
    assert content["notes"]["base_urls"] == [f"{server.url}/v1"]
    assert content["notes"]["header_names"] == ["X-Team"]
    chosen = {"api": "chat", "send_seed": True, "body": {}}
    assert content["engine_options"] == chosen
    assert "team-secret" not in (tmp_path / "s.parquet.run.json").read_text()
    assert (card / "card.json").exists()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("missing.txt --out x", "prompts"),
        ("templates:3", "out"),
        ("templates:3 --out x --backend gpt", "backend"),
        ("templates:0 --out x", "count"),
        ("templates:3 --out x --skip 3", "skip"),
        ("templates:3 --out x --model package:nothing/here", "model"),
        ("templates:3 --out x --model no/such/folder/at/all", "model"),
        ("templates:3 --out x --model a --openai.model b", "openai.model"),
        ("templates:3 --out x --backend synthetic --card file", "card"),
        ("templates:3 --out folder --backend synthetic", "out"),
        ("templates:3 --out x --temperature nan", "temperature"),
        ("templates:3 --out x --filters.near_duplicates 0.49", "near_duplicates"),
        ("templates:3 --out x --filters.near_duplicates nan", "near_duplicates"),
        ("templates:3 --out x --filters.max_characters 0", "max_characters"),
        ("templates:3 --out x --filters.min_prompt_tokens 3", "tokenizer"),
        ("templates:3 --out x --transformers.max_rows 0", "max_rows"),
    ],
)
def test_bad_input_is_one_line_and_code_2(
    arguments: str,
    named: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("file").touch()
    assert main(arguments.split()) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line and "sample/s" not in line]
    assert len(lines) == 1
    assert lines[0].startswith("gen-samples: error: ")
    assert named in lines[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]
