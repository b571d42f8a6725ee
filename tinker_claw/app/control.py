"""Control channel between commands and the gateway that runs on the same data directory.

Rule: whoever can read the file `control.json` there, which is the user who runs the gateway, may
give it orders; nobody else may, neither from a web page nor with an API key.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import select
import socket
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinker_claw.errors import ClawError, UndoError
from tinker_claw.files import write_private
from tinker_claw.ledger.prune import from_turn, in_session

if TYPE_CHECKING:
    from tinker_claw.learner.rollback import Rollback  # commands need this file's name, no learner

CONTROL_FILE = "control.json"
_ASKED_WITHIN_S = 10.0
_CONNECT_S = 10.0
PATIENCE_S = 3.0
"""Time after which the sender of an order is told that the order is still waiting."""


@asynccontextmanager
async def control(
    directory: Path, undoing: Rollback, gateway: tuple[str, int], token: str
) -> AsyncGenerator[None]:
    """Accept orders while the context lasts.

    Args:
        gateway: host and port at which the gateway listens, for the commands.
        token: proves that a sender can read the file; /healthz takes it, too. No key stands there:
            the file may outlive its gateway, and another process may get the port.
    """
    asked = set[asyncio.Task[None]]()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        this = asyncio.current_task()
        assert this is not None
        asked.add(this)
        try:
            with suppress(ConnectionError, TimeoutError, ValueError, TypeError):
                await _converse(undoing, token, reader, writer)
        finally:
            asked.discard(this)
            writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    file = directory / CONTROL_FILE
    file.unlink(missing_ok=True)  # of a process that was killed, perhaps with other rights
    content = {"port": port, "token": token, "gateway": gateway}
    write_private(file, json.dumps(content))
    try:
        yield
    finally:
        file.unlink(missing_ok=True)
        server.close()
        left = list(asked)
        for task in left:
            task.cancel()
        # A forget order has a thread on the ledger, which is closed next.
        await asyncio.gather(*left, return_exceptions=True)


def tell(
    directory: Path,
    order: Mapping[str, Any],
    waits: Callable[[], None],
    *,
    patience_s: float = PATIENCE_S,
) -> Any:
    """Give an order to the gateway that runs on this directory, and wait until it is done.

    Leaving (Ctrl-C) withdraws an order that has not been carried out yet; forgetting that has
    begun goes on. `waits` is called if it takes longer than `patience_s`.

    Raises:
        UndoError: the gateway says why it cannot be done, or does not answer.
    """
    try:
        known = json.loads((directory / CONTROL_FILE).read_text())
        with socket.create_connection(("127.0.0.1", known["port"]), _CONNECT_S) as connection:
            connection.settimeout(None)  # a step in progress may take minutes
            connection.sendall(json.dumps({**order, "token": known["token"]}).encode() + b"\n")
            if not select.select([connection], [], [], patience_s)[0]:
                waits()
            with connection.makefile("rb") as answers:
                line = answers.readline()
    except (OSError, ValueError, KeyError) as error:
        raise UndoError(
            f"a process has {directory} in use and takes no orders ({error}); it may be starting "
            "or stopping: try again, or stop it first"
        ) from error
    if not line:
        raise UndoError("the gateway ended before it was done; look with `tinker-claw versions`")
    answer = json.loads(line)
    if "error" in answer:
        raise UndoError(answer["error"])
    return answer["done"]


async def _converse(
    undoing: Rollback, token: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Answer one order. A long order is cancelled when its connection closes."""
    line = await asyncio.wait_for(reader.readline(), _ASKED_WITHIN_S)
    order: dict[str, Any] = dict(json.loads(line))
    if not hmac.compare_digest(str(order.pop("token", "")).encode(), token.encode()):
        return
    doing, leaving = (
        asyncio.ensure_future(_told(undoing, order)),
        asyncio.ensure_future(reader.read()),
    )
    try:
        await asyncio.wait({doing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if doing.done():
            writer.write(json.dumps(doing.result()).encode() + b"\n")
            await writer.drain()
    finally:
        for task in (doing, leaving):
            task.cancel()
        await asyncio.wait({doing, leaving})


async def _told(undoing: Rollback, order: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"done": await _do(undoing, order)}
    except ClawError as error:
        return {"error": str(error)}


async def _do(undoing: Rollback, order: dict[str, Any]) -> Any:
    match order["do"]:
        case "pin":
            await undoing.pin(order["version"], half=bool(order.get("half")))
            return order["version"]
        case "unpin":
            return await undoing.unpin()
        case "rollback":
            return asdict(await undoing.roll_back(order["version"]))
        case "forget turn":
            return asdict(await undoing.forget(from_turn(int(order["turn"]))))
        case "forget session":
            return asdict(await undoing.forget(in_session(order["session"], order["user"])))
        case "lesson":
            given = order["rule"], order["user"], order["lesson"], order["text"]
            return undoing.ledger.lessons.rule(*given)
        case "rejudge":
            return undoing.judge_again(order["turns"])
        case other:
            raise UndoError(f"the gateway that runs does not know how to {other!r}; restart it")
