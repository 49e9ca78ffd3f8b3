"""Streams pass byte for byte, whatever pieces they come in."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from predictors.proxy.responses import EventStreamReader, JsonReader
from tests.predictors.proxy.fake_engine import event, stream_events

WORDS = st.lists(
    st.one_of(
        st.text(max_size=8),
        st.sampled_from(
            ['"usage":null', ',"usage":null', "\n\n", "data: [DONE]", "é", '"finish_reason":"x"']
        ),
    ),
    max_size=8,
)
SPACES = st.sampled_from([b"\n\n", b"\r\n\r\n", b"\r\r"])


def cut(data: bytes, places: list[int]) -> list[bytes]:
    """The bytes in pieces."""
    ends = sorted({place % (len(data) + 1) for place in places} | {0, len(data)})
    return [data[one:two] for one, two in itertools.pairwise(ends)]


def passed(reader: EventStreamReader, pieces: list[bytes]) -> bytes:
    return b"".join([reader.feed(piece) for piece in pieces]) + reader.end()


@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=12))
def test_any_bytes_pass_in_any_pieces(data: bytes, places: list[int]) -> None:
    assert passed(EventStreamReader(hides_usage=True, keeps_text=True), cut(data, places)) == data


@settings(max_examples=30)
@given(WORDS, st.lists(st.integers(0, 4000), max_size=12), st.booleans(), st.integers(1, 999), SPACES)
def test_counts_that_the_client_has_not_asked_for_leave_no_trace(
    words: list[str], places: list[int], null_usage: bool, usage: int, ends: bytes
) -> None:
    wanted = b"".join(stream_events(words, None)).replace(b"\n\n", ends)
    told = b"".join(stream_events(words, usage, null_usage=null_usage)).replace(b"\n\n", ends)
    reader = EventStreamReader(hides_usage=True, keeps_text=True)
    assert passed(reader, cut(told, places)) == wanted
    stats = reader.stats
    assert (stats.output_tokens, stats.prompt_tokens, stats.finish_reason) == (usage, 3, "stop")
    assert "".join(stats.text or []) == "".join(words)
    assert stats.num_deltas == sum(map(bool, words))
    assert (stats.first_s is None) is (stats.num_deltas == 0)


def test_a_null_usage_of_an_inner_object_and_an_error_stay() -> None:
    inner = event({"choices": [{"delta": {"x": 1, "usage": None}}]})
    both = event({"choices": [{"delta": {"x": 1, "usage": None}}], "usage": None})
    assert passed(EventStreamReader(hides_usage=True), [both]) == inner

    told = event({"choices": [], "usage": {"completion_tokens": 1}, "error": {"message": "x"}})
    assert passed(EventStreamReader(hides_usage=True), [told]) == told


def test_odd_completions_have_no_length() -> None:
    for odd in (b"", b"[]", b'{"choices": 3}', b'{"choices":[{}],"usage":{"completion_tokens":true}}'):
        reader = JsonReader()
        reader.feed(odd)
        assert reader.end() == b""
        assert reader.stats.output_tokens is None
