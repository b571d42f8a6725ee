"""Prompts without repeating what they share.

Rule: a prompt is whole blocks of `BLOCK` ids, each kept once for all turns under the digest of its
ids, and a tail of its own. Read back, it is exactly what was sampled on. An agent's prompts begin
alike, ten thousand ids long.
"""

from __future__ import annotations

import sqlite3
from hashlib import blake2b

from tinker_claw.errors import LedgerError
from tinker_claw.ledger.codec import compress, raw_ids, unpack_ids, unraw_ids
from tinker_claw.ledger.reading import Rows

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
