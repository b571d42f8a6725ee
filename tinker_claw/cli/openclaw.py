"""`run.py openclaw-config`: what OpenClaw needs to know of this gateway, and whether it knows it.

Rule: it prints, and changes a file only where one is named with --write, and in it nothing but the
provider; which model an agent uses is changed only with --primary. A secret stands only where it is
asked for.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Final, cast
from urllib.parse import urlsplit

from pydantic import Field

from tinker_claw.cli import openclaw_file
from tinker_claw.cli.common import ANYWHERE, Flags, note, url_of, write
from tinker_claw.cli.openclaw_file import Where, set_values
from tinker_claw.config.settings import DEFAULT_USER, DEMO, Settings
from tinker_claw.errors import ConfigError
from tinker_claw.origin import is_loopback
from tinker_claw.shipped import MODEL_DIR

SMALLEST_CONTEXT = 16_000
TOO_FEW = "OpenClaw's system prompt and tools alone take about 11,000"
"""Of fewer than that."""


class OpenclawFlags(Flags):
    """Print the provider block that points OpenClaw at the gateway that run.py starts with the same
    flags. Nothing is changed without --write."""

    MORE: ClassVar[str] = (
        "Exit status: 0 done, 2 a flag, a setting or the file is wrong. All flags of run.py can be "
        "given, too."
    )

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


def openclaw_config(given: OpenclawFlags) -> int:
    """Print the block, or merge it into a file.

    Raises:
        ConfigError: a setting is wrong, or the file cannot be read, understood or written.
    """
    settings = given.settings
    url_of(settings)  # the port is known
    key = _key(settings, given.user) if given.show_key else None
    context = asyncio.run(context_of(settings))
    _explain(settings, context, key)
    if given.write is None:
        write([json.dumps(block(settings, context.tokens, key), indent=2, ensure_ascii=False)])
    else:
        _write(given.write, given.primary, settings, context, key)
    return 0


def _key(settings: Settings, user: str | None) -> str | None:
    known = keys(settings)
    if not known and user is None:
        return None
    if user is None and len(known) == 1:
        return next(iter(known.values()))
    if user not in known:
        raise ConfigError(
            f"--show-key: name one of the users that have a key with --user: {', '.join(known)}"
            if known
            else f"--user {user}: this gateway has no keys"
        )
    return known[user]


def _write(
    path: Path, make_primary: bool, settings: Settings, context: Context, key: str | None
) -> None:
    found = openclaw_file.read(path)
    if found is None:
        whole = block(settings, context.tokens, key)
        if not make_primary:
            del whole["agents"]
        openclaw_file.create(path, json.dumps(whole, indent=2, ensure_ascii=False) + "\n")
        write([f"{path}: made, with the provider {PROVIDER}."])
    else:
        _merge(found, settings, context, key, make_primary=make_primary)
    used = primary_of(found.data if found else {})
    if not make_primary and used != primary(settings):
        left = f"left at {used}" if used else "not set"
        write(
            [
                f"agents.defaults.model.primary is {left}: --primary sets it to "
                f"{primary(settings)}, so that your agent uses this model."
            ]
        )
    now = openclaw_file.read(path)
    for use in uses(now.data, settings) if make_primary and now else ():
        if use.agent and not use.here:
            write([f"{use}: it has a model of its own, which was left alone."])


def _merge(
    found: openclaw_file.FoundConfig,
    settings: Settings,
    context: Context,
    key: str | None,
    *,
    make_primary: bool,
) -> None:
    wanted = provider(settings, context.tokens, key)
    keep = {"name"}
    if key is None:
        keep.add("apiKey")  # a secret that works is not replaced by a reference that may not
    if not context.certain:
        keep.add("contextWindow")
    wanted_changes = changes(found.data, wanted, keep)
    if make_primary:
        wanted_changes += primary_change(found.data, settings)
    if not wanted_changes:
        write([f"{found.path}: nothing to change."])
        return
    backup = openclaw_file.replace(found, set_values(found.text, wanted_changes))
    names = ", ".join(".".join(str(key) for key in path) for path, _ in wanted_changes)
    write([f"{found.path}: set {names}. As it was before: {backup}"])


def _explain(settings: Settings, context: Context, key: str | None) -> None:
    """What a reader of the block should know, beside it."""
    gateway = settings.gateway
    note(f"contextWindow {context.tokens}: {context.source}.")
    if context.tokens < SMALLEST_CONTEXT:
        note(f"{context.tokens} tokens are too few for OpenClaw. {TOO_FEW}.")
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


# How many tokens the model's context holds, and who says so: cheap sources only, and a guess is
# called a guess

GUESS: Final = 40_960
"""That of Qwen3 models up to 32B, the smallest among those that agents are used with."""
_PATIENCE_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Context:
    """A number and where it comes from."""

    tokens: int
    source: str
    """Part of a sentence."""
    certain: bool = True


async def context_of(settings: Settings) -> Context:
    """The context that the gateway will offer with these settings."""
    limit = settings.run.context_tokens
    if settings.run.backend == "tinker":
        found = await _of_the_service(settings)
    else:
        found = _of_the_model(settings)
    if limit is None:
        return found
    if found.certain and found.tokens < limit:
        return Context(found.tokens, f"{found.source}, which is below --context-tokens")
    return Context(limit, "--context-tokens")


async def _of_the_service(settings: Settings) -> Context:
    from tinker_claw.backends.tinker_sdk import check_sdk

    try:
        check_sdk()
        # Here, because its SDK takes a second.
        from tinker_claw.backends.tinker.trainer import FALLBACK_CONTEXT, offered

        where, served = await offered(settings, within_s=_PATIENCE_S)
    except ConfigError as error:
        known = _of_the_model(settings)
        return Context(known.tokens, f"{known.source}; the service was not asked: {error}", False)
    if served.context_tokens is None:
        return Context(FALLBACK_CONTEXT, f"{where.base_url} does not say; the gateway takes this")
    return Context(served.context_tokens, f"{where.base_url} says so")


def _of_the_model(settings: Settings) -> Context:
    name = settings.run.model_name.partition(":")[0]  # what follows is a variant at Tinker
    try:
        file = _config_file(name)
        text = json.loads(file.read_text())
        found: dict[str, Any] = text.get("text_config", text)
        return Context(int(found["max_position_embeddings"]), f"the config.json of {name} says so")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return Context(GUESS, f"a guess: no config.json of {name} is on this machine yet", False)


def _config_file(name: str) -> Path:
    if name == DEMO:
        return MODEL_DIR / "config.json"
    if Path(name).is_dir():
        return Path(name) / "config.json"
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(name, "config.json", local_files_only=True))


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


def base_url(settings: Settings) -> str:
    """The address that a client on this machine uses."""
    return f"{url_of(settings)}/v1"


def keys(settings: Settings) -> dict[str, str]:
    """Every key that the gateway takes, by the user whom it names; none: it takes any."""
    default = settings.gateway.api_key
    found = {DEFAULT_USER: default.get_secret_value()} if default is not None else {}
    return found | {user.name: user.key.get_secret_value() for user in settings.users}


def provider(settings: Settings, context_tokens: int, key: str | None = None) -> dict[str, Any]:
    """What belongs under `models.providers.tinker-claw`.

    Args:
        key: stands in it as it is; None: a reference, where the gateway has keys.
    """
    name = settings.served_name
    return {
        "baseUrl": base_url(settings),
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


def block(settings: Settings, context_tokens: int, key: str | None = None) -> dict[str, Any]:
    """The whole block, as it would stand in an otherwise empty configuration."""
    told = provider(settings, context_tokens, key)
    return {
        "models": {"providers": {PROVIDER: told}},
        "agents": {"defaults": {"model": {"primary": primary(settings)}}},
    }


# Whether OpenClaw's configuration fits this gateway, and how to make it fit: what `differences`
# names, `changes` mends; what a user may have chosen on purpose is neither


_PROVIDER_PATH: Where = ("models", "providers", PROVIDER)
PRIMARY_PATH: Where = ("agents", "defaults", "model")


def provider_for(config: Mapping[str, Any], settings: Settings) -> str | None:
    """The name of the provider that points at this gateway; None: none does."""
    providers = _at(config, ("models", "providers"))
    if not isinstance(providers, dict):
        return None
    names = [PROVIDER, *(name for name in cast("dict[str, Any]", providers) if name != PROVIDER)]
    for name in names:
        url = _at(config, ("models", "providers", name, "baseUrl"))
        if isinstance(url, str) and _same_place(url, base_url(settings)):
            return name
    return None


def differences(
    config: Mapping[str, Any], name: str, settings: Settings, context: Context
) -> Iterator[str]:
    """What of the provider `name` does not fit, in sentences. Secrets are never repeated."""
    told = cast("dict[str, Any]", _at(config, ("models", "providers", name)))
    url: str = told["baseUrl"]
    if urlsplit(url).path.rstrip("/") != "/v1":
        yield f"its baseUrl is {url}, not {base_url(settings)}"
    if (api := told.get("api")) != API:
        yield f"its api is {api!r}, not {API!r}"
    wait = told.get("timeoutSeconds")
    if not isinstance(wait, int | float) or wait < TIMEOUT_S:
        yield f"its timeoutSeconds is {wait}: with less than {TIMEOUT_S} a slow reply is given up"
    if (known := keys(settings)) and _is_wrong(told.get("apiKey"), known.values()):
        yield "its apiKey is no key of this gateway: requests will be refused (HTTP 401)"
    model = _model(told, settings.served_name)
    if model is None:
        ids = ", ".join(str(entry.get("id")) for entry in _models(told)) or "none"
        yield f"its models are {ids}; the gateway serves {settings.served_name!r} only"
        return
    if unset := [f"compat.{name}" for name in COMPAT if not _is_set(model, name)]:
        does = "do" if len(unset) > 1 else "does"
        yield (
            f"its {' and '.join(unset)} {does} not stand there: with true OpenClaw names the "
            "session in every request, without it some are told apart by their wording alone"
        )
    window = model.get("contextWindow")
    if window is None:
        yield f"its contextWindow is not set: OpenClaw guesses; {context.tokens} is right"
    elif context.certain and isinstance(window, int | float) and window > context.tokens:
        yield (
            f"its contextWindow is {window}, above the model's {context.tokens}: long sessions "
            "will be refused before OpenClaw shortens them"
        )


def changes(
    config: Mapping[str, Any], wanted: Mapping[str, Any], keep: Set[str]
) -> list[tuple[Where, Any]]:
    """What has to be set so that `config` holds the provider `wanted`; nothing: it does.

    Args:
        keep: fields that are left as they are where they are set.
    """
    there = _at(config, _PROVIDER_PATH)
    if not isinstance(there, dict):
        return [(_PROVIDER_PATH, dict(wanted))]
    found: list[tuple[Where, Any]] = []
    for field, value in wanted.items():
        now = cast("dict[str, Any]", there).get(field)
        if field == "models":
            found += _model_changes(now, value[0], keep)
        elif now != value and (field not in keep or now in (None, "", ANY_KEY)):
            found.append(((*_PROVIDER_PATH, field), value))
    return found


def primary_change(config: Mapping[str, Any], settings: Settings) -> list[tuple[Where, Any]]:
    """What makes this model the one that agents use."""
    wanted, now = primary(settings), _at(config, PRIMARY_PATH)
    if primary_of(config) == wanted:
        return []
    if isinstance(now, dict) or now is None:
        return [((*PRIMARY_PATH, "primary"), wanted)]
    return [(PRIMARY_PATH, wanted)]  # its short form, a string


def primary_of(config: Mapping[str, Any]) -> str | None:
    """The model that agents use unless told otherwise."""
    model = _at(config, PRIMARY_PATH)
    if isinstance(model, dict):
        model = cast("dict[str, Any]", model).get("primary")
    return model if isinstance(model, str) else None


@dataclass(frozen=True, slots=True)
class Use:
    """A model that the configuration names for something."""

    what: str
    """Part of a sentence: `agent work uses`."""
    model: str | None
    """As it stands there; None: nowhere."""
    place: str
    """Where it stands."""
    agent: str | None = None
    """The agent whose usual model it is."""
    here: bool = False
    """It is this gateway's."""

    def __str__(self) -> str:
        return f"{self.what} {self.model or 'no model that is named'} ({self.place})"


