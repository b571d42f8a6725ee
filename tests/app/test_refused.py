"""A service that refuses weights: who answers is told, and a version that is gone comes back.

The product's own parts over the real SDK and HTTP, against our stand-in speaking as SkyRL
does, which unloads weights while it answers everything else.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from examples.demo import homework
from tests.support.faults import App, Receive, Scope, Send, answer_with, body_of, replay
from tests.support.gateways import wired
from tests.support.ledger import judgeable, sql
from tests.support.tinker import KEY, Served, served
from tests.support.waits import eventually
from tinker_claw.app.orders import order
from tinker_claw.app.wiring import System
from tinker_claw.config.load import load
from tinker_claw.retry import Backoff


class Unloads:
    """Refuses to sample from some weights, and to train, as it is told to."""

    def __init__(self) -> None:
        self.refused: set[str] = set()
        """Paths of weights, or the base's name."""
        self.models: set[str] = set()
        """Ids of the models that were saved so far."""
        self.models_gone: set[str] = set()
        """Those among them that are gone."""
        self.how: int | str = 400
        """A status, or the category of a failed future."""
        self._of: dict[str, str] = {}
        self._failed: set[str] = set()

    def __call__(self, app: App) -> App:
        async def speaking(scope: Scope, receive: Receive, send: Send) -> None:
            path = scope.get("path", "").rsplit("/", 1)[-1]
            body = await body_of(receive) if scope["type"] == "http" else b""
            if path == "create_sampling_session":
                send = self._naming(json.loads(body), send)
            if path in ("save_weights", "save_weights_for_sampler"):
                self.models.add(model := json.loads(body)["model_id"])
                if model in self.models_gone:
                    return await answer_with(send, 400, {"detail": "model is not loaded"})
            if path == "asample" and self._of[self._session(body)] in self.refused:
                if isinstance(self.how, int):
                    return await answer_with(send, self.how, {"detail": "model is not loaded"})
                self._failed.add(number := f"failed-{len(self._failed)}")
                return await answer_with(send, 200, {"request_id": number})
            if path == "retrieve_future" and json.loads(body).get("request_id") in self._failed:
                told = {"error": "model is not loaded", "category": self.how}
                return await answer_with(send, 200, told)
            return await app(scope, replay(body, receive), send)

        return speaking

    def _session(self, body: bytes) -> str:
        return max((name for name in self._of if name.encode() in body), key=len)

    def _naming(self, asked: dict[str, Any], send: Send) -> Send:
        """Remember the weights of a session from the answer that names it."""

        async def reading(message: dict[str, Any]) -> None:
            if body := message.get("body"):
                name = json.loads(body).get("sampling_session_id")
                if name:
                    self._of[name] = asked.get("model_path") or asked["base_model"]
            await send(message)

        return reading


@dataclass
class Product:
    system: System
    http: httpx.AsyncClient
    speaks: Unloads
    there: Served
    root: str
    directory: Path

    async def order(self, name: str, **given: Any) -> Any:
        return await asyncio.to_thread(order, self.directory, name, given)

    async def health(self) -> dict[str, Any]:
        return (await self.http.get(f"{self.root}healthz")).json()

    async def ask(self, **body: Any) -> httpx.Response:
        messages = [{"role": "user", "content": "Hello"}]
        body = {"model": "demo", "messages": messages, "max_tokens": 12} | body
        return await self.http.post("/chat/completions", json=body)

    @property
    def newest(self) -> Any:
        return self.system.parts.policy.newest

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        return [tuple(row) for row in sql(self.system.parts.ledger).rows(query)]

    async def until(
        self, happened: Callable[[], bool] | None = None, **fields: Any
    ) -> dict[str, Any]:
        """Wait for something, or for a health with these fields; return the health."""
        async with asyncio.timeout(240):
            while True:
                health = await self.health()
                if happened is not None and happened():
                    return health
                if happened is None and health.items() >= fields.items():
                    return health
                await asyncio.sleep(0.05)

    async def talk(self, seed: int, *lines: str) -> None:
        """Hold a session: a problem, and these lines after each reply."""
        problem = homework.new_problem(random.Random(seed))
        messages = [{"role": "user", "content": homework.first_message(problem)}]
        for line in (*lines, None):
            answer = await self.http.post(
                "/chat/completions",
                json={"model": "demo", "messages": messages, "max_tokens": 60},
                headers={"X-Session-Id": str(seed)},
            )
            reply = answer.json()["choices"][0]["message"]["content"]
            messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": line}]

    async def complain(self, seed: int = 3) -> None:
        await self.talk(seed, "Use fewer words, please.")

    async def learn(self) -> None:
        """Talk until there is a first version."""
        for seed in range(20):
            rng = random.Random(seed)
            await self.talk(seed, *map(rng.choice, (homework.CORRECTIONS, homework.APPROVALS)))
            await eventually(
                lambda: not (judgeable(self.system.parts.ledger) or self.system.learner.stepping),
                120,
            )
            if self.newest.version.id:
                return
        raise AssertionError("it does not learn")


