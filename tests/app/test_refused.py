"""A service that refuses weights: who answers is told, and a version that is gone comes back.

The product's own parts over the real SDK and HTTP, against our stand-in speaking as SkyRL
does, which unloads weights while it answers everything else.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from examples.demo import homework
from tests.support.fakes import rated
from tests.support.faults import App, Receive, Scope, Send, answer_with, body_of, replay
from tests.support.gateways import wired
from tests.support.ledger import judgeable, sql
from tests.support.tinker import KEY, Served, served
from tests.support.waits import eventually
from tinker_claw.app import wiring
from tinker_claw.app.server import in_background
from tinker_claw.app.wiring import System
from tinker_claw.cli.status import describe
from tinker_claw.config.load import load
from tinker_claw.learner import recovery
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

    async def complain(self, seed: int = 3) -> None:
        """Say something, and be displeased with the reply."""
        opening = {
            "role": "user",
            "content": homework.first_message(homework.new_problem(random.Random(seed))),
        }
        answer = await self.ask(messages=[opening])
        said = {"role": "assistant", "content": answer.json()["choices"][0]["message"]["content"]}
        no = {"role": "user", "content": "Use fewer words, please."}
        assert (await self.ask(messages=[opening, said, no])).status_code == 200

    async def learn(self) -> None:
        """Talk until there is a first version."""
        for seed in range(20):
            rng = random.Random(seed)
            messages = [
                {"role": "user", "content": homework.first_message(homework.new_problem(rng))}
            ]
            for line in (rng.choice(homework.CORRECTIONS), rng.choice(homework.APPROVALS), "Bye."):
                answer = await self.http.post(
                    "/chat/completions",
                    json={"model": "demo", "messages": messages, "max_tokens": 60},
                    headers={"X-Session-Id": str(seed)},
                )
                said = answer.json()["choices"][0]["message"]["content"]
                messages += [
                    {"role": "assistant", "content": said},
                    {"role": "user", "content": line},
                ]
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
    monkeypatch.setattr(recovery, "WAITS", Backoff(0.05, 0.2))
    speaks = Unloads()
    options = {"model": "demo", "name": "demo", "root": directory / "box"}
    there = await asyncio.to_thread(lambda: served(directory, speaking=speaks, **options))
    flags = ("--model-name", "demo", "--base-url", there.url, "--data-dir", str(directory / "data"))
    settings = load([*flags, "--batch-size", "2", "--gate", "off", *more])
    async with wired(settings) as (system, http), asyncio.TaskGroup() as group:
        judging = system.judging
        system.learner.recovery._waits = waits = Backoff(0.05, 0.2)
        judging.judge_breaker.waits = judging.teacher_breaker.waits = waits
        works = (system.judging.run, system.learner.run, system.learner.recovery.keep_published)
        tasks = [group.create_task(work()) for work in works]
        yield Product(system, http, speaks, there, str(http.base_url).removesuffix("v1/"))
        for task in tasks:
            task.cancel()


@pytest.fixture
async def product(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[Product]:
    async with running(tmp_path, monkeypatch) as product:
        yield product


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "trainer_too"), [(400, False), (400, True), (404, False), (410, False), ("user", True)]
)
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
        by = found["answered_by"]
        assert by in {f"v{n}" for n in range(number)} | {"the base model"}
        assert f"Replies come from {by}, since v{number} cannot answer" in found["meaning"]
        assert any("not loaded" in line for line in describe(found, "here", 0.0))
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
@pytest.mark.parametrize("how", [400, 404, 410, "user"])
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
    assert found["meaning"].startswith("Requests get an error: neither v0 nor what stands in")
    speaks.refused = set()
    assert (await product.ask()).status_code == 200
    assert (await product.health())["status"] == "ok"


@pytest.mark.slow
async def test_a_request_that_is_refused_for_itself_leaves_health_well(product: Product) -> None:
    inner = product.there.faulty.app

    async def picky(scope: Scope, receive: Receive, send: Send) -> None:
        body = await body_of(receive) if scope["type"] == "http" else b""
        if scope.get("path", "").endswith("asample") and b"0.1234" in body:
            return await answer_with(send, 400, {"detail": "no such temperature here"})
        return await inner(scope, replay(body, receive), send)

    product.there.faulty.app = picky
    answer = await product.ask(temperature=0.1234)
    assert answer.status_code == 400
    assert "no such temperature here" in answer.text
    found = await product.health()
    assert (found["status"], found["serving"], found["backend"]) == ("ok", "ok", "ok")


@pytest.mark.slow
async def test_a_version_that_comes_back_and_is_refused_again_is_told_and_published_each_time(
    product: Product,
) -> None:
    await product.learn()
    number, ref = product.newest.version.id, product.newest.sampler.ref
    async with product.system.learner.between_steps():  # nothing is published for now
        for _ in range(2):
            product.speaks.refused.add(ref)
            assert (await product.ask()).json()["system_fingerprint"] != f"v{number}"
            found = await product.health()
            assert (found["status"], found["serving"]) == ("degraded", "replaced")
            product.speaks.refused.clear()
            assert (await product.ask()).json()["system_fingerprint"] == f"v{number}"
            await product.until(serving="ok")
    refs = [ref]
    for _ in range(2):
        product.speaks.refused.add(refs[-1])
        assert (await product.ask()).status_code == 200
        assert (await product.health())["policy_version"] == number
        await product.until(serving="ok")
        assert (await product.ask()).json()["system_fingerprint"] == f"v{number}"
        refs.append(product.newest.sampler.ref)
    assert len(set(refs)) == 3, "published anew each time it was gone"
    assert (await product.health())["status"] == "ok"


@pytest.mark.slow
@pytest.mark.parametrize("how", [400, 404, 410])
async def test_a_pinned_version_that_is_gone_is_published_anew_from_its_state(
    product: Product, how: int
) -> None:
    await product.learn()
    newest = product.newest
    await product.system.orders._undoing.pin(0)
    (kept,) = product.rows("SELECT sampler_ref, state_ref FROM versions WHERE id = 0")
    product.speaks.how = how
    product.speaks.refused.add(kept[0])
    async with product.system.learner.between_steps():
        assert (await product.ask()).status_code == 200
        found = await product.health()
        assert (found["policy_version"], found["serving"]) == (0, "replaced")
        assert found["meaning"].startswith("Replies come from the base model, since v0 cannot")
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
    assert product.newest.version.id == await product.system.orders._undoing.unpin()
    assert (await product.ask()).json()["system_fingerprint"] == f"v{newest.version.id}"


@dataclass
class Scold:
    """A judge over HTTP: each reply was bad, and each has a hint."""

    status: int = 200

    def app(self) -> FastAPI:
        app = FastAPI()

        async def answer(request: Request) -> JSONResponse:
            body = await request.json()
            if self.status != 200:
                return JSONResponse({"detail": "no such model here"}, self.status)
            text = rated(-1, "Use fewer words", "use fewer words")
            one = {"message": {"content": text}, "finish_reason": "stop"}
            return JSONResponse({"choices": [one] * body.get("n", 1)})

        app.add_api_route("/v1/chat/completions", answer, methods=["POST"])
        return app


@pytest.mark.slow
@pytest.mark.parametrize("how", [400, 404, 410])
async def test_a_judge_that_is_gone_is_told_and_replies_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: int
) -> None:
    judge, seeds = Scold(how), itertools.count(10)
    async with (
        in_background(judge.app()) as url,
        running(tmp_path, monkeypatch, "--judge-url", url) as product,
    ):
        await product.complain()
        found = await product.until(judge="failing")
        assert (found["status"], found["wrong"], found["serving"]) == ("degraded", ["judge"], "ok")
        assert f"HTTP {how}" in found["judge_error"]
        assert "judging waits" in found["meaning"]
        lines = "\n".join(describe(found, "here", found["judge_since"]))
        assert "judge: failing since" in lines
        assert f"HTTP {how}" in lines
        assert (await product.ask()).status_code == 200
        judge.status = 200
        while (await product.health())["judge"] != "ok":
            await product.complain(next(seeds))
            await product.until(lambda: not judgeable(product.system.parts.ledger))
        assert (await product.until(judge="ok"))["status"] == "ok"


@pytest.mark.slow
@pytest.mark.parametrize("how", [400, 404, 410, "user"])
async def test_a_base_model_that_teaches_and_is_gone_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: Any
) -> None:
    async with (
        in_background(Scold().app()) as url,
        running(tmp_path, monkeypatch, "--judge-url", url, "--method", "opd") as product,
    ):
        product.speaks.how, product.speaks.refused = how, {"demo"}
        await product.complain()
        first = await product.until(backend="away")
        await product.until(lambda: product.system.parts.health.backend.attempts("teaching") > 2)
        found = await product.health()
        assert found["backend_since"] == first["backend_since"], "one outage, however often tried"
        assert (found["status"], found["serving"]) == ("degraded", "ok")
        assert "no longer has the base model" in found["backend_error"]
        assert found["meaning"].startswith("Replies come from policy v0 as before; judging waits")
        assert any("no longer has" in line for line in describe(found, "here", 0.0))
        assert found["samples_waiting"] == 0
        product.speaks.refused.clear()
        assert (await product.until(backend="ok", samples_waiting=1))["status"] == "ok"


@pytest.mark.slow
@pytest.mark.parametrize("how", [400, 404, 410, "user"])
async def test_a_base_model_that_judges_and_is_gone_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: Any
) -> None:
    monkeypatch.setattr(wiring, "MODELS", ())  # as a model without a judge of its own
    async with running(tmp_path, monkeypatch) as product:
        product.speaks.how, product.speaks.refused = how, {"demo"}
        await product.complain()
        await product.until(backend="away")
        found = await product.until(judge="stalled")
        assert (found["status"], found["serving"]) == ("degraded", "ok")
        assert "no longer has the base model" in found["backend_error"]
        assert "judging waits" in found["meaning"]
        assert (await product.ask()).status_code == 200
        product.speaks.refused.clear()
        await product.until(backend="ok")
