"""OpenClaw between users and gateway: users talk to the agent, which reads and writes files.

Its provider is the gateway, as the README says. The homework lies in a file of its workspace, and
what the user is content with is to be saved there; the exams ask the gateway itself.

Rule: whatever the user says is one argument of one command; no shell reads it.
"""

from __future__ import annotations

import asyncio
import json
from asyncio.subprocess import DEVNULL, PIPE
from dataclasses import dataclass
from pathlib import Path

from examples.demo import DemoError
from examples.demo.client import Client, Request

ANSWER_S = 900.0
"""Seconds for an answer: an agent may call many tools before it answers."""
FOLDER = "homework"


@dataclass(frozen=True, slots=True)
class Agent:
    """An OpenClaw that is set up."""

    command: tuple[str, ...]
    """Command, as in `openclaw agent --local --json`."""
    workspace: Path
    """Workspace folder of its configuration."""


class ThroughOpenClaw(Client):
    """Client that sends users' messages to the agent, and exam questions to the gateway."""

    def __init__(self, direct: Client, agent: Agent) -> None:
        self._direct, self._agent = direct, agent

    async def ask(self, request: Request) -> str:
        if request.kind == "side":
            return await self._direct.ask(request)
        said = str(request.messages[-1]["content"])
        file = f"{FOLDER}/{request.session}.txt"
        if len(request.messages) == 1:
            path = self._agent.workspace / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(said + "\n")
            said = f"Please help me with what stands in {file}. Answer here; leave the file as is."
        elif request.last:
            said = f"{said} (The file is {file}.)"
        return await self._say(request.session, said)

    async def _say(self, session: str, message: str) -> str:
        """Send one message of the user; return what they would read.

        Raises:
            DemoError: the agent ended with an error, or said nothing that can be read.
        """
        words = (*self._agent.command, "--session-id", session, "-m", message)
        try:
            process = await asyncio.create_subprocess_exec(
                *words, stdin=DEVNULL, stdout=PIPE, stderr=PIPE
            )
        except OSError as error:
            raise DemoError(f"OpenClaw cannot be started: {error}") from error
        try:
            async with asyncio.timeout(ANSWER_S):
                out, errors = await process.communicate()
        except TimeoutError as error:
            raise DemoError(f"OpenClaw did not answer within {ANSWER_S:g} s") from error
        finally:
            if process.returncode is None:
                process.kill()
        text = out.decode(errors="replace")
        if process.returncode or "{" not in text:
            last = errors.decode(errors="replace").strip()[-300:]
            raise DemoError(f"OpenClaw ended with status {process.returncode}: {last}")
        try:
            answer = json.JSONDecoder().raw_decode(text[text.index("{") :])[0]
            parts = [part.get("text") or "" for part in answer.get("payloads", [])]
        except (ValueError, AttributeError) as error:
            raise DemoError(f"OpenClaw said something else: {text[:300]}") from error
        return "\n".join(parts).strip()
