"""Choose a server: the one with the least to compute, counting the requests it already serves.

A prompt is known by keys, one per whole block of tokens, each of which stands for all tokens up to
its end. An agent's next prompt extends the one before token for token, so nobody needs to say which
conversation it belongs to: its first keys are those of the last turn.

Rule: pure, and fast: a prompt of 20,000 tokens is routed in a fraction of a millisecond. What is
known here is a guess about somebody else's cache, and a wrong guess costs time only.
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
"""Tokens of a prompt that a request in flight is worth. Arithmetic for 8B weights at 20,000 tokens:
a reply of 300 tokens reads its 3 GB of keys once per token, a millisecond each, so it takes from
others about 0.3 s, in which an H100 computes some 6,000 prompt tokens; replies are often shorter
and already half done. Too low piles conversations up, too high scatters them."""
_MOST_KEYS: Final = 65_536
"""Most keys per name: 830 prompts of 20,000 tokens that share nothing."""
_RECENT: Final = 64


@dataclass(frozen=True, slots=True)
class Prefix:
    """Common beginning of prompts of one salt."""

    tokens: tuple[int, ...]
    salt: str | None = None


def keys_of(prompt: Tokens, salt: str | None = None) -> list[int]:
    """Compute a key per whole block of tokens, different for every salt.

    It names no weights: those are told beside it.
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
        self._known: dict[str | None, FIFOCache[int, frozenset[int]]] = {}
        """Servers by adapter name and key; the key that was noted longest ago goes first."""
        self._given = Counter[int]()
        """Prompt tokens that each server has received: between equals, caches fill evenly."""

    def choose(
        self, name: str | None, keys: Sequence[int], tokens: int, in_flight: Mapping[int, int]
    ) -> int:
        """Choose the cheapest of the servers in `in_flight`, which maps them to their requests.

        A server costs the tokens that it must compute and `REQUEST_COST` for every request that it
        has. So a conversation stays where it is until that server is busier by what its prompt is
        worth, and what is known to all, or is short, goes where there is least to do.
        """
        cached = self._cached(name, keys, in_flight)

        def cost(server: int) -> tuple[int, int]:
            computed = tokens - cached.get(server, 0)
            return computed + REQUEST_COST * in_flight[server], self._given[server]

        return min(in_flight, key=cost)

    def note(self, name: str | None, keys: Sequence[int], tokens: int, server: int) -> None:
        """Note at once that a server computes a prompt, so that prompts that share it follow."""
        self._given[server] += tokens
        known = self._known.setdefault(name, FIFOCache(self._most_keys))
        for key in keys:
            known[key] = known.get(key, frozenset()) | {server}

    def held(self, server: int, prefixes: Mapping[Prefix, Sequence[int]]) -> list[Prefix]:
        """As much of each prefix as the server has computed, under any adapter's name: a
        conversation up to where it goes on, and of others the part they share with it. The whole
        first prefix, if it has nothing. Prefixes come with their keys."""
        found, covered = list[Prefix](), set[int]()
        for prefix, keys in prefixes.items():
            blocks = len(keys)
            while blocks and not self._holds(server, keys[blocks - 1]):
                blocks -= 1
            if blocks and keys[blocks - 1] not in covered:
                found.append(Prefix(prefix.tokens[: blocks * BLOCK], prefix.salt))
                covered.update(keys[:blocks])
        return found or list(prefixes)[:1]

    def _holds(self, server: int, key: int) -> bool:
        return any(server in known.get(key, ()) for known in self._known.values())

    def forget_server(self, server: int) -> None:
        """Forget a server's cache, as it may have been restarted."""
        for known in self._known.values():
            for key, servers in list(known.items()):
                if server in servers:
                    known[key] = servers - {server}

    def forget_name(self, name: str) -> None:
        self._known.pop(name, None)

    def _cached(
        self, name: str | None, keys: Sequence[int], among: Mapping[int, int]
    ) -> dict[int, int]:
        """Tokens that each server has; those that have none are left out."""
        known, cached = self._known.get(name), dict[int, int]()
        if known is None:
            return cached
        for blocks in range(len(keys), 0, -1):
            for server in known.get(keys[blocks - 1], ()):
                if server in among and server not in cached:
                    cached[server] = blocks * BLOCK
            if len(cached) == len(among):
                break
        return cached


@dataclass(frozen=True, slots=True)
class _Seen:
    prompt: Tokens
    salt: str | None
    keys: Sequence[int]


class HotPrefixes:
    """Prefixes that recent prompts share, and that the next ones will probably start with.

    A new version's cache is empty. What saves most when it is computed beforehand is what most
    requests share, weighed by its length: the system prompt with its tools, and conversations that
    go on, whose prompts of two turns share the whole first one. Prompts of two salts share nothing.
    """

    def __init__(self, recent: int = _RECENT) -> None:
        self._seen = FIFOCache[tuple[int, int], _Seen](recent)

    def note(self, prompt: Tokens, keys: Sequence[int], salt: str | None = None) -> None:
        """Note a prompt; the same one again (a repeated request) counts once.

        Args:
            keys: of the prompt with that salt.
        """
        if not keys:
            return
        tail = hash(tuple(prompt[len(keys) * BLOCK :]))
        self._seen[keys[-1], tail] = _Seen(prompt, salt, keys)

    def hottest(self, most: int) -> list[Prefix]:
        """At most this many prefixes, each shared by two or more recent prompts, the best first.

        Greedy: the one that saves most tokens, then the one that saves most beyond it, and so on.
        """
        users = Counter(key for seen in self._seen.values() for key in seen.keys)
        ends = {
            key: (seen, blocks)
            for seen in self._seen.values()
            for blocks, key in enumerate(seen.keys, 1)
            if users[key] > max(1, users[seen.keys[blocks]] if blocks < len(seen.keys) else 0)
        }
        warm, chosen = set[int](), list[Prefix]()

        def gain(key: int) -> int:
            seen, blocks = ends[key]
            return sum(users[k] for k in seen.keys[:blocks] if k not in warm)

        for _ in range(min(most, len(ends))):
            best = max(ends, key=gain)
            if not gain(best):
                break
            seen, blocks = ends[best]
            warm.update(seen.keys[:blocks])
            chosen.append(Prefix(tuple(seen.prompt[: blocks * BLOCK]), seen.salt))
        return chosen
