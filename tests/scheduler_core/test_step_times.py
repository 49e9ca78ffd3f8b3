"""Models of step times: by hand, and step by step."""

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_core.engine.plan import PrefillChunk
from scheduler_core.errors import InputError
from scheduler_core.scheduler import SchedulerConfig
from scheduler_core.simulator.step_time import make_step_time, operator_table
from scheduler_core.simulator.step_time.base import LinearStepTime, StepTime, StepWork
from scheduler_core.simulator.step_time.quadratic import PRESETS, QuadraticStepTime
from scheduler_core.simulator.step_time.roofline import GPUS, MODELS, RooflineStepTime
from scheduler_core.simulator.step_time.staircase import StaircaseStepTime
from tests.scheduler_core.helpers import PLAIN

TABLE = operator_table.OperatorTable(
    num_layers=2, tokens_s=1e-4 + 1e-6 * np.arange(129),
    decode_s=1e-6 * np.arange(65)[:, None] * (1 + np.sqrt(np.arange(129)))[None, :],
    prefill_s=1e-7 * (1 + np.arange(33)[:, None] * 64) * np.arange(1025)[None, :], batching_overhead=0.1,
)  # fmt: skip
ALL: list[StepTime] = [
    LinearStepTime(), QuadraticStepTime(), StaircaseStepTime(),
    StaircaseStepTime(t_row=16, t_col=8, d=64), RooflineStepTime(),
    RooflineStepTime(model="llama-2-70b", gpu="h100-80gb", tensor_parallel=4), TABLE,
]  # fmt: skip
TRUE = LinearStepTime(base_s=0.01, per_prefill_token_s=5e-5, per_decode_s=4e-4, per_context_token_s=2e-6)
LIMITS = SchedulerConfig(max_num_seqs=32, max_num_batched_tokens=2048, num_kv_blocks=4096)


def chunk(start: int, num: int, is_last: bool = False) -> PrefillChunk:
    return PrefillChunk("p", start, num, is_last)


@pytest.mark.parametrize("model", ALL, ids=lambda model: type(model).__name__)
@given(
    st.lists(st.integers(1, 3000), min_size=1, max_size=12), st.floats(0.0, 3.0), st.integers(1, 300),
    st.integers(0, 40),
)  # fmt: skip
@settings(max_examples=15, deadline=None)
def test_a_run_of_steps(model: StepTime, contexts: list[int], wait_s: float, limit: int, done: int) -> None:
    run = model.run(contexts, 7.0)
    steps_s = [model.step_s(StepWork((), [one + step for one in contexts])) for step in range(200)]
    ends_s = 7.0 + np.cumsum([0.0, *steps_s])
    for steps in (1, 2, 3, 63, 64, 65, 200):
        assert run.end_s(steps) == pytest.approx(ends_s[steps], rel=1e-12)
    run.num_done = done
    found = run.steps_to_reach(7.0 + wait_s, limit)
    assert 1 <= found <= limit
    assert found == 1 or run.end_s(found - 1) < 7.0 + wait_s
    assert found == limit or run.end_s(found) >= 7.0 + wait_s
    again = model.run(contexts, 7.0)
    again.num_done = done + 5
    assert again.end_s(7) == run.end_s(12), "the k-th end depends on k alone"


@pytest.mark.parametrize("model", ALL, ids=lambda model: type(model).__name__)
def test_more_work_never_takes_less(model: StepTime) -> None:
    works = [
        StepWork((), [100]), StepWork((), [100, 100]), StepWork((chunk(0, 32),), [100, 100]),
        StepWork((chunk(0, 120),), [100, 100]), StepWork((chunk(640, 120),), [100, 100]),
    ]  # fmt: skip
    times = [model.step_s(work) for work in works]
    assert all(later >= earlier > 0 for earlier, later in pairwise(times))
    assert times[-1] > times[0]


def test_linear_times_by_hand() -> None:
    model = replace(PLAIN, per_swapped_token_s=5.0)
    work = StepWork((chunk(20, 10), chunk(0, 3)), [100, 50], num_swapped_tokens=2)
    assert model.step_s(work) == pytest.approx(1 + 1.3 + 0.02 + 0.17 + 10)


