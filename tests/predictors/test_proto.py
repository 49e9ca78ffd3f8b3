from __future__ import annotations

from pathlib import Path

from predictors.proto.generate import ROOT, generate


def test_checked_in_code_is_what_the_proto_generates(tmp_path: Path) -> None:
    for fresh in generate(tmp_path):
        checked_in = ROOT / fresh.relative_to(tmp_path)
        assert fresh.read_text() == checked_in.read_text(), (
            f"run python -m predictors.proto.generate ({fresh.name})"
        )
