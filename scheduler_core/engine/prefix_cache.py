"""Prefix cache of an engine: which blocks of keys and values can be found again by the content of a prompt.

A tree of streams. A node has the blocks of one segment's stream (`Segment.key`) after the segments before it; its path is the
content of a prompt, as in the radix tree of SGLang and the block hashes of vLLM. Each node has its first blocks on the
device and possibly further ones in host memory. Blocks that a running request uses are pinned; the others stay until their
memory is needed. They are then dropped, or moved to the host, from the ends of the streams.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from scheduler_core.request import RequestState, Segment

#: Name of a node below its parent: its key and the tokens of the stream before it; also those of segments between the two
#: that are shorter than a block.
_Name = tuple[tuple[int, str], ...]


@dataclass(slots=True, eq=False)
class _Mark:
    """Latest use of the blocks of a node from the end of the mark before it up to `end`."""

    end: int
    use: int
    session: str


class _Node:
    """Blocks of one stream after a path of others; numbers of blocks count from its own first one.

    Attributes:
        num_blocks: Blocks on the device; those from there to `end` are on the host.
        pinned: Blocks that running requests use, from the first one on.
        pins: The same of each running request.
        marks: Uses of the blocks, by increasing end; later ones were used at the latest as early.
        evicted_for: Session whose value orders the eviction of its last block (`PrefixCache.retention`); None: it must stay.
    """

    __slots__ = (
        "children", "end", "evicted_for", "marks", "name", "num_blocks", "parent", "pinned", "pins", "start",
    )  # fmt: skip

    def __init__(self, parent: "_Node | None", name: _Name, start: int) -> None:
        self.parent = parent
        self.name = name
        #: Number of blocks of the path before its first block.
        self.start = start
        self.num_blocks = self.end = self.pinned = 0
        self.pins: dict[str, int] = {}
        self.marks: list[_Mark] = []
        self.children: dict[_Name, _Node] = {}
        self.evicted_for: str | None = None

    def floor(self, on_device: bool) -> int:
        """Blocks that have to stay: those in use, and those before blocks of other nodes in the same memory."""
        least = self.pinned if on_device else self.num_blocks
        for child in self.children.values():
            if child.num_blocks if on_device else child.end:
                least = max(least, child.start - self.start)
        return least

    def tail(self, end: int) -> _Mark:
        """Latest use of block `end` - 1."""
        return self.marks[bisect_left(self.marks, end, key=lambda mark: mark.end)]

    def used(self, num_blocks: int, use: int, session: str) -> None:
        """Marks the first `num_blocks` blocks as used."""
        marks = self.marks
        del marks[: bisect_left(marks, num_blocks + 1, key=lambda mark: mark.end)]
        if num_blocks:
            marks.insert(0, _Mark(num_blocks, use, session))


@dataclass(frozen=True, slots=True)
class Hit:
    """What the cache has of a prompt.

    Attributes:
        num_blocks: Blocks on the device.
        num_pinned: Those of them that running requests use.
        num_host_blocks: Further blocks in host memory.
        path: Nodes, each with its blocks on the device and in host memory together.
    """

    num_blocks: int = 0
    num_pinned: int = 0
    num_host_blocks: int = 0
    path: tuple[tuple[_Node, int], ...] = ()


NO_HIT = Hit()


class PrefixCache:
    """The tree and its counts of blocks; `KVCache` owns the memory.

    Running requests that have computed the same content share one copy. Output tokens are added when a request ends or is
    preempted.

    Args:
        block_tokens: Tokens of a block; only whole blocks are shared.
        num_host_blocks: Blocks of host memory for what is evicted from the device; from there least recently used ones are
            dropped.
    """

    def __init__(self, block_tokens: int, num_host_blocks: int = 0) -> None:
        self.block_tokens = block_tokens
        self.num_host_blocks = num_host_blocks
        #: Blocks on the device that no running request uses, blocks of running requests (each once), blocks on the host.
        self.num_unused = self.num_pinned = self.num_on_host = 0
        #: Keys of the streams that have more or fewer blocks than at the latest `take_changed`; None: before the first one.
        self._resized: set[str] | None = None
        #: Value of a session's unused blocks, smallest evicted first; None: least recently used first.
        self.retention: Callable[[str], float] | None = None
        self._root = _Node(None, (), 0)
        self._nodes: dict[_Node, None] = {}
        self._paths: dict[str, list[_Node]] = {}
        self._uses = 0
        #: Nodes to evict from, the next one last: (-latest use, running number, node), by device (True) or host.
        self._ranked: dict[bool, list[tuple[int, int, _Node]]] = {True: [], False: []}
        self._num_ranked = 0
        #: Latest use when they were ranked; nodes used later come after them.
        self._ranked_at = {True: 0, False: 0}
        #: With values instead: nodes with unused blocks at their ends and the latest uses of these, by session; as of the latest
        #: eviction but for the nodes that have changed since.
        self._ends: dict[str, dict[_Node, int]] = {}
        self._changed: dict[_Node, None] = {}
        #: Values of sessions in the current eviction.
        self._values: dict[str, float] = {}

    def __len__(self) -> int:
        """Number of nodes of the tree."""
        return len(self._nodes)

    def _walk(
        self, content: tuple[Segment, ...], prompt_tokens: int, num_tokens: int
    ) -> Iterator[tuple[_Name, int, int]]:
        """(name, first block, end) of each stream in the first `num_tokens` tokens, by number of block of the path."""
        size, position, before = self.block_tokens, 0, 0
        grows = sum([segment.num_tokens for segment in content]) >= prompt_tokens
        last = len(content) - 1
        name: _Name = ()
        for index, (key, length) in enumerate(content):
            start = position // size
            position += length
            name = (*name, (before, key))
            # The output continues the last stream.
            end = num_tokens if index == last and grows else min(position, num_tokens)
            if end // size > start:
                yield name, start, end // size
                name = ()
            if position >= num_tokens:
                return
            before = length

    def find(self, content: tuple[Segment, ...], prompt_tokens: int, num_tokens: int) -> Hit:
        """What the cache has of the first `num_tokens` tokens of a prompt (and, after a preemption, its output) with this
        content and `prompt_tokens` tokens."""
        node, path = self._root, []
        device = pinned = host = 0
        for name, start, end in self._walk(content, prompt_tokens, num_tokens):
            child = node.children.get(name)
            if child is None:
                break
            want = end - start
            on_device = 0 if host else min(child.num_blocks, want)
            device += on_device
            pinned += min(child.pinned, on_device)
            hit = min(child.end, want)
            host += hit - on_device
            path.append((child, hit))
            if hit < want:
                break
            node = child
        return Hit(device, pinned, host, tuple(path)) if path else NO_HIT

    def pin(self, request_id: str, hit: Hit) -> int:
        """Lets a request use the blocks of a hit; those on the host move to the device. Returns by how many blocks the memory
        that running requests use has grown."""
        before = self.num_pinned
        path = []
        for node, blocks in hit.path:
            if blocks > node.num_blocks:
                self._note(node)
                moved = blocks - node.num_blocks
                node.num_blocks += moved
                self.num_on_host -= moved
                self.num_unused += moved
                self._note_size(node)
            self._pin(node, request_id, blocks)
            path.append(node)
        self._paths[request_id] = path
        return self.num_pinned - before

    def publish(
        self, request_id: str, content: tuple[Segment, ...], prompt_tokens: int, num_tokens: int
    ) -> int:
        """Makes the first `num_tokens` computed tokens of a running request available to others. Returns by how many blocks
        those in the tree that running requests use have grown; the request now holds so many fewer of its own."""
        node, before = self._root, self.num_pinned
        path = self._paths.setdefault(request_id, [])
        for depth, (name, start, end) in enumerate(self._walk(content, prompt_tokens, num_tokens)):
            child = node.children.get(name)
            if child is None:
                child = node.children[name] = _Node(node, name, start)
                self._nodes[child] = None
            want = end - start
            if want > child.num_blocks:
                self._note(child)
                self.num_on_host -= min(child.end, want) - child.num_blocks
                self.num_unused += want - child.num_blocks
                child.num_blocks = want
                child.end = max(child.end, want)
                self._note_size(child)
            if depth == len(path):
                path.append(child)
            self._pin(child, request_id, want)
            node = child
        return self.num_pinned - before

    def own(self, request_id: str) -> int:
        """Blocks in the tree that a request uses."""
        return sum([node.pins[request_id] for node in self._paths.get(request_id, ())])

    def exclusive(self, request_id: str) -> int:
        """Blocks in the tree that no other running request uses."""
        num = 0
        for node in self._paths.get(request_id, ()):
            others = max((blocks for name, blocks in node.pins.items() if name != request_id), default=0)
            num += max(node.pins[request_id] - others, 0)
        return num

    def unpin(self, request_id: str, session: str = "") -> int:
        """Ends the use of all blocks by a request; returns by how many blocks those of running requests have shrunk."""
        before = self.num_pinned
        self._uses = use = self._uses + 1
        for node in reversed(self._paths.pop(request_id, ())):
            blocks = node.pins.pop(request_id)
            node.used(blocks, use, session)
            pinned = max(node.pins.values(), default=0)
            self.num_unused += node.pinned - pinned
            self.num_pinned -= node.pinned - pinned
            node.pinned = pinned
            self._note(node)
            self._clean(node)
        return before - self.num_pinned

    def _pin(self, node: _Node, request_id: str, blocks: int) -> None:
        if node.pins.get(request_id, -1) >= blocks:
            return
        node.pins[request_id] = blocks
        self._note(node)
        if blocks > node.pinned:
            self.num_unused -= blocks - node.pinned
            self.num_pinned += blocks - node.pinned
            node.pinned = blocks
        if not node.marks or node.marks[-1].end < blocks:
            # Until the request ends, its blocks are the ones used last; the mark only covers them.
            node.used(blocks, self._uses + 1, "")

    def _clean(self, node: _Node) -> None:
        """Removes nodes without blocks from the end of a path."""
        while node.parent is not None and not (node.end or node.pins or node.children):
            del node.parent.children[node.name]
            del self._nodes[node]
            self._changed.pop(node, None)
            self._remove_end(node)
            node = node.parent

    def take_changed(self, waiting: Iterable[RequestState]) -> list[RequestState]:
        """Those of these requests of which it may have more or fewer blocks than at the latest call; at the first one, all."""
        resized, self._resized = self._resized, set()
        if resized is None:
            return list(waiting)
        if not resized:
            return []
        return [
            state for state in waiting if not resized.isdisjoint([key for key, _ in state.request.content])
        ]

    def _note_size(self, node: _Node) -> None:
        if self._resized is not None:
            self._resized.add(node.name[-1][1])

    def evict(self, num_blocks: int) -> None:
        """Frees unused blocks on the device. AssertionError if there are too few."""
        self._free(num_blocks, on_device=True)
        excess = self.num_on_host - self.num_host_blocks
        if excess > 0:
            self._free(excess, on_device=False)

    def clear(self) -> None:
        """Drops all unused blocks, on the device and on the host."""
        self._free(self.num_unused, on_device=True)
        self._free(self.num_on_host, on_device=False)

    def _free(self, num_blocks: int, *, on_device: bool) -> None:
        if num_blocks <= 0:
            return
        self._values.clear()  # they may have changed
        by_value = on_device and self.retention is not None
        while num_blocks > 0:
            node, mark = self._next_by_value() if by_value else self._next(on_device)
            end = node.num_blocks if on_device else node.end
            start = max(node.floor(on_device), self._start_of(node, mark))
            freed = min(num_blocks, end - start)
            num_blocks -= freed
            if on_device:
                node.num_blocks -= freed
                self.num_unused -= freed
                if self.num_host_blocks:
                    self.num_on_host += freed
                    self._rank_on_host(node)
                else:
                    node.end = node.num_blocks
            else:
                node.end -= freed
                self.num_on_host -= freed
            self._note_size(node)
            while len(node.marks) > 1 and node.marks[-2].end >= node.end:
                node.marks.pop()
            if by_value:
                self._note(node)
            else:
                self._rank(node, on_device)
                if node.parent is not None and not (node.num_blocks if on_device else node.end):
                    self._rank(node.parent, on_device)
            self._clean(node)

    def _rank_on_host(self, node: _Node) -> None:
        ranked = self._ranked[False]
        if len(ranked) > 4 * len(self._nodes) + 64:
            ranked.clear()
        if ranked:  # else it is filled when it is needed
            self._rank(node, on_device=False)

    @staticmethod
    def _start_of(node: _Node, mark: _Mark) -> int:
        index = bisect_left(node.marks, mark.end, key=lambda item: item.end)
        return node.marks[index - 1].end if index else 0

    def _note(self, node: _Node) -> None:
        """Remembers that the blocks of a node, or their use, change; and its parent, whose blocks before it must stay, if it has
        none at this moment."""
        if self.retention is not None:
            self._changed[node] = None
            if not node.num_blocks and node.parent is not None and node.parent is not self._root:
                self._changed[node.parent] = None

    def _remove_end(self, node: _Node) -> None:
        session = node.evicted_for
        if session is not None:
            ends = self._ends[session]
            del ends[node]
            if not ends:
                del self._ends[session]
            node.evicted_for = None

    def _next_by_value(self) -> tuple[_Node, _Mark]:
        """The node from which to evict next, and its latest use: smallest value of its session first, then least recently used.
        O(changed nodes + sessions)."""
        assert self.retention is not None
        for node in self._changed:
            self._remove_end(node)
            if node.num_blocks > node.floor(on_device=True):
                mark = node.tail(node.num_blocks)
                node.evicted_for = mark.session
                self._ends.setdefault(mark.session, {})[node] = mark.use
        self._changed.clear()
        values = self._values
        for session in self._ends:
            if session not in values:
                values[session] = self.retention(session)
        assert self._ends, "fewer blocks are unused than to be freed"
        least = min([values[session] for session in self._ends])
        ends = [
            item for session, each in self._ends.items() if values[session] == least for item in each.items()
        ]
        node, _ = min(ends, key=lambda item: item[1])
        return node, node.tail(node.num_blocks)

    def _next(self, on_device: bool) -> tuple[_Node, _Mark]:
        """The node from which to evict next, and its latest use."""
        ranked = self._ranked[on_device]
        while True:
            while ranked:
                use, _, node = ranked.pop()
                end = node.num_blocks if on_device else node.end
                if node in self._nodes and end > node.floor(on_device) and node.tail(end).use == -use:
                    return node, node.tail(end)
            self._ranked_at[on_device] = self._uses + 1
            for node in self._nodes:
                self._rank(node, on_device, sort=False)
            assert ranked, "fewer blocks are unused than to be freed"
            ranked.sort(key=lambda item: item[:2])

    def _rank(self, node: _Node, on_device: bool, sort: bool = True) -> None:
        """Adds a node to those to evict from, if it has unused blocks at its end."""
        end = node.num_blocks if on_device else node.end
        if node.parent is None or end <= node.floor(on_device):
            return
        mark = node.tail(end)
        if mark.use > self._ranked_at[on_device]:
            return
        self._num_ranked += 1
        item = (-mark.use, self._num_ranked, node)
        if sort:
            insort(self._ranked[on_device], item, key=lambda entry: entry[:2])
        else:
            self._ranked[on_device].append(item)

    def validate(self) -> None:
        """Checks the counts, O(nodes). AssertionError if one is wrong."""
        for node in self._nodes:
            assert 0 <= node.pinned <= node.num_blocks <= node.end
            assert node.pinned == max(node.pins.values(), default=0)
            assert node.end <= (node.marks[-1].end if node.marks else 0), (node.end, node.marks)
            assert node.parent is not None
            assert node.parent.children[node.name] is node
            before = node.start - node.parent.start
            assert not node.num_blocks or node.parent.parent is None or node.parent.num_blocks >= before
            assert not node.pinned or node.parent.parent is None or node.parent.pinned >= before
            assert not node.end or node.parent.parent is None or node.parent.end >= before
        assert self.num_pinned == sum(node.pinned for node in self._nodes)
        assert self.num_unused == sum(node.num_blocks - node.pinned for node in self._nodes)
        assert (
            self.num_on_host
            == sum(node.end - node.num_blocks for node in self._nodes)
            <= self.num_host_blocks
        )
