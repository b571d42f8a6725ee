"""Command line, environment and TOML file into one `Settings`.

Rules: the command line wins over the environment (`TINKER_CLAW_<SECTION>__<FIELD>`), that over the
file, that over NUM_GPUS and its like, those over the defaults. Nothing else reads the environment.
Unknown keys are refused by their dotted name. Users come from the file, or as JSON from
`TINKER_CLAW_USERS`.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from functools import reduce
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar, cast

import click
from pydantic import BaseModel, ValidationError
from pydantic_settings import EnvSettingsSource, SettingsError

from tinker_claw.config.check import API_KEY, check
from tinker_claw.config.flags import describe, flag_of, has_flag, parameters
from tinker_claw.config.own_key import with_own_key
from tinker_claw.config.settings import ENV_PREFIX, USERS, VARIABLES, Settings, sections
from tinker_claw.errors import ConfigError
from tinker_claw.shipped import MODELS, config_file, shipped_configs

M = TypeVar("M", bound=BaseModel)
CONFIG = "__config"
"""The flag that names a file: of no section."""
ELSEWHERE = (
    "Every flag can also be set in a TOML file ([section] field = value) or in the environment "
    f"({ENV_PREFIX}<SECTION>__<FIELD>); docs/settings.md says when to change them. Keys are set "
    f"there alone. {', '.join(VARIABLES.values())} are honoured for --backend local where nothing "
    "else sets them. Users with keys of their own are tables [[users]] (name, key) of the file, or "
    f"a JSON list in {ENV_PREFIX}{USERS.upper()}."
)
"""Help text on where settings can come from besides the command line."""


def load(arguments: Sequence[str]) -> Settings:
    """Read settings for this command line.

    Raises:
        ConfigError: an unknown flag or key, a file that cannot be read, a value out of range: by
            name.
    """
    command = click.Command("tinker-claw", params=[*flags()], add_help_option=False)
    try:
        with command.make_context("tinker-claw", list(arguments)) as context:
            return load_given(context.params)
    except click.UsageError as error:
        raise ConfigError(error.format_message()) from error


def load_given(parsed: Mapping[str, Any]) -> Settings:
    """Settings where these flags were given, by `<section>__<field>`; what is None was not.

    Raises:
        ConfigError: as `load`.
    """
    path = settings_file(parsed)
    by_section: dict[str, Any] = {}
    for destination, value in parsed.items():
        section, _, name = destination.partition("__")
        if section and name and value is not None:
            by_section.setdefault(section, {})[name] = value
    file = read_toml("--config", path) if path else {}
    values = reduce(_merged, (file, _read_environment(), by_section))
    if _wants_gpus(values.get("run")):
        values = _merged(_read_variables(), values)
    try:
        settings = Settings(**values)
    except ValidationError as error:
        raise ConfigError(describe(error, _named)) from error
    if "api_key" not in values.get("gateway", {}):
        settings = with_own_key(settings)
    check(settings)
    return settings


def settings_file(parsed: Mapping[str, Any]) -> Path | None:
    """Return the settings file in force where these flags were given; None: there is none.

    It is that of `--config`, else the one that the first start wrote, where neither flags nor
    variables say what is to run.
    """
    if path := parsed.get(CONFIG):
        return config_file(path)
    file = first_file()
    return file if not names_run(parsed) and file.is_file() else None


def names_run(parsed: Mapping[str, Any]) -> bool:
    """Return whether flags or variables say what is to run, other than by a settings file."""
    by_flag = any(flag.startswith("run__") for flag, value in parsed.items() if value is not None)
    return by_flag or any(name.startswith(f"{ENV_PREFIX}RUN__") for name in os.environ)


def first_file() -> Path:
    """The settings file that the first start writes."""
    return config_folder() / "tinker-claw" / "settings.toml"


def config_folder() -> Path:
    """Folder in which the user's programs keep their settings."""
    return Path(os.path.expanduser(os.environ.get("XDG_CONFIG_HOME") or "~/.config"))


