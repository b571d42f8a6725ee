"""What a request may say to a model's chat template.

Rule: a switch is set exactly as asked or refused by name. What a template does by itself is said
by no switch, so that requests which mean the same have the same prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import renderers
from renderers.base import merge_chat_template_kwargs

from tinker_claw.errors import RequestError

Switches: TypeAlias = tuple[tuple[str, Any], ...]
"""Names and values, in the order of the names; () leaves all to the template."""

_ON_OFF = ("enable_thinking", "thinking")
_EFFORT = "reasoning_effort"
_OFF = ("none", "minimal")
_NO_THINKING = "no_think"


def switches(config: Any, template: Mapping[str, Any], effort: str | None) -> Switches:
    """The switches that a request sets.

    Args:
        config: the chat format's config, of the `renderers` package.
        template: what chat_template_kwargs says.
        effort: what reasoning_effort says.

    Raises:
        RequestError: this chat format has no such switch, or does not take the value.
    """
    for name, value in template.items():
        where = f"chat_template_kwargs.{name}"
        if name not in renderers.template_field_names(config):
            raise RequestError(f"{where} is not a switch of this model.", param=where)
        if not _takes(config, {name: value}):
            raise RequestError(f"{where} does not take this value.", param=where)
    meant = {} if effort is None else _of_effort(config, effort)
    for name, value in meant.items():
        if template.get(name, value) != value:
            raise RequestError(
                f"reasoning_effort {effort} contradicts chat_template_kwargs.{name}.",
                param=_EFFORT,
            )
    asked = {**template, **meant}
    return tuple(
        (name, asked[name]) for name in sorted(asked) if asked[name] != getattr(config, name)
    )


def _of_effort(config: Any, effort: str) -> Mapping[str, Any]:
    """Switches that come nearest to an effort: a level where there are any, else on or off."""
    known = renderers.template_field_names(config)
    switch = next((name for name in _ON_OFF if name in known), None)
    off = effort in _OFF
    if _EFFORT in known:
        level = {_EFFORT: effort}
        if _takes(config, level):
            return level if switch is None else {**level, switch: not off}
        if off and _takes(config, {_EFFORT: _NO_THINKING}):
            return {_EFFORT: _NO_THINKING}
        if switch is None or not off:
            raise RequestError(
                f"reasoning_effort {effort} is not a level of this model.", param=_EFFORT
            )
    if switch is None:
        raise RequestError(
            "reasoning_effort is not a switch of this model, nor is there one for thinking.",
            param=_EFFORT,
        )
    return {switch: not off}


def _takes(config: Any, options: Mapping[str, Any]) -> bool:
    try:
        merged = merge_chat_template_kwargs(config, options)
    except (ValueError, TypeError):
        return False
    # The package reads "no" and 0 as False; here a value is what it says.
    return all(
        getattr(merged, name) == value
        and isinstance(getattr(merged, name), bool) is isinstance(value, bool)
        for name, value in options.items()
    )
