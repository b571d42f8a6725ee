"""A gateway on a real port, over a fake sampler and a real ledger, or as the product wires it."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import httpx
import pytest
from openai import AsyncOpenAI
from pydantic import SecretStr

from tests.support.fakes import FakeSampler
from tests.support.ledger import sql
from tinker_claw.app.admin import Orders
from tinker_claw.app.healthz import healthz
from tinker_claw.app.server import in_background
from tinker_claw.app.wiring import System, wire
from tinker_claw.backends.local import arrange
from tinker_claw.backends.model_files import source
from tinker_claw.billing.budget import Spending
from tinker_claw.billing.prices import Price, price_in_force
from tinker_claw.config.settings import Chats, Gateway, Settings, User
from tinker_claw.formats import spoken
from tinker_claw.formats.base import WireFormat
from tinker_claw.gateway.app import create_app
from tinker_claw.gateway.auth import Keys
from tinker_claw.gateway.deps import GatewayDeps
from tinker_claw.gateway.fallback import ServingDeps, lineage
from tinker_claw.gateway.index import IDLE_S, ConversationIndex
from tinker_claw.gateway.lessons import LessonChooser
from tinker_claw.gateway.owners import Owners
from tinker_claw.gateway.privacy import SessionPrivacy
from tinker_claw.gateway.rounds import ComputeRounds
from tinker_claw.gateway.secrets import SecretSearch
from tinker_claw.learner.health import Health
from tinker_claw.learner.rollback import RollbackOperations
from tinker_claw.ledger.ledger import Ledger
from tinker_claw.policy import Policy, PolicyHolder, Sampler
from tinker_claw.privacy.redact import Redactor
from tinker_claw.privacy.rules import SECRETS
from tinker_claw.render.renderer import Renderer
from tinker_claw.retry import Backoff
from tinker_claw.served import ServedTurn
from tinker_claw.telemetry import Telemetry
from tinker_claw.types import Capabilities, NextState, Turn

MODEL = "demo"
PLACES = {
    "max_queue": "tinker_claw.gateway.app.MAX_QUEUE",
    "max_held_bytes": "tinker_claw.gateway.limits.MAX_HELD_BYTES",
    "body_s": "tinker_claw.gateway.limits.BODY_S",
    "keepalive_s": "tinker_claw.gateway.respond.KEEPALIVE_S",
    "patience_s": "tinker_claw.gateway.sampling.PATIENCE_S",
    "drain_s": "tinker_claw.app.server.DRAIN_S",
}
"""Constants of the gateway that a test may want smaller, by the names that `gateway` takes."""
IM_END = "<|im_end|>"
OFF = (("enable_thinking", False),)
"""Chat template switches that turn thinking off."""
served = pytest.mark.served
"""Gives the gateway of a test's fixture `world` these settings."""


def spell(renderer: Renderer, text: str, *, end: str = IM_END) -> tuple[int, ...]:
    """Text as ids, markers as single tokens, ended as a model ends its reply."""
    return tuple(renderer.encode(text + end))


class Observer(Telemetry):
    def __init__(self) -> None:
        super().__init__(None)
        self.seen: list[dict[str, Any]] = []

    def exposition(self) -> bytes:
        return b"turns 0\n"

    def served(self, outcome: ServedTurn, turn: int, usd: float | None) -> None:
        super().served(outcome, turn, usd)
        self.seen.append({**outcome.figures, "turn": turn, "usd": usd})

    def turn_not_kept(self, **fields: Any) -> None:
        self.seen.append(fields | {"kind": "private"})


@dataclass
class World:
    """A running gateway and its parts."""

    url: str
    ledger: Ledger
    sampler: FakeSampler
    policy: PolicyHolder
    renderer: Renderer
    observer: Observer
    http: httpx.AsyncClient
    openai: AsyncOpenAI
    woken: list[str]
    spending: Spending
    health: Health
    index: ConversationIndex
    formats: Sequence[WireFormat]

    async def ask(self, *said: str | dict[str, Any], **body: Any) -> httpx.Response:
        """POST messages; strings alternate between user and assistant."""
        headers = body.pop("headers", {})
        body = {"model": MODEL, "messages": chat(*said)} | body
        return await self.http.post("/chat/completions", json=body, headers=headers)

    async def reply(self, body: dict[str, Any], **headers: str) -> dict[str, Any]:
        """Message of a whole answer to an agent's request."""
        response = await self.http.post(
            "/chat/completions", json={"model": MODEL} | body, headers=headers
        )
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["message"]

    async def events(self, *said: str | dict[str, Any], **body: Any) -> list[dict[str, Any]]:
        """Events of a streamed answer; {} stands for [DONE]."""
        response = await self.ask(*said, stream=True, **body)
        assert response.status_code == 200, response.text
        return read_events(response.text)

    def turns(self) -> list[Turn]:
        rows = sql(self.ledger).rows("SELECT id FROM turns ORDER BY id")
        return [self.ledger.turns.get(row["id"]) for row in rows]

    def column(self, name: str) -> list[Any]:
        return [r[0] for r in sql(self.ledger).rows(f"SELECT {name} FROM turns ORDER BY id")]

    def next_states(self) -> dict[int, NextState | None]:
        return {turn.id: self.ledger.turns.next_state(turn.id) for turn in self.turns()}

    def say(self, *texts: str) -> None:
        """Set the model's answers from now on."""
        self.sampler.say(*(spell(self.renderer, text) for text in texts))


def chat(*said: str | dict[str, Any]) -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    return [
        {"role": roles[i % 2], "content": m} if isinstance(m, str) else m
        for i, m in enumerate(said)
    ]


