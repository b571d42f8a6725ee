"""Admin routes: orders over HTTP from commands, to the gateway of their data directory alone."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from tests.learner.test_rollback import SlowTrainer, undoing, until_it_steps
from tests.support.gateways import gateway
from tests.support.learning import World, world
from tinker_claw.app.admin import Orders
from tinker_claw.app.orders import CONTROL_FILE, order
from tinker_claw.app.server import in_background
from tinker_claw.cli import main
from tinker_claw.errors import UndoError
from tinker_claw.learner.rollback import RollbackOperations
from tinker_claw.ledger.database import WritingConnection, beside
from tinker_claw.ledger.versions import pinned
from tinker_claw.render.renderer import Renderer

KEY = "mine-0123456789abcdef"


@asynccontextmanager
async def orders(
    w: World, directory: Path, undo: RollbackOperations | None = None
) -> AsyncIterator[Orders]:
    """Serve the admin routes of a running loop."""
    taken = Orders(undo or undoing(w), lambda: {"status": "ok"}, local=True)
    app = Starlette(routes=taken.routes())
    async with (
        in_background(app) as url,  # type: ignore[arg-type]
        taken.announced(directory, ("127.0.0.1", httpx.URL(url).port or 0)),
    ):
        yield taken


async def test_they_take_the_token_of_the_directory_and_nothing_else(
    tmp_path: Path, renderer: Renderer
) -> None:
    async with gateway(tmp_path, renderer, api_key=KEY, users={"anna": KEY * 2}) as made:
        root = made.url.removesuffix("/v1")
        file = tmp_path / CONTROL_FILE
        assert file.stat().st_mode & 0o777 == 0o600
        token = json.loads(file.read_text())["token"]
        basic = base64.b64encode(f"me:{token}".encode()).decode()
        unknown = (await made.http.get(f"{root}/admin")).json()["error"]["message"]
        for sent in (
            {},
            {"authorization": f"Bearer {KEY}"},
            {"authorization": f"Bearer {KEY * 2}"},
            {"authorization": f"Basic {basic}"},
            {"authorization": f"Bearer {token}x"},
            {"authorization": token},
            {"x-api-key": token},
            {"cookie": f"token={token}"},
        ):
            for name in ("health", "pin", "rollback", "forget-turn", "lesson", "rejudge", "x"):
                for method in ("GET", "POST"):
                    told = await made.http.request(method, f"{root}/admin/{name}", headers=sent)
                    assert told.status_code == 404, (sent, name)
                    said = told.json()["error"]["message"]
                    assert said.partition("admin")[2][-40:] == unknown.partition("admin")[2][-40:]
        right = {"authorization": f"Bearer {token}"}
        told = await made.http.get(f"{root}/admin/health", headers=right)
        assert (told.status_code, told.json()["policy_version"]) == (200, 0)
        for page in ("http://evil.example", root, "null"):
            told = await made.http.get(f"{root}/admin/health", headers=right | {"origin": page})
            assert told.status_code == 403
        told = await made.http.get(f"{root}/admin/pin", headers=right)
        assert told.status_code == 400, "an order has a body"
        assert token not in (await made.http.get(f"{root}/admin/proof/x", headers=right)).text
        for path in ("v1/models", "metrics"):
            assert (await made.http.get(f"{root}/{path}", headers=right)).status_code == 401
        told = await made.http.get(f"{root}/healthz", headers=right)
        assert list(told.json()) == ["status"]
    assert CONTROL_FILE not in os.listdir(tmp_path)


async def test_only_names_of_this_machine_lead_there(tmp_path: Path, renderer: Renderer) -> None:
    async with gateway(tmp_path, renderer) as made:
        token = json.loads((tmp_path / CONTROL_FILE).read_text())["token"]
        sent = {"authorization": f"Bearer {token}", "host": "rebound.example"}
        for path in ("health", "proof/x"):
            told = await made.http.get(f"{made.url.removesuffix('/v1')}/admin/{path}", headers=sent)
            assert told.status_code == 403


async def test_order_whose_sender_leaves_is_taken_back(tmp_path: Path) -> None:
    """For example Ctrl-C in a command that waits for the running step."""
    trainer = SlowTrainer()
    async with world(tmp_path, trainer=trainer) as w, orders(w, tmp_path):
        await until_it_steps(w, trainer)
        known = json.loads((tmp_path / CONTROL_FILE).read_bytes())
        _, sender = await asyncio.open_connection(*known["gateway"])
        sender.write(
            b"POST /admin/rollback HTTP/1.1\r\nhost: localhost\r\ncontent-length: 14\r\n"
            b"authorization: Bearer " + known["token"].encode() + b'\r\n\r\n{"version": 0}'
        )
        await w.until(lambda: w.policy.current.version.id == 0)
        sender.close()
        await w.until(lambda: w.policy.current.version.id == 1)
        trainer.go_on.set()
        await w.version(2)
        assert w.policy.current.version.parent == 1


async def test_an_order_waits_for_the_step_in_hand(tmp_path: Path) -> None:
    trainer = SlowTrainer()
    async with world(tmp_path, trainer=trainer) as w, orders(w, tmp_path):
        await until_it_steps(w, trainer)
        giving = asyncio.create_task(asyncio.to_thread(order, tmp_path, "rollback", {"version": 0}))
        assert await asyncio.wait({giving}, timeout=0.2) == (set(), {giving})
        trainer.go_on.set()
        assert (await asyncio.wait_for(giving, 60))["parent"] == 0


async def test_forgetting_has_left_the_ledger_when_orders_are_taken_no_more(tmp_path: Path) -> None:
    begun, ended = asyncio.Event(), list[bool]()
    loop = asyncio.get_running_loop()

    def work(_: WritingConnection) -> None:
        loop.call_soon_threadsafe(begun.set)
        time.sleep(0.5)  # orders end meanwhile
        ended.append(True)

    async with world(tmp_path) as w:
        undo = undoing(w)
        undo.forget = lambda _: beside(w.ledger.path, work)  # type: ignore[assignment]
        given = {"session": "s", "user": "me"}
        async with orders(w, tmp_path, undo):
            giving = asyncio.create_task(
                asyncio.to_thread(order, tmp_path, "forget-session", given)
            )
            await asyncio.wait_for(begun.wait(), 60)
        assert ended
        with pytest.raises(UndoError, match="the gateway ended before it was done"):
            await giving


# Who is spoken to


class Stranger:
    """A server on a port that was a gateway's: it answers everything, and keeps what it is sent."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    async def answer(self, request: Request) -> PlainTextResponse:
        self.seen.append(f"{request.url.path} {dict(request.headers)} {await request.body()!r}")
        return PlainTextResponse('{"done": 0, "status": "ok"}')

    @asynccontextmanager
    async def serves(self) -> AsyncIterator[tuple[str, int]]:
        route = Route("/{rest:path}", self.answer, methods=["GET", "POST"])
        async with in_background(Starlette(routes=[route])) as url:  # type: ignore[arg-type]
            yield "127.0.0.1", httpx.URL(url).port or 0


