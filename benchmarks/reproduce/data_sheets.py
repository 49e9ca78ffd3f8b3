"""Step times and memory from data sheets alone, as in all studies here: nothing is fitted to an engine."""

from scheduler_core.simulator.step_time.deployment import GPUS
from scheduler_core.simulator.step_time.roofline import RooflineStepTime


def data_sheets(model: str, gpu: str, devices: int = 1) -> RooflineStepTime:
    """60 % of the operations, 75 % of the memory's bandwidth, 1 ms per step, and 300 GB/s after 20 us per message between
    devices; no time outside the engine."""
    return RooflineStepTime(
        model=model,
        gpu=gpu,
        tensor_parallel=devices,
        compute_efficiency=0.6,
        memory_efficiency=0.75,
        overhead_s=1e-3,
        layer_s=0.0,
        frontend_s=0.0,
        async_scheduling=False,
        link_bytes_per_s=450e9,
        link_efficiency=1e-6,
    )


def num_kv_blocks(step_time: RooflineStepTime) -> int:
    """Blocks of 16 tokens in 90 % of the memory in the GPU's name, beside the weights."""
    assert step_time.gpu in GPUS
    memory = 1e9 * int(step_time.gpu.rpartition("-")[2].removesuffix("gb"))
    size = step_time.size
    free = 0.9 * memory * step_time.tensor_parallel - 2 * size.num_parameters
    return int(free // (16 * size.kv_bytes_per_token))
