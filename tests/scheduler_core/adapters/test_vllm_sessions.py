"""Sessions of agents under vLLM's real scheduler and KV cache, in vLLM's own environment: about 20 seconds each."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.data_gen.conftest import ROOT, save_tiny_llama, vllm_environment, vllm_python  # noqa: F401

pytestmark = pytest.mark.slow

#: Eight contexts of 3,000 to 3,500 tokens, and memory for 16,000.
LOAD = {
    "sessions": 8, "turns": 6, "first_tokens": 3000, "growth_tokens": 100, "output_tokens": 8, "pause_s": 0.1,
    "kv_tokens": 16_000, "max_num_seqs": 8, "max_num_batched_tokens": 1024,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"), hidden_size=128, heads=4, kv_heads=2)


@pytest.fixture
def sessions(vllm_python: Path, model: Path) -> Any:  # noqa: F811
    """Runs session_script.py with a policy, None for vLLM's own scheduler; what it printed."""

    def run(policy: str | None, aborts: float = 0.0, **load: Any) -> Any:
        task: dict[str, Any] = {"model": str(model), "policy": policy, "aborts": aborts, "load": LOAD | load}
        done = subprocess.run(
            [str(vllm_python), "-m", "tests.scheduler_core.adapters.session_script", json.dumps(task)],
            cwd=ROOT, env={**vllm_environment(), "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=600,
        )  # fmt: skip
        lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        assert lines, done.stdout[-3000:] + done.stderr[-3000:]
        result = json.loads(lines[0][7:])
        assert set(result["left"].values()) == {0}
        assert result["turns"] == [task["load"]["turns"]] * 8
        return result

    return run


def test_sessions_whose_turns_are_held_back_find_their_contexts(sessions: Any) -> None:
    """The script checks the queue of free blocks in every step."""
    stock = sessions(None)
    assert stock["hits"] < 0.05, "least recently used contexts are gone when their sessions return"
    for policy in ("working_set", "thunder_agent", "continuum"):
        result = sessions(policy)
        assert result["held"] > 0
        assert result["hits"] > 0.4, policy
        assert result["num_wrong"] == 0


@pytest.mark.mend
@pytest.mark.parametrize("policy", ["hrrn", "working_set"])
def test_hits_are_those_of_vllm_after_aborts(sessions: Any, policy: str) -> None:
    for seed in range(2):
        result = sessions(policy, system_tokens=1000, aborts=0.1, seed=seed)
        assert result["hits"] > 0.1
        assert result["num_wrong"] == 0, "hits are those that vLLM finds"


def test_queue_of_free_blocks_survives_preemptions(sessions: Any) -> None:
    """Outputs of many tokens, for which there is too little memory."""
    for seed in range(2):
        result = sessions(
            "working_set", system_tokens=100, aborts=0.005, output_tokens=300, turns=3, seed=seed
        )
        assert result["held"] > 0


@pytest.mark.parametrize(("named", "num"), [("hint", 8), ("session_id", 8), ("no", 8)])
def test_a_session_is_known_by_name_or_by_its_prompt(sessions: Any, named: str, num: int) -> None:
    """Without a name, a prompt that begins with the whole blocks of an ended one is its session's."""
    result = sessions("thunder_agent", named=named, system_tokens=100)
    assert result["names"] == num
    assert result["hits"] > 0.5
