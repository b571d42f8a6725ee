"""`tinker-claw openclaw-config`: what OpenClaw needs to know of this gateway, and if it knows it.

Rule: it prints, and changes a file only where one is named with --write, and in it nothing but the
provider; which model an agent uses is changed only with --primary. A secret stands only where it is
asked for.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, cast
from urllib.parse import urlsplit

from pydantic import Field

from tinker_claw.cli import openclaw_file
from tinker_claw.cli.common import ANYWHERE, Command, keys, note, url_of, write
from tinker_claw.cli.openclaw_file import Change, Where, parse, set_values, shown
from tinker_claw.config.settings import Settings
from tinker_claw.errors import ConfigError
from tinker_claw.origin import is_loopback

if TYPE_CHECKING:
    from tinker_claw.backends.open import Context

SMALLEST_CONTEXT = 16_000
TOO_FEW = "too few for OpenClaw, whose system prompt and tools alone take about 11,000"


class OpenclawConfig(Command):
    """Print the provider block that points OpenClaw at the gateway of a start with the same
    flags. Nothing is changed without --write."""

    MORE: ClassVar[str] = "Exit status: 0 done, 2 a flag, a setting or the file is wrong."

    write: Path | None = Field(
        None,
        title="PATH",
        description="merge the provider into this file instead, after a backup; OpenClaw's own is "
        "~/.openclaw/openclaw.json. Comments and everything else in it stay as they are",
    )
    primary: bool = Field(
        False,
        description="with --write: also make this the model that your agents use "
        "(agents.defaults.model.primary)",
    )
    show_key: bool = Field(
        False, description="show the gateway's key instead of a reference to a variable"
    )
    user: str | None = Field(
        None,
        title="NAME",
        description="with --show-key: whose key, where users have their own",
    )

    def run(self) -> int:
        url_of(self.settings)  # the port is known
        key = self._key() if self.show_key else None
        from tinker_claw.backends.open import context_of  # half a second

        context = asyncio.run(context_of(self.settings))
        _explain(self.settings, context, key)
        if self.write is not None:
            self._merge(self.write, context, key)
            return 0
        block = {
            "models": {"providers": {PROVIDER: provider(self.settings, context.tokens, key)}},
            "agents": {"defaults": {"model": {"primary": primary(self.settings)}}},
        }
        write([json.dumps(block, indent=2, ensure_ascii=False)])
        return 0

    def _key(self) -> str | None:
        known = keys(self.settings)
        if self.user is None and len(known) <= 1:
            return next(iter(known.values()), None)
        if self.user in known:
            return known[self.user]
        if not known:
            raise ConfigError(f"--user {self.user}: this gateway has no keys")
        raise ConfigError(
            f"--show-key: name one of the users that have a key with --user: {', '.join(known)}"
        )

    def _merge(self, path: Path, context: Context, key: str | None) -> None:
        """Into the file that is there, or a new one."""
        found, ours = openclaw_file.read(path), primary(self.settings)
        before = ConfigView(found.data, self.settings)
        fixed = before.misfits(PROVIDER, context, key)
        changes = [change for misfit in fixed for change in misfit.changes]
        used = before.primary(DEFAULTS)
        if self.primary and used != ours:
            place = (*DEFAULTS, "model")
            if isinstance(_at(found.data, place), dict | None):
                place = (*place, "primary")
            changes.append((place, ours))
        text = set_values(found.text, changes)
        if not changes:
            write([f"{found.path}: nothing to change."])
        elif (backup := openclaw_file.save(found, text)) is None:
            write([f"{path}: made, with the provider {PROVIDER}."])
        else:
            names = ", ".join(shown(place) for place, _ in changes)
            write([f"{found.path}: set {names}. As it was before: {backup}"])
        if self.primary:
            after = ConfigView(parse(text), self.settings)
            for name, model in after.usual_models().items():
                if not after.is_ours(model):
                    write([f"agent {name} has a model of its own, {model}: left alone."])
        elif used != ours:
            left = f"left at {used}" if used else "not set"
            sets = f"--primary sets it to {ours}, so that your agent uses this model"
            write([f"agents.defaults.model.primary is {left}: {sets}."])


def _explain(settings: Settings, context: Context, key: str | None) -> None:
    """What a reader of the block should know, beside it."""
    gateway = settings.gateway
    note(f"contextWindow {context.tokens}: {context.source}.")
    if context.tokens < SMALLEST_CONTEXT:
        note(f"{context.tokens} tokens are {TOO_FEW}.")
    if gateway.host in ANYWHERE:
        note(
            f"The gateway listens on all addresses; {ANYWHERE[gateway.host]} is right for an "
            "OpenClaw on this machine. On another one put this machine's name or address there."
        )
    elif not is_loopback(gateway.host):
        note("Other machines reach it over plain HTTP: use a network that you trust.")
    if keys(settings) and key is None:
        note(
            f"apiKey is a reference: give OpenClaw the key in the variable {KEY_VARIABLE} (a line "
            "in ~/.openclaw/.env will do), or use --show-key to have the key itself here."
        )


# The provider block that points OpenClaw at this gateway

PROVIDER: Final = "tinker-claw"
API: Final = "openai-completions"
TIMEOUT_S: Final = 600
"""Without it OpenClaw gives up on a model elsewhere after two minutes without a word."""
ANY_KEY: Final = "anything"
"""OpenClaw wants some key; a gateway without keys takes each."""
COMPAT: Final = {"sendSessionAffinityHeaders": True, "supportsPromptCacheKey": True}
"""With these OpenClaw names the session in every request, also in calls beside the conversation."""
KEY_VARIABLE: Final = "CLAW_GATEWAY_KEY"
"""OpenClaw puts its value in the key's place. The gateway's own variables have another prefix."""


def provider(settings: Settings, context_tokens: int, key: str | None = None) -> dict[str, Any]:
    """What belongs under `models.providers.tinker-claw`.

    Args:
        key: stands in it as it is; None: a reference, where the gateway has keys.
    """
    name = settings.served_name
    return {
        "baseUrl": f"{url_of(settings)}/v1",
        "apiKey": key or (f"${{{KEY_VARIABLE}}}" if keys(settings) else ANY_KEY),
        "api": API,
        "timeoutSeconds": TIMEOUT_S,
        "models": [
            {
                "id": name,
                "name": name.rstrip("/").rsplit("/", 1)[-1],
                "contextWindow": context_tokens,
                "maxTokens": min(settings.gateway.max_reply_tokens, context_tokens),
                "compat": dict(COMPAT),
            }
        ],
    }


def primary(settings: Settings) -> str:
    """How `agents.defaults.model.primary` names the model."""
    return f"{PROVIDER}/{settings.served_name}"


# Whether OpenClaw's configuration fits this gateway: what the doctor says and what --write sets
# are the same misfits

PROVIDERS: Final = ("models", "providers")
DEFAULTS: Final = ("agents", "defaults")


@dataclass(frozen=True, slots=True)
class Misfit:
    """A value of a provider that is not as this gateway would have it."""

    changes: list[Change]
    """What --write sets; nothing: the value is the user's own."""
    said: str | None = None
    """What is wrong, without secrets; None: it works as it is."""


