"""Flags of the command line, derived from fields.

Rule: a flag is declared once, as a pydantic field: its name, type, choices, bounds, default, help
and completion follow from that. click reads and completes words; pydantic makes values of them.
"""

from __future__ import annotations

from pathlib import Path
from types import NoneType
from typing import Any, Final, Literal, get_args, get_origin

import click
from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

WORD: Final = "word"
"""Beside a type (`Annotated[int, WORD]`): a word of its own instead of a flag with a value."""


def parameters(model: type[BaseModel], section: str = "") -> list[click.Parameter]:
    """One parameter a field, in their order, where it has one.

    Those of a section of the settings are named `<section>__<field>`, and None unless given.
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
    """Choice whose value the settings check, in sentences of their own."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        return value


def _parameter(name: str, field: FieldInfo, section: str) -> click.Parameter:
    kind, many = _kind(field.annotation)
    if WORD in field.metadata:
        return click.Argument(
            [name],
            type=kind,
            nargs=-1 if many else 1,
            required=field.is_required(),
            metavar=field.title,
            help=field.description,
        )
    flag, description = (field.alias or name).replace("_", "-"), field.description or ""
    options: dict[str, Any] = {"default": None, "type": kind}
    if kind is click.BOOL:
        options["is_flag"] = True
    elif not isinstance(kind, click.Choice):
        options["metavar"] = field.title or name.rsplit("_", 1)[-1].upper()
    if section:
        extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        unset = field.default is None or field.default is False
        default = "" if unset else f"default {field.default}"
        facts = ", ".join(str(fact) for fact in (extra.get("unit"), default) if fact)
        description += f" ({facts})" if facts else ""
        if isinstance(kind, click.Choice):
            options["type"] = _Checked(kind.choices)
    names = f"--{flag}/--no-{flag}" if section and kind is click.BOOL else f"--{flag}"
    return click.Option(
        [names, f"{section}__{name}" if section else name], help=description, **options
    )


def wrong(name: str, field: FieldInfo, typed: Any, problem: ErrorDetails) -> str:
    """Say which flag or word is wrong, as it was typed, and what it takes."""
    at = problem["loc"][-1]
    if isinstance(typed, tuple) and isinstance(at, int):
        typed = typed[at]
    flag = f"--{field.alias or name}".replace("_", "-")
    flag = field.title or name.upper() if WORD in field.metadata else flag
    return f"{flag} {typed!r}: {takes(problem)}"


_TAKES = {
    "int_parsing": "it takes a whole number",
    "float_parsing": "it takes a number",
    "finite_number": "it takes a finite number",
    "greater_than": "it takes more than {gt}",
    "greater_than_equal": "it takes {ge} or more",
    "less_than": "it takes less than {lt}",
    "less_than_equal": "it takes {le} or less",
    "literal_error": "it takes {expected}",
    "value_error": "{error}",
}
"""Sentences about what a value must be, by pydantic's types of errors."""


def takes(problem: ErrorDetails) -> str:
    """Say what is wrong with a value, or what it has to be."""
    template = _TAKES.get(problem["type"])
    return problem["msg"] if template is None else template.format_map(problem.get("ctx", {}))


def _kind(annotation: Any) -> tuple[click.ParamType[Any], bool]:
    """Return click's type for a field, and whether the flag may be repeated."""
    kinds = [kind for kind in get_args(annotation) or (annotation,) if kind is not NoneType]
    if get_origin(annotation) is Literal:
        return click.Choice(list(kinds)), False
    if all(get_origin(kind) is Literal for kind in kinds):
        return click.Choice([word for kind in kinds for word in get_args(kind)]), False
    if Path in kinds:
        return click.Path(), False
    return click.BOOL if kinds == [bool] else click.STRING, get_origin(annotation) is tuple
