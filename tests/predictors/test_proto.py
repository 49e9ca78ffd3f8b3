from __future__ import annotations

from pathlib import Path

from predictors.proto.generate import ROOT, generate


def test_checked_in_code_is_what_the_proto_generates(tmp_path: Path) -> None:
    assert generate(tmp_path) == 0
    fresh = [path.relative_to(tmp_path) for path in tmp_path.rglob("*.py*")]
    assert len(fresh) == 6
    for path in fresh:
        advice = f"run python -m predictors.proto.generate ({path.name})"
        assert (tmp_path / path).read_text() == (ROOT / path).read_text(), advice
