"""Engine seconds per prompt token and per output token, measured while the engine works."""

from __future__ import annotations

from scheduler_core.errors import InputError
from scheduler_core.request import RequestState


class WorkRate:
    """A step's duration is shared out equally among the tokens processed in it; sums fade with a half-life in steps.

    So the work of all requests adds up to the time the engine was busy, which is what work means in an M/G/1 queue: of a
    step with 32 decodes each token costs a 32nd. Whoever uses it must see every step by itself.

    Args:
        prefill_token_s: Seconds per prompt token before anything is measured.
        decode_token_s: Seconds per output token before anything is measured.
        half_life_steps: After this many steps a measurement counts half.

    Attributes:
        prefill_token_s: Seconds per prompt token.
        decode_token_s: Seconds per output token.
        step_s: Mean duration of a step in seconds: what a running request waits for its next token.

    Raises:
        InputError: A time is not positive.
    """

    __slots__ = (
        "_decode_s",
        "_decode_tokens",
        "_fade",
        "_now_decode",
        "_now_prefill",
        "_prefill_s",
        "_prefill_tokens",
        "_steps",
        "_steps_s",
        "decode_token_s",
        "prefill_token_s",
        "step_s",
    )

    def __init__(
        self, prefill_token_s: float = 5e-5, decode_token_s: float = 1e-3, half_life_steps: float = 1000.0
    ) -> None:
        if not (prefill_token_s > 0 and decode_token_s > 0):
            raise InputError(
                "prefill_token_s, decode_token_s", (prefill_token_s, decode_token_s), "seconds > 0"
            )
        self.prefill_token_s = prefill_token_s
        self.decode_token_s = decode_token_s
        self.step_s = decode_token_s
        self._fade = 0.5 ** (1.0 / half_life_steps)
        self._prefill_s = self._prefill_tokens = self._decode_s = self._decode_tokens = 0.0
        self._steps = self._steps_s = 0.0
        self._now_prefill = self._now_decode = 0

    def saw(self, state: RequestState, num_tokens: int) -> None:
        """Tokens of a request were processed in the step that is ending."""
        if state.num_computed_tokens <= state.prefill_target_tokens:
            self._now_prefill += num_tokens
        else:
            self._now_decode += num_tokens

    def work_s(self, prompt_tokens: float, output_tokens: float) -> float:
        """Engine time that a request of this size takes, in seconds."""
        return self.prefill_token_s * prompt_tokens + self.decode_token_s * output_tokens

    def step_ended(self, step_s: float) -> None:
        """The step took `step_s` seconds."""
        prefill, decode = self._now_prefill, self._now_decode
        self._now_prefill = self._now_decode = 0
        if prefill + decode == 0 or step_s <= 0:
            return
        token_s = step_s / (prefill + decode)
        fade = self._fade
        self._prefill_s = self._prefill_s * fade + token_s * prefill
        self._prefill_tokens = self._prefill_tokens * fade + prefill
        self._decode_s = self._decode_s * fade + token_s * decode
        self._decode_tokens = self._decode_tokens * fade + decode
        self._steps_s = self._steps_s * fade + step_s
        self._steps = self._steps * fade + 1.0
        self.step_s = self._steps_s / self._steps
        if self._prefill_tokens >= 1.0:
            self.prefill_token_s = self._prefill_s / self._prefill_tokens
        if self._decode_tokens >= 1.0:
            self.decode_token_s = self._decode_s / self._decode_tokens
