"""A gateway over real HTTP whose model follows a script, and `examples.tracks` as its client.

Rule: what the script says next depends on the conversation alone, so that a try that is taken up
after a kill goes on as it would have.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tests.support.lives import ROOT
from tests.support.ports import serving

Script = Generator[tuple[str, Mapping[str, Any]], str, str]
"""Yields calls of tools, is sent what they return, and returns the last reply."""


@dataclass
class Scripted:
    """A gateway whose model follows a script."""

    script: Callable[[str, int], Script]
    """Makes the script for a wish and the number of the attempt."""
    outcomes: list[tuple[str, float]] = field(default_factory=list[tuple[str, float]])
    """Sessions and their reported scores."""
    url: str = ""

    async def chat(self, request: Request) -> Response:
        body = await request.json()
        *_, attempt = request.headers["x-session-id"].split("-")
        if "tools" not in body:  # it only asks which version serves
            message: Mapping[str, Any] = {"role": "assistant", "content": "Hello."}
        else:
            exam = "x-group-id" not in request.headers
            script = self.script(body["messages"][0]["content"], 0 if exam else int(attempt))
            try:
                message = said(script, body["messages"])
            except (AssertionError, ValueError) as error:  # which ends the run, in these words
                return JSONResponse({"error": repr(error)}, 400)
        return JSONResponse(
            {
                "id": "chatcmpl-1",
                "choices": [{"message": message, "finish_reason": "stop"}],
                "system_fingerprint": "v0",
                "usage": {"completion_tokens": 5},
            }
        )

    async def feedback(self, request: Request) -> Response:
        body = await request.json()
        self.outcomes.append((body["session"], body["score"]))
        return JSONResponse({"counts": True, "because": None})

    async def health(self, _: Request) -> Response:
        return JSONResponse({})

    @contextmanager
    def serving(self) -> Generator[None]:
        app = Starlette(
            routes=[
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
                Route("/v1/feedback", self.feedback, methods=["POST"]),
                Route("/healthz", self.health),
            ]
        )
        with serving(app) as url:
            self.url = f"{url}/v1"
            yield


def said(script: Script, messages: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Next reply of a conversation."""
    results = [message["content"] for message in messages if message["role"] == "tool"]
    try:
        call = next(script)
        for result in results:
            call = script.send(result)
    except StopIteration as end:
        return {"role": "assistant", "content": end.value}
    function = {"name": call[0], "arguments": json.dumps(call[1])}
    made = {"id": f"call-{len(results)}", "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [made]}


def runner(folder: Path, url: str, track: str, environment: Mapping[str, str]) -> Any:
    """Run `python -m examples.tracks run` in a process of its own."""
    (folder / "track.toml").write_text(track)
    command = [sys.executable, "-m", "examples.tracks", "run", str(folder / "track.toml")]
    with (folder / "runner.log").open("ab") as log:
        return subprocess.Popen(
            [*command, "--url", url, "--out", str(folder / "out")],
            cwd=ROOT,
            env=environment,
            stdout=log,
            stderr=log,
        )


def naming(text: str) -> list[str]:
    """Command lines of all processes that contain a text."""
    found: list[str] = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # it has ended
        if text in line:
            found.append(line)
    return found
