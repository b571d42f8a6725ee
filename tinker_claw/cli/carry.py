"""`tinker-claw carry`: take what one data directory has learned into a new one."""

from __future__ import annotations

import shutil
from pathlib import Path

import click

from tinker_claw.cli.common import FOLDER, Invocation, command, room_beside, write
from tinker_claw.config.own_key import KEY_FILE
from tinker_claw.errors import ConfigError
from tinker_claw.files import close_to_others
from tinker_claw.ledger.carry import carry as take_along
from tinker_claw.ledger.database import is_locked
from tinker_claw.words import plural


@command("carry", epilog="")
@click.argument("old", type=FOLDER, help="data directory with a ledger")
@click.argument("new", type=FOLDER, help="data directory to be made")
def carry(_: Invocation, old: Path, new: Path) -> None:
    """Take the newest version and the lessons of a data directory into a new one.

    For a ledger of an older release, whose schema this one cannot write. Turns, verdicts and steps
    under way stay in the old directory, which is only read.
    """
    target = new.resolve()  # an empty directory may be named as `.` or by a link
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{new} is there already; name a directory to be made")
    if is_locked(old):
        raise ConfigError(f"a gateway is using {old}: stop it first")
    with room_beside(target) as room:
        draft = room / "draft"
        draft.mkdir(0o700)
        carried = take_along(old, draft)
        if (old / KEY_FILE).is_file():
            shutil.copy2(old / KEY_FILE, draft / KEY_FILE)
        close_to_others(draft)
        draft.rename(target)
    sentences = [
        f"{new} continues from v{carried.version} ({plural(carried.step, 'step')}), with "
        f"{plural(carried.lessons, 'lesson')}. Turns stay in {old}."
    ]
    if carried.candidates:
        sentences.append(
            f"Of the lessons, {carried.candidates} came from the judge and wait for you: "
            f"`tinker-claw lessons --data-dir {new}` lists them, `lessons keep` has one "
            "told."
        )
    if carried.unnamed_owners:
        sentences.append(
            "In chat services the first sender is no owner any more: name owners in the table "
            "[gateway.chats] of the settings."
        )
    write(sentences)
