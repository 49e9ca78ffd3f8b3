from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_gen.backend import Answer, PromptResult, SamplingSettings
from data_gen.generate import generate
from data_gen.prompts import Prompt
from data_gen.samples import SCHEMA, join_samples, read_samples
from data_gen.trace import PoissonArrivals, trace_of
from data_gen.transformers_backend import uniforms
from scheduler_core.errors import InputError

PROMPTS = [Prompt(f"p{i}", f"prompt {i}", "kind") for i in range(11)]
SETTINGS = SamplingSettings(num_samples=4, max_tokens=50, temperature=1.0, top_p=1.0, seed=2)


class CountingBackend:
    """Answers from the seeded uniforms; stops the process's work after `fail_after` prompts."""

    name, version, served_model = "counting", "1", "counter"

    def __init__(self, fail_after: int | None = None) -> None:
        self.fail_after = fail_after
        self.asked: list[str] = []

    def sample(self, prompts: Iterable[Prompt], settings: SamplingSettings) -> Iterator[PromptResult]:
        for number, prompt in enumerate(prompts):
            if number == self.fail_after:
                raise KeyboardInterrupt
            self.asked.append(prompt.prompt_id)
            if prompt.prompt_id == "p7":
                yield PromptResult(prompt, 3, (), "too long")
                continue
            lengths = [
                int(1 + 60 * uniforms(settings.seed, prompt.prompt_id, i, 1)[0])
                for i in range(settings.num_samples)
            ]
            answers = tuple(
                Answer(i, min(n, settings.max_tokens), "stop" if n <= settings.max_tokens else "length", "")
                for i, n in enumerate(lengths)
            )
            yield PromptResult(prompt, 3, answers)


def test_samples_have_the_schema_and_the_order_of_the_prompts(tmp_path: Path) -> None:
    out = tmp_path / "s.parquet"
    report = generate(CountingBackend(), PROMPTS, SETTINGS, out)
    table = read_samples(out)
    assert table.schema.names == SCHEMA.names
    assert pq.read_schema(out).metadata[b"tailcast.schema"] == b"samples/1"
    kept = [p.prompt_id for p in PROMPTS if p.prompt_id != "p7"]
    assert table.column("prompt_id").to_pylist() == [p for p in kept for _ in range(4)]
    assert table.column("sample_index").to_pylist() == [0, 1, 2, 3] * len(kept)
    assert report.failed == {"p7": "too long"}
    assert report.num_samples == 40
    assert report.num_censored == table.column("finish_reason").to_pylist().count("length")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s.parquet", "s.parquet.run.json"]


@pytest.mark.parametrize("fail_after", [0, 1, 5, 10])
def test_an_interrupted_run_resumes_to_the_same_file(tmp_path: Path, fail_after: int) -> None:
    whole, cut = tmp_path / "whole.parquet", tmp_path / "cut.parquet"
    generate(CountingBackend(), PROMPTS, SETTINGS, whole)
    with pytest.raises(KeyboardInterrupt):
        generate(CountingBackend(fail_after), PROMPTS, SETTINGS, cut, prompts_per_shard=2)
    assert not cut.exists()
    second = CountingBackend()
    report = generate(second, PROMPTS, SETTINGS, cut, prompts_per_shard=2)
    assert read_samples(cut).equals(read_samples(whole))
    answered_before = [p for p in PROMPTS[:fail_after] if p.prompt_id != "p7"]
    assert report.num_resumed == len(answered_before)
    assert set(second.asked).isdisjoint({p.prompt_id for p in answered_before})


def test_state_of_another_run_is_not_mixed_in(tmp_path: Path) -> None:
    out = tmp_path / "s.parquet"
    with pytest.raises(KeyboardInterrupt):
        generate(CountingBackend(3), PROMPTS, SETTINGS, out, prompts_per_shard=1)
    other = SamplingSettings(num_samples=5, max_tokens=50, temperature=1.0, top_p=1.0, seed=2)
    with pytest.raises(InputError, match="same settings"):
        generate(CountingBackend(), PROMPTS, other, out)


