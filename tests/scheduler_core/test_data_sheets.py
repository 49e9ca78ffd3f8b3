"""Models, deployments and step times from data sheets."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_core.engine.kv_cache import DEFAULT_KV_BLOCKS
from scheduler_core.engine.plan import PrefillChunk
from scheduler_core.errors import InputError
from scheduler_core.scheduler import SchedulerConfig
from scheduler_core.simulator.config import ClusterConfig, SimulationConfig
from scheduler_core.simulator.planning.config import PlanConfig
from scheduler_core.simulator.planning.plan import memory_pressure
from scheduler_core.simulator.step_time.accuracy import REGIONS, error_band, region_of
from scheduler_core.simulator.step_time.base import LinearStepTime, StepWork
from scheduler_core.simulator.step_time.model_size import MODELS, model_size, read_config
from scheduler_core.simulator.step_time.roofline import GPUS, RooflineStepTime
from scheduler_core.simulator.trace import Trace, TraceRequest
from tests.scheduler_core.helpers import random_trace, simulate, trace_row

LLAMA: dict[str, Any] = {
    "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "rope_theta": 5e5, "attention_bias": False,
    "bos_token_id": 128000, "max_position_embeddings": 8192, "torch_dtype": "bfloat16",
}  # fmt: skip


def test_sizes_are_the_published_ones() -> None:
    """Billions of weights, of all and of those that one token uses, in the cards of the models."""
    published = {
        "llama-3.1-405b": (405.9, None), "mixtral-8x7b": (46.7, 12.9), "mixtral-8x22b": (140.6, 39.1), "qwen3-30b-a3b": (30.5, 3.3),
        "qwen3-235b-a22b": (235, 22), "deepseek-v3": (671, 37), "deepseek-v2-lite": (15.7, 2.4), "gpt-oss-20b": (20.9, 3.6),
        "gpt-oss-120b": (116.8, 5.1), "gemma-2-9b": (9.24, None), "llama-4-scout": (109, 17), "yi-34b": (34.4, None),
        "glm-4.5-air": (106, 12), "kimi-k2": (1026, 32),
    }  # fmt: skip
    for name, (billions, active) in published.items():
        size = MODELS[name]
        assert size.num_parameters / 1e9 == pytest.approx(billions, rel=0.02), name
        if active is not None:
            used = size.active_parameters + size.vocabulary * size.hidden
            assert used / 1e9 == pytest.approx(active, rel=0.08), name
    assert MODELS["deepseek-v3"].kv_bytes_per_token == 2 * 61 * 576


def test_a_model_has_the_name_of_the_table_of_hugging_face_or_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    own = RooflineStepTime(model=str(tmp_path), gpu="h100-80gb")
    named = RooflineStepTime(model="meta-llama/Meta-Llama-3-8b", gpu="h100-80gb")
    assert own.size == replace(MODELS["llama-3-8b"], source=str(path))
    assert own.step_s(StepWork((), [500] * 9)) == named.step_s(StepWork((), [500] * 9))
    scout = model_size("RedHatAI/Llama-4-Scout-17B-16E-Instruct-FP8-dynamic")
    assert scout == replace(MODELS["llama-4-scout"], weights="fp8", expert_weights="fp8")
    with pytest.raises(InputError, match="model: got .*no-such-model"):
        RooflineStepTime(model="no-such-model")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"model_type": "mamba2"}, "model_type"),
        ({"vocab_size": None}, "vocab_size"),
        ({"num_hidden_layers": 3.5}, "num_hidden_layers"),
        ({"num_attention_heads": 30}, "head_dim"),
        ({"linear_num_value_heads": 32}, "linear_num_value_heads"),
        ({"mamba_d_ssm": 4}, "mamba_d_ssm"),
        ({"layer_types": ["linear_attention"] * 32}, "layer_types"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"num_local_experts": 4, "num_experts_per_tok": 8}, "num_experts_per_tok"),
        ({"quantization_config": {"quant_method": "aqlm"}}, "quantization_config"),
    ],
)
def test_a_config_that_is_not_understood_names_the_field(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError, match=f"config.json: {field}"):
        read_config(LLAMA | changes)


def test_fields_that_are_off_or_do_not_matter_are_ignored() -> None:
    more = {"mamba_layers": None, "use_sliding_window": False, "sliding_window": 4096, "num_experts": None}
    assert read_config(LLAMA | more) == read_config(LLAMA)
    wrapped = {"model_type": "llava", "vision_config": {"hidden_size": 1}, "text_config": LLAMA}
    assert read_config(wrapped) == read_config(LLAMA)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "awq", "bits": 4}, "int4"),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 8}}}}, "fp8"),
    ],
)  # fmt: skip
def test_weights_have_the_type_of_the_config(config: dict[str, Any], expected: str) -> None:
    assert read_config(LLAMA | {"quantization_config": config}).weights == expected


def test_a_step_reads_the_experts_that_its_tokens_use() -> None:
    step_time = RooflineStepTime(
        model="mixtral-8x7b",
        gpu="h100-80gb",
        tensor_parallel=2,
        memory_efficiency=1.0,
        layer_s=0.0,
        link_efficiency=1.0,
    )
    layer, num = step_time.size.layers[0]
    first_s, second_s = (step_time.step_s(StepWork((), [0] * tokens)) for tokens in (1, 2))
    # The second token uses 2 of 8 experts, of which a quarter are those of the first.
    more_s = num * 1.5 * 2 * layer.expert / 2 / 3350e9
    assert second_s - first_s == pytest.approx(more_s, rel=0.01)
    times = [step_time.step_s(StepWork((), [0] * tokens)) for tokens in (1, 2, 4, 8, 16, 32, 64)]
    assert all(later > earlier for earlier, later in pairwise(times))
    whole = replace(step_time, expert_parallel=True)
    assert whole.step_s(StepWork((), [0] * 4)) > step_time.step_s(StepWork((), [0] * 4)), "the busiest device"


@given(
    st.sampled_from(["gemma-2-9b", "gpt-oss-20b", "mistral-7b"]),
    st.lists(st.integers(1, 6000), min_size=1, max_size=6),
    st.integers(1, 3),
)
@settings(max_examples=20, deadline=None)
def test_runs_with_windows_have_the_times_of_their_steps(
    model: str, contexts: list[int], stages: int
) -> None:
    step_time = RooflineStepTime(model=model, gpu="h100-80gb", pipeline_parallel=stages)
    contexts = [*contexts, 100, 4090]
    run, total = step_time.run(contexts, 5.0), 0.0
    for step in range(60):
        total += step_time.step_s(StepWork((), [one + step for one in contexts]))
        assert run.elapsed_s(step + 1) == pytest.approx(total, rel=1e-12)
    groups = run.steps(7, 50)
    assert sum(group.num_steps for group in groups) == 50
    assert sum(group.total_s for group in groups) == pytest.approx(
        run.elapsed_s(57) - run.elapsed_s(7), rel=1e-9
    )
    assert run.steps_to_reach(5.0 + total * (1 - 1e-9), 500) == 60


def test_fewer_bits_more_devices_and_faster_devices_take_less_time_and_memory() -> None:
    base = RooflineStepTime(model="llama-3.1-70b", gpu="h100-80gb", tensor_parallel=4)
    for work in (StepWork((), [900] * 100), StepWork((PrefillChunk("p", 0, 2000, True),), [900] * 20)):
        for faster in (
            replace(base, weights="fp8"), replace(base, kv_cache="fp8"), replace(base, tensor_parallel=8),
            replace(base, gpu="h200-141gb"), replace(base, gpu="b200-180gb"),
        ):  # fmt: skip
            assert faster.step_s(work) < base.step_s(work)
            assert faster.num_kv_blocks() > base.num_kv_blocks() or faster.kv_cache == base.kv_cache
        assert replace(base, gpu="a100-80gb").step_s(work) > base.step_s(work)
    assert replace(base, kv_cache="fp8").num_kv_blocks() == pytest.approx(2 * base.num_kv_blocks(), rel=1e-3)
    halves = replace(base, tensor_parallel=2, pipeline_parallel=2)
    assert halves.num_kv_blocks() == pytest.approx(base.num_kv_blocks(), rel=0.05)
    # Latent attention has one vector for all heads, so that more devices hold copies of it.
    latent = RooflineStepTime(model="deepseek-v2-lite", gpu="h100-80gb")
    assert replace(latent, tensor_parallel=4).num_kv_blocks() < 1.7 * latent.num_kv_blocks()


def test_a_model_that_does_not_fit_is_refused_with_what_would() -> None:
    with pytest.raises(InputError, match=r"at least 2: .*141 GB.*or weights fp8; or gpu b200-180gb"):
        RooflineStepTime(model="llama-3.1-70b", gpu="h100-80gb")
    for options in ({"tensor_parallel": 2}, {"gpu": "b200-180gb"}):
        RooflineStepTime(**{"model": "llama-3.1-70b", "gpu": "h100-80gb"} | options)
    with pytest.raises(InputError, match="tensor_parallel: got 3; allowed: 1, 2, 4, 8, 16, 32, by the"):
        RooflineStepTime(tensor_parallel=3)
    with pytest.raises(InputError, match="tensor_parallel: got 4; allowed: 1, 2, 5, 10, 20, 40"):
        RooflineStepTime(model="phi-4", tensor_parallel=4)
    with pytest.raises(InputError, match="expert_parallel"):
        RooflineStepTime(expert_parallel=True)


def test_a_simulation_has_the_kv_cache_that_fits(tmp_path: Path) -> None:
    trace = str(tmp_path / "t.jsonl")
    config = SimulationConfig(
        trace=trace,
        step_time_model="roofline",
        step_time_parameters={"model": "llama-2-7b", "gpu": "h100-80gb"},
        scheduler=SchedulerConfig(max_num_seqs=128),
    )
    step_time = config.make_step_time()
    assert isinstance(step_time, RooflineStepTime)
    assert config.limits.num_kv_blocks == step_time.num_kv_blocks(16, 128, 2048)
    # vLLM's log for this model on an H100: about 117,000 tokens.
    assert config.limits.num_kv_blocks * 16 == pytest.approx(117_000, rel=0.03)
    plain = SimulationConfig(trace=trace)
    assert plain.limits == replace(plain.scheduler, num_kv_blocks=DEFAULT_KV_BLOCKS)


@pytest.mark.mend  # The default number of blocks, set by the user, was replaced by as many as fit.
@pytest.mark.parametrize("num_blocks", [100, DEFAULT_KV_BLOCKS])
def test_the_kv_cache_has_the_size_that_is_set(num_blocks: int) -> None:
    parameters = {"model": "llama-2-7b", "gpu": "h100-80gb"}
    config = SimulationConfig(
        trace="t.jsonl",
        step_time_model="roofline",
        step_time_parameters=parameters,
        scheduler=SchedulerConfig(num_kv_blocks=num_blocks),
    )
    assert config.limits == config.scheduler
    plan = PlanConfig(target="ttft_s.p99<1", gpus="h100=2", model="llama-2-7b", num_kv_blocks=num_blocks)
    choice = plan.hardware()[0]
    base = plan.base("t.jsonl", has_predictions=False)
    assert choice.config(base, 1).limits.num_kv_blocks == num_blocks


@pytest.mark.mend  # The default scaler, set by the user, had no effect without a word.
@pytest.mark.parametrize("scaler", ["freeness", "target_tracking"])
def test_a_scaler_needs_auto_scaling(scaler: str) -> None:
    with pytest.raises(InputError, match="unset without min_replicas"):
        ClusterConfig(num_replicas=2, scaler=scaler)


@pytest.mark.mend  # The efficiency was chosen by the first letter of the name of the device.
def test_the_efficiency_is_that_of_the_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(GPUS, "apex-80gb", GPUS["h100-80gb"])
    monkeypatch.setitem(GPUS, "grace-80gb", GPUS["a100-80gb"])
    work = StepWork((PrefillChunk("", 0, 2048, True),))
    for name, same in (("apex", "h100"), ("grace-80gb", "a100-80gb"), ("A100-80GB", "a100-80gb")):
        seconds = [RooflineStepTime(gpu=gpu).step_s(work) for gpu in (name, same)]
        assert seconds[0] == seconds[1]


def rows(*arrivals_s: float) -> Trace:
    return Trace(
        tuple(
            TraceRequest(
                request_id=f"r{index}", arrival_s=at, prompt_tokens=10, output_tokens=40, max_tokens=40
            )
            for index, at in enumerate(arrivals_s)
        )
    )


class Ahead(LinearStepTime):
    """An engine with steps of 1 s that plans a step ahead, 0.25 s behind its front end."""

    @property
    def delays(self) -> Any:
        return RooflineStepTime(frontend_s=0.25).delays


@pytest.mark.parametrize("exact", [False, True])
def test_a_request_waits_for_the_step_under_way_and_the_one_planned(exact: bool) -> None:
    step_time = Ahead(base_s=1.0, per_prefill_token_s=0.0, per_decode_s=0.0, per_context_token_s=0.0)
    outcome = simulate(rows(0.0, 5.5), step_time=step_time, exact_steps=exact)
    first, second = sorted(outcome.records, key=lambda record: record.request_id)
    assert first.ttft_s == pytest.approx(1.25), "an idle engine plans at once"
    # It comes at 5.75; the step until 6.25 runs, that until 7.25 is planned, and its own ends at 8.25.
    assert second.first_token_s == pytest.approx(8.25)
    assert second.ttft_s == pytest.approx(2.75)
    assert outcome.metrics["littles_law_error"] < 1e-9, "requests in the front end are in the system"


@pytest.mark.mend  # The region ignored the KV memory: a load of a tenth of the batches was light, though requests wait for blocks.
def test_a_full_memory_is_near_saturation() -> None:
    trace = Trace(tuple([trace_row(f"r{number}", number / 2, 512, 500, 500) for number in range(300)]))
    regions = []
    for num_blocks in (DEFAULT_KV_BLOCKS, 800, 400):
        limits = SchedulerConfig(num_kv_blocks=num_blocks)
        metrics = simulate(trace, scheduler=limits).metrics
        kv_usage, preempted = memory_pressure(metrics)
        regions.append(region_of(0.1, kv_usage, preempted))
        assert region_of(0.9, kv_usage, preempted) == "near_saturation"
        assert region_of(1.5, kv_usage, preempted) == "overload"
    assert metrics["mean_requests_waiting"] > 1
    assert regions == ["light", "near_saturation", "near_saturation"]
    assert region_of(0.1, 0.3, 0.02) == "near_saturation"


def test_the_error_bands_are_there_for_every_region() -> None:
    assert [region_of(load) for load in (0.1, 0.9, 3.0)] == list(REGIONS)
    for region in REGIONS:
        band = error_band(region)
        assert 0 < band.e2e_mean < 1
        assert band.num_runs > 0
        assert band.basis in ("measured", "propagated")
    with pytest.raises(InputError, match="region"):
        error_band("calm")
    with pytest.raises(InputError, match="load"):
        region_of(0.0)


@pytest.mark.parametrize("replicas", [1, 3])
def test_planning_ahead_gives_the_same_times_step_by_step(replicas: int) -> None:
    trace = random_trace(150, seed=replicas, rate_rps=30.0 * replicas, cap=60, most_prompt=3000)
    outcomes = [
        simulate(
            trace,
            step_time=RooflineStepTime(gpu="h100-80gb"),
            cluster=ClusterConfig(num_replicas=replicas),
            exact_steps=exact,
        )
        for exact in (False, True)
    ]
    assert len(outcomes[0].records) == 150
    assert outcomes[0].records == outcomes[1].records


def test_devices_have_the_name_of_the_table_or_its_first_part() -> None:
    assert RooflineStepTime(gpu="H100").device is RooflineStepTime(gpu="h100-80GB").device
    with pytest.raises(InputError, match="gpu: got 'a100'; allowed: a100-40gb, a100-80gb"):
        RooflineStepTime(gpu="a100")
