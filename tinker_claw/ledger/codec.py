"""Encode token arrays losslessly as compact blobs, and prompts without repeating shared parts.

Ids are int32. The upper two bytes hardly differ from token to token and are compressed; the lower
two are stored as they are. That is smaller than compressing all four, and takes a tenth of the
time. Logprobs are float32 where that is lossless, as for a model's output, and float64 otherwise.
All numbers are little-endian.

A prompt is stored as whole blocks of `BLOCK` ids, each kept once for all turns under the digest of
its ids, and a remainder of its own. It is read back exactly. An agent's prompts share a prefix of
ten thousand ids.
"""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from itertools import chain
from struct import pack, unpack
from typing import TypeVar

from tinker_claw.errors import LedgerError
from tinker_claw.ledger.database import Rows

BLOCK = 1024
"""Ids in a block."""
_ID_BYTES = 4
_BLOCK_BYTES = _ID_BYTES * BLOCK
_FAST = 1
"""zlib level; the request path should not wait for level 9."""
_PLAIN = b"\0"
"""Prefix of uncompressed blobs; zlib's own begin with 0x78."""
_SINGLE = b"\1"
"""Prefix of float32 blobs, which are not compressed because that gains little."""
_WORTH = 512
"""Smallest array in bytes that is compressed; for less the set-up takes too long."""
_Number = TypeVar("_Number", int, float)


def raw_ids(ids: Sequence[int]) -> bytes:
    """Encode ids as little-endian int32."""
    return pack(f"<{len(ids)}i", *ids)


def unraw_ids(raw: bytes | bytearray) -> tuple[int, ...]:
    return unpack(f"<{len(raw) // 4}i", raw)


def pack_raw(raw: bytes) -> bytes:
    """Return the blob of ids that are int32 already."""
    if len(raw) < _WORTH:
        return _PLAIN + raw
    return zlib.compress(raw[3::4] + raw[2::4], _FAST) + raw[1::4] + raw[0::4]


def pack_ids(ids: Sequence[int]) -> bytes:
    return pack_raw(raw_ids(ids))


def unpack_ids(blob: bytes) -> tuple[int, ...]:
    if blob[:1] == _PLAIN:
        return unraw_ids(blob[1:])
    unzip = zlib.decompressobj()
    upper = unzip.decompress(blob)
    lower, n = unzip.unused_data, len(upper) // 2
    raw = bytearray(4 * n)
    raw[3::4], raw[2::4], raw[1::4], raw[0::4] = upper[:n], upper[n:], lower[:n], lower[n:]
    return unraw_ids(raw)


def pack_floats(values: Iterable[float]) -> bytes:
    """Encode floats, as float32 where that loses nothing."""
    doubles = tuple(values)
    n = len(doubles)
    try:
        singles = pack(f"<{n}f", *doubles)
        if unpack(f"<{n}f", singles) == doubles:
            return _SINGLE + singles
    except OverflowError:  # beyond float32
        pass
    raw = pack(f"<{n}d", *doubles)
    return zlib.compress(raw, _FAST) if len(raw) >= _WORTH else _PLAIN + raw


def unpack_floats(blob: bytes) -> tuple[float, ...]:
    if blob[:1] == _SINGLE:
        return unpack(f"<{len(blob) // 4}f", blob[1:])
    raw = blob[1:] if blob[:1] == _PLAIN else zlib.decompress(blob)
    return unpack(f"<{len(raw) // 8}d", raw)


def flat(rows: Sequence[Sequence[_Number]]) -> tuple[_Number, ...]:
    """Return the values of all rows in one tuple."""
    return tuple(chain.from_iterable(rows))


def rows_of(values: Sequence[_Number], k: int) -> tuple[tuple[_Number, ...], ...]:
    """Split values into rows of k. Raises ValueError where they do not fit."""
    return tuple(zip(*[iter(values)] * k, strict=True)) if k else ()


def store_prompt(
    tx: sqlite3.Connection, ids: Sequence[int], *, head: bytes = b"", shared: bool = True
) -> tuple[bytes, bytes]:
    """Return the columns `blocks` and `prompt` for a prompt, and write its new blocks.

    Args:
        head: the column `blocks` of a prompt with which this one begins.
        shared: False keeps all of it in its own row, with which it is deleted.
    """
    if not shared:
        return b"", pack_ids(ids)
    raw = raw_ids(ids[BLOCK * (len(head) // _ID_BYTES) :])
    end = len(raw) - len(raw) % _BLOCK_BYTES
    blocks = _block_ids(tx, [raw[at : at + _BLOCK_BYTES] for at in range(0, end, _BLOCK_BYTES)])
    return head + raw_ids(blocks), pack_raw(raw[end:])


def _block_ids(tx: sqlite3.Connection, blocks: Sequence[bytes]) -> list[int]:
    """Return the row ids of blocks, inserting those that are new."""
    digests = [blake2b(block, digest_size=16).digest() for block in blocks]
    places = ", ".join("?" * len(digests))
    query = f"SELECT digest, id FROM prompt_blocks WHERE digest IN ({places})"
    ids = {row["digest"]: row["id"] for row in tx.execute(query, digests)}
    for digest, block in zip(digests, blocks, strict=True):
        if digest not in ids:
            query = "INSERT INTO prompt_blocks (digest, ids) VALUES (?, ?)"
            ids[digest] = tx.execute(query, (digest, pack_raw(block))).lastrowid
    return [ids[digest] for digest in digests]


def load_prompt(database: Rows, row: sqlite3.Row) -> tuple[int, ...]:
    """Return the prompt of a row of `turns`.

    Raises:
        LedgerError: a block is missing.
    """
    ids: list[int] = []
    for block in unraw_ids(row["blocks"]):
        block_row = database.row("SELECT ids FROM prompt_blocks WHERE id = ?", block)
        if block_row is None:
            raise LedgerError(f"turn {row['id']} has lost block {block} of its prompt")
        ids += unpack_ids(block_row["ids"])
    return (*ids, *unpack_ids(row["prompt"]))
