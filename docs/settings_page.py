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
from tinker_claw.config.settings import ENV_PREFIX, VARIABLES, sections

_VARIABLES: Final = ", ".join(f"`{variable}`" for variable in VARIABLES.values())
_HEAD: Final = f"""# Settings

<!-- Written by `python -m docs.settings_page > docs/settings.md`: change the declarations in
tinker_claw/config/settings.py, and run it again. -->

A setting is a flag of `run.py`, an environment variable, and a key of the TOML file that
`--config` names:

```sh
python run.py --batch-size 8
{ENV_PREFIX}TRAINING__BATCH_SIZE=8 python run.py
python run.py --config mine.toml        # [training]
                                        # batch_size = 8
```

Flags win over the environment, the environment over the file. Secrets have no flag: every user of
the machine can read command lines. With `--backend local` {_VARIABLES} count, too. Users stand in
`[[users]]` of the file ([access](access.md#keys-and-users)).
"""
_COLUMNS: Final = ("setting", "default", "meaning, *when to change it*")
_CODE: Final = re.compile(
    r"(?<![\w`-])(--[a-z][a-z-]+(?: cpu| local| constant| train| paper)?|runs/<model>-<method>"
    r"|\[+(?:users|(?:judge|gateway)\.[a-z.]+)\]+)"
)
"""What stands in a declaration as plain text, and would be read as Markdown or HTML."""


def settings_page() -> str:
    """The page in Markdown: a table per section."""
    parts = [_HEAD]
    for name, model in sections().items():
        parts.append(f"## {name}\n\n{_table(_COLUMNS, [*_rows(name, model)])}")
    return "\n".join(parts)


def _rows(section: str, model: type[BaseModel]) -> Iterator[list[str]]:
    flags = {flag.name: flag for flag in parameters(model, section)}
    for name, field in model.model_fields.items():
        flag, extra = flags.get(f"{section}__{name}"), cast("Any", field.json_schema_extra)
        when = extra["when"]
        words = [*flag.opts, *flag.secondary_opts] if flag else []
        yield [
            f"{', '.join(f'`{word}`' for word in words) or 'no flag'}<br>`{section}.{name}`"
            f"<br>`{ENV_PREFIX}{section.upper()}__{name.upper()}`",
            "; ".join(_values(field, flag, extra["unit"])),
            _CODE.sub(r"`\1`", f"{field.description}{when and f'.<br>*{when}*'}"),
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


def _table(columns: tuple[str, ...], rows: list[list[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    sys.stdout.write(settings_page())
