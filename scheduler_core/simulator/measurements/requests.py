"""Steps inferred from the times of requests: of a live probe, `vllm bench serve` results, or the proxy's log."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scheduler_core.errors import InputError
from scheduler_core.simulator.engine_probe import Probe
from scheduler_core.simulator.measurements.steps import StepMeasurement

FloatArray = NDArray[np.float64]

#: Moments at which the batch of a request without the times of its tokens is counted.
MOMENTS = 32
#: Tokens of a request came together if the time between them is less than this fraction of the median.
TOGETHER = 0.2
#: Number of steps with a prompt between other tokens from which times to the first token are not used as steps, because they
#: also have the time outside the engine.
MIN_PROMPTS = 50
LONG_PROMPTS = "steps that may hold a part of a prompt longer than max_num_batched_tokens"


@dataclass(frozen=True, slots=True)
class _Batch:
    """What an engine works on at any time, from the times of all its requests."""

    sent: FloatArray
    first: FloatArray
    last: FloatArray
    first_of: NDArray[np.int64]
    prompts: FloatArray
    prompts_by_first: FloatArray
    ended_by_last: FloatArray
    tokens: FloatArray
    probes: Sequence[Probe]

    @classmethod
    def of(cls, probes: Sequence[Probe]) -> _Batch:
        first, last = (np.array([one.token_s[at] for one in probes]) for at in (0, -1))
        prompts = np.array([one.prompt_tokens for one in probes], float)
        outputs = np.array([one.output_tokens for one in probes], float)
        order = np.argsort(first, kind="stable")
        ends = np.argsort(last, kind="stable")
        return cls(
            np.sort([one.sent_s for one in probes]),
            first[order],
            last[ends],
            order,
            prompts,
            np.concatenate([[0.0], np.cumsum(prompts[order])]),
            np.concatenate([[0.0], np.cumsum((prompts + outputs)[ends])]),
            np.sort(np.concatenate([_token_times(one) for one in probes])),
            probes,
        )

    def decodes(self, at_s: FloatArray) -> FloatArray:
        """Number of requests between their first and last token."""
        begun, ended = np.searchsorted(self.first, at_s, "right"), np.searchsorted(self.last, at_s, "right")
        return (begun - ended).astype(float)

    def context(self, at_s: FloatArray) -> FloatArray:
        """Their cached tokens: prompts, and outputs except the last token of each."""
        begun, ended = np.searchsorted(self.first, at_s, "right"), np.searchsorted(self.last, at_s, "right")
        tokens = np.searchsorted(self.tokens, at_s, "right")
        cached = self.prompts_by_first[begun] - self.ended_by_last[ended] + tokens - (begun - ended)
        return np.maximum(cached, 0.0)

    def prompts_in(self, after_s: float, until_s: float, sent_before_s: float) -> list[float]:
        """Lengths of the prompts whose first token came in (after, until]."""
        low, high = np.searchsorted(self.first, (after_s, until_s), "right")
        inside = self.first_of[low:high]
        return [float(self.prompts[at]) for at in inside if self.probes[at].sent_s < sent_before_s]


def _token_times(probe: Probe) -> FloatArray:
    """Times of all tokens, evenly spread between those that are known."""
    times_s, num = np.array(probe.token_s), probe.output_tokens
    if len(times_s) == num:
        return times_s
    times: FloatArray = np.interp(np.linspace(0, len(times_s) - 1, num), np.arange(len(times_s)), times_s)
    return times


def request_measurements(
    probes: Sequence[Probe], max_num_batched_tokens: int
) -> tuple[list[StepMeasurement], Counter[str]]:
    """The steps of an engine in the order of time, and reasons with numbers of what was left out.

    The time between two tokens of a request is one step. Its decodes are all requests between their first and
    last token; its prefills are the requests whose first token is at its end. As every decode of a step shows it, each
    counts as a part of it. Of a request without the time of every token all steps are one measurement: their mean duration,
    with the mean batch of its time. The time to the first token of a request on an idle engine is the step of its prompt; it
    is used if few other steps have one.
    """
    complete = [one for one in probes if one.error is None and one.token_s and one.output_tokens]
    left_out: Counter[str] = Counter()
    for probe in probes:
        if probe.error is not None or not probe.token_s or not probe.output_tokens:
            left_out[f"request: {probe.error or 'no output token'}"[:120]] += 1
    if not complete:
        return [], left_out
    batch = _Batch.of(complete)
    rows: list[tuple[float, StepMeasurement]] = []
    isolated: list[tuple[float, StepMeasurement]] = []
    for probe in complete:
        first_s = probe.token_s[0]
        others = np.searchsorted(batch.sent, first_s) - np.searchsorted(batch.last, probe.sent_s, "right") - 1
        if others == 0 and first_s > probe.sent_s and probe.prompt_tokens <= max_num_batched_tokens:
            step = StepMeasurement(first_s - probe.sent_s, 0, 0, probe.prompt_tokens, 1)
            isolated.append((first_s, step))
        if len(probe.token_s) != probe.output_tokens:
            rows += _all_steps(batch, probe)
    rows += _single_steps(batch, [one for one in complete if len(one.token_s) == one.output_tokens])
    if sum(step.prefills > 0 for _, step in rows) < MIN_PROMPTS:
        rows += isolated
    rows.sort(key=lambda row: row[0])
    steps = [step for _, step in rows]
    is_partial = _has_long_prompt(complete, max_num_batched_tokens, np.array([at_s for at_s, _ in rows]))
    is_partial &= np.array([step.weight for step in steps]) <= 1
    if is_partial.any():
        left_out[LONG_PROMPTS] = int(is_partial.sum())
        steps = [step for step, is_left_out in zip(steps, is_partial, strict=True) if not is_left_out]
    return steps, left_out


def _has_long_prompt(probes: Sequence[Probe], limit: int, at_s: FloatArray) -> NDArray[np.bool_]:
    """Whether a prompt of more tokens than a step can take was processed at these times, or waited."""
    long = [one for one in probes if one.prompt_tokens > limit]
    begun = np.searchsorted(np.sort([one.sent_s for one in long]), at_s)
    ended = np.searchsorted(np.sort([one.token_s[0] for one in long]), at_s)
    return begun > ended


def _single_steps(batch: _Batch, probes: Sequence[Probe]) -> list[tuple[float, StepMeasurement]]:
    """Steps of the requests with the time of every token. A token right after another one was sent with it, because the first
    was late: their steps are one measurement."""
    times = [np.array(one.token_s) for one in probes if len(one.token_s) > 1]
    if not times:
        return []
    shortest_s = TOGETHER * float(np.median(np.concatenate([np.diff(one) for one in times])))
    begin, end, steps = [], [], []
    for one in times:
        starts = np.flatnonzero(np.diff(one) > shortest_s)
        ends = np.append(starts[1:], len(one) - 1)[: len(starts)]
        begin.append(one[starts])
        end.append(one[ends])
        steps.append(ends - starts)
    before, after, num = (np.concatenate(values) for values in (begin, end, steps))
    step_s = (after - before) / np.maximum(num, 1)
    middle, low, late = (before + after) / 2, before + step_s / 2, after + step_s / 2
    decodes, context = batch.decodes(middle), batch.context(middle)
    with_prompt = np.searchsorted(batch.first, late, "right") > np.searchsorted(batch.first, low, "right")
    rows = []
    for index in range(len(middle)):
        lengths = []
        if with_prompt[index]:
            lengths = batch.prompts_in(low[index], late[index], after[index] - step_s[index] / 2)
        step = StepMeasurement(
            step_s[index],
            decodes[index],
            context[index],
            sum(lengths) / num[index],
            len(lengths) / num[index],
            weight=num[index] / max(decodes[index], 1.0),
        )
        rows.append((float(after[index]), step))
    return rows


def _all_steps(batch: _Batch, probe: Probe) -> list[tuple[float, StepMeasurement]]:
    """The mean of the steps of a request without the time of every token."""
    first_s, last_s, num = probe.token_s[0], probe.token_s[-1], probe.output_tokens - 1
    if num < 1 or not last_s > first_s:
        return []
    moments = first_s + (np.arange(MOMENTS) + 0.5) / MOMENTS * (last_s - first_s)
    decodes = float(batch.decodes(moments).mean())
    lengths = batch.prompts_in(first_s, last_s, math.inf)
    step = StepMeasurement(
        (last_s - first_s) / num,
        decodes,
        float(batch.context(moments).mean()),
        sum(lengths) / num,
        len(lengths) / num,
        weight=num / max(decodes, 1.0),
    )
    return [(last_s, step)]


#: Lists of a result of `vllm bench serve --save-detailed`.
BENCH_LISTS = ("input_lens", "output_lens", "start_times", "ttfts", "itls")


def bench_probes(result: Mapping[str, Any], name: str) -> list[Probe]:
    """The requests of a result of `vllm bench serve --save-detailed`. `InputError`, with the file's `name`, if a list is
    missing, of another length, or has a wrong value."""
    lists = {}
    for key in BENCH_LISTS:
        values = result.get(key)
        if not isinstance(values, list):
            allowed = "results of vllm bench serve --save-detailed, which have the list " + key
            raise InputError(f"{name}: {key}", values, allowed)
        lists[key] = values
    num = len(lists["input_lens"])
    errors = result.get("errors") or [""] * num
    for key, values in (*lists.items(), ("errors", errors)):
        if not isinstance(values, list) or len(values) != num:
            raise InputError(
                f"{name}: {key}", len(values), f"a list of {num} values, as many as input_lens has"
            )
    probes = []
    for index in range(num):
        probe = Probe(request_id=f"r{index}")
        if errors[index]:
            probe.error = str(errors[index])
            probes.append(probe)
            continue
        where = f"{name}: {{}}[{index}]"
        prompt, output = (
            _number(lists[key][index], where.format(key), integer=True)
            for key in ("input_lens", "output_lens")
        )
        start, ttft = (_number(lists[key][index], where.format(key)) for key in ("start_times", "ttfts"))
        gaps = lists["itls"][index]
        if not isinstance(gaps, list):
            raise InputError(where.format("itls"), gaps, "a list of seconds")
        gaps = [_number(gap, f"{where.format('itls')}[{at}]") for at, gap in enumerate(gaps)]
        probe.prompt_tokens, probe.output_tokens, probe.max_tokens = int(prompt), int(output), int(output)
        probe.sent_s = probe.arrival_s = start
        probe.token_s = np.cumsum([start + ttft, *gaps]).tolist()
        if not output:
            probe.error = "no output token"
        probes.append(probe)
    return probes


def feedback_probe(row: Mapping[str, Any], name: str, line: int) -> Probe:
    """The request in a line of the proxy's log, with the times of its first and last token."""
    where = f"{name}, line {line}: {{}}"
    probe = Probe(request_id=str(row.get("request_id")))
    needed = ("prompt_tokens", "output_tokens", "time", "ttft_s", "total_s")
    if missing := [key for key in needed if row.get(key) is None]:
        probe.error = f"no {missing[0]}"
        return probe
    prompt, output = (_number(row[key], where.format(key), integer=True) for key in needed[:2])
    start, ttft, total = (_number(row[key], where.format(key)) for key in needed[2:])
    waited = _number(row.get("waited_s") or 0.0, where.format("waited_s"))
    if not waited <= ttft <= total:
        raise InputError(where.format("ttft_s"), ttft, "from waited_s to total_s")
    probe.prompt_tokens, probe.output_tokens, probe.max_tokens = int(prompt), int(output), int(output)
    probe.sent_s = probe.arrival_s = start + waited
    probe.token_s = [start + ttft, start + total] if output > 1 else [start + ttft]
    if not output:
        probe.error = "no output token"
    return probe


def from_zero(probes: list[Probe]) -> list[Probe]:
    """Times from the first request on, so that differences are precise."""
    start_s = min((one.sent_s for one in probes if one.error is None), default=0.0)
    for one in probes:
        one.sent_s -= start_s
        one.arrival_s -= start_s
        one.token_s = [at_s - start_s for at_s in one.token_s]
    return probes


def _number(value: Any, field: str, *, integer: bool = False) -> float:
    """A finite number >= 0; `InputError` naming the field otherwise."""
    is_number = isinstance(value, int if integer else int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value < 1e15:
        raise InputError(field, value, "an integer >= 0" if integer else "a number >= 0")
    return float(value)
