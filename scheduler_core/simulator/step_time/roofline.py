"""Step times from data sheets: the maximum of compute time and memory time (roofline model)."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from itertools import pairwise

from scheduler_core.ranges import FINITE, POSITIVE, check_ranges
from scheduler_core.shell.json_text import parse_json
from scheduler_core.simulator.step_time.base import (
    DecodeRun,
    EngineDelays,
    PolynomialRun,
    StepGroup,
    StepGroups,
    StepWork,
    total_of,
)
from scheduler_core.simulator.step_time.deployment import (
    GPUS,
    KV_BYTES,
    NODE_DEVICES,
    NODE_LINK_BYTES_PER_S,
    Deployment,
)
from scheduler_core.simulator.step_time.model_size import MODELS, WEIGHT_BITS

__all__ = ["GPUS", "MODELS", "RooflineStepTime"]

#: Large messages between devices, as of the collectives of long prompts: seconds beside the transfer, and the achieved fraction
#: of the bandwidth.
MESSAGE_S, MESSAGE_EFFICIENCY = 2e-5, 2 / 3
#: Bandwidth to host memory: PCIe 4.0 x16.
HOST_BYTES_PER_S = 25e9
#: Achieved fraction of the operations by architecture, where it is known to differ from that of H100: Vidur's profile of A100.
COMPUTE_EFFICIENCIES = {"ampere": 0.6}
#: Constants that `python -m benchmarks.h100 --fit` writes.
FITTED: dict[str, float] = parse_json(files(__package__).joinpath("roofline.json").read_text())


@dataclass(frozen=True, kw_only=True)
class RooflineStepTime(Deployment):
    """t = overhead_s + layer_s L + max(F_w / f, B_w / b) + attention + collectives + copies; attention is the sum of
    max(F_a / f, B_a / b) over the chunks, plus one such term for all decodes.

    Linear layers: F_w = 2 W_1 n, plus 2 V per sampled token; B_w = the bytes of W and V, read once per step, where of E experts
    in a layer, of which a token uses k, those of n tokens are read: E (1 - (1 - k / E)^n), if tokens choose independently.
    Attention of c tokens after k: F_a = 4 H c (k + (c + 1) / 2), B_a = bytes of the keys and values of k + c tokens, in all
    layers; in one with a window only within it.
    Collectives: each layer has two all-reduces of n hidden vectors, a ring's 2 (d - 1) / d of their bytes on each of d links.
    Pipeline of p stages: the requests form p batches (fewer if there are fewer requests), one in each stage, so that a step
    with all of them takes as long as one of these batches in all stages.

    | symbol | meaning | unit |
    | --- | --- | --- |
    | W, W_1, V | weights of the layers; those that one token uses; of the output embedding | - |
    | L, H, n | layers; query heads times their size; tokens in the step | - |
    | f, b | efficiency times operations and bytes per second of all devices of the group | 1/s |

    Source: Williams et al. 2009 (roofline); the operations are those of any decoder-only transformer. The constants in
    roofline.json are fitted to vLLM on H100, with errors in docs/accuracy.md. On an A100 step times are within 20 % of Vidur's
    profile of Llama-3-8B for 1 to 128 decodes and 256 to 4,096 prompt tokens (tests). For an engine at hand use
    `simulate calibrate`.
    """

    compute_efficiency: float | None = None
    """Achieved fraction of the peak operations, in (0, 1]. Unset: 0.6 for Ampere devices (Vidur's profile), else as fitted on
    H100, which sustains less of its peak."""
    memory_efficiency: float = FITTED["memory_efficiency"]
    """Achieved fraction of the peak bandwidth of the memory, in (0, 1]."""
    link_efficiency: float = FITTED["link_efficiency"]
    """Achieved fraction of the bandwidth between devices with the small messages of decode steps, in (0, 1]."""
    layer_s: float = FITTED["layer_s"]
    """Seconds per layer and step beside the roofline: launches of kernels and gaps between them."""
    overhead_s: float = 0.0
    """Additional seconds per step."""
    frontend_s: float = FITTED["frontend_s"]
    """Seconds of each request outside the engine: HTTP, tokenization, first token to the client."""
    async_scheduling: bool = True
    """The engine plans a step while the one before it runs, so that a new request waits for a whole step more (vLLM's batch
    queue, on by default since 0.14)."""

    def __post_init__(self) -> None:
        Deployment.__post_init__(self)
        check_ranges(self, overhead_s=(0, FINITE), layer_s=(0, FINITE), frontend_s=(0, FINITE))
        check_ranges(self, compute_efficiency=(POSITIVE, 1), memory_efficiency=(POSITIVE, 1))
        check_ranges(self, link_efficiency=(POSITIVE, 1))

    @property
    def delays(self) -> EngineDelays:
        """What requests wait for beside the steps that they are in."""
        return EngineDelays(self.frontend_s, self.async_scheduling)

    @cached_property
    def _bytes_per_s(self) -> float:
        """Achieved bandwidth of the memory of one device."""
        return self.device.bytes_per_s * self.memory_efficiency

    @property
    def _compute_efficiency(self) -> float:
        if self.compute_efficiency is not None:
            return self.compute_efficiency
        return COMPUTE_EFFICIENCIES.get(self.device.architecture, FITTED["compute_efficiency"])

    @cached_property
    def _flops(self) -> float:
        """Achieved 16-bit operations of the devices that share a layer."""
        return self.device.flops * self._compute_efficiency * self.tensor_parallel

    @cached_property
    def _fixed_s(self) -> float:
        """Time of a step without work."""
        return self.overhead_s + self.layer_s * self.size.num_layers

    @cached_property
    def _output_weights(self) -> int:
        return self.size.vocabulary * self.size.hidden

    @cached_property
    def _token_s(self) -> float:
        """Compute time of one token in the linear layers."""
        dense, expert = (
            self.device.fp8_flops if name == "fp8" else self.device.flops for name in self.weight_types
        )
        routed = self.size.active_parameters - self.size.dense_parameters
        seconds = self.size.dense_parameters / dense + routed / expert
        return 2.0 * seconds / (self._compute_efficiency * self.tensor_parallel)

    @cached_property
    def _dense_bytes(self) -> float:
        """Bytes of the weights of the layers on a device that each step reads."""
        return self.size.dense_parameters * WEIGHT_BITS[self.weight_types[0]] / 8 / self.tensor_parallel

    @cached_property
    def _experts(self) -> tuple[tuple[int, float, float], ...]:
        """For each kind of layer with experts: their number, the probability that a token uses one of them, and the bytes of
        one expert in all layers of the kind."""
        bits = WEIGHT_BITS[self.weight_types[1]]
        return tuple(
            (layer.num_experts, layer.experts_per_token / layer.num_experts, num * layer.expert * bits / 8)
            for layer, num in self.size.layers
            if layer.num_experts
        )

    @cached_property
    def _attention(self) -> tuple[tuple[int | None, float, float, float], ...]:
        """For each window (None: without): seconds for a token in the context of a decode; for reading that of a chunk; for
        computing one token's attention to another in a chunk."""
        kinds: dict[int | None, tuple[float, float, float]] = {}
        for layer, num in self.size.layers:
            held = num * layer.kv_values * KV_BYTES[self.kv_cache] / min(self.tensor_parallel, layer.kv_heads)
            reading = held / self._bytes_per_s
            decode = max(num * layer.decode_flops / self._flops, reading)
            before = kinds.get(layer.window, (0.0, 0.0, 0.0))
            now = (decode, reading, num * layer.prefill_flops / self._flops)
            kinds[layer.window] = (before[0] + now[0], before[1] + now[1], before[2] + now[2])
        return tuple((window, *seconds) for window, seconds in kinds.items())

    def step_s(self, work: StepWork) -> float:
        num = len(work.contexts)
        sampled = num + sum([chunk.is_last for chunk in work.prefills])
        batches = self._batches(num + len(work.prefills))
        seconds = self._decodes(work.contexts) if num else 0.0
        for chunk in work.prefills:
            seconds += self._chunk(chunk.start_token, chunk.num_tokens)
        seconds = seconds / batches + self._linear(work.num_tokens / batches, sampled / batches)
        return seconds + work.num_swapped_tokens * self.size.kv_bytes_per_token / HOST_BYTES_PER_S

    def run(self, contexts: Sequence[int], start_s: float) -> DecodeRun:
        """The attention of decodes is linear in the sum of their contexts, which grows by one per request and step, up to the
        windows of layers."""
        num = len(contexts)
        batches = self._batches(num)
        first_s = self._decodes(contexts) / batches + self._linear(num / batches, num / batches)
        growth_s, windows = 0.0, []
        for window, decode_s, _, _ in self._attention:
            if window is None:
                growth_s += num * decode_s / batches
            else:
                steps = sorted([window - context - 1 for context in contexts if context + 1 < window])
                windows.append((decode_s / batches, steps))
        if any(steps for _, steps in windows):
            return WindowedRun(start_s, first_s, growth_s, windows)
        return PolynomialRun(start_s, first_s, growth_s)

    def least_s(self, num_steps: float, prefill_tokens: float, decodes: float) -> float:
        """Without the output embedding for the first tokens of requests, and without reading it; each step reads the experts
        of one token."""
        num_tokens = prefill_tokens + decodes
        computing = self._token_s * num_tokens + 2.0 * self._output_weights * decodes / self._flops
        experts = sum(num * used * size for num, used, size in self._experts) / self.tensor_parallel
        reading = (self._dense_bytes + experts) * num_steps / self._bytes_per_s
        efficiency = max(self.link_efficiency, MESSAGE_EFFICIENCY)
        seconds = computing + self._sent_bytes(num_tokens) / (efficiency * self._link_bytes_per_s)
        sent = seconds - computing
        # A pipeline of p stages processes at most p batches at a time.
        parts = self.pipeline_parallel
        return self._fixed_s * num_steps + max(computing / parts, reading) + sent / parts

    def least_attention_s(self, prompt_tokens: int, output_tokens: int) -> float:
        """The prompt in one chunk, and all decodes."""
        decodes = output_tokens - 1
        seconds = self._chunk(0, prompt_tokens)
        for window, decode_s, _, _ in self._attention:
            seconds += decode_s * _sum_of_contexts(prompt_tokens, decodes, window)
        return seconds / self.pipeline_parallel

    def _batches(self, num_requests: int) -> int:
        """Number of batches that are in the pipeline at the same time."""
        return max(1, min(self.pipeline_parallel, num_requests))

    def _linear(self, num_tokens: float, num_sampled: float) -> float:
        """A step without attention."""
        output = self._output_weights
        computing = self._token_s * num_tokens + 2.0 * output * num_sampled / self._flops
        reading = self._dense_bytes + (2.0 * output / self.tensor_parallel if num_sampled else 0.0)
        for num_experts, used, size in self._experts:
            reading += size * self._touched(num_experts, 1.0 - (1.0 - used) ** num_tokens)
        seconds = self._fixed_s + max(computing, reading / self._bytes_per_s)
        return seconds + self._communication(num_tokens)

    def _touched(self, num_experts: int, probability: float) -> float:
        """Experts whose weights a device reads, if each is used with this probability; with whole experts on each device,
        about the expected maximum over the devices (of normal variables)."""
        devices = self.tensor_parallel
        mean = num_experts * probability / devices
        if not self.expert_parallel or devices == 1:
            return mean
        deviation = math.sqrt(mean * (1.0 - probability)) * math.sqrt(2.0 * math.log(devices))
        return min(num_experts / devices, mean + deviation)

    def _sent_bytes(self, num_tokens: float) -> float:
        """Bytes that a device sends in the all-reduces of all layers."""
        devices = self.tensor_parallel
        return 2 * self.size.num_layers * 2 * self.size.hidden * num_tokens * 2 * (devices - 1) / devices

    def _communication(self, num_tokens: float) -> float:
        """Time of all-reduces, each in the faster of two ways, and of copies between the stages of a pipeline."""
        seconds = 0.0
        if self.tensor_parallel > 1:
            sent = self._sent_bytes(num_tokens) / self._link_bytes_per_s
            latency_s = 2 * self.size.num_layers * MESSAGE_S
            seconds = min(sent / self.link_efficiency, latency_s + sent / MESSAGE_EFFICIENCY)
        if self.pipeline_parallel > 1:
            link = self._link_bytes_per_s if self.num_devices <= NODE_DEVICES else NODE_LINK_BYTES_PER_S
            hidden_s = 2 * self.size.hidden * num_tokens / (link * MESSAGE_EFFICIENCY)
            seconds += (self.pipeline_parallel - 1) * (MESSAGE_S + hidden_s)
        return seconds

    def _decodes(self, contexts: Sequence[int]) -> float:
        """Attention time of decodes, each of which also reads the keys and values of its new token."""
        seconds = 0.0
        for window, decode_s, _, _ in self._attention:
            if window is None:
                tokens = total_of(contexts) + len(contexts)
            else:
                tokens = sum([min(context + 1, window) for context in contexts])
            seconds += decode_s * tokens
        return seconds

    def _chunk(self, start: int, num: int) -> float:
        seconds = 0.0
        for window, _, reading_s, pair_s in self._attention:
            tokens = start + num if window is None else min(start + num, window + num)
            seconds += max(pair_s * _sum_of_contexts(start, num, window), reading_s * tokens)
        return seconds


def _sum_of_contexts(start: int, num: int, window: int | None) -> float:
    """Sum of min(start + j, window) over j from 1 to `num`."""
    if window is None or start + num <= window:
        return num * (start + (num + 1) / 2)
    full = min(max(window - start, 0), num)
    return full * (start + (full + 1) / 2) + (num - full) * window


class WindowedRun(PolynomialRun):
    """Run in which the contexts of some layers stop to grow at a window. `windows`: for each window seconds per token, and
    the sorted numbers of steps > 0 for which the contexts of requests that have not reached it grow."""

    __slots__ = ("_windows",)

    def __init__(
        self, start_s: float, first_s: float, growth_s: float, windows: Sequence[tuple[float, list[int]]]
    ) -> None:
        super().__init__(start_s, first_s, growth_s)
        self._windows = windows

    def elapsed_s(self, num_steps: int) -> float:
        seconds = PolynomialRun.elapsed_s(self, num_steps)
        last = num_steps - 1
        for token_s, steps in self._windows:
            # Each context grows by one for `many` steps, then stays.
            tokens = sum([(many := min(last, one)) * (many + 1) // 2 + (last - many) * many for one in steps])
            seconds += token_s * tokens
        return seconds

    def steps(self, first: int, num_steps: int) -> StepGroups:
        bounds = {one for _, steps in self._windows for one in steps if first < one < first + num_steps}
        return [
            StepGroup(self._step_s(start), self._step_s(start + 1) - self._step_s(start), end - start)
            for start, end in pairwise(sorted({first, first + num_steps} | bounds))
        ]

    def _step_s(self, step: int) -> float:
        seconds = self._first_s + self._growth_s * step
        return seconds + sum(
            token_s * sum([min(step, one) for one in steps]) for token_s, steps in self._windows
        )

    def _guess(self, time_s: float, limit: int) -> int:
        return 1 + bisect_left(range(1, limit), time_s, key=self.end_s)