def uses(config: Mapping[str, Any], settings: Settings) -> list[Use]:
    """Every model that answers for an agent: its own or the default, fallbacks, and pinned ones.

    Without a list of agents there is one, which has no name here.
    """
    found: list[Use] = []
    roster = _roster(config)
    default = _Choice.of(_at(config, PRIMARY_PATH), PRIMARY_PATH)
    for name, agent, path in roster or [("", {}, ())]:
        who = f"agent {name} " if name else "agents "
        s = "s" if name else ""
        model = _Choice.of(agent.get("model"), (*path, "model"))
        primary = model if model.primary else default
        # An agent with a model of its own has only the fallbacks that it names.
        backs = model if model.fallbacks is not None or model.primary else default
        found.append(Use(f"{who}use{s}", primary.primary, primary.place(), agent=name))
        found += [
            Use(f"{who}fall{s} back to", one, f"{backs.place('fallbacks')}")
            for one in backs.fallbacks or ()
        ]
        found += _pinned(agent, path, f" of agent {name}")
    found += _pinned(_at(config, PRIMARY_PATH[:2]), PRIMARY_PATH[:2], "")
    channels = _at(config, ("channels", "modelByChannel"))
    for channel, peers in _items(channels):
        place = f"channels.modelByChannel.{channel}"
        found += [Use(f"{channel} {peer} uses", _text(one), place) for peer, one in _items(peers)]
    return [replace(use, here=_is_ours(use.model, config, settings)) for use in found]


