"""When workers are started again and when the command ends, with workers that do nothing but that."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from predictors.service import workers as module
from predictors.service.workers import Supervisor

WORKER = """
import os, signal, sys, time
folder, plan, number = sys.argv[1:]
life = 0
while True:
    try:
        os.close(os.open(f"{folder}/{number}-{life}", os.O_CREAT | os.O_EXCL))
        break
    except FileExistsError:
        life += 1
steps = dict(part.split(":") for part in plan.split(","))
what = steps.get(f"{number}-{life}", steps.get("else", "serve"))
if what == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if what.startswith("late"):  # only once the other one serves
    while not os.path.exists(f"{folder}/serving"):
        time.sleep(0.01)
    if what == "latekilled":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(3)
if what.isdigit():
    sys.exit(int(what))
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
open(f"{folder}/pid-{number}", "w").write(str(os.getpid()))
os.write(1, b"x")
open(f"{folder}/serving", "w").close()
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_BACKOFF_S", 0.01)


async def run(folder: Path, plan: str, *, suspended: int | None = None) -> tuple[int, list[str], bool]:
    """Exit code, lives of workers (number-life), and whether all of them were ready at some time."""
    command = [sys.executable, "-S", "-c", WORKER, str(folder), plan]
    supervisor = Supervisor(command, 2, stop_timeout_s=120 if suspended is None else 1)
    was_ready = False

    def on_ready() -> None:
        nonlocal was_ready
        was_ready = True
        if suspended is not None:
            os.kill(int((folder / f"pid-{suspended}").read_text()), signal.SIGSTOP)
        supervisor.stop()

    async with asyncio.timeout(120):
        code = await supervisor.run(on_ready)
    lives = sorted(file.name for file in folder.glob("[0-9]-*"))
    return code, lives, was_ready


@pytest.mark.parametrize(
    ("plan", "lives"),
    [
        ("else:serve", ["0-0", "1-0"]),
        ("0-0:killed,1-0:killed", ["0-0", "0-1", "1-0", "1-1"]),
        ("1-0:latekilled", ["0-0", "1-0", "1-1"]),
        ("1-0:late,1-1:late", ["0-0", "1-0", "1-1", "1-2"]),
    ],
    ids=["nothing happens", "both killed early", "killed later", "fails beside one that serves"],
)
async def test_workers_that_end_are_started_again(tmp_path: Path, plan: str, lives: list[str]) -> None:
    assert await run(tmp_path, plan) == (0, lives, True)


async def test_workers_that_never_come_up_end_the_command(tmp_path: Path) -> None:
    for plan, expected in (("else:2", 2), ("else:killed", 1)):
        (tmp_path / plan).mkdir()
        code, lives, was_ready = await run(tmp_path / plan, plan)
        assert (code, was_ready) == (expected, False)
    assert module.MAX_EARLY_ENDS <= len(lives) <= module.MAX_EARLY_ENDS + 1  # killed again and again


async def test_a_worker_that_is_not_ready_again_yet_has_nothing_to_drain(tmp_path: Path) -> None:
    # Ready in its first life alone; then it takes for ever to start, without a handler for SIGTERM.
    first, second = tmp_path / "first", tmp_path / "second"
    script = (
        "import os, pathlib, sys, time; first, second = map(pathlib.Path, sys.argv[1:3])\n"
        "again = first.exists(); (second if again else first).write_text(str(os.getpid()))\n"
        "if not again: os.write(1, b'x')\n"
        "time.sleep(600)"
    )
    command = [sys.executable, "-c", script, str(first), str(second)]
    supervisor = Supervisor(command, count=1, stop_timeout_s=120)
    ready = asyncio.Event()
    running = asyncio.create_task(supervisor.run(ready.set))
    async with asyncio.timeout(120):
        await ready.wait()
        os.kill(int(first.read_text()), signal.SIGKILL)
        while not second.exists():
            await asyncio.sleep(0.01)
        supervisor.stop()
        assert await running == 0


async def test_workers_that_do_not_end_in_time_are_killed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # A suspended process does not get SIGTERM; the other one ends as it should.
    code, lives, was_ready = await run(tmp_path, "else:serve", suspended=0)
    assert (code, lives, was_ready) == (1, ["0-0", "1-0"], True)
    assert "1 workers still run 1 s after the signal to stop: killed" in caplog.text
