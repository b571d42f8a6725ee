"""Make `data/openclaw.jsonl` from a folder of raw captures, one JSON a line and request.

    python -m tests.lab.make_captures FOLDER

Rule: of OpenClaw's own text nothing is kept but the short marks that identification reads. What a
person or the mock model wrote, names, ids, times and structure are kept as they are.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from pathlib import Path
from typing import Any

from tests.support.captures import FILE

_HEADERS = re.compile(
    r"accept.*|content-type|sec-fetch-mode|session_id|traceparent|user-agent|x-.*"
)
_SYSTEM_MARKS = (
    "<!-- openclaw:attempt:STABLE -->\nYou are a personal assistant running inside OpenClaw.",
    "Write an Activity recap",
    "Generate a concise session title",
)
# Kept wherever they stand in a message: marks, and what varies in them.
_KEPT = re.compile(
    r"<<<(?:BEGIN|END)_OPENCLAW_INTERNAL_CONTEXT>>>\n?"
    r"|\[[A-Z][a-z]{2} \d{4}-\d\d-\d\d \d\d:\d\d UTC\] "
    r"|\n\nRuntime: agent=[^\n]*"
    r"|(?:Current time|Reference UTC): [^\n]*"
    r"|\[Queued user message from a previous active turn|\]\n(?=.*\n\nContinue the current task)"
    r"|Continue the current task from the existing transcript"
    r"|The previous attempt did not produce a user-visible answer\."
    r"|\[cron:[^\]]*\] cron isolated job message"
    r"|A scheduled reminder has been triggered\.|cron main system event"
    r"|Follow the heartbeat monitor scratch context"
    r"|\[Subagent Context\]|\[Subagent Task\]|CHILDTASK: say hi"
    r"|A background task completed\.|\[Internal task completion event\]|source: subagent"
    r"|session_(?:key|id): [-:\w]+|gw default answer"
    r"|\[Inter-session message\] sourceSession=[^\n\"]*"
    r"|\n+",
)
_AUTOMATED = re.compile(
    r"\[Queued user message|The previous attempt did not|\[cron:|A scheduled reminder|Follow the "
    r"heartbeat|\[Subagent Context\]|A background task completed|<<<BEGIN_OPENCLAW"
)
_RETRIED = re.compile(r"(?<=below\.\]\n).*?(?=\n\nContinue the current task)", re.DOTALL)
# The parts of a tool's result around OpenClaw's note.
_NOTE = "The final reply returns"
_AROUND_NOTES = re.compile(
    rf"\A.*?(?={_NOTE})|(?<=ONLY with NO_REPLY\.).*?(?={_NOTE}|\Z)", re.DOTALL
)
_PROSE_FIELDS = ("description", "title")
_WORTH_SHARING = 60


class Shared:
    """Values that several requests share, each stored once."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self.filler: list[tuple[int, int, str]] = []
        self._at: dict[str, int] = {}

    def text(self, text: str, kept: re.Pattern[str] | None) -> Any:
        """Replace everything in `text` except the parts that `kept` finds."""
        pieces: list[Any] = []
        at = 0
        for found in kept.finditer(text) if kept else re.finditer(r"\n+", text):
            pieces += self._foreign(text[at : found.start()])
            pieces.append(found[0])
            at = found.end()
        pieces += self._foreign(text[at:])
        return self.value({"~": self._joined(pieces)})

    def value(self, value: Any) -> Any:
        """Return `value`, or a reference to it."""
        name = json.dumps(value)
        if len(name) < _WORTH_SHARING:
            return value
        if name not in self._at:
            self._at[name] = len(self.values)
            self.values.append(value)
        return {"$": self._at[name]}

    def _foreign(self, text: str) -> list[Any]:
        if not text:
            return []
        seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")
        return [(len(text), seed)]

    def _joined(self, pieces: list[Any]) -> list[Any]:
        """Join adjacent literals; the line ends after a stretch belong to it."""
        joined: list[Any] = []
        for piece in pieces:
            if not isinstance(piece, str):
                joined.append(self._stretch(*piece, ""))
            elif joined and isinstance(joined[-1], str):
                joined[-1] += piece
            elif joined and not piece.strip("\n"):
                characters, seed, ending = self.filler[joined[-1]]
                joined[-1] = self._stretch(characters, seed, ending + piece)
            else:
                joined.append(piece)
        return joined

    def _stretch(self, characters: int, seed: int, ending: str) -> int:
        name = f"{characters} {seed} {ending}"
        if name not in self._at:
            self._at[name] = len(self.filler)
            self.filler.append((characters, seed, ending))
        return self._at[name]