_PINNED: Final[Mapping[str, Where]] = {
    "heartbeats{} use": ("heartbeat", "model"),
    "subagents{} use": ("subagents", "model"),
    "compaction{} uses": ("compaction", "model"),
    "memory flushes{} use": ("compaction", "memoryFlush", "model"),
    "titles and recaps{} use": ("utilityModel",),
}


def _pinned(agent: Any, path: Where, of: str) -> Iterator[Use]:
    for what, place in _PINNED.items():
        model = _Choice.of(_at(agent, place), (*path, *place))
        if model.primary:
            yield Use(what.format(of), model.primary, model.place())


@dataclass(frozen=True, slots=True)
class _Choice:
    """A model as OpenClaw lets one be named: a string, or an object with fallbacks."""

    primary: str | None
    fallbacks: tuple[str, ...] | None
    """None: it says nothing of them."""
    path: Where
    short: bool

    @classmethod
    def of(cls, model: Any, path: Where) -> _Choice:
        if not isinstance(model, dict):
            return cls(_text(model), None, path, short=True)
        told = cast("dict[str, Any]", model)
        listed = told.get("fallbacks")
        texts = map(_text, cast("list[Any]", listed)) if isinstance(listed, list) else None
        backs = None if texts is None else tuple(text for text in texts if text)
        return cls(_text(told.get("primary")), backs, path, short=False)

    def place(self, field: str = "primary") -> str:
        path = self.path if self.short and self.primary else (*self.path, field)
        return ".".join(map(str, path))


