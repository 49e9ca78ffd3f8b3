"""Prefixes that a router has sent to each replica: its estimate of what their caches hold."""

from collections import OrderedDict
from dataclasses import dataclass, field

from scheduler_core.routing.base import RoutingRequest


@dataclass(slots=True)
class PrefixIndex:
    """Blocks of prompts by replica, the least recently sent ones dropped beyond `max_blocks` of a replica.

    The engine's own evictions are unknown to it, and a hash is stored instead of a radix tree's text.
    """

    max_blocks: int
    _sent: dict[str, OrderedDict[int, None]] = field(default_factory=dict, init=False, repr=False)

    def hit_blocks(self, item: RoutingRequest, replica_id: str) -> int:
        """Number of leading prompt blocks that were sent to the replica before and are still stored."""
        sent = self._sent.get(replica_id)
        if not sent:
            return 0
        for count, block in enumerate(item.prefix_blocks):
            if block not in sent:
                return count
        return len(item.prefix_blocks)

    def add(self, item: RoutingRequest, replica_id: str) -> None:
        """Stores the prompt of a request that was sent to the replica."""
        sent = self._sent.setdefault(replica_id, OrderedDict())
        # In reverse order, so that a prefix is dropped later than the blocks that follow it.
        for block in reversed(item.prefix_blocks):
            sent[block] = None
            sent.move_to_end(block)
        while len(sent) > self.max_blocks:
            sent.popitem(last=False)

    def forget(self, replica_id: str) -> None:
        """Drops what was sent to a replica whose cache is lost."""
        self._sent.pop(replica_id, None)