def test_quadratic_times_by_hand() -> None:
    model = QuadraticStepTime(alpha_1=0.001, alpha_2=0.1, gamma_1=0.01, gamma_2=1.0, beta=2.0)
    chunked = [model.step_s(StepWork((chunk(start, 10),))) for start in (0, 10, 20)]
    assert sum(chunked) == pytest.approx(0.001 * 30**2 + 0.1 * 30), "chunks add up to the prompt"
    assert model.step_s(StepWork((chunk(0, 10),), [40, 300])) == pytest.approx(4.0), "the longest member"
    assert model.step_s(StepWork((), [300], 3)) == pytest.approx(4.0 + 6.0)
    # m tokens after a prompt of n: gamma_1 (m^2 / 2 + n m + m / 2) + gamma_2 m, where the paper counts the token itself.
    n, m = 50, 20
    assert model.run([n + 1], 0.0).end_s(m) == pytest.approx(0.01 * (m * m / 2 + n * m + m / 2) + m)


def test_the_staircase_rises_where_a_tile_begins_and_by_hand_only_there() -> None:
    tiles = dict.fromkeys(("linear_tile_s", "decode_tile_s", "prefill_tile_s"), 0.0)
    nothing = StaircaseStepTime(base_s=0.0, per_token_s=1e-9, **tiles)
    model = replace(nothing, linear_tile_s=1.0, per_token_s=0.0)
    times = [model.step_s(StepWork((chunk(0, num),))) for num in (1, 256, 257, 512, 513)]
    assert times == [1.0, 1.0, 2.0, 2.0, 3.0]
    attention = replace(nothing, decode_tile_s=1.0, prefill_tile_s=1.0)
    # A decode at position 129: 2 rows of 128, 1 column of 256: 128/256 * 2 + 128/128 * 1.
    assert attention.step_s(StepWork((), [128])) == pytest.approx(2.0)
    assert attention.step_s(StepWork((), [127])) == pytest.approx(1.5)
    # 300 tokens after 100: 2 columns; last position 400: 4 rows, 13 of 32: 2 (128/32 * 4 + 128/128 * 13).
    assert attention.step_s(StepWork((chunk(100, 300),))) == pytest.approx(58.0, rel=1e-6)


def test_staircase_defaults_are_near_slais_timings() -> None:
    model = StaircaseStepTime(prefill_tile_s=0.0)
    timings = {64: 22.7, 128: 24.1, 256: 28.8, 384: 37.8, 512: 46.5, 768: 57.1, 1024: 74.7}
    for tokens, milliseconds in timings.items():
        assert model.step_s(StepWork((chunk(0, tokens),))) == pytest.approx(milliseconds / 1e3, rel=0.05)


def test_sizes_of_models_are_the_published_ones() -> None:
    published = {
        "llama-2-7b": 6.74, "llama-2-13b": 13.0, "llama-2-70b": 69.0, "llama-3-8b": 8.03, "llama-3-70b": 70.6,
        "codellama-34b": 33.7, "mistral-7b": 7.24, "qwen1.5-4b": 3.95, "qwen2.5-7b": 7.62, "qwen2.5-72b": 72.7,
    }  # fmt: skip
    for name, billions in published.items():
        assert MODELS[name].num_parameters / 1e9 == pytest.approx(billions, rel=0.005), name
    assert MODELS["mistral-7b"].kv_bytes_per_token == 131_072
    assert all(one.source for one in (*MODELS.values(), *GPUS.values()))


def test_a_roofline_is_near_a_profile() -> None:
    """Layers of Llama-3-8B on an A100 in Vidur's profile, in ms: decodes after 500 tokens, prompts in one chunk."""
    model = RooflineStepTime()
    for num, milliseconds in {1: 10.72, 16: 11.94, 32: 12.65, 64: 14.91, 128: 19.37}.items():
        assert model.step_s(StepWork((), [500] * num)) == pytest.approx(milliseconds / 1e3, rel=0.2)
    for num, milliseconds in {256: 21.07, 512: 37.32, 1024: 81.94, 2048: 165.73, 4096: 347.23}.items():
        assert model.step_s(StepWork((chunk(0, num),))) == pytest.approx(milliseconds / 1e3, rel=0.2)


