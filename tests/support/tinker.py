"""The stand-in for Tinker's service, in this process or in its own, and the backend over it.

Rule: clients reach it over real HTTP, with the unmodified SDK. The backend has one server per
folder and test; starting a trainer again on the same folder is a restart of the client,
`Served.restart` one of the server. A fixture of conftest.py stops them all.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import tinker
from tinker.proto import tinker_public_pb2 as pb
from tinker.proto.request_conv import forward_backward_request_to_proto

from local_gpu.backend import LocalBackend
from local_gpu.config import LocalConfig
from local_gpu.model.lora import BaseModel
from local_gpu.tinker.app import create_app
from local_gpu.tinker.checkpoints import Store, locked
from local_gpu.tinker.service import Service
from tests.support.backends import held_requests, tiny_model
from tests.support.faults import Faulty
from tests.support.ports import in_a_thread
from tinker_claw.backends.tinker.trainer import ServiceLimits, TinkerTrainer
from tinker_claw.config.settings import Run, Settings, Training
from tinker_claw.shipped import MODELS

# Read by the SDK when a client is made: its telemetry would talk to the server between tests.
os.environ["TINKER_TELEMETRY"] = "0"


ROOT = Path(__file__).parents[2]
KEY = "tml-test-of-the-wire"
NAME = "tiny"
RAW_TOKENS = [(i * 7 + 3) % 64 for i in range(30)]


@dataclass(frozen=True)
class TinkerServer:
    """A server in this process."""

    url: str
    loop: asyncio.AbstractEventLoop
    service: Service

    @property
    def base(self) -> BaseModel:
        """Base model of the trainer in this process."""
        learning: Any = self.service.backend.learning
        return learning._base

    @property
    def store(self) -> Store:
        return self.service.store

    @property
    def checkpoints(self) -> set[str]:
        """Paths of the checkpoints that are there."""
        root = self.store.root
        return {f"tinker://{folder.relative_to(root)}" for folder in root.glob("*/*/[!.]*")}

    @property
    def held_requests(self) -> int:
        """Number of requests of samplers in this process that hold cache or wait for it."""
        serving: Any = self.service.backend.serving
        return sum(map(held_requests, tuple(serving._open)))

    def call(self, work: Any) -> Any:
        """Run a coroutine in the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(120)


@contextmanager
def wire_server(
    folder: Path,
    *,
    around: Callable[[Any], Any] = lambda app: app,
    port: int = 0,
    **settings: Any,
) -> Iterator[TinkerServer]:
    """Serve the tiny model; starting again on the same folder is a restart.

    Args:
        around: wraps the application, for a server that misbehaves.
    """
    defaults: dict[str, Any] = {
        "model": str(tiny_model(folder / "model")),
        "name": NAME,
        "root": folder / "wire",
        "threads": 1,
    }
    given = defaults | settings
    given["model"] = str(MODELS.get(given["model"], given["model"]))
    config = LocalConfig(device="cpu", **given)

    @asynccontextmanager
    async def opening() -> AsyncGenerator[Service]:
        with locked(config.root) as store:
            backend = await LocalBackend.start(config, store.folder)
            try:
                yield Service(config, store, backend)
            finally:
                await backend.aclose()

    with in_a_thread(opening(), lambda service: around(create_app(service)), port=port) as running:
        try:
            yield TinkerServer(running.url, running.loop, running.opened)
        finally:
            running.loop.call_soon_threadsafe(running.opened.futures.cancel)


@dataclass(frozen=True)
class WireProcess:
    """A `python -m local_gpu.tinker` process."""

    process: subprocess.Popen[str]
    url: str
    line: str

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout=240)