def text_of(events: list[dict[str, Any]]) -> str:
    """Text of a streamed answer."""
    return "".join(
        choice["delta"].get("content", "") for e in events for choice in e.get("choices", ())
    )


def read_events(text: str) -> list[dict[str, Any]]:
    blocks = [block for block in text.split("\n\n") if block]
    assert all(block.startswith("data: ") for block in blocks)
    return [{} if b == "data: [DONE]" else json.loads(b[len("data: ") :]) for b in blocks]


@asynccontextmanager
async def gateway(
    directory: Path,
    renderer: Renderer,
    sampler: FakeSampler | None = None,
    *,
    versions: dict[int, Sampler] | None = None,
    base: Sampler | None = None,
    stand_in_s: float = 5,
    context_tokens: int = 4000,
    student_topk: int = 2,
    sees: bool = False,
    api_key: str | None = None,
    key_file: Path | None = None,
    users: Mapping[str, str] | None = None,
    admins: Collection[str] = (),
    groups: Mapping[str, str] | None = None,
    redactor: Redactor | None = None,
    spending: Callable[[Ledger], Spending] | None = None,
    health: Health | None = None,
    compute: ComputeRounds | None = None,
    formats: Sequence[WireFormat] | None = None,
    idle_s: float = IDLE_S,
    owners: Collection[str] = (),
    hears_others: bool = False,
    lessons: bool = False,
    **settings: Any,
) -> AsyncGenerator[World]:
    """Start one on `directory`; starting again there is a restart. `health`: to be told of.

    `users`: names and keys; `admins` among them, `groups` by name. `base`: with it, earlier
    versions and then the base stand in for a version that fails.
    """
    sampler = sampler or FakeSampler(spell(renderer, "fine"))
    ledger = Ledger(directory)
    version = ledger.versions.newest()
    if version is None:
        version = ledger.versions.add_first(state_ref="s0", sampler_ref="p0")
    paid = spending(ledger) if spending else Spending(Price(), ledger.spend, Telemetry(None))
    parts = health or Health()
    policy, observer, woken = PolicyHolder(Policy(version, sampler)), Observer(), list[str]()

    async def open_version(number: int) -> Sampler:
        return (versions or {})[number]

    places = [patch(place, settings.pop(n)) for n, place in PLACES.items() if n in settings]
    index = ConversationIndex(ledger.turns, idle_s)
    lock = compute or ComputeRounds()
    formats = formats or spoken()
    key = api_key or "none"
    with ExitStack() as small:
        for place in places:
            small.enter_context(place)
        keys = Keys(
            SecretStr(api_key) if api_key else None,
            [
                User(
                    name=name,
                    key=SecretStr(key),
                    role="admin" if name in admins else "user",
                    group=(groups or {}).get(name),
                )
                for name, key in (users or {}).items()
            ],
            key_file,
        )
        secrets = SecretSearch(redactor or Redactor([SECRETS]), lock)
        deps = GatewayDeps(
            settings=Gateway(
                chats=Chats(others_judge=hears_others),
                **settings,
            ),
            served_name=MODEL,
            policy=policy,
            serving=ServingDeps(
                open_version,
                parts.outages,
                lineage(ledger.versions.get, open_version, base) if base else lambda _: (),
                waits=Backoff(first_s=0.05, longest_s=0.2),
                retries=Backoff(first_s=0.02, longest_s=0.1, attempts=3),
                stand_in_s=stand_in_s,
            ),
            ledger=ledger,
            index=index,
            secrets=secrets,
            privacy=SessionPrivacy(ledger, secrets),
            owners=Owners(ledger.turns, owners, listed_only=settings.get("agents") == "listed"),
            compute=lock,
            spending=paid,
            renderer=renderer,
            can=Capabilities(
                MODEL,
                frozenset(),
                True,
                True,
                context_tokens,
                sees=sees,
            ),
            student_topk=student_topk,
            lessons=LessonChooser(ledger.lessons, partial(renderer.hint_tokens, words="{hint}"))
            if lessons
            else None,
            wake_judging=lambda: woken.append("judge"),
            telemetry=observer,
            keys=keys,
        )
        body = partial(healthz, deps, parts, 16)
        app = create_app(deps, formats, body)
        orders = Orders(cast("RollbackOperations", None), body, local=not keys.needed)
        app.router.routes.extend(orders.routes())
        async with (
            in_background(app) as url,
            # verify=False: loading certificates would take longer than most tests.
            httpx.AsyncClient(
                base_url=url, timeout=120, verify=False, limits=httpx.Limits(max_connections=None)
            ) as http,
            orders.announced(directory, ("127.0.0.1", httpx.URL(url).port or 0)),
        ):
            client = AsyncOpenAI(base_url=url, api_key=key, max_retries=0, http_client=http)
            yield World(
                url,
                ledger,
                sampler,
                policy,
                renderer,
                observer,
                http,
                client,
                woken,
                paid,
                parts,
                index=index,
                formats=formats,
            )
    ledger.close()


@asynccontextmanager
async def wired(settings: Settings) -> AsyncGenerator[tuple[System, httpx.AsyncClient]]:
    """The product's parts, connected by its own wiring, and a client; judge and learner rest."""
    ledger, local = Ledger(settings.run.directory), settings.run.backend == "local"
    async with AsyncExitStack() as stack:
        stack.callback(ledger.close)
        arranged, price = arrange(settings) if local else None, price_in_force(settings)
        system = await wire(settings, source(settings), arranged, ledger, price, stack)
        url = await stack.enter_async_context(in_background(system.app))
        place = ("127.0.0.1", httpx.URL(url).port or 0)
        await stack.enter_async_context(system.orders.announced(settings.run.directory, place))
        http = httpx.AsyncClient(base_url=url, timeout=240, verify=False)
        yield system, await stack.enter_async_context(http)
