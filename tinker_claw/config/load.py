"""Command line, environment and TOML file into one `Settings`.

Rules: the command line wins over the environment (`TINKER_CLAW_<SECTION>__<FIELD>`), that over the
file, that over NUM_GPUS and its like, those over the defaults. Nothing else reads the environment.
Unknown keys are refused by their dotted name. Users come from the file, or as JSON from
`TINKER_CLAW_USERS`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import textwrap
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn, cast

from pydantic import ValidationError
from pydantic_settings import EnvSettingsSource, SettingsError

from tinker_claw.config.check import check
from tinker_claw.config.settings import (
    DEMO,
    ENV_PREFIX,
    USERS,
    Declared,
    Settings,
    declared,
    sections,
)
from tinker_claw.errors import ConfigError

PURPOSE: Final = "Serve a model to your agent, and let it learn from how the agent is used."
COMMON: Final = (
    *("run.model_name", "run.backend", "run.method"),
    *("gateway.port", "training.observe", "spend.budget_usd"),
)
"""What most starts set; --help shows these, --help-all every flag."""
VARIABLES: Final = {
    "NUM_GPUS": "gpus",
    "ACTOR_GPUS": "actor_gpus",
    "ROLLOUT_GPUS": "rollout_gpus",
    "PRM_GPUS": "prm_gpus",
}
"""OpenClaw-RL's variables, and the fields that they set where nothing else does."""


def load(arguments: Sequence[str]) -> Settings:
    """Read settings for this command line.

    Raises:
        ConfigError: a file that cannot be read, an unknown key, a value out of range: by name.
        SystemExit: argparse's, for --help and malformed flags.
    """
    return _settings(parser().parse_args(arguments))


def load_known(arguments: Sequence[str]) -> tuple[Settings, list[str]]:
    """Settings for a command that takes more than the flags of run.py, and what is left for it.

    Raises:
        ConfigError: as `load`.
    """
    given, rest = parser().parse_known_args(arguments)
    return _settings(given), rest


def _settings(flags_given: argparse.Namespace) -> Settings:
    given = vars(flags_given)
    path = cast("Path | None", given.pop("config"))
    flags: dict[str, Any] = {}
    for destination, value in given.items():
        section, name = destination.split(".")
        flags.setdefault(section, {})[name] = value
    layers = (_read_file(path) if path else {}, _read_environment(), flags)
    values = _merge(layers)
    if _wants_gpus(values.get("run")):
        values = _merge((_read_variables(), values))
    settings = _build(values)
    check(settings)
    return settings


# Flags and their help


