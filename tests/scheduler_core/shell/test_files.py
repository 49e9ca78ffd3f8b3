import errno
import json
import os
import pickle
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from scheduler_core.errors import InputError, TailcastError
from scheduler_core.shell import files
from scheduler_core.shell.options import check_outputs


def test_a_finished_file_takes_the_name_and_leaves_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "result.txt"
    target.write_text("old")
    with files.atomic_file(target) as temporary:
        temporary.write_text("new")
        assert target.read_text() == "old"
    assert target.read_text() == "new"
    with pytest.raises(OSError, match="No space"), files.atomic_file(target) as temporary:
        temporary.write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")
    assert (target.read_text(), os.listdir(tmp_path)) == ("new", ["result.txt"])


def test_a_folder_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "artifact"
    with pytest.raises(RuntimeError, match="stop"), files.atomic_directory(target, "artifact") as temporary:
        (temporary / "file").write_text("x")
        raise RuntimeError("stop")
    assert os.listdir(tmp_path) == []
    with files.atomic_directory(target, "artifact") as temporary:
        (temporary / "file").write_text("x")
        assert not target.exists()
    assert os.listdir(tmp_path) == ["artifact"]
    assert json.loads((target / files.RECORD).read_text()) == {"artifact": ["file"]}


def test_targets_of_the_wrong_kind_are_refused(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="not of a folder"), files.atomic_file(tmp_path / "folder"):
        pass
    with pytest.raises(InputError, match="not of a file"):
        files.folder_target(tmp_path / "file", "kind", overwrite=True)
    with pytest.raises(InputError, match="out: .*folder can be created"):
        files.writable_target(tmp_path / "file" / "below", "out")
    for missing in ("nothing", "folder"):
        with pytest.raises(InputError, match="data: .*existing file"):
            files.existing_file(tmp_path / missing, "data")
    (tmp_path / "empty").touch()
    with pytest.raises(InputError, match="not empty"):
        files.existing_file(tmp_path / "empty", "data")


