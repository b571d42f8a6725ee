"""`tinker-claw openclaw-config`: what OpenClaw needs to know of this gateway, and if it knows it.

Rule: OpenClaw's file is OpenClaw's: it is read here, and only its own `openclaw config set` writes
it. No key stands in a command.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, cast
from urllib.parse import urlsplit

from pydantic import Field

from tinker_claw.cli.common import ANYWHERE, Command, keys, note, url_of, write
from tinker_claw.config.settings import Settings
from tinker_claw.errors import ConfigError
from tinker_claw.origin import is_loopback

if TYPE_CHECKING:
    from tinker_claw.backends.open import Context

Where = tuple[str | int, ...]
"""Keys and indices from the root."""
SMALLEST_CONTEXT: Final = 32_768


class OpenclawConfig(Command):
    """Print the provider block that points OpenClaw at the gateway of a start with the same
    flags, and the commands by which OpenClaw takes it."""

    MORE: ClassVar[str] = (
        "Exit status: 0 done, 2 a flag or a setting is wrong, or OpenClaw refuses."
    )

    write: bool = Field(
        False,
        description="run the first command: OpenClaw writes its file anew (without the comments "
        "in it) and keeps the old one as .bak",
    )
    primary: bool = Field(
        False, description="with --write: run the second one, too, so that your agents use it"
    )

    def run(self) -> int:
        url_of(self.settings)  # the port is known
        from tinker_claw.backends.open import context_of  # half a second

        context = asyncio.run(context_of(self.settings))
        if (refusal := too_small(context.tokens)) is not None:
            raise ConfigError(f"{refusal}. Now it is {context.tokens:,}: {context.source}")
        _explain(self.settings, context)
        ours, used = provider(self.settings, context.tokens), primary(self.settings)
        commands = [
            _set("models.providers." + PROVIDER, _json(ours), "--strict-json", "--merge"),
            _set("agents.defaults.model.primary", used),
        ]
        if self.write:
            _carry_out(commands if self.primary else commands[:1])
            return 0
        block = {
            "models": {"providers": {PROVIDER: ours}},
            "agents": {"defaults": {"model": {"primary": used}}},
        }
        told = json.dumps(block, indent=2, ensure_ascii=False)
        write([told, "", *map(shlex.join, commands)])
        return 0


def too_small(context_tokens: int) -> str | None:
    """Why OpenClaw cannot be served with such a window, and what helps; None: it can."""
    if context_tokens >= SMALLEST_CONTEXT:
        return None
    return (
        f"OpenClaw needs a window of {SMALLEST_CONTEXT:,} tokens: in a smaller one it compacts at "
        "once, at every message, because its system prompt and tools alone take about 11,000. Give "
        f"--context-tokens {SMALLEST_CONTEXT} or more, or a model whose context is so long"
    )


def _set(place: str, value: str, *flags: str) -> Sequence[str]:
    return ("openclaw", "config", "set", place, value, *flags)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _carry_out(commands: Sequence[Sequence[str]]) -> None:
    """Raises ConfigError where there is no OpenClaw, or it refuses."""
    if (program := shutil.which("openclaw")) is None:
        raise ConfigError(
            "there is no openclaw on the PATH: run this where OpenClaw is, or without --write, "
            "which prints its commands"
        )
    for _, *words in commands:
        if status := subprocess.run([program, *words]).returncode:
            told = f"`openclaw {' '.join(words[:3])} …` ended with status {status}"
            raise ConfigError(f"{told}; what it said stands above")


def _explain(settings: Settings, context: Context) -> None:
    """What a reader of the block should know, beside it."""
    gateway = settings.gateway
    note(f"contextWindow {context.tokens}: {context.source}.")
    if gateway.host in ANYWHERE:
        note(
            f"The gateway listens on all addresses; {ANYWHERE[gateway.host]} is right for an "
            "OpenClaw on this machine. On another one put this machine's name or address there."
        )
    elif not is_loopback(gateway.host):
        note("Other machines reach it over plain HTTP: use a network that you trust.")
    if _needs_key(settings):
        file = settings.key_file
        whose = "the key" if file is None else f"what stands in {file.absolute()} once it started"
        note(
            f"apiKey is a reference: write {KEY_VARIABLE}=<{whose}> as a line of "
            "~/.openclaw/.env, for OpenClaw to read."
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


def provider(settings: Settings, context_tokens: int) -> dict[str, Any]:
    """What belongs under `models.providers.tinker-claw`."""
    name = settings.served_name
    return {
        "baseUrl": f"{url_of(settings)}/v1",
        "apiKey": f"${{{KEY_VARIABLE}}}" if _needs_key(settings) else ANY_KEY,
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


def _needs_key(settings: Settings) -> bool:
    """It has keys, or makes one at its first start."""
    return bool(keys(settings)) or settings.key_file is not None


def primary(settings: Settings) -> str:
    """How `agents.defaults.model.primary` names the model."""
    return f"{PROVIDER}/{settings.served_name}"


# Whether OpenClaw's configuration fits this gateway, for the doctor

PROVIDERS: Final = ("models", "providers")
DEFAULTS: Final = ("agents", "defaults")


def usual_path() -> Path:
    """Where OpenClaw itself looks."""
    if named := os.environ.get("OPENCLAW_CONFIG_PATH"):
        return Path(named).expanduser()
    state = os.environ.get("OPENCLAW_STATE_DIR") or "~/.openclaw"
    return Path(state).expanduser() / "openclaw.json"


def read(path: Path) -> dict[str, Any] | None:
    """What stands at `path`; None: nothing.

    Raises:
        ConfigError: it cannot be read, or is more than JSON.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path} is no plain JSON, so only OpenClaw can read it: `openclaw config get "
            "models.providers` shows what it understands"
        ) from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} holds no JSON object")
    return cast("dict[str, Any]", data)


