"""Tools that a request offers to the model.

Rule: a tool's schema goes into the prompt as the client wrote it; only its shape is checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from tinker_claw.errors import RequestError

MAX_DEPTH = 64
"""Levels of nesting in one schema: deeper ones would overflow the encoder's stack later."""


def parse_tools(raw: Any) -> tuple[Mapping[str, Any], ...]:
    """Check `tools`.

    Raises:
        RequestError: names the tool and the field.
    """
    if raw is None:
        return ()
    if not isinstance(raw, list):
        raise RequestError("tools must be a list.", param="tools")
    tools = cast("list[Any]", raw)
    return tuple(_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools))


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
    if function.get("strict"):
        raise RequestError(
            f"{at}.strict cannot be honoured: replies are not constrained to a schema.",
            param=f"{at}.strict",
        )
    if _depth(function) > MAX_DEPTH:
        raise RequestError(f"{at} is nested more than {MAX_DEPTH} levels deep.", param=at)


def _depth(value: Any) -> int:
    """Levels of lists and objects, counted without recursion."""
    depth, level = 0, [value]
    while level and depth <= MAX_DEPTH:
        inner: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                inner.extend(cast("dict[str, Any]", item).values())
            elif isinstance(item, list):
                inner.extend(cast("list[Any]", item))
        depth, level = depth + 1, inner
    return depth
