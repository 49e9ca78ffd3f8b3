"""What the prompts of a session have in common, as segments for a model of the engine's prefix cache.

A proxy has messages, not tokens. For each session it keeps hashes of the messages that it has seen: where the next prompt
repeats all of them it continues their stream of tokens, and where it does not, as after a compaction, it shares the tokens of
those that are equal. What sub-agents send under the same session are further streams. System prompt and tools are
a segment of their own, which sessions share.

Tokens are those that the engine has reported of the prompt before, and for what is new the characters times the tokens per
character of the session, else of the served model. Before any report they are `ApiRequest.prompt_tokens`.
"""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scheduler_core.prediction.api_request import CHARS_PER_TOKEN, ApiRequest
from scheduler_core.prediction.prompt_text import SYSTEM
from scheduler_core.request import Segment

#: Maximum number of messages of all sessions, of sessions, and of streams of one session.
MAX_MESSAGES, MAX_SESSIONS, MAX_STREAMS = 1_000_000, 20_000, 8
#: Characters of a piece of a text that is no message.
PIECE_CHARS = 4096
#: Beginning of the keys of system prompts, which sessions share.
SYSTEM_KEY = "system:"
#: Maximum tokens per character; images have tokens without characters.
MAX_RATIO = 2.0
#: Weight of a prompt in the tokens per character of its served model.
_WEIGHT = 0.05


@dataclass(slots=True, eq=False)
class _Stream:
    """A growing prompt.

    Attributes:
        chain: Hash of the messages up to each one; the first one is the system prompt with the tools.
        chars: Characters up to each of them.
        before: Segments before its own.
        prompt_tokens, prompt_chars: Of its latest prompt; tokens as reported by the engine, if they were.
        output_tokens: Of the latest output, if known.
        turn: Number of the latest prompt.
    """

    key: str
    chain: array[int]
    chars: array[int]
    before: tuple[Segment, ...]
    prompt_tokens: int
    prompt_chars: int
    output_tokens: int = 0
    turn: int = 0

    @property
    def content(self) -> tuple[Segment, ...]:
        """Segments of its latest prompt."""
        shared = sum(segment.num_tokens for segment in self.before)
        return (*self.before, Segment(self.key, self.prompt_tokens - shared))

    def common(self, chain: array[int]) -> int:
        """Number of leading messages that are equal."""
        own = self.chain
        num = min(len(own), len(chain))
        return bisect_left(range(num), True, key=lambda index: own[index] != chain[index])


@dataclass(slots=True, eq=False)
class _Session:
    """The streams of a session, the latest one last, and its tokens per character."""

    streams: list[_Stream] = field(default_factory=list)
    ratio: float | None = None

    @property
    def num_messages(self) -> int:
        """Messages of all streams."""
        return sum(len(stream.chain) for stream in self.streams)


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """A prompt of a session.

    Attributes:
        content: Its segments, which are all of its `prompt_tokens`.
        is_estimated: Whether no number of tokens was reported that its own depends on.
        owner: See `ClientRules.owner`.
        is_last: Whether the client says that no other one follows.
    """

    session: str
    content: tuple[Segment, ...]
    prompt_tokens: int
    is_estimated: bool
    num_chars: int
    number: int
    model: str
    stream: _Stream
    owner: str = ""
    is_last: bool = False