@asynccontextmanager
async def running(
    directory: Path, monkeypatch: pytest.MonkeyPatch, *more: str
) -> AsyncGenerator[Product]:
    """Run the product on a Tinker server of its own. `more`: flags of the start."""
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    monkeypatch.setattr(Backoff, "after", lambda self, failures: 0.1)
    speaks = Unloads()
    options = {"model": "demo", "name": "demo", "root": directory / "box"}
    there = await asyncio.to_thread(lambda: served(directory, speaking=speaks, **options))
    flags = ("--model-name", "demo", "--base-url", there.url, "--data-dir", str(directory / "data"))
    settings = load([*flags, "--batch-size", "2", "--gate", "off", *more])
    async with wired(settings) as (system, http), asyncio.TaskGroup() as group:
        works = (system.judging.run, system.learner.run, system.learner.recovery.keep_published)
        tasks = [group.create_task(work()) for work in works]
        yield Product(
            system,
            http,
            speaks,
            there,
            str(http.base_url).removesuffix("v1/"),
            settings.run.directory,
        )
        for task in tasks:
            task.cancel()


@pytest.fixture
async def product(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[Product]:
    async with running(tmp_path, monkeypatch) as product:
        yield product


@pytest.mark.slow
@pytest.mark.parametrize(("how", "trainer_too"), [(400, True), (410, False), ("user", True)])
async def test_a_refused_version_is_told_and_published_anew(
    product: Product, how: Any, *, trainer_too: bool
) -> None:
    await product.learn()
    newest = product.newest
    number, ref = newest.version.id, newest.sampler.ref
    async with product.system.learner.between_steps():  # nothing is published for now
        product.speaks.how = how
        product.speaks.refused.add(ref)
        if trainer_too:
            product.speaks.models_gone = set(product.speaks.models)
        before = len(product.rows("SELECT id FROM turns"))
        for _ in range(3):
            answer = await product.ask()
            assert answer.status_code == 200, answer.text
        found = await product.health()
        assert (found["status"], found["serving"]) == ("degraded", "replaced")
        assert found["policy_version"] == number
        assert "not loaded" in found["serving_error"]
        assert f"since v{number} cannot answer" in found["meaning"]
        turns = product.rows("SELECT policy_version, fallback IS NULL FROM turns ORDER BY id")[
            before:
        ]
        assert all(version != number and not own for version, own in turns), turns
    await product.until(serving="ok")
    (kept,) = product.rows(f"SELECT id, sampler_ref, state_ref FROM versions WHERE id = {number}")
    assert kept == (number, product.newest.sampler.ref, newest.version.state_ref)
    assert kept[1] != ref
    assert product.rows("SELECT MAX(id) FROM versions") == [(number,)], "the id stays"
    assert (await product.ask()).json()["system_fingerprint"] == f"v{number}"
    found = await product.health()
    assert (found["status"], found["answered_by"]) == ("ok", f"v{number}")


@pytest.mark.slow
@pytest.mark.parametrize("how", [400, "user"])
async def test_a_base_model_that_is_gone_is_told(product: Product, how: Any) -> None:
    speaks, refs = (
        product.speaks,
        {ref for (ref,) in product.rows("SELECT sampler_ref FROM versions")},
    )
    speaks.how, speaks.refused = how, {"demo", *refs}
    assert (await product.ask()).status_code == 503
    found = await product.health()
    assert (found["status"], found["serving"], found["answered_by"]) == (
        "degraded",
        "refused",
        None,
    )
    assert "not loaded" in found["serving_error"]
    speaks.refused = set()
    assert (await product.ask()).status_code == 200
    assert (await product.health())["status"] == "ok"


@pytest.mark.slow
async def test_a_pinned_version_that_is_gone_is_published_anew_from_its_state(
    product: Product,
) -> None:
    await product.learn()
    newest = product.newest
    await product.order("pin", version=0)
    (kept,) = product.rows("SELECT sampler_ref, state_ref FROM versions WHERE id = 0")
    product.speaks.how = 410
    product.speaks.refused.add(kept[0])
    async with product.system.learner.between_steps():
        assert (await product.ask()).status_code == 200
        found = await product.health()
        assert (found["policy_version"], found["serving"]) == (0, "replaced")
    found = await product.until(serving="ok")
    assert (found["status"], found["answered_by"], found["pinned"]) == ("ok", "v0", True)
    ((ref, state),) = product.rows("SELECT sampler_ref, state_ref FROM versions WHERE id = 0")
    assert (ref != kept[0], state) == (True, kept[1])
    before = len(product.rows("SELECT id FROM turns"))
    assert (await product.ask()).json()["system_fingerprint"] == "v0"
    (turn,) = product.rows("SELECT policy_version, fallback FROM turns ORDER BY id")[before:]
    assert turn == (0, None)
    # Learning goes on from the newest version, whose weights are loaded again.
    assert product.newest == newest
    assert not product.system.learner.recovery.suspect
    assert product.newest.version.id == await product.order("unpin")
    assert (await product.ask()).json()["system_fingerprint"] == f"v{newest.version.id}"
