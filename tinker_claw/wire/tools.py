"""Tools that a request offers to the model.

Rule: a tool's schema goes into the prompt as the client wrote it; only its shape is checked. No
reply is constrained to one: where a strict tool is called otherwise, the turn says so (schema.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from tinker_claw.errors import RequestError
from tinker_claw.wire.values import items

MAX_DEPTH = 64
"""Levels of nesting in one tool: deeper ones would overflow the encoder's stack later."""


def parse_tools(raw: Any) -> tuple[Mapping[str, Any], ...]:
    """Check `tools`.

    Raises:
        RequestError: names the tool and the field.
    """
    if raw is None:
        return ()
    listed = items(raw, "tools")
    tools = tuple(_tool(tool, f"tools[{i}]") for i, tool in enumerate(listed))
    if _deep(listed, MAX_DEPTH + 1):
        at = next(f"tools[{i}]" for i, tool in enumerate(listed) if _deep(tool, MAX_DEPTH))
        raise RequestError(f"{at} is nested more than {MAX_DEPTH} levels deep.", param=at)
    return tools


def _tool(raw: Any, at: str) -> Mapping[str, Any]:
    if not isinstance(raw, dict) or cast("dict[str, Any]", raw).get("type") != "function":
        raise RequestError(f"{at} must be an object of type function.", param=at)
    tool = cast("dict[str, Any]", raw)
    function = tool.get("function")
    if not isinstance(function, dict):
        raise RequestError(f"{at}.function must be an object.", param=f"{at}.function")
    _check_function(cast("dict[str, Any]", function), f"{at}.function")
    return tool


def _check_function(function: dict[str, Any], at: str) -> None:
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise RequestError(f"{at}.name must be a string.", param=f"{at}.name")
    if not isinstance(function.get("description", ""), str | None):
        raise RequestError(f"{at}.description must be a string.", param=f"{at}.description")
    if not isinstance(function.get("parameters", {}), dict | None):
        raise RequestError(f"{at}.parameters must be an object.", param=f"{at}.parameters")
    if not isinstance(function.get("strict"), bool | None):
        raise RequestError(f"{at}.strict must be true or false.", param=f"{at}.strict")


def _deep(value: Any, limit: int) -> bool:
    """Whether lists and objects are nested deeper than `limit`; counted without recursion."""
    level: list[Any] = [value]
    for _ in range(limit + 1):
        if not level:
            return False
        level = [
            entry
            for outer in level
            for entry in (outer.values() if type(outer) is dict else outer)
            if type(entry) is dict or type(entry) is list
        ]
    return True