def test_an_interrupted_run_may_end_with_fewer_or_more_prompts(tmp_path: Path) -> None:
    for count in (2, 9):
        out = tmp_path / f"{count}.parquet"
        with pytest.raises(KeyboardInterrupt):
            generate(CountingBackend(4), PROMPTS[:6], SETTINGS, out, prompts_per_shard=1)
        generate(CountingBackend(), PROMPTS[:count], SETTINGS, out)
        fresh = tmp_path / f"fresh-{count}.parquet"
        generate(CountingBackend(), PROMPTS[:count], SETTINGS, fresh)
        assert read_samples(out).drop_columns(["run_id"]).equals(read_samples(fresh).drop_columns(["run_id"]))
    with pytest.raises(KeyboardInterrupt):
        generate(CountingBackend(4), PROMPTS, SETTINGS, tmp_path / "x.parquet", prompts_per_shard=1)
    with pytest.raises(InputError, match="text that the interrupted run had"):
        generate(CountingBackend(), [Prompt("p0", "another text")], SETTINGS, tmp_path / "x.parquet")


def test_repeated_ids_and_runs_without_any_answer_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="each prompt id once"):
        generate(CountingBackend(), [PROMPTS[0], PROMPTS[0]], SETTINGS, tmp_path / "a.parquet")
    with pytest.raises(InputError, match="too long"):
        generate(CountingBackend(), [PROMPTS[7]], SETTINGS, tmp_path / "b.parquet")
    assert not (tmp_path / "b.parquet").exists()


def test_join_refuses_an_answer_that_counts_twice(tmp_path: Path) -> None:
    first, second = tmp_path / "a.parquet", tmp_path / "b.parquet"
    generate(CountingBackend(), PROMPTS[:3], SETTINGS, first)
    generate(CountingBackend(), PROMPTS[3:6], SETTINGS, second)
    assert join_samples([first, second]).num_rows == 24
    with pytest.raises(InputError, match="p0"):
        join_samples([first, second, first])


def test_unreadable_samples_are_named(tmp_path: Path) -> None:
    good = tmp_path / "s.parquet"
    generate(CountingBackend(), PROMPTS[:3], SETTINGS, good)
    cut = tmp_path / "cut.parquet"
    cut.write_bytes(good.read_bytes()[:-40])
    with pytest.raises(InputError, match="whole Parquet file"):
        read_samples(cut)
    narrow = tmp_path / "narrow.parquet"
    pq.write_table(pq.read_table(good).drop_columns(["finish_reason"]), narrow)
    with pytest.raises(InputError, match="also finish_reason"):
        read_samples(narrow)


def test_trace_holds_the_chosen_answers_once_at_the_asked_rate(tmp_path: Path) -> None:
    out = tmp_path / "s.parquet"
    generate(CountingBackend(), PROMPTS, SETTINGS, out)
    samples = read_samples(out)
    trace = trace_of(samples, PoissonArrivals(rate_rps=5.0, seed=1), {"p1", "p2"})
    chosen = samples.filter(pa.compute.is_in(samples.column("prompt_id"), pa.array(["p1", "p2"])))
    assert sorted(trace.column("output_tokens").to_pylist()) == sorted(
        chosen.column("output_tokens").to_pylist()
    )
    assert len(set(trace.column("request_id").to_pylist())) == 8
    times = PoissonArrivals(rate_rps=5.0, seed=1).times(4000)
    assert times[0] == 0
    assert (times[1:] >= times[:-1]).all()
    # The mean of 4,000 exponential gaps has a standard error of 1.6 %.
    assert times[-1] / 3999 == pytest.approx(0.2, rel=0.08)
    with pytest.raises(InputError, match="at least one finished answer"):
        trace_of(samples, PoissonArrivals(5.0, 1), {"unknown"})
    with pytest.raises(InputError, match="rate_rps"):
        PoissonArrivals(0.0, 1)
