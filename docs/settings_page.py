"""The settings page, docs/settings.md: every setting, of its declaration.

`python -m docs.settings_page > docs/settings.md` renews it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any, Final, cast

import click
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from tinker_claw.config.flags import parameters
from tinker_claw.config.settings import (
    ENV_PREFIX,
    USERS,
    VARIABLES,
    Chats,
    User,
    sections,
)

_VARIABLES: Final = ", ".join(f"`{variable}`" for variable in VARIABLES.values())
_HEAD: Final = f"""# Settings

<!-- Written by `python -m docs.settings_page > docs/settings.md`: change the declarations in
tinker_claw/config/settings.py, and run it again. -->

A setting is a flag of `run.py`, an environment variable, and a key of a TOML file that
`--config FILE` names:

```sh
python run.py --batch-size 8
{ENV_PREFIX}TRAINING__BATCH_SIZE=8 python run.py
python run.py --config mine.toml        # [training]
                                        # batch_size = 8
```

Flags win over the environment, the environment over the file, the file over the defaults. An
unknown name is refused. Secrets have no flag: every user of the machine can read command lines.
With `--backend local` {_VARIABLES} count, too, where no setting names these GPUs.
"""
_COLUMNS: Final = ("setting", "default; what else it can be", "what it is, and *when to change it*")
_CODE: Final = re.compile(
    r"(?<![\w`-])(--[a-z][a-z-]+(?: cpu| local| constant| train| paper)?|runs/<model>-<method>"
    r"|\[+(?:users|(?:judge|gateway)\.[a-z.]+)\]+)"
)
"""What stands in a declaration as plain text, and would be read as Markdown or HTML."""


def settings_page() -> str:
    """The page in Markdown: a table per section."""
    parts = [_HEAD]
    for name, model in sections().items():
        told = (model.__doc__ or "").strip()
        parts.append(f"## {name}\n\n{told}.\n\n{_table(_COLUMNS, [*_rows(name, model)])}")
    parts.append(_of_file("gateway.chats", Chats, "."))
    variable = f"{ENV_PREFIX}{USERS.upper()}"
    parts.append(_of_file(USERS, User, f", or an object of the JSON list in `{variable}`."))
    return "\n".join(parts)


def _rows(section: str, model: type[BaseModel]) -> Iterator[list[str]]:
    flags = {flag.name: flag for flag in parameters(model, section)}
    for name, field in model.model_fields.items():
        flag, extra = flags.get(f"{section}__{name}"), cast("Any", field.json_schema_extra)
        words = [*flag.opts, *flag.secondary_opts] if flag else []
        yield [
            f"{', '.join(f'`{word}`' for word in words) or 'no flag'}<br>`{section}.{name}`"
            f"<br>`{ENV_PREFIX}{section.upper()}__{name.upper()}`",
            "; ".join(_values(field, flag, extra["unit"])),
            _CODE.sub(r"`\1`", f"{field.description}.<br>*{extra['when']}*"),
        ]


def _values(field: FieldInfo, flag: click.Parameter | None, unit: str) -> Iterator[str]:
    """The default with its unit, then the other choices or the bounds."""
    kind = flag.type if flag else None
    default = str(field.default).lower() if kind is click.BOOL else field.default
    if field.default in (None, {}) or isinstance(field.default, BaseModel):
        yield f"unset ({unit})" if unit else "unset"
    else:
        yield f"`{default}` {unit}".strip()
    if isinstance(kind, click.Choice):
        yield ", ".join(f"`{choice}`" for choice in kind.choices if choice != default)
    elif bounds := ", ".join(_bounds(field.metadata)):
        yield f"`{bounds}`"


def _bounds(rules: Iterable[Any]) -> Iterator[str]:
    for rule in rules:
        for name, sign in (("ge", ">="), ("gt", ">"), ("le", "<=")):
            if hasattr(rule, name):
                yield f"{sign}{getattr(rule, name)}"


def _of_file(name: str, model: type[BaseModel], otherwise: str) -> str:
    """A table that has no flags. `otherwise`: how else it can be set."""
    rows: list[list[str]] = []
    for key, field in model.model_fields.items():
        default = "needed" if field.is_required() else f"`{field.default}`"
        rows.append([f"`{key}`", "unset" if field.default in (None, {}) else default])
        rows[-1].append(_CODE.sub(r"`\1`", field.description or ""))
    told = _CODE.sub(r"`\1`", (model.__doc__ or "").strip())
    return f"## {name}\n\n{told}{otherwise}\n\n" + _table(("key", "default", "what it is"), rows)


def _table(columns: tuple[str, ...], rows: list[list[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    sys.stdout.write(settings_page())