class Flags(argparse.ArgumentParser):
    """A parser that says what is wrong in a sentence, without repeating all there is."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"tinker-claw: {message} ({self.prog} --help says more)\n")


def parser() -> argparse.ArgumentParser:
    """The flags, grouped by section, derived from the declarations."""
    top = Flags(
        prog="run.py",
        description=PURPOSE,
        epilog="Every flag can also be set in a TOML file ([section] field = value) or in the "
        f"environment ({ENV_PREFIX}<SECTION>__<FIELD>); docs/settings.md says when to change them. "
        f"Keys are set there alone. {', '.join(VARIABLES)} are honoured for --backend local where "
        "nothing else sets them. Users with keys of their own are tables [[users]] (name, key) of "
        f"the file, or a JSON list in {ENV_PREFIX}{USERS.upper()}.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
        add_help=False,
    )
    top.add_argument("--config", type=Path, default=None, metavar="FILE", help="TOML settings file")
    top.add_argument(
        *("-h", "--help"),
        action="help",
        help="show the flags that most starts set, and the commands",
    )
    top.add_argument("--help-all", action="help", help="show every flag")
    groups = {
        name: top.add_argument_group(name, (model.__doc__ or "").strip())
        for name, model in sections().items()
    }
    for setting in declared():
        if setting.flag is None:
            continue
        options: dict[str, Any] = {"dest": setting.key, "help": _help(setting).replace("%", "%%")}
        if setting.switch:
            options["action"] = argparse.BooleanOptionalAction
        elif setting.choices:
            options["choices"] = list(setting.choices)
        else:
            options["metavar"] = _metavar(setting)
        groups[setting.section].add_argument(setting.flag, **options)
    return top


def _metavar(setting: Declared) -> str:
    return setting.name.rsplit("_", 1)[-1].upper()


def _help(setting: Declared) -> str:
    default = setting.field.default
    facts = [setting.unit, "" if default is None else f"default {default}"]
    shown = ", ".join(fact for fact in facts if fact)
    return f"{setting.told} ({shown})" if shown else setting.told


def brief_help() -> str:
    """The flags that most starts set, in a few lines."""
    width = max(60, shutil.get_terminal_size().columns)
    told = {"--config FILE": "a TOML file that sets any of them"}
    for setting in declared():
        if setting.key in COMMON:
            metavar = "" if setting.switch else f" {_metavar(setting)}"
            of = f"{' or '.join(setting.choices)}, " if setting.choices else ""
            default = setting.field.default
            shown = f" ({of}default {default})" if metavar and default is not None else ""
            told[f"{setting.flag}{metavar}"] = f"{setting.told}{shown}"
    column = max(map(len, told)) + 4
    lines = [
        line
        for flag, text in told.items()
        for line in textwrap.wrap(
            text, width, initial_indent=f"  {flag:<{column - 2}}", subsequent_indent=" " * column
        )
    ]
    return "\n".join(["usage: run.py [COMMAND] [flags]", "", PURPOSE, "", *lines, ""])


def others_help(*, whole: bool) -> str:
    """The flags of run.py, to stand under those of a command that takes them, too.

    Args:
        whole: all of them; else where they stand.
    """
    if not whole:
        return "\n--help-all shows those of run.py, too.\n"
    flags = parser()
    flags.usage, flags.description = argparse.SUPPRESS, None
    return "\n" + flags.format_help()


# Sources


def _read_file(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"--config {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path} is not valid TOML: {error}") from error


def _read_environment() -> dict[str, Any]:
    prefixes = tuple(f"{ENV_PREFIX}{name.upper()}__" for name in sections())
    for name in os.environ:
        known = name.startswith(prefixes) or name == ENV_PREFIX + USERS.upper()
        if name.startswith(ENV_PREFIX) and not known:
            raise ConfigError(
                f"environment: {name} names no setting (run.py --help-all lists them)"
            )
    try:
        return EnvSettingsSource(Settings)()
    except SettingsError as error:
        raise ConfigError(
            f"environment: {ENV_PREFIX}{USERS.upper()} must be a JSON list of users, "
            '[{"name": ..., "key": ...}]'
        ) from error


def _wants_gpus(run: Any) -> bool:
    """Neither a service nor the demo's model asks for any."""
    given = cast("Mapping[str, Any]", run) if isinstance(run, Mapping) else {}
    return given.get("backend") == "local" and given.get("model_name") != DEMO


def _read_variables() -> dict[str, Any]:
    """OpenClaw-RL's variables. Other programs may know such names, so an empty one is none."""
    given = {field: os.environ.get(name, "").strip() for name, field in VARIABLES.items()}
    return {"local": {field: value for field, value in given.items() if value}}


def _merge(layers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Later layers win, field by field."""
    merged: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            if isinstance(value, Mapping) and isinstance(merged.get(key), Mapping):
                merged[key] = {**merged[key], **value}
            else:
                merged[key] = value
    return merged


def _build(values: Mapping[str, Any]) -> Settings:
    try:
        return Settings(**values)
    except ValidationError as error:
        problems = "; ".join(
            f"{_named(e['loc'])}: {_reason(e)}" for e in error.errors(include_input=False)
        )
        raise ConfigError(f"settings: {problems}") from error


def _named(location: tuple[int | str, ...]) -> str:
    dotted = ".".join(str(part) for part in location)
    variable = next((v for v, field in VARIABLES.items() if dotted == f"local.{field}"), None)
    return f"{dotted} ({variable})" if variable else dotted


def _reason(problem: Mapping[str, Any]) -> str:
    if problem["type"] == "extra_forbidden":
        return "there is no such setting (run.py --help-all lists them)"
    return str(problem["msg"])
