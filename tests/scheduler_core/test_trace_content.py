"""What the prompts of a trace share, and which requests wait for which: derived, read, written, repeated and simulated."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_core.errors import InputError
from scheduler_core.request import Segment
from scheduler_core.simulator.content import Content, hash_content, session_content
from scheduler_core.simulator.loop import Simulation
from scheduler_core.simulator.sources import EventSource
from scheduler_core.simulator.trace import Trace, TraceRequest, load_trace, write_trace
from scheduler_core.simulator.trace_predictions import Predictions
from tests.scheduler_core.helpers import ROUND, scheduler, trace_row

SUFFIXES = pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])


def num_shared(first: Content, second: Content) -> int:
    """Leading tokens that two texts share, as `Request.content` defines it."""
    total = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            return total + (min(one.num_tokens, other.num_tokens) if one.key == other.key else 0)
        total += one.num_tokens
    return total


def context(row: TraceRequest) -> Content:
    """Prompt and output."""
    *before, (key, num_tokens) = row.content
    return (*before, Segment(key, num_tokens + row.output_tokens))


@st.composite
def sessions(draw: st.DrawFn) -> list[TraceRequest]:
    """Turns that repeat the text before as a whole, up to the prompt, about up to it, or a part of it."""
    rows: list[TraceRequest] = []
    for turn in range(draw(st.integers(1, 12))):
        before = rows[-1].prompt_tokens if rows else 0
        whole = before + rows[-1].output_tokens if rows else 0
        prefix = draw(st.one_of(
            st.just(whole), st.sampled_from([before, max(before - 1, 0), before // 64 * 64]), st.integers(0, whole),
        ))  # fmt: skip
        prompt, output = prefix + draw(st.integers(1, 40)), draw(st.integers(1, 20))
        rows.append(
            trace_row(f"r{turn}", 0.0, prompt, output, session_id="s", turn=turn, prefix_tokens=prefix)
        )
    return rows


@pytest.mark.mend
@given(rows=sessions())
def test_turns_share_exactly_their_prefix_with_the_turn_before(rows: list[TraceRequest]) -> None:
    """And with every earlier one the least of the prefixes since."""
    for row, content in zip(rows, session_content(rows), strict=True):
        object.__setattr__(row, "content", content)
        assert sum(segment.num_tokens for segment in content) == row.prompt_tokens
    for first in range(len(rows)):
        for second in range(first + 1, len(rows)):
            least = min(row.prefix_tokens for row in rows[first + 1 : second + 1])
            assert num_shared(context(rows[first]), rows[second].content) == least


def test_a_session_that_only_grows_is_one_stream_and_a_compaction_starts_another() -> None:
    """A recorded agent: whole blocks of 64 of the prompt before are found, and after the compaction the system prompt."""
    prompts = [700, 900, 1300, 2000, 400, 700, 800]
    prefixes = [0, 640, 896, 1280, 128, 384, 640]
    rows = [
        trace_row(f"r{turn}", 0.0, prompt, 9, session_id="s", turn=turn, prefix_tokens=prefix)
        for turn, (prompt, prefix) in enumerate(zip(prompts, prefixes, strict=True))
    ]
    contents = session_content(rows)
    assert [content[:-1] for content in contents] == [
        (("s", 640),), (("s", 896),), (("s", 1280),), (("s", 1280),), (("s", 128), ("s#4", 256)),
        (("s", 128), ("s#4", 512)), (("s", 128), ("s#4", 512)),
    ]  # fmt: skip


@pytest.mark.mend
@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), min_size=1, max_size=8),
    st.integers(1, 512),
)
def test_hashes_share_their_blocks(paths: list[list[int]], last: int) -> None:
    """The id of a block names its path, as hashes of prefixes do, but for the second half of prompts: there ids repeat."""
    prompts = {
        str(number): (
            512 * (len(path) - 1) + last,
            [str(path[: at + 1]) if number % 2 else f"x{key}" for at, key in enumerate(path)],
        )
        for number, path in enumerate(paths)
    }
    contents = hash_content(prompts)
    for name, content in contents.items():
        num_tokens, ids = prompts[name]
        assert sum(segment.num_tokens for segment in content) == num_tokens
        for other, (other_tokens, other_ids) in prompts.items():
            equal = 0
            while equal < min(len(ids), len(other_ids)) and ids[equal] == other_ids[equal]:
                equal += 1
            shared = min(equal * 512, num_tokens, other_tokens)
            assert num_shared(content, contents[other]) == shared


def test_hashes_of_small_blocks_and_of_none() -> None:
    assert hash_content({"a": (40, [1, 2, 3]), "b": (33, [1, 2, 4])}) == {
        "a": (("1", 40),), "b": (("1", 32), ("4", 1)),
    }  # fmt: skip
    assert hash_content({"a": (40, [1]), "b": (2000, [1, 2])}) == {"a": (("1", 40),), "b": (("1", 1024),)}
    with pytest.raises(
        InputError, match="hash_ids of request b: got '9 ids'; allowed: an id for each of its blocks"
    ):
        hash_content({"a": (40, [1, 2, 3]), "b": (2000, list(range(9)))})


def line(name: str, **more: Any) -> dict[str, Any]:
    return {
        "request_id": name,
        "arrival_s": 0,
        "prompt_tokens": 9,
        "output_tokens": 2,
        "max_tokens": 4,
    } | more


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@SUFFIXES
def test_content_and_order_are_written_and_read(suffix: str, tmp_path: Path) -> None:
    rows = (
        trace_row("a", 0.0, 20, 3, session_id="s", ended_by="tool_use", content=(Segment('k"ö', 12),)),
        trace_row("b", 0.0, 20, 3, session_id="s", turn=1, content=(Segment('k"ö', 15), Segment("l", 5))),
        trace_row("c", 1.0, 20, 3, after=("a", "b"), think_time_s=2.0, ended_by="end_turn"),
    )
    write_trace(Trace(rows), tmp_path / f"t{suffix}")
    loaded = load_trace(tmp_path / f"t{suffix}").requests
    assert loaded == rows
    assert (loaded[1].request().content, loaded[1].request().session) == (rows[1].content, "s")


def test_sessions_of_a_file_get_their_content(tmp_path: Path) -> None:
    rows = [
        line("a", session_id="s", turn=0), line("b", session_id="s", turn=1, prompt_tokens=20, prefix_tokens=11),
        line("c", hash_ids=[7]), line("d", session_id="t", content=[["own", 4]]),
        line("e", session_id="t", turn=1, prefix_tokens=3), line("f", session_id="u"),
    ]  # fmt: skip
    contents = [row.content for row in load_trace(write(tmp_path / "t.jsonl", rows)).requests]
    assert contents == [(("s", 9),), (("s", 11), ("s#1+", 9)), (("7", 9),), (("own", 4),), (), ()]


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        ([line("a", content="k")], "row 1 column content: got 'k'; allowed: a list of pairs"),
        ([line("a", content=[["k", 2.5]])], r"row 1 column content: got \['k', 2.5\]"),
        ([line("a", content=[["k", 2, 3]])], "row 1 column content"),
        ([line("a", content=[["k", 10]])], "content of request a: .* at most prompt_tokens"),
        ([line("a", content=[["k", 0]])], "content of request a"),
        ([line("a", after=[1])], "row 1 column after: got 1; allowed: a list of ids"),
        ([line("a", after=["z"])], "after of request a: got 'z'; allowed: ids of requests of the trace"),
        ([line("a", after=["a"])], "after: got 'a, a'; allowed: requests that do not wait for each other"),
        ([line("a", after=["b"]), line("b", after=["a"])], "after: got"),
        (
            [line("a", session_id="s", after=["b"]), line("b", session_id="s", turn=1, think_time_s=1)],
            "after: got",
        ),
        ([line("a", hash_ids=[1, 2])], "t.jsonl: hash_ids of request a: got '2 ids'"),
        ([line("a", hash_ids=[[1]])], r"row 1 column hash_ids: got \[1\]"),
    ],
)  # fmt: skip
def test_lists_that_are_none_are_named(rows: list[dict[str, Any]], named: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=named):
        load_trace(write(tmp_path / "t.jsonl", rows))


def test_repetitions_share_nothing_and_wait_for_their_own() -> None:
    rows = (
        trace_row("a", 0.0, 20, 3, content=(Segment("k#2", 20),)),
        trace_row("b", 1.0, 20, 3, content=(Segment("k", 4), Segment("l", 3)), after=("a",)),
    )
    twice = Trace(rows).repeated(2).requests
    assert twice[:2] == rows
    assert (twice[2].content, twice[3].after) == ((("k#2##2", 20),), ("a##2",))
    assert twice[3].content == (("k##2", 4), ("l##2", 3))


@st.composite
def waiting_rows(draw: st.DrawFn) -> list[TraceRequest]:
    """Requests that wait for earlier ones, in any order of the trace; some are too large for the engine."""
    rows: list[TraceRequest] = []
    for number in range(draw(st.integers(1, 15))):
        names = [row.request_id for row in rows]
        after = draw(st.lists(st.sampled_from(names), max_size=3)) if names else []
        rows.append(trace_row(
            f"r{number}", draw(st.floats(0, 20)), draw(st.sampled_from([5, 20, 9000])), draw(st.integers(1, 4)),
            after=tuple(after), think_time_s=draw(st.sampled_from([None, 0.0, 3.0])) if after else None,
        ))  # fmt: skip
    return draw(st.permutations(rows))


@pytest.mark.mend
@given(rows=waiting_rows())
def test_requests_arrive_after_those_that_they_wait_for_and_none_is_lost(rows: list[TraceRequest]) -> None:
    core = scheduler(num_kv_blocks=200)
    out = Simulation(Trace(tuple(rows)), core, ROUND, Predictions()).run()
    assert {record.request_id for record in out.records} | set(out.refused) == {
        row.request_id for row in rows
    }
    by_name = {row.request_id: row for row in rows}
    ends = {record.request_id: record.finish_s for record in out.records}
    arrivals = {record.request_id: record.arrival_s for record in out.records}

    def times(name: str) -> tuple[float, float]:
        """Arrival and end by the definition; a refused request ends at its arrival."""
        row = by_name[name]
        last = max((times(other)[1] for other in row.after), default=0.0)
        arrival = max(row.arrival_s, last + (row.think_time_s or 0.0))
        return arrival, ends.get(name, arrival)

    assert arrivals == pytest.approx({name: times(name)[0] for name in arrivals})


def test_turns_wait_for_the_turn_before_unless_they_name_others() -> None:
    rows = (
        trace_row("a", 0.0, 5, 2, session_id="s"),
        trace_row("b", 0.0, 5, 2, session_id="s", turn=1, think_time_s=1.0),
        trace_row("c", 0.0, 5, 2, session_id="s", turn=2, think_time_s=1.0, after=("a",)),
    )
    source = EventSource(Trace(rows), Predictions())
    assert source.pop().request.request_id == "a"
    source.end_request(rows[0], 10.0)
    assert [(event.request.request_id, event.time_s) for event in (source.pop(), source.pop())] == [
        ("b", 11.0), ("c", 11.0),
    ]  # fmt: skip
    with pytest.raises(InputError, match="after of request d: got 'z'"):
        EventSource(Trace((*rows, trace_row("d", 0.0, 5, 2, after=("z",)))), Predictions())
