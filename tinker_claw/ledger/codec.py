"""Token arrays to compact blobs and back, exactly: ids as int32, logprobs as float64, or as float32
where that is the same.

Rule: blobs that older versions wrote stay readable.
"""

from __future__ import annotations

import sqlite3
import sys
import zlib
from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import TypeVar

from tinker_claw.errors import LedgerError
from tinker_claw.ledger.database import Rows

_Number = TypeVar("_Number", int, float)

_FAST = 1
"""zlib's level: the request path should not wait for level 9."""
_PLAIN = b"\0"
"""Stands before a blob that is not compressed; zlib's own begin with 0x78."""
_SINGLE = b"\1"
"""Stands before floats that are float32, and not compressed: there is little to gain."""
_WORTH = 512
"""Bytes from which on compressing is worth its set-up, which takes longer than a small array."""


def _raw(typecode: str, values: Iterable[int] | Iterable[float]) -> bytes:
    packed = array(typecode, values)  # type: ignore[arg-type]
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _pack(typecode: str, values: Iterable[int] | Iterable[float]) -> bytes:
    return compress(_raw(typecode, values))


def compress(raw: bytes) -> bytes:
    return zlib.compress(raw, _FAST) if len(raw) >= _WORTH else _PLAIN + raw


def _unpack(typecode: str, blob: bytes) -> array[int] | array[float]:
    plain = blob[:1] == _PLAIN
    return _unraw(typecode, blob[1:] if plain else zlib.decompress(blob))


def _unraw(typecode: str, raw: bytes) -> array[int] | array[float]:
    values = array(typecode)
    values.frombytes(raw)
    if sys.byteorder == "big":
        values.byteswap()
    return values


def raw_ids(ids: Sequence[int]) -> bytes:
    """Ids as little-endian int32."""
    return _raw("i", ids)


def unraw_ids(raw: bytes) -> tuple[int, ...]:
    return tuple(int(i) for i in _unraw("i", raw))


def pack_ids(ids: Sequence[int]) -> bytes:
    return _pack("i", ids)


def unpack_ids(blob: bytes) -> tuple[int, ...]:
    return tuple(int(i) for i in _unpack("i", blob))


def pack_floats(values: Iterable[float]) -> bytes:
    """Half as long where that loses nothing: what a model computed in float32 fits into it."""
    doubles = array("d", values)
    singles = array("f", doubles)
    if doubles and array("d", singles) == doubles:
        return _SINGLE + _raw("f", singles)
    return _pack("d", doubles)


def unpack_floats(blob: bytes) -> tuple[float, ...]:
    if blob[:1] == _SINGLE:
        return tuple(_unraw("f", blob[1:]))
    return tuple(float(x) for x in _unpack("d", blob))


def pack_id_rows(rows: Sequence[Sequence[int]]) -> bytes:
    return _pack("i", (value for row in rows for value in row))


def unpack_id_rows(blob: bytes, k: int) -> tuple[tuple[int, ...], ...]:
    return _rows(unpack_ids(blob), k)


def pack_float_rows(rows: Sequence[Sequence[float]]) -> bytes:
    return pack_floats(value for row in rows for value in row)


def unpack_float_rows(blob: bytes, k: int) -> tuple[tuple[float, ...], ...]:
    return _rows(unpack_floats(blob), k)


def _rows(flat: tuple[_Number, ...], k: int) -> tuple[tuple[_Number, ...], ...]:
    if k == 0:
        return ()
    if len(flat) % k:
        raise LedgerError(f"a stored array of {len(flat)} values does not split into rows of {k}")
    return tuple(flat[i : i + k] for i in range(0, len(flat), k))


# Prompts without repeating what they share.
#
# Rule: a prompt is whole blocks of `BLOCK` ids, each kept once for all turns under the digest of
# its
# ids, and a tail of its own. Read back, it is exactly what was sampled on. An agent's prompts
# begin
# alike, ten thousand ids long.


BLOCK = 1024
"""Ids in a block."""
_BYTES = 4 * BLOCK


def store(tx: sqlite3.Connection, packed: bytes) -> tuple[bytes, bytes]:
    """The columns `blocks` and `prompt` for a prompt, its blocks written where they are new.

    Args:
        packed: the prompt's ids as little-endian int32.
    """
    end = len(packed) - len(packed) % _BYTES
    blocks = [packed[at : at + _BYTES] for at in range(0, end, _BYTES)]
    digests = [blake2b(block, digest_size=16).digest() for block in blocks]
    marks = ", ".join("?" * len(digests))
    rows = tx.execute(f"SELECT digest, id FROM prompt_blocks WHERE digest IN ({marks})", digests)
    known = {row["digest"]: int(row["id"]) for row in rows}
    for digest, block in zip(digests, blocks, strict=True):
        if digest not in known:
            cursor = tx.execute(
                "INSERT INTO prompt_blocks (digest, ids) VALUES (?, ?)", (digest, compress(block))
            )
            known[digest] = int(cursor.lastrowid or 0)
    return raw_ids([known[digest] for digest in digests]), compress(packed[end:])


def load(database: Rows, row: sqlite3.Row) -> tuple[int, ...]:
    """The prompt of a row of `turns`.

    Raises:
        LedgerError: a block is missing.
    """
    ids: list[int] = []
    for block in unraw_ids(row["blocks"]):
        found = database.row("SELECT ids FROM prompt_blocks WHERE id = ?", block)
        if found is None:
            raise LedgerError(f"turn {row['id']} has lost block {block} of its prompt")
        ids += unpack_ids(found["ids"])
    return (*ids, *unpack_ids(row["prompt"]))