def flags() -> list[click.Parameter]:
    """Return the flag that names a settings file, and the flags of all sections."""
    file = click.Option(
        ["--config", CONFIG],
        type=click.Path(),
        metavar="FILE",
        help="a TOML file of settings, or a shipped one (1x80GB)",
    )
    keyless = click.Option(
        ["--api-key", "gateway__api_key"],
        type=click.Choice(["none"]),
        help="none: no key is needed, although others have accounts on this machine; a key "
        f"itself stands in {API_KEY}",
    )
    of_sections = (parameters(model, name) for name, model in sections().items())
    return [file, keyless, *chain.from_iterable(of_sections)]


# Sources


def read_toml(flag: str, path: Path) -> dict[str, Any]:
    """The file that a flag names.

    Raises:
        ConfigError: it is no TOML, or is not there.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        cure = "fix the path, or leave it out"
        if flag == "--config":
            cure += f"; shipped files go by their names alone: {', '.join(shipped_configs())}"
        raise ConfigError(f"{flag} {path} cannot be read ({error.strerror}): {cure}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{flag} {path} is not valid TOML: {error}") from error


def read_as(model: type[M], flag: str, path: Path) -> M:
    """The file that a flag names, as this model has it.

    Raises:
        ConfigError: as `read_toml`, or an entry is wrong; names all that are.
    """
    try:
        return model.model_validate(read_toml(flag, path))
    except ValidationError as error:
        raise ConfigError(f"{flag} {path}: {describe(error, _dotted)}") from error


def _read_environment() -> dict[str, Any]:
    prefixes = tuple(f"{ENV_PREFIX}{name.upper()}__" for name in sections())
    for name in os.environ:
        is_setting = name.startswith(prefixes) or name == ENV_PREFIX + USERS.upper()
        if name.startswith(ENV_PREFIX) and not is_setting:
            raise ConfigError(
                f"environment: {name} names no setting (tinker-claw --help-all lists them)"
            )
    try:
        tree = cast("Any", Settings)  # it takes any model, and is declared for one of its own
        return EnvSettingsSource(tree, env_prefix=ENV_PREFIX, env_nested_delimiter="__")()
    except SettingsError as error:
        raise ConfigError(
            f"environment: a variable for a table, as {ENV_PREFIX}JUDGE__HEADERS, must be a JSON "
            f"object, and one for a list a JSON list: {ENV_PREFIX}{USERS.upper()} "
            f'[{{"name": ..., "key": ...}}], {ENV_PREFIX}GATEWAY__CHATS__OWNERS ["telegram:1"]'
        ) from error


def _wants_gpus(run: Any) -> bool:
    """Return whether a run uses GPUs; a service or a shipped model needs none."""
    fields = cast("Mapping[str, Any]", run) if isinstance(run, Mapping) else {}
    return fields.get("backend") == "local" and fields.get("model_name") not in MODELS


def _read_variables() -> dict[str, Any]:
    """OpenClaw-RL's variables. Other programs may know such names, so an empty one is none."""
    variables = {field: os.environ.get(name, "").strip() for field, name in VARIABLES.items()}
    return {"local": {field: value for field, value in variables.items() if value}}


def _merged(values: dict[str, Any], later: dict[str, Any]) -> dict[str, Any]:
    """Merge two layers field by field; the later one wins."""
    return values | {
        key: _merged(values[key], value)
        if isinstance(value, dict) and isinstance(values.get(key), dict)
        else value
        for key, value in later.items()
    }


def _dotted(place: tuple[int | str, ...]) -> str:
    return ".".join(map(str, place))


def _named(place: tuple[int | str, ...]) -> str:
    """Return the dotted name of a setting, with the flag and the variable that may have set it."""
    section, name = (*map(str, place), "", "")[:2]
    model, sources = sections().get(section), list[str]()
    if model and name in model.model_fields and has_flag(model.model_fields[name]):
        sources.append(flag_of(name))
    if section == "local" and name in VARIABLES:
        sources.append(VARIABLES[name])
    return _dotted(place) + (f" ({', '.join(sources)})" if sources else "")