def test_a_roofline_reads_weights_at_least_once_and_knows_its_room() -> None:
    model = RooflineStepTime(layer_s=0.0, memory_efficiency=1.0)
    size, gpu = MODELS["llama-3-8b"], GPUS["a100-80gb"]
    floor_s = 2 * (size.layer_parameters + size.vocabulary * size.hidden) / gpu.bytes_per_s
    assert model.step_s(StepWork((), [0])) == pytest.approx(floor_s, rel=1e-3)
    room = 0.9 * gpu.memory_bytes - 2 * size.num_parameters
    assert model.num_kv_blocks() == pytest.approx(room // (131_072 * 16), rel=0.03), "beside activations"
    with pytest.raises(InputError, match="tensor_parallel"):
        RooflineStepTime(model="llama-2-70b").num_kv_blocks()


def test_table_times_by_hand() -> None:
    # 40 tokens of chunks, 3 decodes of mean context (99 + 200 + 130) / 3 = 143, and the new token: 3 columns of 64.
    work = StepWork((chunk(65, 30), chunk(0, 10)), [99, 200, 130])
    prefill = 1e-7 * (1 + 2 * 64) * round(math.sqrt(30**2 + 10**2)) * 1.1
    decode = 1e-6 * 3 * (1 + math.sqrt(3)) * 1.1
    assert TABLE.step_s(work) == pytest.approx(2 * (1e-4 + 43e-6 + prefill + decode))
    with pytest.raises(InputError, match="num_swapped_tokens"):
        TABLE.step_s(StepWork((), [5], 1))
    with pytest.raises(InputError, match="tokens"):
        TABLE.step_s(StepWork((chunk(0, 1024),), [5]))


def write_profile(folder: Path, suffix: str) -> None:
    tokens = list(range(1, 33))
    per_token = {"num_tokens": tokens, "prediction": [0.001 * one for one in tokens]}
    nums, sizes = [1, 1, 1, 2, 2, 2], [0, 64, 128, 0, 64, 128]
    times = [num + size / 1000 for num, size in zip(nums, sizes, strict=True)]
    tables: dict[str, dict[str, list[Any]]] = {
        **dict.fromkeys((*operator_table.TOKEN_OPERATORS, "attn_kv_cache_save", "all_reduce"), per_token),
        "attn_decode": {"batch_size": nums, "kv_cache_size": sizes, "prediction": times},
        "attn_prefill": {
            "kv_cache_size": [0, 64], "prefill_chunk_size_squared": [64, 64], "prediction": [5.0, 6.0],
        },
    }  # fmt: skip
    for name, columns in tables.items():
        path = folder / f"{name}{suffix}"
        if suffix == ".parquet":
            pq.write_table(pa.table(columns), path)
        else:
            with pa.output_stream(path) as stream:  # compressed by the name's ending
                csv.write_csv(pa.table(columns), stream)


@pytest.mark.parametrize("suffix", [".csv", ".csv.gz", ".parquet"])
def test_a_profile_is_read_and_rounded(tmp_path: Path, suffix: str) -> None:
    write_profile(tmp_path, suffix)
    model = operator_table.read_operator_table(tmp_path, num_layers=10, tensor_parallel=2)
    # 9 tokens are 16 for nine operators and two collectives (0.02 ms more each), 9 for the cache: ms per layer.
    tokens_ms = 9 * 0.016 + 0.009 + 2 * (0.016 + 0.02)
    work = StepWork((chunk(1, 8),), [70])
    assert model.step_s(work) == pytest.approx(10 * 1e-3 * (tokens_ms + 6.0 + 1.128))
    with pytest.raises(InputError, match="profiled"):
        model.step_s(StepWork((chunk(0, 7),)))  # no row of 49
    (tmp_path / f"attn_rope{suffix}").write_text("num_tokens,other\n1,2\n")
    with pytest.raises(InputError, match="profile"):
        operator_table.read_operator_table(tmp_path, num_layers=10)


@pytest.mark.parametrize(
    ("name", "parameters", "field"),
    [
        ("cubic", {}, "step time"), ("linear", {"base_s": 0.0, "per_decode_s": 0.0}, "base_s"),
        ("quadratic", {"preset": "b200"}, "preset"),
        ("quadratic", {"preset": "a100-4b", "beta": 1.0}, "preset"), ("roofline", {"gpu": "abacus"}, "gpu"),
        ("roofline", {"memory_efficiency": 1.5}, "memory_efficiency"),
        ("table", {"directory": "nowhere", "num_layers": 2}, "directory of a profile"),
        ("table", {"directory": "."}, "step time table"),
    ],
)  # fmt: skip
def test_what_makes_no_model_is_told(name: str, parameters: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError, match=field):
        make_step_time(name, parameters)


def test_models_are_made_by_name() -> None:
    assert make_step_time("quadratic", {"preset": "a5000-4b"}) == PRESETS["a5000-4b"]
    assert (PRESETS["a100-4b"].alpha_1, PRESETS["a5000-7b"].gamma_2) == (1.46584975e-09, 2.72656264e-02)
    assert make_step_time("quadratic", {"beta": 2.0}) == QuadraticStepTime(beta=2.0)
