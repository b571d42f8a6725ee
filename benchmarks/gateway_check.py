"""Check that sampled prompts have the ids of a plain, full render.

Rule: the other side of the comparison is the `renderers` package alone, over the tokenizer as it
comes, on the very body that was sent; none of our code is used for it.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from array import array
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, cast

import renderers
from renderers.base import load_tokenizer

from tinker_claw.ledger.ledger import Ledger
from tinker_claw.types import Tokens

_FEW = 200
"""Number of renders below which starting processes takes longer than rendering."""
_plain: list[renderers.Renderer] = []
"""Renderer of this process."""


@dataclass(frozen=True)
class Check:
    """Result of the check over a number of requests."""

    requests: int
    equal: int
    """Requests whose stored prompt equals the full render, id for id."""
    stored: int
    """Turns in the ledger."""
    median_tokens: int
    bytes_per_token: float
    smallest: int
    """Bytes of the smallest body."""
    largest: int


def check(directory: Path, vocabulary: Path, bodies: Sequence[bytes], workers: int) -> Check:
    """Render every body in full, and look for its ids in the ledger."""
    stored = _stored(directory)
    if len(bodies) < _FEW:
        _load(str(vocabulary))
        rendered = [_render(body) for body in bodies]
    else:
        with ProcessPoolExecutor(
            workers, get_context("spawn"), initializer=_load, initargs=(str(vocabulary),)
        ) as pool:
            rendered = list(pool.map(_render, bodies, chunksize=16))
    equal = stored & Counter(digest for digest, _ in rendered)
    return Check(
        requests=len(bodies),
        equal=equal.total(),
        stored=stored.total(),
        median_tokens=int(statistics.median(length for _, length in rendered)),
        bytes_per_token=sum(map(len, bodies)) / sum(length for _, length in rendered),
        smallest=min(map(len, bodies)),
        largest=max(map(len, bodies)),
    )


def _stored(directory: Path) -> Counter[str]:
    """Count the digests of all prompts of the ledger."""
    ledger, digests = Ledger(directory), Counter[str]()
    turn = 1
    while True:
        try:
            digests[_digest(ledger.turns.get(turn).prompt)] += 1
        except KeyError:
            break
        turn += 1
    ledger.close()
    return digests


def _load(vocabulary: str) -> None:
    config = cast("Any", renderers.config_from_name("qwen3"))
    config = config.model_copy(update={"enable_thinking": False})  # no request asks for it
    _plain[:] = [renderers.create_renderer(load_tokenizer(vocabulary), config)]


def _render(body: bytes) -> tuple[str, int]:
    request = json.loads(body)
    messages: list[Any] = request["messages"]
    for message in messages:
        if isinstance(message["content"], list):  # of one text; the package would keep the list
            message["content"] = "".join(part["text"] for part in message["content"])
    ids = _plain[0].render_ids(messages, tools=request["tools"], add_generation_prompt=True)
    return _digest(tuple(ids)), len(ids)


def _digest(ids: Tokens) -> str:
    return hashlib.sha256(array("i", ids).tobytes()).hexdigest()
