"""Batch formers in vLLM's real scheduler, KV cache and prefix cache, in vLLM's own environment; half a minute in all."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from scheduler_core.batching import BATCH_FORMERS
from tests.data_gen.conftest import ROOT, save_tiny_llama, vllm_environment, vllm_python  # noqa: F401

pytestmark = pytest.mark.slow

#: A policy for each former: its paper's, or one that evicts by key.
POLICIES = {"uniboost": "uniboost", "stage_aware": "semantic", "chunked_prefill": "trail", "vllm": "priority"}
RAD = {"t_row": 16, "t_col": 8, "t_red": 8}
PARAMETERS: dict[str, dict[str, Any]] = {"rad": RAD, "rad_prefill_first": RAD, "slai": {"fitted": True}}
#: Formers that reserve memory, or finish a cycle before the next one, so that it hardly runs out.
RESERVING = ("orca", "quantile_reserve", "rad_prefill_first", "request_level")
#: Formers that process whole prompts.
WHOLE = ("orca", "request_level", "vllm")
#: Hooks that raise, with the settings in which vLLM reaches them.
ORDER = {"policy": "trail"}
PLANNED = {"policy": "uniboost", "batching": "uniboost", "depth": 2}
HOOKS = [
    *((f"_tailcast_order.policy.{name}", ORDER) for name in ("key", "eviction_key", "on_admit", "on_finish")),
    ("_tailcast_order.policy.on_tokens", {"policy": "mlfq"}),  # it is called for policies that implement it
    *((f"_tailcast_order.policy.{name}", PLANNED) for name in ("key", "on_preempt", "on_step", "may_admit")),
    *(
        (f"_tailcast_batches.{name}", PLANNED)
        for name in ("former.form", "former.on_step", "pool.admit", "pool.kv.synchronize")
    ),
]
PARTS = [("predictor", "_tailcast_thread.take"), ("calibration", "_tailcast_calibration.correct")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"), hidden_size=128, heads=4, kv_heads=2)


def run(vllm_python: Path, model: Path, cases: list[dict[str, Any]]) -> list[Any]:  # noqa: F811
    """Results of former_script.py, one a case."""
    task = json.dumps({"model": str(model), "cases": cases})
    done = subprocess.run(
        [str(vllm_python), "-m", "tests.scheduler_core.adapters.former_script", task],
        cwd=ROOT, env={**vllm_environment(), "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    rows = [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert len(rows) == len(cases), done.stderr[-3000:]
    for row in rows:
        assert "problem" not in row, row["trace"]
    return rows


def test_each_former_serves_all_requests(vllm_python: Path, model: Path) -> None:  # noqa: F811
    """Aborts, preemptions, prefix hits; with one and with two steps under way."""
    cases = [
        {
            "batching": name,
            "policy": POLICIES.get(name, "ssjf"),
            "batching_parameters": PARAMETERS.get(name, {}),
            "depth": depth,
            "seed": 4 - depth,
            "predictor": "tiny",
        }
        for name in sorted(BATCH_FORMERS)
        for depth in (1, 2)
    ]
    for case, row in zip(cases, run(vllm_python, model, cases), strict=True):
        assert row["wrong"] == {}, case
        assert row["left"] == [0, 0, 0, 0], case
        assert row["used_blocks"] == 0, case
        assert not row["failed"], (case, row["failures"])
        assert row["ours"]["above limit"] == 0, case
        assert row["ours"]["aborted"] > 0, case
        assert row["ours"]["preemptions"] > 0 or case["batching"] in RESERVING, case
        if case["batching"] in ("slai", "stage_aware", "uniboost", "rad", "rad_prefill_first", "vllm"):
            assert row["ours"]["paused"] > 0, case


@pytest.mark.mend
def test_prompts_with_images_are_served_by_each_former(vllm_python: Path, model: Path) -> None:  # noqa: F811
    """Images were computed for tokens beyond the plan. Where prompts that were paused filled the encoder cache, the planned ones
    waited for ever, and so did prompts planned as a whole that vLLM had processed up to an image."""
    cases = [
        {
            "batching": name,
            "policy": POLICIES.get(name, "ssjf"),
            "batching_parameters": PARAMETERS.get(name, {}),
            "depth": depth,
            "seed": depth,
            "images": 24,
            "blocks": 120,
            "tokens": 512 if name in WHOLE else 24,
        }
        for name in sorted(BATCH_FORMERS)
        for depth in (1, 2)
    ]
    num_blocked = 0
    for case, row in zip(cases, run(vllm_python, model, cases), strict=True):
        assert row["wrong"] == {}, case
        assert row["left"] == [0, 0, 0, 0], case
        assert (row["used_blocks"], row["held_images"]) == (0, 0), case
        assert not row["failed"], (case, row["failures"])
        assert row["ours"]["images"] > 20, case
        assert row["ours"]["early images"] == 0, case
        num_blocked += row["ours"]["blocked"]
    assert num_blocked > 10


@pytest.mark.mend
def test_no_hook_takes_the_engine_down(vllm_python: Path, model: Path) -> None:  # noqa: F811
    cases = [
        {**settings, "raise": {hook: "boom"}, "after": after}
        for hook, settings in HOOKS
        for after in (0, 3 if "preempt" in hook else 25)
    ]
    for case, row in zip(cases, run(vllm_python, model, cases), strict=True):
        assert row["failed"], case
        assert row["queue"] == "FCFSRequestQueue", case
        assert row["wrong"] == {}, case
        assert row["left"] == [0, 0, 0, 0], case
        assert row["used_blocks"] == 0, case


@pytest.mark.mend
def test_order_goes_on_without_predictor_or_calibration(vllm_python: Path, model: Path) -> None:  # noqa: F811
    # Enough requests that some still arrive when the predictor has been loaded.
    settings = {"policy": "ssjf", "batching": "slai", "predictor": "tiny", "num": 600}
    cases = [{**settings, "raise": {hook: "boom"}, "after": 0} for _, hook in PARTS]
    rows = run(vllm_python, model, cases)
    for (part, _), row in zip(PARTS, rows, strict=True):
        assert not row["failed"], part
        assert row["failures"].get(part) == 1, row["failures"]
        assert row["wrong"] == {}, part