COMMANDS = (["status"], ["pin", "v0"], ["lessons", "add", "Shorter"], ["openclaw-config"])


@pytest.mark.parametrize("held", [False, True], ids=["killed", "starting again"])
async def test_a_strangers_port_is_sent_neither_token_nor_key_nor_words(
    tmp_path: Path, renderer: Renderer, monkeypatch: pytest.MonkeyPatch, held: bool
) -> None:
    """The file of a killed gateway names a port that somebody else has by now."""
    monkeypatch.setenv("TINKER_CLAW_GATEWAY__API_KEY", KEY)
    stranger = Stranger()
    async with stranger.serves() as there:
        async with gateway(tmp_path, renderer, api_key=KEY) as made:
            token = json.loads((tmp_path / CONTROL_FILE).read_text())["token"]
            kept = json.dumps({"gateway": there, "token": token})
            (tmp_path / CONTROL_FILE).write_text(kept)
            flags = ["--model-name", "demo", "--backend", "local", "--port", str(there[1])]
            flags += ["--data-dir", str(tmp_path)]
            if held:
                for words in COMMANDS:
                    await asyncio.to_thread(main.main, [*words, *flags])
            assert pinned(made.ledger.rows) is None
        if not held:
            (tmp_path / CONTROL_FILE).write_text(kept)
            for words in COMMANDS:
                await asyncio.to_thread(main.main, [*words, *flags])
    told = "\n".join(stranger.seen)
    for secret in (token, KEY, "Shorter"):
        assert secret not in told
    assert all("/admin/proof/" in line for line in stranger.seen)
    assert bool(stranger.seen) == held


async def test_without_a_gateway_on_the_directory_the_default_port_is_sent_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stranger = Stranger()
    monkeypatch.setenv("TINKER_CLAW_GATEWAY__API_KEY", KEY)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    async with stranger.serves() as (_, port):
        monkeypatch.setenv("TINKER_CLAW_GATEWAY__PORT", str(port))
        for words in (["status"], ["log", "turns"], ["versions"], ["unpin"], ["rejudge"]):
            assert await asyncio.to_thread(main.main, words) == 2
            assert "No gateway runs on runs/" in capsys.readouterr().err or words[0] != "status"
    assert stranger.seen == []
