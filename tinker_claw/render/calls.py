"""Parsed tool calls of the `renderers` package to ours.

Rule: an attempt that an agent could not execute is no call; its text is shown instead.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from renderers import ParsedToolCall, ToolCallParseStatus

from tinker_claw.types import ToolCall

# Whether a tool exists and whether an argument has the declared type is for the agent to say.
_EXECUTABLE = frozenset(
    {
        ToolCallParseStatus.OK,
        ToolCallParseStatus.UNKNOWN_TOOL,
        ToolCallParseStatus.INVALID_JSON,
    }
)


def tool_call(attempt: ParsedToolCall) -> ToolCall | None:
    """The call, with an id that agents keep as it is, or None when it is malformed."""
    if attempt.status not in _EXECUTABLE or not attempt.name:
        return None
    arguments = _compact(attempt.arguments)
    if arguments is None or not _is_text(attempt.name):
        return None
    return ToolCall(id=f"call{uuid4().hex}", name=attempt.name, arguments=arguments)


def only_call(attempts: Sequence[ParsedToolCall]) -> ToolCall | None:
    """The call in a block that should hold exactly one."""
    return tool_call(attempts[0]) if len(attempts) == 1 else None


def _is_text(name: Any) -> bool:
    """Half a surrogate pair is none: it can neither be sent nor stored."""
    try:
        return isinstance(name, str) and bool(name.encode())
    except UnicodeEncodeError:
        return False


def _compact(arguments: Any) -> str | None:
    """Compact JSON of an object, written as JavaScript writes it; None when it is no object."""
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
        value = {} if value is None else value
        if not isinstance(value, dict):
            return None
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except (ValueError, RecursionError):
        return None
    # Half a surrogate pair cannot be sent as it is; escaped it can.
    return text.encode(errors="backslashreplace").decode()