@contextmanager
def wire_process(root: Path, *flags: str, port: int = 0) -> Iterator[WireProcess]:
    """Serve the demo model, on a free port unless told; it is killed at the end if it still
    runs."""
    command = [sys.executable, "-m", "local_gpu.tinker", "--port", str(port)]
    log = root.with_suffix(".log")
    with log.open("ab") as stderr:
        process = subprocess.Popen(
            [*command, "--root", str(root), *flags],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
    assert process.stdout is not None
    try:
        began = time.monotonic()
        line = process.stdout.readline()
        assert line.startswith("serving "), f"{line}{log.read_text()} {time.monotonic() - began}"
        yield WireProcess(process, line.split(" at ")[1].split()[0], line)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        process.stdout.close()


class Raw:
    """A client that sends exactly what it is told."""

    def __init__(self, url: str, key: str = KEY) -> None:
        self.http = httpx.Client(base_url=f"{url}/api/v1/", headers={"X-API-Key": key}, timeout=240)

    def post(self, path: str, /, **body: Any) -> Any:
        answer = self.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def status(self, path: str, /, **body: Any) -> int:
        return self.http.post(path, json=body).status_code

    def poll(self, request_id: str) -> httpx.Response:
        return self.http.post("retrieve_future", json={"request_id": request_id})

    def result(self, request_id: str) -> httpx.Response:
        """Poll until the answer is there."""
        deadline = time.monotonic() + 120
        while b"try_again" in (answer := self.poll(request_id)).content:
            assert time.monotonic() < deadline
        return answer

    def session(self) -> str:
        return self.post("create_session", tags=[], user_metadata=None, sdk_version="x")[
            "session_id"
        ]

    def model(self, session: str | None = None, number: int = 0, base: str = NAME) -> str:
        asked = {"rank": 4, "seed": 1, "train_unembed": False}
        where = {"session_id": session or self.session(), "model_seq_id": number}
        made = self.post("create_model", **where, base_model=base, lora_config=asked)
        return self.result(made["request_id"]).json()["model_id"]

    def forward_backward(self, model: str, seq_id: int, tokens: Sequence[int] = RAW_TOKENS) -> str:
        datum = tinker.Datum(
            tinker.ModelInput.from_ints(tokens[:-1]),
            {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
        )
        request = tinker.types.ForwardBackwardRequest(
            forward_backward_input=tinker.types.ForwardBackwardInput([datum], "cross_entropy"),
            model_id=model,
            seq_id=seq_id,
        )
        body = forward_backward_request_to_proto(request).SerializeToString()
        answer = self.http.post("forward_backward", content=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["request_id"]

    def optim_step(self, model: str, seq_id: int) -> str:
        adam = {"learning_rate": 0.01}
        return self.post("optim_step", model_id=model, seq_id=seq_id, adam_params=adam)[
            "request_id"
        ]

    def loss(self, request_id: str) -> float:
        message = pb.ForwardBackwardOutput()
        message.ParseFromString(self.result(request_id).content)
        return message.metrics["loss:sum"]


_running: dict[Path, Served] = {}


class Served:
    """A server at one address that can misbehave and be restarted."""

    def __init__(
        self, folder: Path, speaking: Callable[[Any], Any] = lambda app: app, **settings: Any
    ) -> None:
        """`speaking` wraps the application, for a server that deviates from the API."""
        self.folder = folder
        self._speaking = speaking
        self._settings = settings
        self._stack = ExitStack()
        self.server: TinkerServer
        self.faulty: Faulty
        self._start(port=0)

    def _start(self, port: int) -> None:
        def around(app: Any) -> Faulty:
            self.faulty = Faulty(self._speaking(app))
            return self.faulty

        self.server = self._stack.enter_context(
            wire_server(self.folder, around=around, port=port, **self._settings)
        )

    @property
    def url(self) -> str:
        return self.server.url

    def stop(self) -> None:
        self._stack.close()

    def restart(self) -> None:
        """Restart the server: sessions, futures and gradients are gone; checkpoints stay."""
        port = int(self.url.rsplit(":", 1)[1])
        self.stop()
        self._start(port)


def served(folder: Path, **settings: Any) -> Served:
    """Server of this folder, started if there is none."""
    if folder not in _running:
        _running[folder] = Served(folder, **settings)
    return _running[folder]


async def start_tinker(
    folder: Path,
    *,
    alpha: int = 8,
    server: dict[str, Any] | None = None,
    rank: int = 4,
    context_tokens: int | None = None,
    **limits: Any,
) -> TinkerTrainer:
    """Start a trainer over the server of this folder."""
    options = {"root": folder / "served", "alpha": alpha, **(server or {})}
    there = await asyncio.to_thread(lambda: served(folder, **options))
    asked = settings(base_url=there.url, rank=rank, context_tokens=context_tokens)
    return await TinkerTrainer.start(asked, ServiceLimits(**limits), key=KEY)


def settings(
    model: str = NAME,
    *,
    base_url: str | None = None,
    rank: int = 32,
    context_tokens: int | None = None,
) -> Settings:
    """Settings that the adapter reads."""
    run = Run(model_name=model, base_url=base_url, context_tokens=context_tokens)
    return Settings(run=run, training=Training(lora_rank=rank))


def stop_all() -> None:
    """Stop every server that was started."""
    while _running:
        _, there = _running.popitem()
        there.stop()
