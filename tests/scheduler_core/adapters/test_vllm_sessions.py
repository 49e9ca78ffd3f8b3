"""Sessions of agents under vLLM's real scheduler and KV cache, in vLLM's own environment: about 20 seconds each."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.data_gen.conftest import ROOT, save_tiny_llama, vllm_environment, vllm_python  # noqa: F401

pytestmark = pytest.mark.slow

#: Eight contexts of 20 to 33 blocks each, and memory for 120 blocks.
LOAD = {
    "sessions": 8, "turns": 6, "first_tokens": 300, "growth_tokens": 40, "output_tokens": 8, "pause_s": 0.02,
    "kv_tokens": 120 * 16, "max_num_seqs": 8, "max_num_batched_tokens": 512,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"), hidden_size=128, heads=4, kv_heads=2)


@pytest.fixture
def sessions(vllm_python: Path, model: Path) -> Any:  # noqa: F811
    """Runs session_script.py with a policy, None for vLLM's own scheduler; what it printed."""

    def run(policy: str | None, aborts: float = 0.0, **load: Any) -> Any:
        task = {"model": str(model), "policy": policy, "aborts": aborts, "load": LOAD | load}
        done = subprocess.run(
            [str(vllm_python), "-m", "tests.scheduler_core.adapters.session_script", json.dumps(task)],
            cwd=ROOT, env={**vllm_environment(), "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=600,
        )  # fmt: skip
        lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        assert lines, done.stdout[-3000:] + done.stderr[-3000:]
        result = json.loads(lines[0][7:])
        assert set(result["left"].values()) == {0}
        assert result["turns"] == [LOAD["turns"]] * 8
        return result

    return run


def test_sessions_whose_turns_are_held_back_find_their_contexts(sessions: Any) -> None:
    """The script checks the queue of free blocks in every step, and the hits against vLLM's own search."""
    stock = sessions(None)
    assert stock["hits"] < 0.05, "least recently used contexts are gone when their sessions return"
    held = sessions("thunder_agent")
    assert held["held"] > 0
    assert held["hits"] > 0.5
    kept = sessions("continuum")
    assert kept["hits"] > 0.2


def test_hits_are_those_of_vllm(sessions: Any) -> None:
    for seed in range(2):
        result = sessions("hrrn", system_tokens=100, kv_tokens=3200, aborts=0.1, seed=seed)
        assert result["hits"] > 0.2


def test_queue_of_free_blocks_survives_aborts_and_preemptions(sessions: Any) -> None:
    for seed in range(2):
        result = sessions("continuum", system_tokens=100, aborts=0.1, output_tokens=30, seed=seed)
        assert result["held"] > 0


@pytest.mark.parametrize(("named", "num"), [("hint", 8), ("session_id", 8), ("no", 8)])
def test_a_session_is_known_by_name_or_by_its_prompt(sessions: Any, named: str, num: int) -> None:
    """Without a name, a prompt that begins with the whole blocks of an ended one is its session's."""
    result = sessions("thunder_agent", named=named, system_tokens=100)
    assert result["names"] == num
    assert result["hits"] > 0.5
