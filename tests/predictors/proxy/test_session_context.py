"""Contents of the prompts of sessions: what is equal in two prompts, in tokens, as a prefix cache would find it."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from predictors.proxy.session_context import MAX_STREAMS, PIECE_CHARS, SessionContexts, Turn, truncate
from scheduler_core.adapters.live_calibration import packed, unpacked
from scheduler_core.engine.prefix_cache import PrefixCache
from scheduler_core.prediction.api_request import read_request
from scheduler_core.request import Request, Segment

SYSTEM = {"role": "system", "content": "s" * 400}


def message(text: str, size: int = 400, role: str = "user") -> dict[str, str]:
    return {"role": role, "content": text.ljust(size, ".")}


def begin(contexts: SessionContexts, *messages: dict[str, str], session: str = "a", **more: Any) -> Turn:
    return contexts.begin(session, read_request({"model": "m", "messages": [SYSTEM, *messages], **more}))


def shared(first: Turn, second: Turn) -> int:
    """Tokens that the second prompt finds after the first one."""
    cache = PrefixCache(1)
    cache.publish("first", first.content, first.prompt_tokens, first.prompt_tokens)
    return cache.find(second.content, second.prompt_tokens, second.prompt_tokens).num_blocks


def test_a_grown_prompt_has_the_one_before() -> None:
    contexts = SessionContexts()
    first = begin(contexts, message("a"))
    assert (first.prompt_tokens, first.is_estimated) == (200, True)
    assert [segment.num_tokens for segment in first.content] == [100, 100]
    second = begin(contexts, message("a"), message("b", role="assistant"), message("c"))
    assert second.prompt_tokens == 400
    assert shared(first, second) == 200
    assert second.content[:1] == first.content[:1]


def test_an_edited_prompt_has_what_is_equal() -> None:
    contexts = SessionContexts()
    first = begin(contexts, message("a"), message("b"), message("c"))
    edited = begin(contexts, message("a"), message("b"), message("other"), message("d"))
    assert shared(first, edited) == 300
    assert edited.prompt_tokens == 500
    compacted = begin(contexts, message("summary"))
    assert (shared(edited, compacted), compacted.prompt_tokens) == (100, 200)
    again = begin(
        contexts, message("a"), message("b"), message("c"), message("e")
    )  # a second stream of the session
    assert shared(first, again) == 400
    shorter = begin(contexts, message("a"), message("b"))
    assert shared(first, shorter) == 299  # its output is another one
    assert (
        shared(first, begin(contexts, message("a"), tools=[{"name": "x"}])) == 0
    )  # comes before all messages


def test_sessions_share_only_the_system_prompt() -> None:
    contexts = SessionContexts()
    turns = [begin(contexts, message("a"), session=session) for session in "ab"]
    assert shared(*turns) == 100
    assert shared(turns[0], begin(contexts, message("a"), session="c", model="n")) == 0
    bare = contexts.begin("d", read_request({"messages": [message("a")]}))
    assert [segment.num_tokens for segment in bare.content] == [100]


def test_reported_tokens_calibrate_the_characters() -> None:
    contexts = SessionContexts()
    first = begin(contexts, message("a"))
    contexts.end(first, 400, 50)  # half a token per character
    second = begin(contexts, message("a"), message("b"))
    assert (second.prompt_tokens, second.is_estimated) == (600, False)
    assert shared(first, second) == 200
    other = begin(contexts, message("a"), session="b")
    assert (other.prompt_tokens, other.is_estimated) == (400, False)
    contexts.end(first, 4000, 50)  # of a prompt before
    assert begin(contexts, message("a"), message("b")).prompt_tokens == 600
    contexts.end(other, None, None)
    contexts.end(begin(contexts, message("a"), session="b"), 10**6, 1)
    grown = begin(contexts, message("a"), message("b"), session="b")
    assert grown.prompt_tokens == 10**6 + 800  # images: at most two tokens per character


def test_a_response_is_continued() -> None:
    contexts = SessionContexts()
    first = contexts.begin("a", read_request({"input": "x" * 400}))
    contexts.end(first, 100, 30)
    second = contexts.begin("a", read_request({"input": "y" * 40}), continues=True)
    assert (second.prompt_tokens, shared(first, second)) == (140, 100)
    contexts.end(second, 141, 9)
    third = contexts.begin("a", read_request({"input": "z" * 44}), continues=True)
    assert shared(second, third) == 140
    assert contexts.begin("b", read_request({"input": "z" * 44}), continues=True).prompt_tokens < 20


def test_texts_and_token_ids_grow() -> None:
    contexts = SessionContexts()
    text = "abcd" * PIECE_CHARS
    first = contexts.begin("a", read_request({"prompt": text[:9000]}))
    second = contexts.begin("a", read_request({"prompt": text[:11000]}))
    assert shared(first, second) == 2250
    ids = [contexts.begin("b", read_request({"prompt": [7] * num})) for num in (100, 150)]
    assert [turn.prompt_tokens for turn in ids] == [100, 150]
    assert shared(*ids) == 100


def test_memory_is_bounded() -> None:
    contexts = SessionContexts(max_messages=50, max_sessions=9)
    for number in range(20):
        begin(contexts, session=str(number))
    assert len(contexts) == 9
    begin(contexts, *(message(str(number)) for number in range(60)), session="long")
    assert len(contexts) == 1
    for number in range(2 * MAX_STREAMS):
        begin(contexts, message(str(number)), session="long")
    assert contexts._num_messages <= 2 * MAX_STREAMS
    assert (
        shared(begin(contexts, message("0"), session="long"), begin(contexts, message("0"), session="long"))
        == 200
    )


def test_sessions_go_on_after_a_restart() -> None:
    contexts, restored = SessionContexts(), SessionContexts()
    first = begin(contexts, message("a"), message("b"))
    contexts.end(first, 900, 50)
    begin(contexts, message("summary"))
    begin(contexts, message("a"), session="b")
    restored.restore(unpacked(packed(contexts.state())))
    assert len(restored) == 2
    texts = message("a"), message("b"), message("c")
    for turn in (begin(contexts, *texts), begin(restored, *texts)):
        assert (turn.prompt_tokens, turn.is_estimated, shared(first, turn)) == (1200, False, 300)
    later = begin(restored, message("x"), session="c")
    assert later.content[-1].key not in {segment.key for segment in first.content}
    restored.restore(unpacked(packed(SessionContexts().state())))
    assert len(restored) == 0


def test_a_session_that_has_ended_is_forgotten() -> None:
    contexts = SessionContexts()
    first = begin(contexts, message("a"))
    contexts.forget("a")
    contexts.forget("b")
    assert (len(contexts), contexts._num_messages) == (0, 0)
    assert shared(first, begin(contexts, message("a"))) == 100  # the system prompt


PROMPTS = st.lists(st.integers(0, 2), max_size=6)
STEPS = st.lists(
    st.tuples(st.sampled_from("ab"), PROMPTS, st.none() | st.integers(1, 3000)), min_size=1, max_size=12
)


@settings(max_examples=150, deadline=None)
@given(STEPS)
def test_segments_are_all_of_a_prompt(steps: list[tuple[str, list[int], int | None]]) -> None:
    """Whatever sessions send and engines report, contents are those of a valid request."""
    contexts = SessionContexts()
    for session, numbers, reported in steps:
        turn = begin(contexts, *(message(str(number), 100 * number) for number in numbers), session=session)
        request = Request(
            request_id="x",
            arrival_s=0.0,
            prompt_tokens=turn.prompt_tokens,
            max_tokens=1,
            content=turn.content,
        )
        assert sum(segment.num_tokens for segment in request.content) == turn.prompt_tokens
        assert shared(turn, turn) == turn.prompt_tokens
        contexts.end(turn, reported, 1)


@pytest.mark.parametrize("num_tokens", [-1, 0, 2, 3, 4, 9])
def test_truncated_content(num_tokens: int) -> None:
    content = (Segment("a", 2), Segment("b", 3))
    assert sum(segment.num_tokens for segment in truncate(content, num_tokens)) == min(max(num_tokens, 0), 5)
