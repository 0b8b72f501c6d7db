"""Which of several servers a prompt goes to: the one that holds most of its keys and values, unless it is busier.

Siblings have equal prompts, and a later turn extends an earlier one. A server that has computed a prompt computes only
the rest of one that begins alike, so prompts are remembered by blocks, as the servers' own caches do.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from turntree.engines.server import Server

_BLOCK = 16  # tokens
_REMEMBERED = 2**18  # blocks per server: 4 million tokens, which is more than a server keeps
_SPREAD = 2.0  # a server with this many times the requests of the idlest one is passed over ...
_SLACK = 8  # ... beyond this many more


class Router:
    """Remembers which server was asked for what. Each call of `choose` opens a request there; `done` ends it."""

    def __init__(self, servers: Sequence[Server]) -> None:
        self._seen: dict[Server, OrderedDict[int, None]] = {server: OrderedDict() for server in servers}
        self.open = dict.fromkeys(servers, 0)

    def choose(self, prompt: tuple[int, ...], among: Sequence[Server]) -> Server:
        """The server for a prompt: where at least half of it was asked for before, the one with the longest such
        prefix; else, and where that one is much busier than others, the one with the fewest requests."""
        blocks = _blocks(prompt)
        idlest = min(among, key=lambda server: self.open[server])
        held, chosen = max(
            ((self._held(server, blocks), server) for server in among), key=lambda pair: (pair[0], -self.open[pair[1]])
        )
        busy = self.open[chosen] > _SPREAD * self.open[idlest] + _SLACK
        if busy or 2 * held < len(blocks) or not held:
            chosen = idlest
        self._remember(chosen, blocks)
        self.open[chosen] += 1
        return chosen

    def done(self, server: Server) -> None:
        self.open[server] -= 1

    def forget(self, server: Server) -> None:
        """Its cache is empty now."""
        self._seen[server].clear()

    def _held(self, server: Server, blocks: Sequence[int]) -> int:
        """How many leading blocks the server was asked for."""
        seen = self._seen[server]
        return next((count for count in range(len(blocks), 0, -1) if blocks[count - 1] in seen), 0)

    def _remember(self, server: Server, blocks: Sequence[int]) -> None:
        seen = self._seen[server]
        for block in blocks:
            seen[block] = None
            seen.move_to_end(block)
        while len(seen) > _REMEMBERED:
            seen.popitem(last=False)


def _blocks(prompt: tuple[int, ...]) -> list[int]:
    """A key per block, which stands for the block and all before it."""
    keys: list[int] = []
    for end in range(_BLOCK, len(prompt) + 1, _BLOCK):
        keys.append(hash((keys[-1] if keys else 0, prompt[end - _BLOCK : end])))
    return keys