def _roster(config: Mapping[str, Any]) -> list[tuple[str, dict[str, Any], Where]]:
    """The agents, from the list of today's configurations and from that of older ones."""
    found: dict[str, tuple[str, dict[str, Any], Where]] = {
        name: (name, cast("dict[str, Any]", agent), ("agents", "entries", name))
        for name, agent in _items(_at(config, ("agents", "entries")))
        if isinstance(agent, dict)
    }
    older = _at(config, ("agents", "list"))
    for n, agent in enumerate(cast("list[Any]", older) if isinstance(older, list) else ()):
        if isinstance(agent, dict):
            told = cast("dict[str, Any]", agent)
            name = _text(told.get("id")) or str(n)
            found.setdefault(name, (name, told, ("agents", f"list[{n}]")))
    return list(found.values())


def _is_ours(model: str | None, config: Mapping[str, Any], settings: Settings) -> bool:
    """Whether a name leads to this gateway: `provider/model`, an alias, or the model alone."""
    if model is None:
        return False
    aliases = _items(_at(config, ("agents", "defaults", "models")))
    named = next((ref for ref, told in aliases if _at(told, ("alias",)) == model), model)
    provider, _, name = named.partition("/")
    url = _at(config, ("models", "providers", provider, "baseUrl"))
    if isinstance(url, str):
        served = settings.served_name
        return _same_place(url, base_url(settings)) and name.partition("@v")[0] == served
    return provider_for(config, settings) is not None and named == settings.served_name