_SAID: Final[Mapping[Any, str]] = {
    "baseUrl": "baseUrl is {now}, not {value}",
    "api": "api is {now!r}, not {value!r}",
    "timeoutSeconds": "timeoutSeconds is {now}: with less than {value} a slow reply is given up",
    "apiKey": "apiKey is no key of this gateway: requests will be refused (HTTP 401)",
    "contextWindow": "contextWindow is {now}, not the model's {value}: with more OpenClaw shortens "
    f"long sessions too late, and with less than {SMALLEST_CONTEXT} all of them at once",
    **dict.fromkeys(
        COMPAT,
        "compat.{field} does not stand there: with true OpenClaw names the session in every "
        "request, without it some are told apart by their wording alone",
    ),
}
"""What is wrong where a field is not as the gateway would have it."""
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

    def misfits(self, name: str, context: Context) -> Iterator[str]:
        """What is wrong with the provider `name`, without secrets."""
        root, wanted = (*PROVIDERS, name), provider(self.settings, context.tokens)
        (model,) = wanted.pop("models")
        models = _members(self._at((*root, "models"))).values()
        ids = [_at(one, ("id",)) for one in models]
        fields: dict[Where, Any] = {(*root, field): value for field, value in wanted.items()}
        if model["id"] in ids:
            at = (*root, "models", ids.index(model["id"]))
            fields[*at, "contextWindow"] = model["contextWindow"]
            fields |= {(*at, "compat", switch): True for switch in COMPAT}
        for place, value in fields.items():
            field, now = place[-1], self._at(place)
            if not self._works(field, now, value, context):
                yield f"its {_SAID[field].format(field=field, now=now, value=value)}"
        if model["id"] not in ids:
            others = ", ".join(str(one) for one in ids if one is not None) or "none"
            yield f"its models are {others}; the gateway serves {model['id']!r} only"

    def _works(self, field: str | int, now: Any, value: Any, context: Context) -> bool:
        """Whether a field may stand as it does."""
        number = now if isinstance(now, int | float) else math.nan
        match field:
            case "baseUrl":
                return str(now).rstrip("/").endswith(f":{self.settings.gateway.port}/v1")
            case "timeoutSeconds":
                return number >= value
            case "apiKey":
                # Into a reference to a variable or to a store of secrets nobody can look.
                known = keys(self.settings).values()
                reference = now is not None and not (isinstance(now, str) and now[:2] != "${")
                return reference or not known or now in known
            case "contextWindow":
                fits = number <= value or (now is not None and not context.certain)
                return fits and not number < SMALLEST_CONTEXT
            case _ if field in COMPAT:
                return isinstance(now, bool)  # who has set it to false has done so on purpose
            case _:
                return now == value

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


def shown(path: Where) -> str:
    """How a place is named in a sentence: agents.list[2].model."""
    steps = (f"[{key}]" if isinstance(key, int) else f".{key}" for key in path)
    return "".join(steps).removeprefix(".")


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