_SAID: Final[Mapping[Any, str]] = {
    "baseUrl": "baseUrl is {now}, not {value}",
    "api": "api is {now!r}, not {value!r}",
    "timeoutSeconds": "timeoutSeconds is {now}: with less than {value} a slow reply is given up",
    "apiKey": "apiKey is no key of this gateway: requests will be refused (HTTP 401)",
    "contextWindow": "contextWindow is {now}, not the model's {value}: OpenClaw shortens long "
    "sessions too late, and they are refused",
    **dict.fromkeys(
        COMPAT,
        "compat.{field} does not stand there: with true OpenClaw names the session in every "
        "request, without it some are told apart by their wording alone",
    ),
}
"""What is wrong where a field is not as the gateway would have it; all others work."""
_CHANNELS: Final = ("channels", "modelByChannel")


@dataclass(frozen=True, slots=True)
class ConfigView:
    """OpenClaw's configuration, of whatever shape, beside this gateway's settings."""

    config: Mapping[str, Any]
    settings: Settings

    def provider(self) -> str | None:
        """The name of the provider that points at this gateway; None: none does."""
        here = _place(url_of(self.settings))
        names = map(str, (PROVIDER, *_members(self._at(PROVIDERS))))
        return next((name for name in names if self._leads_to(name) == here), None)

    def misfits(self, name: str, context: Context, key: str | None = None) -> Iterator[Misfit]:
        """Where the provider `name` does not fit.

        Args:
            key: to be written as it is; None: a key that stands there is left, as it may work,
                and a reference to a variable may not.
        """
        root, wanted = (*PROVIDERS, name), provider(self.settings, context.tokens, key)
        if not isinstance(self._at(root), dict):
            yield Misfit([(root, wanted)])
            return
        (model,) = wanted.pop("models")
        models = self._at((*root, "models"))
        listed = isinstance(models, list)
        ids = [_at(one, ("id",)) for one in _members(models).values()] if listed else []
        fields: dict[Where, Any] = {(*root, field): value for field, value in wanted.items()}
        if model["id"] in ids:
            at, compat = (*root, "models", ids.index(model["id"])), model.pop("compat")
            fields |= {(*at, field): value for field, value in model.items()}
            fields |= {(*at, "compat", switch): value for switch, value in compat.items()}
        known = keys(self.settings).values()
        for place, value in fields.items():
            field, now = place[-1], self._at(place)
            if now == value:
                continue
            works, own = field not in _SAID, False
            number = now if isinstance(now, int | float) else math.nan
            if field == "baseUrl":
                works = str(now).rstrip("/").endswith(f":{self.settings.gateway.port}/v1")
            elif field == "timeoutSeconds":
                works = number > value
            elif field == "apiKey":
                # Into a reference to a variable or to a store of secrets nobody can look.
                reference = now is not None and not (isinstance(now, str) and now[:2] != "${")
                works = reference or not known or now in known
                own = key is None and now not in (None, "", ANY_KEY)
            elif field == "name":
                own = now is not None
            elif field == "contextWindow":
                own = now is not None and not context.certain
                works = own or number < value
            elif field in COMPAT:
                works = own = now is False  # who has set it so has done so on purpose
            wrong = None if works else _SAID[field].format(field=field, now=now, value=value)
            yield Misfit([] if own else [(place, value)], wrong and f"its {wrong}")
        if model["id"] not in ids:
            change = ((*root, "models", -1), model) if listed else ((*root, "models"), [model])
            others = ", ".join(str(one) for one in ids if one is not None) or "none"
            serves = f"the gateway serves {model['id']!r} only"
            yield Misfit([change], f"its models are {others}; {serves}")

    def usual_models(self) -> dict[str, str | None]:
        """The model that each agent uses, its own or the default; None: none is named.

        Without a list of agents there is one, which has no name here.
        """
        default = self.primary(DEFAULTS)
        agents = self._agents() or {"": DEFAULTS}
        return {name: self.primary(path) or default for name, path in agents.items()}

    def elsewhere(self) -> Iterator[str]:
        """What answers for agents and is not this gateway: whose it is, the model, where it stands.

        Fallbacks are among them, and models pinned for heartbeats, compaction, titles or a channel.
        """
        owners = {f"agent {name}": path for name, path in self._agents().items()}
        for owner, path in {**owners, "all agents": DEFAULTS, "channels": _CHANNELS}.items():
            for place, model in _texts(self._at(path), path):
                *_, field = (key for key in place if isinstance(key, str))
                names = field.lower().endswith("model") or field in ("primary", "fallbacks")
                if (names or path == _CHANNELS) and not self.is_ours(model):
                    yield f"{owner}: {model} ({shown(place)})"
        if None in self.usual_models().values():
            yield f"all agents: no model is named ({shown(DEFAULTS)}.model.primary)"

    def primary(self, path: Where) -> str | None:
        """OpenClaw takes a string, or an object that has fallbacks, too."""
        told = (*path, "model")
        return _text(self._at(told)) or _text(self._at((*told, "primary")))

    def _agents(self) -> dict[str, Where]:
        """Names and places, of today's configurations and of older ones, which have a list."""
        found = dict[str, Where]()
        for where in (("agents", "entries"), ("agents", "list")):
            for key, agent in _members(self._at(where)).items():
                if isinstance(agent, dict):
                    name = key if isinstance(key, str) else _text(_at(agent, ("id",)))
                    found.setdefault(name or str(key), (*where, key))
        return found

    def is_ours(self, model: str | None) -> bool:
        """Whether a name leads to this gateway: `provider/model`, an alias, or the model alone."""
        if model is None:
            return False
        aliases = _members(self._at((*DEFAULTS, "models"))).items()
        model = next((str(name) for name, told in aliases if _at(told, ("alias",)) == model), model)
        provider, _, name = model.partition("/")
        if place := self._leads_to(provider):
            here = place == _place(url_of(self.settings))
            return here and name.partition("@v")[0] == self.settings.served_name
        return self.provider() is not None and model == self.settings.served_name

    def _leads_to(self, provider: str) -> tuple[str, int | None] | None:
        """Where a provider is, as `_place`; None: it does not say."""
        url = _text(self._at((*PROVIDERS, provider, "baseUrl")))
        return None if url is None else _place(url)

    def _at(self, path: Where) -> Any:
        return _at(self.config, path)


# A configuration of any shape


def _members(value: Any) -> dict[str | int, Any]:
    """Of an object by their keys, of a list by their indices."""
    if isinstance(value, list):
        return dict(enumerate(cast("list[Any]", value)))
    return cast("dict[str | int, Any]", value) if isinstance(value, dict) else {}


def _at(config: Any, path: Where) -> Any:
    for key in path:
        config = _members(config).get(key)
    return config


def _texts(value: Any, path: Where) -> Iterator[tuple[Where, str]]:
    """All of them below a place, and where each stands."""
    if text := _text(value):
        yield path, text
    for key, inner in _members(value).items():
        yield from _texts(inner, (*path, key))


def _text(value: Any) -> str | None:
    return value.strip() or None if isinstance(value, str) else None


def _place(url: str) -> tuple[str, int | None]:
    """The machine and the port, as far as the names tell."""
    try:
        split = urlsplit(url)
        host = ANYWHERE.get(split.hostname or "", split.hostname or "")
        return ("localhost" if is_loopback(host) else host, split.port)
    except ValueError:
        return url, None