def _system(text: str, shared: Shared) -> Any:
    for mark in _SYSTEM_MARKS:
        if text.startswith(mark):
            return shared.text(text, re.compile(rf"^{re.escape(mark)}|\n\nRuntime: [^\n]*|\n+"))
    return shared.text(text, re.compile(r"\n\nRuntime: agent=[^\n]*|\n+"))


def _text(role: str, text: str, shared: Shared) -> Any:
    if role in ("system", "developer"):
        return _system(text, shared)
    if role == "user" and _AUTOMATED.search(text):
        said = _RETRIED.search(text)
        words = rf"(?<=\]\n){re.escape(said[0])}(?=\n\nContinue)|" if said else ""
        return shared.text(text, re.compile(words + _KEPT.pattern))
    if _NOTE in text:
        return shared.text(text, _AROUND_NOTES)
    return shared.value(text)


def _content(role: str, content: Any, shared: Shared) -> Any:
    if isinstance(content, str):
        return _text(role, content, shared)
    if isinstance(content, list):
        return [
            part | {"text": _text(role, part["text"], shared)} if "text" in part else part
            for part in content
        ]
    return content


def _message(message: dict[str, Any], shared: Shared) -> dict[str, Any]:
    role = message.get("role", "tool")
    return {
        name: _content(role, value, shared) if name in ("content", "output") else value
        for name, value in message.items()
    }


def _schema(value: Any, shared: Shared) -> Any:
    """Replace the prose of a tool's schema; names and types stay."""
    if isinstance(value, list):
        return [_schema(one, shared) for one in value]
    if not isinstance(value, dict):
        return value
    return {
        name: shared.text(one, None)
        if name in _PROSE_FIELDS and isinstance(one, str)
        else _schema(one, shared)
        for name, one in value.items()
    }


def _body(body: dict[str, Any], shared: Shared) -> dict[str, Any]:
    made = dict(body)
    for name in ("messages", "input"):
        if name in made:
            made[name] = [_message(message, shared) for message in made[name]]
    if "system" in made:
        made["system"] = _content("system", made["system"], shared)
    if "tools" in made:
        made["tools"] = [shared.value(_schema(tool, shared)) for tool in made["tools"]]
    return made


def main(folder: Path) -> None:
    """Write the file."""
    shared, requests = Shared(), []
    for log in sorted(folder.glob("*.jsonl")):
        for number, line in enumerate(log.read_text().splitlines(), 1):
            entry = json.loads(line)
            if entry.get("method") != "POST":
                continue
            headers = {name.lower(): value for name, value in entry["headers"]}
            requests.append(
                {
                    "scenario": log.stem,
                    "line": number,
                    "path": entry["path"],
                    "headers": {n: v for n, v in headers.items() if _HEADERS.fullmatch(n)}
                    | ({"x-api-key": "none"} if "x-api-key" in headers else {}),
                    "body": _body(entry["body"], shared),
                    "answer": entry["answer_spec"],
                }
            )
    if not requests:
        raise SystemExit(f"{folder} holds no captures, so {FILE.name} stays as it is.")
    with FILE.open("w", encoding="utf-8") as out:
        tables = {"values": shared.values, "filler": shared.filler}
        for entry in (tables, *requests):
            out.write(json.dumps(entry, ensure_ascii=False, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
