"""Ctrl-C at any moment: exit code 130 and one line, in real processes.

A process interrupts itself when it imports a certain module first, so that the moment is the same in every run: a
`sitecustomize` module in front of the path sends SIGINT out of the import.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hostile import write_good_files

ROOT = Path(__file__).parents[1]

_SITE = """
import os, signal, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        child = "--multiprocessing-fork" in sys.orig_argv
        if name == os.environ["INTERRUPT_AT"] and child == ("INTERRUPT_CHILD" in os.environ):
            sys.meta_path.remove(self)
            os.killpg(0, signal.SIGINT)
        return None

sys.meta_path.insert(0, Interrupt())
"""
_SLEEPER = """
import sys, threading
from scheduler_core.shell.command import entry_point

@entry_point("tool", extra="sim")
def main(args=None):
    # A thread that goes on after the command, as those of libraries do; interrupted while the interpreter waits for it.
    threading.Thread(target=lambda: (sys.stdout.write("over\\n"), sys.stdout.flush(), threading.Event().wait())).start()
    return 0

sys.exit(main())
"""


@pytest.fixture(autouse=True)
def default_sigint() -> Iterator[None]:
    """Children inherit an ignored SIGINT, which a shell gives to its background jobs (`make test &`)."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    (folder / "sitecustomize.py").write_text(_SITE)
    return folder


def interrupted(
    site: Path, moment: str, module: str, *args: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """The command and its processes, all interrupted at the first import of `moment`."""
    changes = {"INTERRUPT_AT": moment, "PYTHONPATH": f"{site}{os.pathsep}{ROOT}", **environment}
    options = {"env": os.environ | changes, "cwd": site, "timeout": 120, "start_new_session": True}
    return subprocess.run([sys.executable, "-m", module, *args], capture_output=True, text=True, **options)


# Ctrl-C during imports printed a traceback.
@pytest.mark.mend
@pytest.mark.parametrize(
    ("module", "prog", "moment", "args"),
    [
        ("scheduler_core.simulator.commands.simulate", "simulate", "numpy", ("run",)),
        ("scheduler_core.simulator.commands.simulate", "simulate run", "jsonargparse", ("run",)),
        ("data_gen.commands.gen_samples", "gen-samples", "numpy", ()),
        ("training.commands.fit_dist", "fit-dist", "docstring_parser", ()),
        ("training.commands.train", "train", "training.network.config", ()),
        ("export.commands.package_artifact", "package-artifact", "export.packages", ()),
        ("predictors.commands.serve_predictor", "serve-predictor", "jsonargparse", ()),
    ],
)
def test_interrupted_imports(site: Path, module: str, prog: str, moment: str, args: tuple[str, ...]) -> None:
    done = interrupted(site, moment, module, *args)
    assert (done.returncode, done.stderr) == (130, f"{prog}: interrupted\n")
    assert done.stdout == ""


def test_an_interrupt_in_the_middle_of_the_work(site: Path, tmp_path: Path) -> None:
    samples = write_good_files(tmp_path / "good")["samples.parquet"]
    out = tmp_path / "out"
    done = interrupted(
        site, "scipy", "training.commands.fit_dist", str(samples), "--out", f"{out}/fits.parquet"
    )
    assert (done.returncode, done.stderr) == (130, "fit-dist: interrupted\n")
    assert [path for path in out.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("moment", ["numpy", "scheduler_core.simulator.run"])
def test_an_interrupt_while_processes_of_a_sweep_start(site: Path, tmp_path: Path, moment: str) -> None:
    args = f"sweep {tmp_path}/out --workers 2 --num_seeds 2 --workload.num_requests 9".split()
    done = interrupted(site, moment, "scheduler_core.simulator.commands.simulate", *args, INTERRUPT_CHILD="1")
    assert (done.returncode, done.stderr) == (130, "simulate sweep: interrupted\n")


# Ctrl-C at exit printed a traceback.
@pytest.mark.mend
def test_an_interrupt_while_the_interpreter_waits_for_threads(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_SLEEPER)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, str(script)], text=True, env=environment, **pipes) as process:
        assert process.stdout.readline() == "over\n"
        process.send_signal(signal.SIGINT)
        try:
            _, stderr = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, stderr) == (130, "tool: interrupted\n")
