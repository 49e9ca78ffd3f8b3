"""A seeded engine without a model: answers come in a shuffled order and in parts, some fail, all by plan."""

import random
import resource
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass

from data_gen.backend import SampledOutput, SampleFailure, SamplingSettings, Work, WorkResult, uniforms
from data_gen.prompts import Prompt

Plan = Callable[[str, int, int], SampleFailure | None]


@dataclass(eq=False)
class FakeBackend:
    """Lengths from the seeded uniforms.

    Args:
        plan: (prompt id, sample index, attempt from 1) -> a failure, or None for an output.
        shuffle, window: Seed of the order of the results, and how many are held back for it.
        stop_after: Raises KeyboardInterrupt instead of the output after so many.
        on_stored: Gets each result once the run has stored it.
    """

    name, served_model, seeded = "fake", "counter", True

    plan: Plan = lambda prompt_id, sample_index, attempt: None
    _: KW_ONLY
    shuffle: int = 0
    window: int = 7
    stop_after: int | None = None
    version: str = "1"
    on_stored: Callable[[WorkResult], None] = lambda result: None

    def __post_init__(self) -> None:
        self.asked: list[tuple[str, int]] = []
        self.given: list[tuple[str, int]] = []
        self.num_closed = 0
        self._order = random.Random(self.shuffle)
        self._attempts: dict[tuple[str, int], int] = {}

    def sample(self, work: Iterable[Work], settings: SamplingSettings) -> Generator[WorkResult, None, None]:
        held: list[tuple[Prompt, int]] = []
        try:
            for item in work:
                self.asked += [(item.prompt.prompt_id, index) for index in item.indices]
                held += [(item.prompt, index) for index in item.indices]
                while len(held) > self.window:
                    yield (result := self._result(held, settings))
                    self.on_stored(result)
            while held:
                yield (result := self._result(held, settings))
                self.on_stored(result)
        finally:
            self.num_closed += 1

    def _result(self, held: list[tuple[Prompt, int]], settings: SamplingSettings) -> WorkResult:
        """One random answer, together with all held ones of its prompt every third time."""
        if self.stop_after is not None and len(self.given) >= self.stop_after:
            raise KeyboardInterrupt
        prompt, index = held.pop(self._order.randrange(len(held)))
        indices = [index]
        if self._order.random() < 1 / 3:
            indices += [other for owner, other in held if owner is prompt]
            held[:] = [entry for entry in held if entry[0] is not prompt]
        answers, failures = [], []
        for index in indices:
            key = (prompt.prompt_id, index)
            self._attempts[key] = self._attempts.get(key, 0) + 1
            failure = self.plan(*key, self._attempts[key])
            if failure is not None:
                failures.append(failure)
                continue
            self.given.append(key)
            length = int(1 + 60 * uniforms(settings.seed, prompt.prompt_id, index, 1)[0])
            reason = "stop" if length <= settings.max_tokens else "length"
            text = f"answer {index} to {prompt.text}"
            answers.append(SampledOutput(index, min(length, settings.max_tokens), reason, text))  # type: ignore[arg-type]
        return WorkResult(prompt, 3, tuple(answers), tuple(failures))

    def close(self) -> None:
        pass


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """The kernel refuses to let files grow beyond `num_bytes`, as a full disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
