"""The real OpenClaw from npm, installed once into a cache and run as its users run it."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import httpx

from examples.day import DayError
from examples.day.npm import installed, on_path
from examples.demo.server import free_port
from tinker_claw.cli.openclaw import TRIED


def install(release: str = TRIED[0]) -> Path:
    """Install Node and a release of OpenClaw from npm. Returns the folder."""
    return installed(f"openclaw-{release}", f"openclaw@{release}")


def readme_block() -> dict[str, Any]:
    """OpenClaw configuration that the README tells users to add."""
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    return json.loads(readme.split("```json\n")[1].split("```")[0])


_TOKEN: Final = "day"
_ANSWER_S: Final = 900.0
"""Seconds for one message, with all its tool calls on a busy machine."""
_START_TRIES: Final = 360
_STOP_S: Final = 60.0


@dataclass(frozen=True)
class OpenClaw:
    """One user's OpenClaw: its home, its state and a provider block, nothing else configured."""

    installed: Path
    home: Path

    @classmethod
    def create(
        cls,
        home: Path,
        base_url: str,
        model: str,
        *,
        release: str = TRIED[0],
        thinks: str = "off",
        provider: Mapping[str, Any] | None = None,
        **entry: Any,
    ) -> Self:
        """Configure an OpenClaw as in the README, except for the arguments.

        Args:
            thinks: how much it lets the model think, as `/think` has it.
            provider: fields of the provider.
            entry: fields of the provider's model.
        """
        for name in ("state", "workspace"):
            (home / name).mkdir(parents=True)
        # a workspace that has been introduced skips the first-run ritual
        (home / "workspace" / "IDENTITY.md").write_text("- **Name:** Claw\n")
        config = readme_block()
        block, defaults = config["models"]["providers"]["tinker-claw"], config["agents"]["defaults"]
        block |= {"baseUrl": base_url, **(provider or {})}
        named = {"id": model, "name": model, "contextWindow": 65536, "maxTokens": 128}
        block["models"][0] |= named | entry
        primary = f"tinker-claw/{model}"
        defaults |= {"workspace": str(home / "workspace"), "model": {"primary": primary}}
        defaults["models"] = {primary: {"params": {"thinking": thinks}}}
        (home / "openclaw.json").write_text(json.dumps(config, indent=1))
        return cls(install(release), home)

    @asynccontextmanager
    async def gateway(self) -> AsyncGenerator[Gateway]:
        """Run its gateway, with its HTTP endpoint for chat; ended with the block."""
        port = free_port()
        file = self.home / "openclaw.json"
        served = {"endpoints": {"chatCompletions": {"enabled": True}}}
        here = {"mode": "local", "bind": "loopback", "port": port, "http": served}
        here |= {"auth": {"mode": "token", "token": _TOKEN}}
        file.write_text(json.dumps(json.loads(file.read_text()) | {"gateway": here}, indent=1))
        log = self.home / "gateway.log"
        with log.open("wb") as out:
            process = self.start("gateway", "run", "--port", str(port), out=out)
        try:
            async with talking(port) as http:
                await _until_up(http, process, log)
                yield Gateway(self, http, port)
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(process.wait, _STOP_S)
            process.kill()
            process.wait()

    @property
    def environment(self) -> dict[str, str]:
        return {
            "PATH": on_path(self.installed),
            "HOME": str(self.home),
            "OPENCLAW_STATE_DIR": str(self.home / "state"),
            "OPENCLAW_CONFIG_PATH": str(self.home / "openclaw.json"),
            "OPENCLAW_HANDSHAKE_TIMEOUT_MS": "120000",  # calls on a busy machine
            "DO_NOT_TRACK": "1",
            "NO_COLOR": "1",
        }

    def start(self, *words: str, out: Any = subprocess.PIPE) -> subprocess.Popen[str]:
        command = self.installed / "node_modules" / "openclaw" / "openclaw.mjs"
        bin_folder = self.installed / "node_modules" / ".bin"
        return subprocess.Popen(
            [str(bin_folder / "node"), str(command), *words],
            env=os.environ | self.environment,
            stdout=out,
            stderr=out,
            text=True,
        )


def talking(port: int) -> httpx.AsyncClient:
    """Client of OpenClaw's gateway, with a connection for each message: Node closes one that is
    idle for five seconds, perhaps just when the next message is sent."""
    return httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{port}",
        headers={"authorization": f"Bearer {_TOKEN}"},
        timeout=_ANSWER_S,
        limits=httpx.Limits(max_keepalive_connections=0),
        trust_env=False,
    )


@dataclass(frozen=True)
class Gateway:
    """A running gateway of OpenClaw, and a person who writes to its agent."""

    claw: OpenClaw
    http: httpx.AsyncClient
    port: int

    async def say(self, session: str, message: str) -> str:
        """Send one message; return what the person reads."""
        body = {"model": "openclaw", "messages": [{"role": "user", "content": message}]}
        headers = {"x-openclaw-session-key": session}
        try:
            answer = await self.http.post("/v1/chat/completions", json=body, headers=headers)
        except httpx.HTTPError as error:
            raise DayError(f"OpenClaw did not answer: {type(error).__name__} {error}") from error
        if not answer.is_success:
            raise DayError(f"OpenClaw answered {answer.status_code}: {answer.text[:500]}")
        return str(answer.json()["choices"][0]["message"]["content"] or "")

    async def new(self, session: str) -> None:
        """Begin a new session, as `/new` does."""
        await self.call("sessions.reset", key=session)

    async def call(self, method: str, **params: Any) -> None:
        """Call a method of its protocol, as its web chat does."""
        words = ("gateway", "call", method, "--json", "--token", _TOKEN, "--timeout", "120000")
        words += ("--url", f"ws://127.0.0.1:{self.port}", "--params", json.dumps(params))
        process = self.claw.start(*words)
        try:
            out, errors = await asyncio.to_thread(process.communicate, timeout=240)
        finally:
            process.kill()
        if process.returncode:
            raise DayError(f"OpenClaw refused {method}: {errors[-1000:] or out[-1000:]}")


async def _until_up(http: httpx.AsyncClient, process: subprocess.Popen[str], log: Path) -> None:
    for _ in range(_START_TRIES):
        if process.poll() is not None:
            break
        with suppress(httpx.TransportError):
            if (await http.get("/health")).is_success:
                return
        await asyncio.sleep(0.5)
    text = await asyncio.to_thread(log.read_text)
    raise DayError(f"OpenClaw's gateway did not start: {text[-2000:]}")
