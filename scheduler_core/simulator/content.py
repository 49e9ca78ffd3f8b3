"""Content of the prompts of a trace, see `scheduler_core.request.Request.content`: of sessions, and of blocks with hashes."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Protocol

from scheduler_core.errors import InputError
from scheduler_core.request import Segment

#: Tokens of a block with a hash, in traces of Mooncake and of Bailian (Qwen). The last block of a prompt may be smaller.
_MOONCAKE_TOKENS, _BAILIAN_TOKENS = 512, 16

Content = tuple[Segment, ...]


class Turn(Protocol):
    """What `session_content` reads of a `TraceRequest`."""

    @property
    def session_id(self) -> str | None: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def output_tokens(self) -> int: ...
    @property
    def prefix_tokens(self) -> int: ...


def session_content(rows: Sequence[Turn]) -> list[Content]:
    """Content of the turns of one session, in their order. Each shares exactly its first `prefix_tokens` tokens with prompt
    and output of the turn before, or all of them if they are fewer.

    As long as turns only add to the context, its text is one stream, whose key is the id of the session. What the next turn
    does not repeat has a key of its own, so that a turn has two segments, and one more after each compaction.
    """
    shared = [0]
    shared += [
        min(row.prefix_tokens, before.prompt_tokens + before.output_tokens) for before, row in pairwise(rows)
    ]
    contents: list[Content] = []
    #: Longest use of each stream, with the output that continues it.
    used: dict[str, int] = {}
    last: Content = ()
    for number, (row, num_shared) in enumerate(zip(rows, shared, strict=True)):
        following = shared[number + 1] if number + 1 < len(rows) else 0
        name = f"{row.session_id}#{number}" if number else str(row.session_id)
        context = _first_tokens(last, num_shared)
        if context and used[context[-1].key] <= context[-1].num_tokens:
            name = context.pop().key
        repeated = max(num_shared, min(following, row.prompt_tokens))
        before = sum(segment.num_tokens for segment in context)
        if repeated > before:
            context.append(Segment(name, repeated - before))
        if row.prompt_tokens > repeated:
            context.append(Segment(f"{row.session_id}#{number}+", row.prompt_tokens - repeated))
        for key, num_tokens in context:
            used[key] = max(used.get(key, 0), num_tokens)
        contents.append(tuple(context))
        key, num_tokens = context[-1]
        used[key] = max(used[key], num_tokens + row.output_tokens)
        last = (*context[:-1], Segment(key, num_tokens + row.output_tokens))
    return contents


def _first_tokens(content: Content, num_tokens: int) -> list[Segment]:
    """The first `num_tokens` tokens."""
    parts = []
    for key, length in content:
        if num_tokens <= 0:
            break
        parts.append(Segment(key, min(length, num_tokens)))
        num_tokens -= length
    return parts


def hash_content(prompts: Mapping[str, tuple[int, Sequence[object]]]) -> dict[str, Content]:
    """Content by request id of prompts, by request id: number of tokens, and ids of blocks, of which equal ones have equal
    text. Blocks have 512 tokens; or 16, if there is an id for each block of 16 tokens. Ids may be missing at the end of a
    prompt, not with 16. `InputError` if there are more of them.

    Blocks that always follow the same one, as in prompts that start alike, are one stream with it.
    """
    size = _MOONCAKE_TOKENS
    if any(len(ids) > math.ceil(num / size) for num, ids in prompts.values()):
        size = _BAILIAN_TOKENS
        for name, (num, ids) in prompts.items():
            if len(ids) != math.ceil(num / size):
                blocks = f"blocks of {_MOONCAKE_TOKENS} or {size} tokens"
                raise InputError(
                    f"hash_ids of request {name}", f"{len(ids)} ids", f"an id for each of its {blocks}"
                )
    #: The block before each one; None: not always the same one.
    before: dict[object, object] = {}
    for _, ids in prompts.values():
        for previous, block in zip((None, *ids), ids, strict=False):
            if before.setdefault(block, previous) != previous:
                before[block] = None
    #: Name of the stream of a block, and the block that continues the stream of one: the first one to follow it.
    streams: dict[object, str] = {}
    continued: dict[object, object] = {}
    contents = {}
    for name, (num_tokens, ids) in prompts.items():
        segments: list[Segment] = []
        for index, block in enumerate(ids):
            length = min(size, num_tokens - index * size)
            previous = before[block]
            if previous is not None and continued.setdefault(previous, block) == block:
                streams[block] = streams[previous]
                length += segments.pop().num_tokens
            else:
                streams[block] = str(block)
            segments.append(Segment(streams[block], length))
        contents[name] = tuple(segments)
    return contents
