from __future__ import annotations

import json
from pathlib import Path

import pytest

from data_gen.cli import main
from data_gen.samples import read_samples


def test_gen_samples_on_a_users_file(tiny_model: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "mine.txt"
    prompts.write_text("w1 w2\nw3\nw4 w5 w6\n", encoding="utf-8")
    out = tmp_path / "samples.parquet"
    arguments = [
        str(prompts),
        "--out",
        str(out),
        "--model",
        str(tiny_model),
        "--num_samples",
        "3",
        "--max_tokens",
        "8",
        "--skip",
        "1",
        "--progress",
        "false",
    ]
    assert main(arguments) == 0
    table = read_samples(out)
    assert table.num_rows == 6
    assert set(table.column("prompt").to_pylist()) == {"w3", "w4 w5 w6"}
    run = json.loads((tmp_path / "samples.parquet.run.json").read_text())
    assert run["settings"]["max_tokens"] == 8
    assert run["num_samples"] == 6


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
        (["templates:3", "--out", "x.parquet", "--model", "package:nothing/here"], "model"),
        (["templates:3", "--out", "x.parquet", "--model", "no/such/folder/at/all"], "model"),
        (["templates:3", "--out", "x.parquet", "--unknown", "1"], "unknown"),
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
    assert main(arguments) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line and "prompt/s" not in line]
    assert len(lines) == 1
    assert lines[0].startswith("gen-samples: error: ")
    assert named in lines[0]
    assert not (tmp_path / "x.parquet").exists()


def test_help_explains_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    from dataclasses import fields

    from data_gen.cli import GenSamplesConfig

    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    for field in fields(GenSamplesConfig):
        assert field.name in shown.lower()
    assert "right-censored" in shown


def test_config_file_and_overrides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("num_samples: 7\nmax_tokens: 9\nout: from-file.parquet\n", encoding="utf-8")
    with pytest.raises(SystemExit):
        main(["templates:2", "--config", str(config), "--max_tokens", "11", "--print_config"])
    shown = capsys.readouterr().out
    assert "num_samples: 7" in shown
    assert "max_tokens: 11" in shown
    assert "out: from-file.parquet" in shown
