"""Check settings that conflict or depend on one another, and the keys of users.

Rules: a sentence names what was set, by its flag and by the variable that may have set it, and says
what works; none ever holds a key. What depends on the machine is not looked at here.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from urllib.parse import urlsplit

from tinker_claw.config.settings import (
    DEFAULT_USER,
    ENV_PREFIX,
    NEEDS_GPU,
    VARIABLES,
    Settings,
)
from tinker_claw.errors import ConfigError
from tinker_claw.origin import is_loopback
from tinker_claw.shipped import MODELS, SMALL

API_KEY = f"{ENV_PREFIX}GATEWAY__API_KEY"
_KEY = re.compile(r"[!-~]{16,512}")
"""Pattern of a key that can be sent in a header unchanged, and cannot be guessed."""
_MAKE_ONE = "python -c 'import secrets; print(secrets.token_urlsafe(32))' makes a good one"
_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,100}")
_VALUE = re.compile(r"[ -~]{1,8000}")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[A-Za-z0-9._-]+(:[0-9]{1,5})?")


def check(settings: Settings) -> None:
    """Refuse settings that contradict one another, and those that would let strangers in.

    Raises:
        ConfigError: says what to set, or what to leave out.
    """
    rules = (_access, _owners, _urls, _local, _judge)
    for wrong in chain.from_iterable(rule(settings) for rule in rules):
        raise ConfigError(wrong)


def _access(settings: Settings) -> Iterator[str]:
    """Refuse an address that other machines can reach without a key, and keys of several users."""
    host, api_key, users = settings.gateway.host, settings.gateway.api_key, settings.users
    keys = {f"users[{n}].key": user.key.get_secret_value() for n, user in enumerate(users)}
    names = [user.name for user in users]
    if api_key is not None:
        keys = {API_KEY: api_key.get_secret_value(), **keys}
        names.append(DEFAULT_USER)
    if not is_loopback(host) and not keys:
        yield (
            f"--host {host} is reachable from other machines: set {API_KEY}, or give each user a "
            "key ([[users]] in the settings file), or bind to 127.0.0.1"
        )
    for origin in settings.gateway.origins:
        if not _ORIGIN.fullmatch(origin):
            yield (
                f"--allow-origin: {origin!r} is no origin; write it as the app sends it, without a "
                "path or a slash at its end, as app://obsidian.md"
            )
    if settings.gateway.origins and not keys and settings.key_file is None:
        yield (
            "--allow-origin lets a page of that origin in only with a key: set "
            f"{API_KEY}; {_MAKE_ONE}"
        )
    for name in names:
        if names.count(name) > 1:
            yield (
                f"users: the name {name!r} is given twice; {API_KEY} is the key of the user "
                f"{DEFAULT_USER!r}"
            )
    for whose, key in keys.items():
        if not _KEY.fullmatch(key):
            yield (
                f"{whose}: a key is made of ASCII letters, digits and signs, without blanks, at "
                f"most 512 of them, and of at least 16, or it can be guessed; {_MAKE_ONE}"
            )
    if len(set(keys.values())) < len(keys):
        yield "users: two users have the same key; a key must name one user"


def _owners(settings: Settings) -> Iterator[str]:
    """Refuse practice where several owners share the weights: one's wishes would reach another."""
    of = Counter(name.partition(":")[0] for name in settings.gateway.chats.owners)
    names = {user.name for user in settings.users}
    names |= {DEFAULT_USER} if settings.gateway.api_key is not None and names else set()
    owners = max(len(names), *of.values(), 1)
    if settings.training.practice == "on" and owners > 1:
        yield (
            f"--practice on trains what one owner wishes, and {owners} share this policy: "
            "give them an adapter each, by gateways of their own (--data-dir, --port), or leave "
            "it out"
        )


def _urls(settings: Settings) -> Iterator[str]:
    judge, root = settings.judge, "http://HOST:PORT"
    service = settings.run.base_url or os.environ.get("TINKER_BASE_URL")
    for name, url, form in (
        ("--base-url (TINKER_BASE_URL)", service, root),
        ("--judge-url", judge.judge_url, f"{root}/v1"),
        *((f"--sampler-urls: {url!r}", url, root) for url in settings.local.urls),
    ):
        if url and not _is_address(url):
            yield f"{name} is no address; write {form}"


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        named = parts.port != 0 and bool(re.match(r"\S", parts.hostname or ""))
        return named and parts.scheme in ("http", "https")
    except ValueError:  # its host or its port cannot be one
        return False


def _local(settings: Settings) -> Iterator[str]:
    """Check GPU settings against the backend, the model and one another."""
    run, local = settings.run, settings.local
    named = local.given(*VARIABLES, "sampler_urls")
    if run.backend == "tinker" and named:
        yield (
            f"{named}: with --backend tinker, the default, a service trains and samples; add "
            "--backend local, or leave it out"
        )
    if local.rollout_gpus is not None and local.rollout_gpus % local.rollout_tp:
        yield (
            f"--rollout-gpus {local.rollout_gpus} (ROLLOUT_GPUS) cannot be split into servers of "
            f"--rollout-tp {local.rollout_tp} GPUs; give a multiple of it"
        )
    if run.model_name == SMALL and run.backend == "tinker":
        yield "--model-name small runs on this machine; add --backend local"
    needs = local.given(*NEEDS_GPU)
    if run.model_name in MODELS and needs:
        advice = "needs no GPU; leave it out, or name another model"
        yield f"{needs}: the model {run.model_name} {advice}"
    if local.device == "cpu" and needs:
        yield f"{needs} needs GPUs, but --device is cpu; leave one of the two out"
    if local.device.startswith("cuda:") and (local.gpus or 1) > 1:
        yield f"--device {local.device} is one GPU; for several give --gpus and --device cuda"
    started = local.given("rollout_gpus", "rollout_tp")
    if local.urls and started:
        yield (
            f"{started} is for samplers that are started here; --sampler-urls names some that run "
            "already: leave one of the two out"
        )


def _judge(settings: Settings) -> Iterator[str]:
    judge = settings.judge
    if judge.judge_model is not None and judge.judge_url is None:
        yield (
            "--judge-model needs a place to judge: set --judge-url, where a server with that model "
            "runs already"
        )
    if judge.judge_images and (judge.judge_url is None or settings.gateway.images != "train"):
        yield "--judge-images shows kept images to an endpoint: set --judge-url and --images train"
    for name, value in judge.headers.items():
        if not _HEADER.fullmatch(name):
            yield f"[judge.headers]: {name!r} is no name of a header"
        elif not _VALUE.fullmatch(value.get_secret_value()):
            yield f"[judge.headers]: the value of {name} must be printable ASCII on one line"
