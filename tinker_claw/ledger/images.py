"""Images in the prompts of turns that may be trained.

Rule: a file is kept once, however many prompts hold it, and is deleted with the last of their
turns.
"""

from __future__ import annotations

import sqlite3
from hashlib import sha256

from tinker_claw.ledger.database import Rows
from tinker_claw.types import Images, PlacedImage


def store_images(tx: sqlite3.Connection, turn: int, images: Images) -> None:
    """Store the images of a new turn, and their positions in its prompt."""
    for image in images:
        digest = sha256(image.data).digest()
        tx.execute(
            "INSERT OR IGNORE INTO images (digest, format, data) VALUES (?, ?, ?)",
            (digest, image.format, image.data),
        )
        tx.execute(
            "INSERT INTO turn_images SELECT ?, id, ?, ? FROM images WHERE digest = ?",
            (turn, image.at, image.tokens, digest),
        )


def images_of(rows: Rows, turn: int) -> Images:
    """Return the images of a turn that were kept."""
    image_rows = rows.rows(
        "SELECT at, tokens, data, format FROM turn_images JOIN images ON images.id = image_id "
        "WHERE turn_id = ? ORDER BY at",
        turn,
    )
    return tuple(PlacedImage(**row) for row in image_rows)


def move(tx: sqlite3.Connection, turn: int, at: int, by: int) -> None:
    """Shift a turn's images at or after index `at` of its prompt by `by` tokens."""
    query = "UPDATE turn_images SET at = at + ? WHERE turn_id = ? AND at >= ?"
    tx.execute(query, (by, turn, at))


def let_go(tx: sqlite3.Connection, turn: int) -> None:
    """Delete a turn's images, except files that other turns hold."""
    unlink = "DELETE FROM turn_images WHERE turn_id = ? RETURNING image_id"
    tx.executemany(
        "DELETE FROM images WHERE id = ?1 "
        "AND NOT EXISTS (SELECT 1 FROM turn_images WHERE image_id = ?1)",
        {tuple(row) for row in tx.execute(unlink, (turn,)).fetchall()},
    )