class SessionContexts:
    """Contexts of the sessions that were used last."""

    def __init__(self, max_messages: int = MAX_MESSAGES, max_sessions: int = MAX_SESSIONS) -> None:
        self._max_messages, self._max_sessions = max_messages, max_sessions
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        self._num_messages = 0
        self._num_turns = 0
        #: Tokens per character of served models.
        self._ratios: OrderedDict[str, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def begin(self, session: str, body: ApiRequest, *, continues: bool = False) -> Turn:
        """The next prompt of a session, or of none if its name is empty. `continues`: the body has only what follows the latest
        response."""
        state = self._sessions.pop(session, None) or _Session()
        self._num_messages -= state.num_messages
        self._num_turns += 1
        ratio = state.ratio or self._ratios.get(body.model)
        latest = state.streams[-1] if continues and state.streams else None
        chain, chars = _pieces(body, latest)
        num_chars = body.num_chars + (latest.prompt_chars if latest else 0)
        stream = self._stream(state, session, chain, chars, num_chars, ratio or 1.0 / CHARS_PER_TOKEN, latest)
        if body.num_prompt_ids and latest is None:
            stream.prompt_tokens = max(body.num_prompt_ids, len(stream.before) + 1)
        stream.chain, stream.chars, stream.prompt_chars = chain, chars, num_chars
        stream.turn = self._num_turns
        stream.before = truncate(stream.before, stream.prompt_tokens - 1)
        others = [each for each in state.streams if each is not stream]
        state.streams = [*others[1 - MAX_STREAMS :], stream]
        if session:
            self._sessions[session] = state
            self._num_messages += state.num_messages
        while len(self._sessions) > self._max_sessions or (
            self._num_messages > self._max_messages and len(self._sessions) > 1
        ):
            self._num_messages -= self._sessions.popitem(last=False)[1].num_messages
        return Turn(
            session,
            stream.content,
            stream.prompt_tokens,
            ratio is None,
            num_chars,
            stream.turn,
            body.model,
            stream,
        )

    def end(self, turn: Turn, prompt_tokens: int | None, output_tokens: int | None) -> None:
        """Takes the numbers of tokens that the engine has reported of a prompt and its output."""
        stream = turn.stream
        if not prompt_tokens or stream.turn != turn.number:
            return
        stream.prompt_tokens, stream.output_tokens = prompt_tokens, output_tokens or 0
        stream.before = truncate(stream.before, prompt_tokens - 1)
        if not turn.num_chars:
            return
        ratio = min(prompt_tokens / turn.num_chars, MAX_RATIO)
        if (state := self._sessions.get(turn.session)) is not None:
            state.ratio = ratio
        before = self._ratios.pop(turn.model, ratio)
        self._ratios[turn.model] = before + _WEIGHT * (ratio - before)
        if len(self._ratios) > MAX_SESSIONS:
            self._ratios.popitem(last=False)

    def forget(self, session: str) -> None:
        """Drops a session that has ended, if it is there."""
        if (state := self._sessions.pop(session, None)) is not None:
            self._num_messages -= state.num_messages

    def state(self) -> dict[str, Any]:
        """All sessions, the latest one last: JSON content with arrays, of hashes and numbers, without texts."""
        streams = [(name, each) for name, session in self._sessions.items() for each in session.streams]
        return {
            "num_turns": self._num_turns,
            "ratios": list(self._ratios.items()),
            "sessions": [(name, session.ratio) for name, session in self._sessions.items()],
            "streams": [
                (name, each.key, each.before, each.prompt_tokens, each.prompt_chars, each.output_tokens)
                for name, each in streams
            ],
            "lengths": [len(each.chain) for _, each in streams],
            "chains": _joined([each.chain for _, each in streams]),
            "chars": _joined([each.chars for _, each in streams]),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores a `state`; raises an error if it is none."""
        ends = np.cumsum(state["lengths"], dtype=int)
        chains, chars = (
            np.split(np.asarray(state[name], np.int64), ends)[:-1] for name in ("chains", "chars")
        )
        sessions = OrderedDict((str(name), _Session(ratio=ratio)) for name, ratio in state["sessions"])
        for (name, key, before, *numbers), own_chain, own_chars in zip(
            state["streams"], chains, chars, strict=True
        ):
            if not len(own_chain) == len(own_chars) > 0 or numbers[0] < 1:
                raise ValueError("streams")
            pieces = array("q", own_chain.tobytes()), array("q", own_chars.tobytes())
            stream = _Stream(str(key), *pieces, content_of(before), *map(int, numbers))
            sessions[name].streams.append(stream)
        self._sessions, self._num_turns = sessions, int(state["num_turns"])
        self._ratios = OrderedDict((str(model), float(ratio)) for model, ratio in state["ratios"])
        self._num_messages = sum(session.num_messages for session in sessions.values())

    def _stream(
        self,
        state: _Session,
        session: str,
        chain: array[int],
        chars: array[int],
        num_chars: int,
        ratio: float,
        latest: _Stream | None,
    ) -> _Stream:
        """The stream of a prompt, with its tokens: a grown one, or a new one with what it shares with others."""
        if latest is not None:
            grown = latest.output_tokens + round((num_chars - latest.prompt_chars) * ratio)
            latest.prompt_tokens += max(grown, 0)
            return latest
        common, best = 0, None
        for stream in state.streams:
            if (num := stream.common(chain)) and num >= common:
                common, best = num, stream
        if best is not None and common == len(best.chain):
            grown = round((num_chars - best.prompt_chars) * ratio)
            best.prompt_tokens = max(best.prompt_tokens + grown, 1)
            return best
        num_tokens = max(round(num_chars * ratio), 1)
        before: tuple[Segment, ...] = ()
        if best is None:
            if system := round(chars[0] * ratio):
                before = (Segment(f"{SYSTEM_KEY}{chain[0] % 2**64:x}", system),)
        else:
            shared = min(chars[common - 1] / max(best.prompt_chars, 1), 1.0) * best.prompt_tokens
            before = truncate(best.content, int(shared))
            num_tokens = max(round(shared + (num_chars - chars[common - 1]) * ratio), 1)
        return _Stream(f"{session}:{self._num_turns}", chain, chars, before, num_tokens, num_chars)


def content_of(pairs: Iterable[tuple[str, int]]) -> tuple[Segment, ...]:
    """The content with these keys and numbers of tokens."""
    return tuple(Segment(str(key), int(num_tokens)) for key, num_tokens in pairs)


def truncate(content: tuple[Segment, ...], num_tokens: int) -> tuple[Segment, ...]:
    """The first tokens of a content, at most `num_tokens`."""
    segments = []
    for key, length in content:
        if (left := min(length, num_tokens)) < 1:
            break
        segments.append(Segment(key, left))
        num_tokens -= left
    return tuple(segments)


def resized(content: tuple[Segment, ...], num_tokens: int) -> tuple[Segment, ...]:
    """The content of a prompt that has another number of tokens: its last segment has the difference."""
    if not content:
        return ()
    before = truncate(content[:-1], num_tokens - 1)
    num_before = sum(segment.num_tokens for segment in before)
    return (*before, Segment(content[-1].key, num_tokens - num_before))


def _joined(arrays: list[array[int]]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(0, np.int64), *(np.frombuffer(each, np.int64) for each in arrays)])


def _pieces(body: ApiRequest, latest: _Stream | None) -> tuple[array[int], array[int]]:
    """Hashes of the messages, or pieces of a text, up to each one, and the characters up to each; after those of `latest`."""
    chain, chars = array("q"), array("q")
    digest = hashlib.blake2b(digest_size=8)
    num_chars = 0

    def add(*parts: str) -> None:
        for part in parts:
            data = part.encode("utf-8", "surrogatepass")
            digest.update(len(data).to_bytes(8, "little"))
            digest.update(data)
        chain.append(int.from_bytes(digest.digest(), "little", signed=True))
        chars.append(num_chars)

    messages = body.messages
    if latest is None:
        num_system = next((n for n, message in enumerate(messages) if message.role != SYSTEM), len(messages))
        systems = [message.text for message in messages[:num_system]]
        num_chars = body.num_other_chars + sum(map(len, systems))
        add(body.model, str(body.num_other_chars), *systems)
        messages = messages[num_system:]
    else:
        chain.extend(latest.chain)
        chars.extend(latest.chars)
        num_chars = latest.prompt_chars
        add(str(chain[-1]))
    for message in messages:
        num_chars += len(message.text)
        add(message.role, message.text)
    for text in body.texts:
        # The last piece grows with the text.
        for start in range(0, len(text) - PIECE_CHARS + 1, PIECE_CHARS):
            num_chars += PIECE_CHARS
            add(text[start : start + PIECE_CHARS])
    return chain, chars
