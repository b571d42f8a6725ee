"""Checks of key, address and model before the first token; each failure is one sentence.

Rule: everything here is asked once, at start, and costs nothing.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

import tinker
from tinker import types as sdk
from tinker.lib.credentials import JsonCredentialStore, ManualKey, default_credentials_path

from tinker_claw.backends.tinker.failures import (
    DEFAULT_URL,
    Unreachable,
    about_status,
    ask_what_it_has,
    reason,
)
from tinker_claw.backends.tinker.session import Address, rest_client
from tinker_claw.errors import ConfigError

KEY_VARIABLE = "TINKER_API_KEY"
URL_VARIABLE = "TINKER_BASE_URL"
_COMMAND_VARIABLE = "TINKER_CREDENTIAL_CMD"
_KEPT_AS = "tinker-claw"
_KEY = re.compile(r"(tml-|eyJ)[!-~]*")
"""An API key, or a short-lived token that an organisation may issue instead; sent in a header."""
CONSOLE = "https://tinker-console.thinkingmachines.ai"


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that the service has."""

    name: str
    context_tokens: int | None
    """Context length in tokens; None: the service does not say."""
    trainable: bool
    """False only where the service says so."""


def address(base_url: str | None, key: str | None = None) -> Address:
    """Address and key of the service: the arguments, else what the SDK itself would take.

    Raises:
        ConfigError: there is no key, or what is there cannot be one.
    """
    url = (base_url or os.environ.get(URL_VARIABLE) or DEFAULT_URL).rstrip("/")
    api_key = key or os.environ.get(KEY_VARIABLE)
    if not api_key:
        if source_of_key() is not None:
            return Address(url, None)
        where = f"make one at {CONSOLE} and" if url == DEFAULT_URL else "for a server of your own"
        raise ConfigError(
            f"{KEY_VARIABLE} is not set: {where} export {KEY_VARIABLE}=tml-... ; "
            "or train on this machine with --backend local"
        )
    if not _KEY.fullmatch(api_key):
        raise ConfigError(
            f"{KEY_VARIABLE} holds no Tinker key: those begin with 'tml-', and are plain letters, "
            "digits and signs without blanks"
        )
    return Address(url, api_key)


async def served_models(where: Address, deadline_s: float) -> list[ServedModel]:
    """Ask the service for its models.

    Raises:
        ConfigError: it cannot be reached, refuses the key, or does not speak this API.
    """
    try:
        answer = await ask_what_it_has(where.base_url, where.key)
    except Unreachable as error:
        more = "" if where.base_url == DEFAULT_URL else " and --base-url, and that the server runs"
        raise ConfigError(f"{error}: check the network{more}") from error
    if answer.status_code == HTTPStatus.NOT_FOUND:
        raise ConfigError(f"{where.base_url} is no Tinker server (HTTP 404): check --base-url")
    if answer.status_code in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        # Some organisations exchange keys for short-lived tokens, which only the SDK does.
        return await _served_to_the_sdk(where, deadline_s)
    if not answer.is_success:
        raise ConfigError(f"Tinker at {where.base_url}: {about_status(answer.status_code)}")
    try:
        capabilities = sdk.GetServerCapabilitiesResponse.model_validate(answer.json())
    except ValueError as error:
        raise ConfigError(f"{where.base_url} is no Tinker server: check --base-url") from error
    return _served(capabilities)


async def _served_to_the_sdk(where: Address, deadline_s: float) -> list[ServedModel]:
    try:
        async with asyncio.timeout(deadline_s):
            client = await rest_client(where)
            return _served(await client.get_server_capabilities().result_async())
    except TimeoutError as error:
        raise ConfigError(f"no answer from {where.base_url} within {deadline_s:g} s") from error
    except (tinker.TinkerError, ValueError, RuntimeError) as error:
        raise ConfigError(f"Tinker at {where.base_url}: {reason(error)}") from error


def _served(capabilities: sdk.GetServerCapabilitiesResponse) -> list[ServedModel]:
    return [
        ServedModel(model.model_name, model.max_context_length, model.trainable is not False)
        for model in capabilities.supported_models
        if model.model_name
    ]


def choose(model: str, served: Sequence[ServedModel], base_url: str) -> ServedModel:
    """Return the entry of `model`. With a server that lists nothing, any model is accepted here.

    Raises:
        ConfigError: it is not there, or cannot be trained; with those that can.
    """
    if not served:
        return ServedModel(model, None, trainable=True)
    chosen = next((entry for entry in served if entry.name == model), None)
    able = ", ".join(sorted(entry.name for entry in served if entry.trainable)) or "none"
    if chosen is None:
        raise ConfigError(
            f"--model-name {model} is not among the models that {base_url} trains: {able}"
        )
    if not chosen.trainable:
        raise ConfigError(
            f"--model-name {model} can be sampled at {base_url} but not trained; these can: {able}"
        )
    return chosen


def source_of_key() -> str | None:
    """Return the source of a key: a variable, a credential command, or the file that `tinker auth
    login` wrote; None: there is no key.

    Raises:
        ConfigError: what is stored cannot be read. The SDK's own error would quote it.
    """
    for name in (KEY_VARIABLE, _COMMAND_VARIABLE):
        if os.environ.get(name):
            return name
    path = default_credentials_path()
    try:
        return None if JsonCredentialStore(path).get_default_key() is None else str(path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read ({type(error).__name__}): move it away, and `tinker auth "
            f"login` makes it anew; or export {KEY_VARIABLE}=tml-..."
        ) from error


def keep(key: str) -> Path:
    """Store a key where the SDK itself looks for one; return the file, which only its owner can
    read.

    Raises:
        ConfigError: it cannot be written, or what is there is no such file.
    """
    path = default_credentials_path()
    store = JsonCredentialStore(path)
    try:
        store.add_key(_KEPT_AS, ManualKey(key=key, name=_KEPT_AS))
        store.set_default(_KEPT_AS)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or type(error).__name__
        raise ConfigError(
            f"{path} cannot be written ({reason}): fix that, or export {KEY_VARIABLE}=tml-..."
        ) from error
    return path
