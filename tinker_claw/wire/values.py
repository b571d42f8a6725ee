"""Single values of a request, checked.

Rule: what comes back has exactly the type and the range that were asked for; anything else is
refused by name. True is no number, and no comparison turns a huge integer into a float.
"""

from __future__ import annotations

from typing import Any, cast

from tinker_claw.errors import RequestError

INT64 = 2**63


def string(value: Any, at: str, *, empty: bool = False) -> str:
    if not isinstance(value, str) or not (value or empty):
        raise RequestError(f"{at} must be a string.", param=at)
    return value


def flag(value: Any, at: str, default: bool = False) -> bool:
    """None means absent."""
    if value is None:
        return default
    if not isinstance(value, bool):
        raise RequestError(f"{at} must be true or false.", param=at)
    return value


def integer(value: Any, at: str, low: int, high: int) -> int:
    """An integer in [low, high)."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise RequestError(f"{at} must be an integer.", param=at)
    if not low <= value < high:
        raise RequestError(f"{at} must be at least {low} and below {high}.", param=at)
    return value


def number(value: Any, at: str, low: float, high: float, *, open_low: bool = False) -> float:
    """A number in [low, high], or in (low, high] where `open_low`."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise RequestError(f"{at} must be a number.", param=at)
    if not low <= value <= high or (open_low and value == low):
        least = f"above {low}" if open_low else f"at least {low}"
        raise RequestError(f"{at} must be {least} and at most {high}.", param=at)
    return float(value)


def members(value: Any, at: str) -> dict[str, Any]:
    """The non-null members of an object; None means absent."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise RequestError(f"{at} must be an object.", param=at)
    inner = cast("dict[str, Any]", value)
    return {name: entry for name, entry in inner.items() if entry is not None}


def items(value: Any, at: str) -> list[Any]:
    if not isinstance(value, list):
        raise RequestError(f"{at} must be a list.", param=at)
    return cast("list[Any]", value)


def shown(name: str) -> str:
    """A client's own name for something, short enough to be sent back."""
    return name if len(name) <= 80 else f"{name[:80]}…"
