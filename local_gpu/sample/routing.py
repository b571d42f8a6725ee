"""Choose a server: the one with the least to compute, counting the requests it already serves.

A prompt is identified by keys, one per whole block of tokens, each a hash of all tokens up to its
end. An agent's next prompt extends the one before token for token, so no request needs to name its
conversation: its first keys are those of the last turn.

Rule: pure, and fast: a prompt of 20,000 tokens is routed in a fraction of a millisecond. Routes are
guesses at the servers' prefix caches, and a wrong guess costs time only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from cachetools import FIFOCache

from tinker_claw.types import Tokens

BLOCK: Final = 256
REQUEST_COST: Final = 2048
"""Cost of a request in flight, in prompt tokens. Arithmetic for 8B weights at 20,000 tokens: a
reply of 300 tokens reads its 3 GB of keys once per token, a millisecond each, so it takes from
others about 0.3 s, in which an H100 computes some 6,000 prompt tokens; replies are often shorter
and already half done. Too low piles conversations up, too high scatters them."""
_MOST_KEYS: Final = 65_536
"""Most keys per name: 830 prompts of 20,000 tokens that share nothing."""
_RECENT: Final = 64


@dataclass(frozen=True, slots=True)
class Prefix:
    """Whole blocks at the beginning of a prompt, and its salt."""

    tokens: tuple[int, ...]
    salt: str | None = None


def keys_of(prompt: Tokens, salt: str | None = None) -> list[int]:
    """Compute a key per whole block of tokens, different for every salt.

    Keys do not depend on the weights, whose name is passed beside them.
    """
    tokens = prompt if isinstance(prompt, tuple) else tuple(prompt)
    key, keys = 0 if salt is None else hash(salt), list[int]()
    for end in range(BLOCK, len(tokens) + 1, BLOCK):
        key = hash((key, tokens[end - BLOCK : end]))
        keys.append(key)
    return keys


class Routes:
    """A guess at which prefixes each server, known by number, has cached under which adapter's
    name."""

    def __init__(self, most_keys: int = _MOST_KEYS) -> None:
        self._most_keys = most_keys
        self._servers: dict[str | None, FIFOCache[int, frozenset[int]]] = {}
        """Servers by adapter name and key; the key that was noted longest ago goes first."""
        self._received = Counter[int]()
        """Prompt tokens that each server has received: a tie goes to the least, so caches fill
        evenly."""

    def choose(
        self, name: str | None, keys: Sequence[int], tokens: int, in_flight: Mapping[int, int]
    ) -> int:
        """Choose the cheapest of the servers in `in_flight`, which maps them to their requests.

        A server costs the tokens that it must compute and `REQUEST_COST` for every request that it
        has. So a conversation stays on its server until the requests there cost more than its
        cached prompt saves. A prompt that is short, or cached everywhere, goes to the least busy
        server.
        """
        cached = self._cached(name, keys, in_flight)

        def cost(server: int) -> tuple[int, int]:
            computed = tokens - cached.get(server, 0)
            return computed + REQUEST_COST * in_flight[server], self._received[server]

        return min(in_flight, key=cost)

    def note(self, name: str | None, keys: Sequence[int], tokens: int, server: int) -> None:
        """Note at once that a server computes a prompt, so that prompts that share it follow."""
        self._received[server] += tokens
        by_key = self._servers.setdefault(name, FIFOCache(self._most_keys))
        for key in keys:
            by_key[key] = by_key.get(key, frozenset()) | {server}

    def forget_server(self, server: int) -> None:
        """Forget a server's cache, as it may have been restarted."""
        for by_key in self._servers.values():
            for key, servers in list(by_key.items()):
                if server in servers:
                    by_key[key] = servers - {server}

    def forget_name(self, name: str) -> None:
        self._servers.pop(name, None)

    def _cached(
        self, name: str | None, keys: Sequence[int], among: Mapping[int, int]
    ) -> dict[int, int]:
        """Tokens that each server has; those that have none are left out."""
        by_key, cached = self._servers.get(name), dict[int, int]()
        if by_key is None:
            return cached
        for blocks in range(len(keys), 0, -1):
            for server in by_key.get(keys[blocks - 1], ()):
                if server in among and server not in cached:
                    cached[server] = blocks * BLOCK
            if len(cached) == len(among):
                break
        return cached


class RecentPrompts:
    """The newest prompts of recent conversations, each with the server that has computed it.

    A new version's cache is empty. Computing these prompts beforehand saves a continued
    conversation its whole prompt, and any other the system prompt with its tools.
    """

    def __init__(self, recent: int = _RECENT) -> None:
        self._seen = FIFOCache[int, tuple[Prefix, int]](recent)

    def note(self, prompt: Tokens, keys: Sequence[int], salt: str | None, server: int = 0) -> None:
        """Note a prompt, replacing one that it extends.

        Args:
            keys: of the prompt with that salt.
        """
        for key in keys:
            self._seen.pop(key, None)
        if keys:
            prefix = Prefix(tuple(prompt[: len(keys) * BLOCK]), salt)
            self._seen[keys[-1]] = prefix, server

    def clear(self) -> None:
        self._seen.clear()

    def prefixes(self, most: int, server: int | None = None) -> list[Prefix]:
        """At most this many, the newest first: those of a server, or of all."""
        newest = reversed(list(self._seen.values()))
        return [prefix for prefix, where in newest if server in (None, where)][:most]
