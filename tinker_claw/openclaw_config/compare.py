"""Whether OpenClaw's configuration fits this gateway, and how to make it fit.

Rule: pure. What `differences` names, `changes` mends; what a user may have chosen on purpose is
neither.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, Final, cast
from urllib.parse import urlsplit

from tinker_claw.config import Settings, is_loopback
from tinker_claw.openclaw_config.block import (
    ANY_KEY,
    ANYWHERE,
    API,
    COMPAT,
    PROVIDER,
    TIMEOUT_S,
    base_url,
    keys,
    primary,
)
from tinker_claw.openclaw_config.context import Context
from tinker_claw.openclaw_config.edit import Where

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
