"""The core runs where numpy is the only package."""

import subprocess
import sys

PROGRAM = """
import importlib, pkgutil, sys

class OnlyNumpy:
    allowed = {"numpy", "scheduler_core", *sys.stdlib_module_names}

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in self.allowed:
            raise ModuleNotFoundError(f"{name} is not here", name=name)
        return None

sys.meta_path.insert(0, OnlyNumpy())
import scheduler_core
for module in pkgutil.walk_packages(scheduler_core.__path__, "scheduler_core."):
    importlib.import_module(module.name)

from pathlib import Path
from scheduler_core.files import write_json
from scheduler_core.simulator.commands.simulate import main
from scheduler_core.simulator.config import SimulationConfig
from scheduler_core.simulator.run import run_simulation

folder = Path(sys.argv[1])
trace = folder / "trace.jsonl"
trace.write_text('{"request_id": "a", "arrival_s": 0, "prompt_tokens": 3, "output_tokens": 2, "max_tokens": 4}\\n')
result = run_simulation(SimulationConfig(trace=str(trace), policy="sjf"))
write_json(folder / "result.json", result.to_json())
assert result.metrics["num_finished"] == 1
assert main(["run", "--trace", str(trace)]) == 2
"""


def test_everything_imports_and_simulates_with_numpy_alone(tmp_path: object) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "pip install 'tailcast[sim]'" in done.stderr