def test_a_new_file_follows_the_umask_and_an_existing_one_keeps_its_mode(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.touch()
    old.chmod(0o600)
    previous = os.umask(0o027)
    try:
        for path in (old, new):
            with files.atomic_file(path) as temporary:
                temporary.unlink()  # safetensors replaces the file by one for the owner alone
                temporary.touch(0o600)
        with files.atomic_directory(tmp_path / "folder", "kind") as folder:
            pass
    finally:
        os.umask(previous)
    assert not folder.exists()
    assert [path.stat().st_mode & 0o777 for path in (old, new, tmp_path / "folder")] == [0o600, 0o640, 0o750]


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_stays_and_its_target_is_written(tmp_path: Path, exists: bool) -> None:
    (tmp_path / "elsewhere").mkdir()
    link, target = tmp_path / "link", tmp_path / "elsewhere" / "target"
    link.symlink_to("elsewhere/target")
    if exists:
        target.write_text("old")
    with files.atomic_file(files.writable_target(link, "out")) as temporary:
        temporary.write_text("new")
        assert temporary.parent == target.parent
    assert link.is_symlink()
    assert (target.read_text(), os.listdir(target.parent)) == ("new", ["target"])
    files.remove_output(link)
    assert (link.is_symlink(), target.exists()) == (True, False)


# A device or a named pipe was replaced by a file.
@pytest.mark.mend
def test_devices_and_pipes_are_written_to_and_stay(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    received: list[str] = []
    reader = threading.Thread(target=lambda: received.append(fifo.read_text()), daemon=True)
    reader.start()
    files.write_json(files.writable_target(fifo, "json"), {"a": 1})
    reader.join(timeout=30)
    assert json.loads(received[0]) == {"a": 1}
    assert stat.S_ISFIFO(fifo.stat().st_mode)
    files.write_json(files.writable_target("/dev/null", "json"), {})
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    for path in (fifo, "/dev/null"):
        files.remove_output(path)
    assert os.path.exists("/dev/null")
    assert os.listdir(tmp_path) == ["fifo"]


@pytest.mark.parametrize("path", ["/dev/stdout", "/dev/fd/1", "link"])
def test_standard_output_in_a_file_is_appended_to(tmp_path: Path, path: str) -> None:
    log = tmp_path / "log"
    log.write_text("before\n")
    if path == "link":
        (tmp_path / "link").symlink_to("/dev/stdout")
    code = f"from scheduler_core.shell.files import *; write_json(writable_target({path!r}, 'json'), 1); print('after')"
    with open(log, "a") as stream:
        subprocess.run([sys.executable, "-c", code], stdout=stream, check=True, cwd=tmp_path)
    assert log.read_text() == "before\n1\nafter\n"


def test_a_file_without_write_permission_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "kept"
    path.touch(0o444)
    monkeypatch.setattr(os, "access", lambda at, mode: at != path)  # root may write everywhere
    with pytest.raises(InputError, match="json: .*can be written to"):
        files.writable_target(path, "json")


def filled(path: Path, kind: str, *names: str, overwrite: bool = False) -> None:
    target = files.folder_target(path, kind, overwrite=overwrite)
    with files.atomic_directory(target, kind, overwrite=overwrite) as folder:
        for name in names:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(name)


# calibrate and export-onnx deleted a folder of the user.
@pytest.mark.mend
def test_only_a_whole_output_of_the_same_kind_is_replaced(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()  # an empty folder is no obstacle
    filled(out, "checkpoint", "a", "sub/b")
    for overwrite in (False, True):
        with pytest.raises(InputError, match="out: .*an earlier artifact to replace"):
            filled(out, "artifact", "c", overwrite=overwrite)
    with pytest.raises(InputError, match="out: .*--overwrite true replaces this checkpoint"):
        filled(out, "checkpoint", "c")
    (out / "sub" / "notes.txt").write_text("mine")
    with pytest.raises(TailcastError, match="out: .* holds sub/notes.txt, which is not part of the che"):
        filled(out, "checkpoint", "c", overwrite=True)
    assert (out / "sub" / "notes.txt").read_text() == "mine"
    (out / "sub" / "notes.txt").unlink()
    filled(out, "checkpoint", "c", overwrite=True)
    assert (sorted(os.listdir(out)), os.listdir(tmp_path)) == ([files.RECORD, "c"], ["out"])


# calibrate and export-onnx deleted a folder of the user.
@pytest.mark.mend
@pytest.mark.parametrize("record", [None, "", "[]", '{"checkpoint": 1}', '{"other": ["config.json"]}'])
def test_a_folder_of_the_user_is_never_replaced(tmp_path: Path, record: str | None) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text("{}")
    if record is not None:
        (out / files.RECORD).write_text(record)
    with pytest.raises(InputError, match="a new or empty folder"):
        files.folder_target(out, "checkpoint", overwrite=True)
    with pytest.raises(InputError, match="a new"), files.atomic_directory(out, "checkpoint", overwrite=True):
        pass
    assert ((out / "config.json").read_text(), os.listdir(tmp_path)) == ("{}", ["out"])


# Two runs into one folder mixed their files.
@pytest.mark.mend
@pytest.mark.parametrize("one_step", [True, False])
def test_each_of_two_replaces_all(tmp_path: Path, one_step: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not one_step:
        monkeypatch.setattr(os, "name", "other")
    out = tmp_path / "out"
    filled(out, "kind", "before")
    with files.atomic_directory(out, "kind", overwrite=True) as second:
        (second / "second").touch()
        filled(out, "kind", "first", overwrite=True)
        assert sorted(os.listdir(out)) == [files.RECORD, "first"]
    assert (sorted(os.listdir(out)), os.listdir(tmp_path)) == ([files.RECORD, "second"], ["out"])


# A file of the user in an output folder was lost.
@pytest.mark.mend
def test_a_file_that_comes_while_a_folder_is_written_is_kept(tmp_path: Path) -> None:
    out = tmp_path / "out"
    filled(out, "kind", "before")
    replaced = files.atomic_directory(out, "kind", overwrite=True)
    with pytest.raises(TailcastError, match="holds mine"), replaced:
        (out / "mine").touch()
    assert sorted(os.listdir(out)) == [files.RECORD, "before", "mine"]


def test_a_shared_folder_keeps_other_files(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert files.shared_folder(out, "sweep", ["config.json"]) == out
    files.check_shared_folder(out, "sweep", ["report.html"])  # is not yet written by it
    (out / "config.json").write_text("ours")
    (out / "report.html").write_text("mine")
    files.shared_folder(out, "sweep", ["config.json"])
    files.shared_folder(out, "card", ["card.md"])
    with pytest.raises(TailcastError, match="out: .* holds report.html, which no sweep wrote"):
        files.shared_folder(out, "sweep", ["config.json", "report.html"])
    with pytest.raises(TailcastError, match="card: .* holds config.json, which no card wrote"):
        files.shared_folder(out, "card", ["config.json"], field="card")
    with pytest.raises(TailcastError, match="which no quickstart wrote"):
        files.shared_folder(out, "quickstart")
    new = files.shared_folder(tmp_path / "new", "quickstart")
    (new / "any").touch()
    files.shared_folder(new, "quickstart")
    with pytest.raises(InputError, match="not of a file"):
        files.shared_folder(out / "config.json", "sweep", [])
    with pytest.raises(InputError, match="folder that can be created"):
        files.shared_folder(out / "config.json" / "below", "sweep", [])


def test_a_locked_folder_is_for_one_process(tmp_path: Path) -> None:
    folder = tmp_path / "work"
    with files.locked_folder(folder, "out"):
        with pytest.raises(InputError, match="no other process"), files.locked_folder(folder, "out"):
            pass
        assert folder.is_dir()
    assert not folder.exists()
    with files.locked_folder(folder, "out"):
        (folder / "state").touch()
    with files.locked_folder(folder, "out"):
        assert os.listdir(folder) == ["state"]
    with pytest.raises(InputError, match="can be created"), files.locked_folder(folder / "state", "out"):
        pass


# Commands wrote over their inputs.
@pytest.mark.mend
def test_outputs_neither_hold_inputs_nor_lie_in_them(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").touch()
    (tmp_path / "alias").symlink_to("model")
    with pytest.raises(InputError, match="json: .*a path outside the folder of model"):
        check_outputs({"model": [tmp_path / "model"]}, {"json": tmp_path / "alias" / "new.json"})
    with pytest.raises(InputError, match="out: .*a path that does not contain that of data"):
        check_outputs({"data": [tmp_path / "model" / "config.json"]}, {"out": tmp_path / "alias"})
    with pytest.raises(InputError, match="out: .*does not contain that of page, which is written too"):
        check_outputs({}, {"out": tmp_path / "new", "page": tmp_path / "new" / "page.md"})
    check_outputs(
        {"model": [tmp_path / "model", "hf:name", "missing"], "stream": ["/dev/null"]},
        {"json": "/dev/null", "html": "/dev/null", "out": tmp_path / "model2", "pairs": "-", "page": None},
    )


FULL_DISK = """
import os, resource, sys
import numpy as np, pyarrow as pa, pyarrow.parquet as pq
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from scheduler_core.shell.files import atomic_directory, atomic_file, write_json

noise = np.random.default_rng(0).random(100_000)
writers = {
    "text": lambda path: path.write_text("x" * 100_000),
    "parquet": lambda path: pq.write_table(pa.table({"x": noise}), path),
    "safetensors": lambda path: save_file({"x": noise}, path),
    "tokenizer": lambda path: Tokenizer(WordLevel({str(i): i for i in range(9999)}, "1")).save(str(path)),
}
resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
for name, write in writers.items():
    for inside in (False, True):
        try:
            if inside:
                with atomic_directory(name, "kind") as folder:
                    write(folder / name)
            else:
                with atomic_file(name) as temporary:
                    write(temporary)
        except OSError as error:
            assert "too large" in str(error).lower(), error
        else:
            sys.exit(f"{name} was written")
sys.exit(repr(os.listdir()) if os.listdir() else 0)
"""


# A full disk left partial files and a traceback.
@pytest.mark.mend
def test_a_full_disk_is_an_os_error_of_every_library_and_leaves_nothing(tmp_path: Path) -> None:
    for package in ("pyarrow", "safetensors", "tokenizers"):
        pytest.importorskip(package)
    done = subprocess.run([sys.executable, "-c", FULL_DISK], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_input_error_names_field_value_and_allowed_and_survives_processes() -> None:
    error = InputError("nu", -1, "a number above 0")
    assert str(error) == "nu: got -1; allowed: a number above 0"
    copy = pickle.loads(pickle.dumps(error))
    assert isinstance(copy, ValueError)
    assert isinstance(copy, TailcastError)
    assert (copy.field, copy.value, copy.allowed) == ("nu", -1, "a number above 0")
    assert len(str(InputError("prompt", "x" * 10_000, "less"))) < 300
