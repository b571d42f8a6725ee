"""What can be wrong before the first token: key, address, model. Each is a sentence.

Rule: everything here is asked once, at start, and costs nothing.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Final

import tinker
from tinker import types as sdk

from tinker_claw.backends.tinker.failures import (
    DEFAULT_URL,
    Unreachable,
    about_status,
    ask_what_it_has,
    reason,
)
from tinker_claw.backends.tinker.session import Address, in_daemon_thread
from tinker_claw.errors import ConfigError

KEY_VARIABLE: Final = "TINKER_API_KEY"
URL_VARIABLE: Final = "TINKER_BASE_URL"
_KEY_PREFIXES: Final = ("tml-", "eyJ")
"""Of keys, and of the short-lived tokens that an organisation may hand out instead."""
_CONSOLE: Final = "https://tinker-console.thinkingmachines.ai"


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that the service has."""

    name: str
    context_tokens: int | None
    """None: the service does not say."""
    trainable: bool
    """False only where the service says so."""


def address(base_url: str | None, key: str | None = None) -> Address:
    """Where to go and with which key: the arguments, else what the SDK itself would take.

    Raises:
        ConfigError: there is no key, or what is there cannot be one.
    """
    url = (base_url or os.environ.get(URL_VARIABLE) or DEFAULT_URL).rstrip("/")
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--base-url {url} is no address: it begins with http:// or https://")
    found = key or os.environ.get(KEY_VARIABLE)
    if not found:
        if _sdk_has_another_source():
            return Address(url, None)
        where = f"make one at {_CONSOLE} and" if url == DEFAULT_URL else "for a server of your own"
        raise ConfigError(
            f"{KEY_VARIABLE} is not set: {where} export {KEY_VARIABLE}=tml-... ; "
            "or train on this machine with --backend local"
        )
    if not found.startswith(_KEY_PREFIXES):
        raise ConfigError(f"{KEY_VARIABLE} holds no Tinker key: those begin with 'tml-'")
    return Address(url, found)


async def served_models(where: Address, deadline_s: float) -> list[ServedModel]:
    """Ask the service what it has.

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
        found = sdk.GetServerCapabilitiesResponse.model_validate(answer.json())
    except ValueError as error:
        raise ConfigError(f"{where.base_url} is no Tinker server: check --base-url") from error
    return _served(found)


async def _served_to_the_sdk(where: Address, deadline_s: float) -> list[ServedModel]:
    try:
        async with asyncio.timeout(deadline_s):
            client = await in_daemon_thread(
                lambda: tinker.RestClient(base_url=where.base_url, api_key=where.key)
            )
            return _served(await client.get_server_capabilities().result_async())
    except TimeoutError as error:
        raise ConfigError(f"no answer from {where.base_url} within {deadline_s:g} s") from error
    except (tinker.TinkerError, ValueError, RuntimeError) as error:
        raise ConfigError(f"Tinker at {where.base_url}: {reason(error)}") from error


def _served(found: sdk.GetServerCapabilitiesResponse) -> list[ServedModel]:
    return [
        ServedModel(model.model_name, model.max_context_length, model.trainable is not False)
        for model in found.supported_models
        if model.model_name
    ]


def choose(model: str, served: Sequence[ServedModel], base_url: str) -> ServedModel:
    """The entry of `model`. A server that lists nothing is taken at its word later.

    Raises:
        ConfigError: it is not there, or cannot be trained; with those that can.
    """
    found = next((entry for entry in served if entry.name == model), None)
    if found is None and not served:
        return ServedModel(model, None, trainable=True)
    able = ", ".join(sorted(entry.name for entry in served if entry.trainable)) or "none"
    if found is None:
        raise ConfigError(
            f"--model-name {model} is not among the models that {base_url} trains: {able}"
        )
    if not found.trainable:
        raise ConfigError(
            f"--model-name {model} can be sampled at {base_url} but not trained; these can: {able}"
        )
    return found


def _sdk_has_another_source() -> bool:
    """A credential command, or what `tinker auth login` stored."""
    stored = Path.home() / ".tinker" / "credentials.json"
    return bool(os.environ.get("TINKER_CREDENTIAL_CMD")) or stored.is_file()
