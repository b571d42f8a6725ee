"""Questions on a terminal that take each key at once.

Rule: what is typed before its question, a pasted secret above all, is never shown. So the
terminal's echo is off from the first question to the last, and only what we write is shown.
"""

from __future__ import annotations

import os
import select
import sys
import termios
import tty
from collections.abc import Generator, Mapping
from contextlib import contextmanager

import click

_ENTER = "\n"
_BACK = ("\x7f", "\b")
_END = (b"", b"\x04")
"""The end of the input, and Ctrl-D."""
_ESCAPE = b"\x1b"
_AT_ONCE_S = 0.05
"""Most seconds between the bytes of one key."""


@contextmanager
def unseen() -> Generator[None]:
    """Let the terminal show no key by itself, and hand over each at once."""
    handle = sys.stdin.fileno()
    before = termios.tcgetattr(handle)
    tty.setcbreak(handle, termios.TCSANOW)  # what was typed already stays to be read
    try:
        yield
    finally:
        termios.tcsetattr(handle, termios.TCSADRAIN, before)


def choose(answers: Mapping[str, str]) -> str:
    """List answers with their numbers; return the name of the one whose number is pressed.

    Enter is no answer, so pressing it after a number does not answer the next question.

    Raises:
        click.Abort: the input has ended.
    """
    for number, answer in enumerate(answers.values(), 1):
        print(f"  {number}  {answer}")
    ask = f"1 to {len(answers)}: "
    _show(ask)
    while (key := _key()) not in map(str, range(1, len(answers) + 1)):
        if key.isprintable():
            _show(f"{key} is none of them\n{ask}")
    print(key, flush=True)
    return [*answers][int(key) - 1]


def line(ask: str, *, echo: bool = True) -> str:
    """Return a line that is typed, without blanks around it; an empty one is none.

    Raises:
        click.Abort: the input has ended.
    """
    _show(f"{ask}: ")
    typed = ""
    while (key := _key()) != _ENTER or not typed.strip():
        if key in _BACK and typed:
            typed = typed[:-1]
            _show("\b \b" * echo)
        elif key.isprintable():
            typed += key
            _show(key * echo)
    print(flush=True)
    return typed.strip()


def _key() -> str:
    """Return the next key that is a character; arrows, Home and the like are passed over."""
    raw = b""
    while True:
        byte = os.read(sys.stdin.fileno(), 1)
        if byte in _END:
            raise click.Abort
        if byte == _ESCAPE:
            _pass_over()
            continue
        raw += byte
        try:
            return raw.decode().replace("\r", _ENTER)
        except UnicodeDecodeError:
            raw = b"" if len(raw) == 4 else raw


def _pass_over() -> None:
    """Read the rest of a key that begins with Escape: ESC O and a letter, or ESC [, numbers and a
    last byte from @ on (ECMA-48, 5.4)."""
    kind = _soon()
    if kind not in (b"[", b"O"):
        return
    while (byte := _soon()) and not b"@" <= byte <= b"~":
        pass


def _soon() -> bytes:
    """Return the next byte, if it comes at once."""
    handle = sys.stdin.fileno()
    return os.read(handle, 1) if select.select([handle], [], [], _AT_ONCE_S)[0] else b""


def _show(text: str) -> None:
    print(text, end="", flush=True)
