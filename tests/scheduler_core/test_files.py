from __future__ import annotations

import errno
import json
import os
import pickle
from pathlib import Path

import pytest

from scheduler_core.errors import InputError, TailcastError
from scheduler_core.files import (
    atomic_directory,
    atomic_file,
    existing_file,
    sha256_file,
    writable_target,
    write_json,
)


def test_a_finished_file_takes_the_name_and_leaves_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "result.txt"
    target.write_text("old")
    with atomic_file(target) as temporary:
        temporary.write_text("new")
        assert target.read_text() == "old"
    assert target.read_text() == "new"
    assert os.listdir(tmp_path) == ["result.txt"]
    assert target.stat().st_mode & 0o777 == 0o644


def test_a_failed_write_leaves_the_old_file_alone(tmp_path: Path) -> None:
    target = tmp_path / "result.txt"
    target.write_text("old")
    with pytest.raises(OSError, match="No space"), atomic_file(target) as temporary:
        temporary.write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")
    assert target.read_text() == "old"
    assert os.listdir(tmp_path) == ["result.txt"]


def test_a_folder_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "artifact"
    for content in ("first", "second"):
        with atomic_directory(target) as temporary:
            (temporary / content).write_text(content)
    assert os.listdir(target) == ["second"]
    with pytest.raises(RuntimeError, match="stop"), atomic_directory(target) as temporary:
        (temporary / "third").write_text("x")
        raise RuntimeError("stop")
    assert os.listdir(target) == ["second"]
    assert os.listdir(tmp_path) == ["artifact"]


def test_targets_of_the_wrong_kind_are_refused(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="folder stands there"), atomic_file(tmp_path / "folder"):
        pass
    with pytest.raises(InputError, match="file stands there"), atomic_directory(tmp_path / "file"):
        pass
    with pytest.raises(InputError, match="out: .*folder can be made"):
        writable_target(tmp_path / "file" / "below", "out")
    for missing in ("nothing", "folder"):
        with pytest.raises(InputError, match="data: .*existing file"):
            existing_file(tmp_path / missing, "data")
    (tmp_path / "empty").touch()
    with pytest.raises(InputError, match="not empty"):
        existing_file(tmp_path / "empty", "data")


def test_json_has_no_nan_and_a_stable_order(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    write_json(path, {"b": 1, "a": [1.5, None]})
    assert path.read_text().index('"a"') < path.read_text().index('"b"')
    assert json.loads(path.read_text()) == {"a": [1.5, None], "b": 1}
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json(path, {"a": float("nan")})
    assert json.loads(path.read_text()) == {"a": [1.5, None], "b": 1}


def test_sha256_of_known_bytes(tmp_path: Path) -> None:
    path = tmp_path / "abc"
    path.write_bytes(b"abc")
    assert sha256_file(path) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_input_error_names_field_value_and_allowed_and_survives_processes() -> None:
    error = InputError("nu", -1, "a number above 0")
    assert str(error) == "nu: got -1; allowed: a number above 0"
    assert isinstance(error, ValueError)
    assert isinstance(error, TailcastError)
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.field, copy.value, copy.allowed) == ("nu", -1, "a number above 0")
    assert len(str(InputError("prompt", "x" * 10_000, "less"))) < 300