def _items(value: Any) -> list[tuple[str, Any]]:
    return list(cast("dict[str, Any]", value).items()) if isinstance(value, dict) else []


def _text(value: Any) -> str | None:
    return value.strip() or None if isinstance(value, str) else None


def _model_changes(
    now: Any, wanted: Mapping[str, Any], keep: Set[str]
) -> Iterator[tuple[Where, Any]]:
    path = (*_PROVIDER_PATH, "models")
    if not isinstance(now, list):
        yield path, [dict(wanted)]
        return
    entries = cast("list[Any]", now)
    at = next(
        (
            n
            for n, entry in enumerate(entries)
            if isinstance(entry, dict) and cast("dict[str, Any]", entry).get("id") == wanted["id"]
        ),
        len(entries),
    )
    if at == len(entries):
        yield (*path, at), dict(wanted)
        return
    for field, value in wanted.items():
        there = entries[at].get(field)
        if field == "compat" and isinstance(there, dict):
            for name in value:
                if not _is_set(entries[at], name):
                    yield (*path, at, field, name), value[name]
        elif there != value and (field not in keep or there is None):
            yield (*path, at, field), value


def _is_set(model: Mapping[str, Any], name: str) -> bool:
    """Whether a switch is there; who has set it to false has done so on purpose."""
    return isinstance(_at(model, ("compat", name)), bool)


def _is_wrong(given: Any, known: Collection[str]) -> bool:
    """A reference to a variable or to a store of secrets cannot be looked into."""
    reference = not isinstance(given, str) or given.startswith("${")
    return given is None or (not reference and given not in known)


def _model(provider: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    return next((entry for entry in _models(provider) if entry.get("id") == name), None)


def _models(provider: Mapping[str, Any]) -> Sequence[dict[str, Any]]:
    models = provider.get("models")
    if not isinstance(models, list):
        return []
    entries = cast("list[Any]", models)
    return [cast("dict[str, Any]", entry) for entry in entries if isinstance(entry, dict)]


def _at(config: Any, path: Where) -> Any:
    for key in path:
        if not isinstance(config, dict):
            return None
        config = cast("dict[str | int, Any]", config).get(key)
    return config


def _same_place(one: str, other: str) -> bool:
    """The same port of the same machine, as far as the names tell."""
    return _place(one) == _place(other)


def _place(url: str) -> tuple[str, int | None]:
    try:
        split = urlsplit(url)
        host = ANYWHERE.get(split.hostname or "", split.hostname or "")
        return ("localhost" if is_loopback(host) else host, split.port)
    except ValueError:
        return (url, None)
