"""Flags of the command line, derived from fields.

Rule: a flag is declared once, as a pydantic field: its name, type, choices, bounds, default, help
and completion follow from that. click reads and completes words; pydantic makes values of them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import click
from pydantic import BaseModel, SecretStr, ValidationError
from pydantic.fields import FieldInfo


def parameters(model: type[BaseModel], section: str) -> list[click.Parameter]:
    """One parameter a field of a section of the settings, where it has one, in their order.

    They are named `<section>__<field>`, and None unless given.
    """
    return [
        _parameter(name, field, section)
        for name, field in model.model_fields.items()
        if has_flag(field)
    ]


def has_flag(field: FieldInfo) -> bool:
    """Return whether a field has a flag; secrets and tables have none."""
    kinds = get_args(field.annotation) or (field.annotation,)
    tables = any(isinstance(kind, type) and issubclass(kind, BaseModel) for kind in kinds)
    return not tables and SecretStr not in kinds


class _Checked(click.Choice[str]):
    """Choices that help and completion show; the settings check the value, and say what to write
    instead."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        return value


def _parameter(name: str, field: FieldInfo, section: str) -> click.Parameter:
    kind, flag = _kind(field.annotation), flag_of(name)
    options: dict[str, Any] = {"default": None, "type": kind}
    if kind is click.BOOL:
        flag = f"{flag}/--no-{flag[2:]}"
    elif not isinstance(kind, click.Choice):
        options["metavar"] = name.rsplit("_", 1)[-1].upper()
    extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
    default = f"default {field.default}" if field.default not in (None, False) else ""
    facts = ", ".join(str(fact) for fact in (extra.get("unit"), default) if fact)
    described = f"{field.description} ({facts})" if facts else field.description
    return click.Option([flag, f"{section}__{name}"], help=described, **options)


def flag_of(name: str) -> str:
    """Return the flag of a field."""
    return f"--{name}".replace("_", "-")


def describe(error: ValidationError, named: Callable[[tuple[int | str, ...]], str]) -> str:
    """Say what is wrong with values. `named`: returns the name of the value at a place."""
    sentences = list[str]()
    for problem in error.errors(include_input=False):
        sentence = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "extra_forbidden":
            sentence = "there is no such setting"
        sentences.append(f"{named(problem['loc'])}: {sentence}")
    return "; ".join(sentences)


def _kind(annotation: Any) -> click.ParamType[Any]:
    """Return click's type for a field."""
    kinds = [kind for kind in get_args(annotation) or (annotation,) if kind is not NoneType]
    if get_origin(annotation) is Literal:
        return _Checked(list(kinds))
    if Path in kinds:
        return click.Path()
    return click.BOOL if kinds == [bool] else click.STRING
