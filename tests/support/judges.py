"""What a judge answers, for tests that speak for one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def rated(rating: int, quote: str = "", hint: str = "", **more: Any) -> str:
    """An answer in the form that judges are asked for."""
    said = {"reasoning": "So it was.", "quote": quote, "hint": hint, **more, "rating": rating}
    return json.dumps(said)


def asks_hint(schema: Mapping[str, Any]) -> bool:
    """Whether an answer by this schema has a hint."""
    return "hint" in schema["properties"]
