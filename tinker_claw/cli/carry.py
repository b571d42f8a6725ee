"""`tinker-claw carry`: take what one data directory has learned into a new one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

from pydantic import Field

from tinker_claw.cli.common import Command, room_beside, write
from tinker_claw.config.flags import WORD
from tinker_claw.config.own_key import KEY_FILE
from tinker_claw.errors import ConfigError
from tinker_claw.files import close_to_others
from tinker_claw.ledger.carry import carry
from tinker_claw.ledger.database import is_locked
from tinker_claw.words import plural


class Carry(Command):
    """Take the newest version and the lessons of a data directory into a new one.

    For a ledger of an older release, whose schema this one cannot write. Turns, verdicts and steps
    under way stay in the old directory, which is only read.
    """

    old: Annotated[Path, WORD] = Field(description="data directory with a ledger")
    new: Annotated[Path, WORD] = Field(description="data directory to be made")

    def run(self) -> int:
        new = self.new.resolve()  # an empty directory may be named as `.` or by a link
        if new.exists() and (not new.is_dir() or any(new.iterdir())):
            raise ConfigError(f"{self.new} is there already; name a directory to be made")
        if is_locked(self.old):
            raise ConfigError(f"a gateway is using {self.old}: stop it first")
        with room_beside(new) as room:
            draft = room / "draft"
            draft.mkdir(0o700)
            carried = carry(self.old, draft)
            if (self.old / KEY_FILE).is_file():
                shutil.copy2(self.old / KEY_FILE, draft / KEY_FILE)
            close_to_others(draft)
            draft.rename(new)
        sentences = [
            f"{self.new} continues from v{carried.version} ({plural(carried.step, 'step')}), with "
            f"{plural(carried.lessons, 'lesson')}. Turns stay in {self.old}."
        ]
        if carried.candidates:
            sentences.append(
                f"Of the lessons, {carried.candidates} came from the judge and wait for you: "
                f"`tinker-claw lessons --data-dir {self.new}` lists them, `lessons keep` has one "
                "told."
            )
        if carried.unnamed_owners:
            sentences.append(
                "In chat services the first sender is no owner any more: name owners in the table "
                "[gateway.chats] of the settings."
            )
        write(sentences)
        return 0
