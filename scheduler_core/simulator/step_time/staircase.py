"""Step times that increase with the number of matrix tiles: RAD's model of a GPU."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

from scheduler_core.errors import InputError
from scheduler_core.ranges import FINITE, check_ranges
from scheduler_core.simulator.step_time.base import DecodeRun, PiecewiseRun, StepWork


@dataclass(frozen=True, kw_only=True)
class StaircaseStepTime:
    """t = base_s + linear_tile_s ceil(tau / t_col) + per_token_s tau + sum of attention over decodes and chunks.

    attention of a decode at position i:  decode_tile_s (d / t_col ceil(i / t_row) + d / t_row ceil(i / t_col))
    attention of a chunk of c from i on:  prefill_tile_s ceil(c / t_col)
                                          (d / t_red ceil((i + c - 1) / t_row) + d / t_row ceil((i + c - 1) / t_red))

    | symbol | meaning | unit |
    | --- | --- | --- |
    | tau | tokens in the step: decodes and chunk tokens | tokens |
    | i | position of a token, from 1 | tokens |
    | t_row, t_col, t_red | sides of a matrix tile; 128 x 256 and 32 for an A100 | - |
    | d | size of a head | - |
    | linear_tile_s | 1 / mu_lin: one column of tiles of all linear layers | s |
    | per_token_s | 1 / mu_nlin: operations per token | s |
    | decode_tile_s | N / mu_v: a tile of a decode's attention, all layers and heads | s |
    | prefill_tile_s | N / (s mu): a tile of a chunk's attention, all layers and heads | s |

    Source: the paper of RAD and SLAI, Eq. 7, which has neither base_s nor copies. The defaults are for Mistral-7B on an
    RTX 6000 Ada: base_s, linear_tile_s and per_token_s are a non-negative least-squares fit (errors up to 5 %) to the chunk
    timings published with SLAI (64 to 1024 tokens: 22.7 to 74.7 ms; agrimUT/SLAI @ 5098a7a); decode_tile_s is
    the time to read 128 KiB of keys and values per token at 960 GB/s; prefill_tile_s is the time of the
    attention operations at 60 % of 364 TFLOPS.
    """

    base_s: float = 0.01483
    linear_tile_s: float = 4.26e-3
    per_token_s: float = 4.09e-5
    decode_tile_s: float = 1.75e-5
    prefill_tile_s: float = 9.8e-6
    t_row: int = 128
    t_col: int = 256
    t_red: int = 32
    d: int = 128
    per_swapped_token_s: float = 5.24e-6
    """Seconds per token copied between the KV cache and host memory."""

    def __post_init__(self) -> None:
        for item in fields(self):
            check_ranges(self, **{item.name: (0, FINITE) if item.name.endswith("_s") else (1, 2**31)})
        if self.base_s + self.linear_tile_s + self.per_token_s <= 0:
            raise InputError("base_s, linear_tile_s, per_token_s", 0.0, "one of them > 0")

    def step_s(self, work: StepWork) -> float:
        chunk_tiles = sum([self.chunk_tiles(one.start_token, one.num_tokens) for one in work.prefills])
        return (
            self._linear(work.num_tokens)
            + self.prefill_tile_s * chunk_tiles
            + self.decode_tile_s * sum([self.decode_tiles(context) for context in work.contexts])
            + self.per_swapped_token_s * work.num_swapped_tokens
        )

    def run(self, contexts: Sequence[int], start_s: float) -> DecodeRun:
        """The duration of steps is constant until a context reaches another tile."""
        linear_s = self._linear(len(contexts))
        contexts = list(contexts)

        def segment(step: int) -> tuple[float, int]:
            now = [context + step for context in contexts]
            each_s = linear_s + self.decode_tile_s * sum([self.decode_tiles(context) for context in now])
            # The token at position i = context + 1 is in a new tile when i - 1 is a multiple of the side.
            nearest = min(side - context % side for context in now for side in (self.t_row, self.t_col))
            return each_s, step + nearest

        return PiecewiseRun(start_s, segment)

    def least_s(self, num_steps: float, prefill_tokens: float, decodes: float) -> float:
        """All tiles are full, or each step has one tile."""
        tokens = prefill_tokens + decodes
        tiles = max(tokens / self.t_col, num_steps)
        return self.base_s * num_steps + self.linear_tile_s * tiles + self.per_token_s * tokens

    def least_attention_s(self, prompt_tokens: int, output_tokens: int) -> float:
        """The prompt in chunks of t_col after the rest: each column of tiles ends as early as it can."""
        ends = range(prompt_tokens, 0, -self.t_col)
        chunks = [self.chunk_tiles(end - min(end, self.t_col), min(end, self.t_col)) for end in ends]
        last, decodes = prompt_tokens + output_tokens - 1, 0.0
        context = prompt_tokens
        while context < last:  # constant until the next tile
            end = min(last, *(context + side - context % side for side in (self.t_row, self.t_col)))
            decodes += (end - context) * self.decode_tiles(context)
            context = end
        return self.prefill_tile_s * sum(chunks) + self.decode_tile_s * decodes

    def _linear(self, num_tokens: int) -> float:
        return self.base_s + self.linear_tile_s * -(-num_tokens // self.t_col) + self.per_token_s * num_tokens

    def decode_tiles(self, context: int) -> float:
        """Number of tiles of a decode's attention after `context` tokens, per layer and head."""
        position = context + 1
        rows, columns = -(-position // self.t_row), -(-position // self.t_col)
        return self.d / self.t_col * rows + self.d / self.t_row * columns

    def chunk_tiles(self, start_token: int, num_tokens: int) -> float:
        """Number of tiles of a chunk's attention after `start_token` tokens, per layer and head."""
        last = start_token + num_tokens
        rows, reductions = -(-last // self.t_row), -(-last // self.t_red)
        return -(-num_tokens // self.t_col) * (self.d / self.t_red * rows + self.d / self.t_row * reductions)
