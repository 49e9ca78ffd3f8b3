"""The command `gen-samples`: sample many outputs for each prompt."""

from __future__ import annotations

import contextlib
import itertools
import logging
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from scheduler_core.errors import InputError
from scheduler_core.shell.command import command

if TYPE_CHECKING:
    from data_gen.config import GenSamplesConfig
    from data_gen.prompts import Prompt

log = logging.getLogger(__name__)

# Options of each engine that affect output lengths; a run resumes only with equal ones.
_ENGINE_OPTIONS = {
    "transformers": ("dtype",),
    "openai": ("api", "send_seed", "body"),
    "synthetic": (),
}


@dataclass(frozen=True, slots=True)
class _Prompts:
    """The selected prompts; every iteration reopens the source."""

    config: GenSamplesConfig
    skipped: dict[str, int] = field(default_factory=dict)  # by reason, from the last full iteration

    def __iter__(self) -> Iterator[Prompt]:
        from data_gen.filters import filtered
        from data_gen.sources.open import open_prompts

        config = self.config
        counts = Counter[str]()
        passed = filtered(open_prompts(config.prompts, config.source), config.filters, counts)
        stop = None if config.limit is None else config.skip + config.limit
        prompt = None
        for prompt in itertools.islice(passed, config.skip, stop):
            yield prompt
        if prompt is None:
            allowed = "a source with at least one prompt after filters, skip and limit"
            raise InputError("prompts", config.prompts, allowed)
        self.skipped.clear()
        self.skipped.update(sorted(counts.items()))


@contextlib.contextmanager
def _terminate_as_interrupt() -> Iterator[None]:
    """Makes SIGTERM raise `KeyboardInterrupt` inside the context."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def gen_samples(config: GenSamplesConfig) -> None:
    """Runs the command; see `data_gen.sampling_run.run_sampling` for its guarantees."""
    from data_gen.backend import SamplingSettings
    from data_gen.config import make_backend
    from data_gen.sampling_run import SamplingRunOptions, run_sampling, summary_lines

    def options_of(kind: type[Any]) -> Any:
        names = {item.name for item in fields(kind)} & {item.name for item in fields(config)}
        return kind(**{name: getattr(config, name) for name in names})

    if config.card is not None:
        from data_gen.card import FILES, write_card
        from scheduler_core.shell.files import check_shared_folder

        check_shared_folder(config.card, "card", FILES, field="card")
    prompts = _Prompts(config)
    options = getattr(config, config.backend, None)
    notes = {
        "prompts": config.prompts,
        "source": asdict(config.source),
        "filters": asdict(config.filters),
        "skip": config.skip,
        "limit": config.limit,
        # Filled in before the notes are written, because a run first reads all prompts.
        "skipped": prompts.skipped,
    }
    if config.backend == "openai":
        notes |= {"base_urls": config.openai.base_urls, "header_names": sorted(config.openai.headers)}
    backend = make_backend(config)
    with _terminate_as_interrupt(), contextlib.closing(backend):
        content = run_sampling(
            backend,
            prompts,
            options_of(SamplingSettings),
            config.out,
            options_of(SamplingRunOptions),
            engine_options={name: getattr(options, name) for name in _ENGINE_OPTIONS[config.backend]},
            notes=notes,
        )
    for line in summary_lines(content, config.out):
        log.info("%s", line)
    for reason, count in prompts.skipped.items():
        log.info("prompts skipped, %s: %d", reason, count)
    if config.card is not None:
        write_card(config.out, config.card)


main = command(
    "gen-samples", "data_gen.config:GenSamplesConfig", gen_samples, positionals=("prompts",), extra="gen"
)


if __name__ == "__main__":
    raise SystemExit(main())
