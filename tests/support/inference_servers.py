"""Inference servers for tests: vLLM's HTTP dialect, as captured from a real one, over a tiny model.

Real HTTP on loopback, one thread per server, adapters really loaded, sampling by the embedded
engine. `Faults` are what such servers have been seen to do wrong.

Rule: a server knows nothing of its client but what comes over HTTP, and writes down what came.

One in a process of its own can be stopped and continued. Like one that hangs, it keeps its
connections open then and sends nothing.

    python -m tests.support.inference_servers tiny|demo          ends when its standard input does
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import ExitStack, aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

from local_gpu.model.files import read_adapter
from local_gpu.model.load import load_base, open_base
from local_gpu.model.lora import BaseModel, with_lora
from local_gpu.sample.embedded import Engine, EngineSize
from tests.support.backends import CONTEXT, tiny_model
from tests.support.lives import ROOT
from tests.support.ports import in_a_thread
from tinker_claw.errors import BackendError
from tinker_claw.shipped import MODEL_DIR
from tinker_claw.types import SamplingParams, StopReason, TokenChunk

MODEL = "tiny-base"
_BLOCK = 128
"""Tokens per block of the prefix cache."""
MODULES = threading.Lock()
"""Lock for building modules, as peft can only build one at a time."""


@cache
def tiny_base() -> BaseModel:
    with TemporaryDirectory() as folder:
        source = str(tiny_model(Path(folder)))
        return load_base(source, device=torch.device("cpu"), dtype=torch.float32)


@dataclass
class Faults:
    """Faults of a server; may be set and cleared while it runs."""

    status: int | None = None
    """Status of all completions; None: no fault."""
    hangs: bool = False
    """Whether completions never answer, and nothing is computed."""
    breaks_after: int | None = None
    """Tokens of a stream after which the connection is cut."""
    ends_after: int | None = None
    """Tokens after which a stream ends as if all was well, without a finish reason."""
    slow_s: float = 0.0
    """Seconds before each token."""
    load_s: float = 0.0
    """Seconds before an adapter is loaded."""
    refuses_loads: bool = False
    ignores_adapters: bool = False
    """Whether adapters are reported as loaded, but the base answers."""
    alpha: float = 1.0
    """Factor on the adapter's own alpha."""
    stale: bool = False
    """Whether prompts that another version has answered get that version's numbers."""
    most_candidates: int = 20
    """Most top-k logprobs per token; requests for more are refused."""
    static: bool = False
    """Whether it was started without permission to load adapters."""


@dataclass
class Log:
    """Requests that came, in order."""

    prompts: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    """(model, prompt) of completions with more than one token to sample."""
    warmed: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    """(model, prompt) of completions with one token to sample."""
    salts: dict[tuple[str, tuple[int, ...]], set[str | None]] = field(default_factory=dict)
    """Salts by (model, prompt)."""
    changes: list[tuple[str, str]] = field(default_factory=list)
    """("load" or "unload", name) in order, and ("late", name) for a request under an unloaded
    name."""
    running: int = 0
    aborted: int = 0
    most_running: dict[str, int] = field(default_factory=dict)
    """Requests in flight by model when that model was unloaded: 0 if all went well."""


class InferenceServer:
    """One server; `stop` and `start` again are a crash and a restart, after which it has no
    adapters."""

    def __init__(
        self,
        base: BaseModel,
        *,
        model: str = MODEL,
        context: int = CONTEXT,
    ) -> None:
        self.faults = Faults()
        self.log = Log()
        self._base = base
        self._model = model
        self._context = context
        self._size = EngineSize(base.vocabulary, context, context * 64, 512)
        self._port = 0
        self.url = ""

    def start(self) -> InferenceServer:
        self.adapters: dict[str, tuple[Path, Engine]] = {}
        self._base_engine = Engine(self._base.module, self._size)
        self._answered: dict[tuple[int, ...], str] = {}
        self._busy: dict[str, int] = {}
        self._steps = 0
        self._stack = ExitStack()
        running = self._stack.enter_context(in_a_thread(self._opening(), port=self._port))
        self.url, self._server = running.url, running.server
        self._port = int(self.url.rpartition(":")[2])
        return self

    def stop(self) -> None:
        """Cut every connection, as a process that dies does."""
        self._server.force_exit = True
        self._stack.close()

    def restart(self) -> None:
        self.stop()
        self.start()

    @asynccontextmanager
    async def _opening(self) -> AsyncGenerator[FastAPI]:
        try:
            yield self._app()
        finally:
            for engine in [self._base_engine, *(e for _, e in self.adapters.values())]:
                await engine.aclose()

    def _app(self) -> FastAPI:
        app = FastAPI()
        app.get("/health")(self._health)
        app.get("/v1/models")(self._models)
        app.get("/version")(self._version)
        app.get("/metrics")(self._metrics)
        if not self.faults.static:
            app.post("/v1/load_lora_adapter")(self._load)
            app.post("/v1/unload_lora_adapter")(self._unload)
        app.post("/v1/completions")(self._completions)
        return app

    async def _health(self) -> Response:
        return Response()

    async def _version(self) -> dict[str, str]:
        return {"version": "0.32.0"}

    async def _metrics(self) -> Response:
        return PlainTextResponse(
            "# TYPE vllm:iteration_tokens_total histogram\n"
            f'vllm:iteration_tokens_total_count{{engine="0"}} {self._steps}\n'
            f"process_cpu_seconds_total {time.process_time()}\n"
        )

    async def _models(self) -> dict[str, Any]:
        def entry(name: str, root: str, **more: Any) -> dict[str, Any]:
            return {"id": name, "object": "model", "owned_by": "vllm", "root": root} | more

        base = entry(self._model, self._base.source, parent=None, max_model_len=self._context)
        adapters = [
            entry(name, str(folder), parent=self._model, max_model_len=None)
            for name, (folder, _) in self.adapters.items()
        ]
        return {"object": "list", "data": [base, *adapters]}

    async def _load(self, request: Request) -> Response:
        body = await request.json()
        name, folder = body["lora_name"], Path(body["lora_path"])
        await asyncio.sleep(self.faults.load_s)
        if self.faults.refuses_loads:
            return _error(500, "Call to add_lora method failed: Worker failed with error 'x'")
        if name in self.adapters:
            return _error(400, f"The lora adapter '{name}' has already been loaded.")
        try:
            engine = await asyncio.to_thread(self._engine, folder)
        except BackendError as error:
            return _error(404, f"Loading lora {name} failed: No adapter found for {error}")
        self.log.changes.append(("load", name))
        self.adapters[name] = (folder, engine)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    def _engine(self, folder: Path) -> Engine:
        if self.faults.ignores_adapters:
            return Engine(self._base.module, self._size)
        with MODULES:
            saved = read_adapter(folder, self._base)
            tensors = {
                name: tensor * self.faults.alpha if ".lora_B." in name else tensor
                for name, tensor in saved.tensors.items()
            }
            return Engine(with_lora(self._base, saved.shape, tensors), self._size)

    async def _unload(self, request: Request) -> Response:
        name = (await request.json())["lora_name"]
        if name not in self.adapters:
            return _error(404, f"The lora adapter '{name}' cannot be found.")
        self.log.changes.append(("unload", name))
        self.log.most_running[name] = self._busy.get(name, 0)
        _, engine = self.adapters.pop(name)
        await engine.aclose()
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    async def _completions(self, request: Request) -> Response:
        body = await request.json()
        name, prompt = body["model"], tuple(body["prompt"])
        if name != self._model and name not in self.adapters:
            self.log.changes.append(("late", name))
            return _error(404, f"The model `{name}` does not exist.")
        seen = self.log.warmed if body["max_tokens"] == 1 else self.log.prompts
        seen.append((name, prompt))
        self.log.salts.setdefault((name, prompt), set()).add(body["cache_salt"])
        if self.faults.hangs:
            await self._hang(request)
        if self.faults.status is not None:
            return _error(self.faults.status, "EngineCore encountered an issue.")
        if body["logprobs"] > self.faults.most_candidates:
            return _error(400, f"{body['logprobs']} logprobs, which is greater than max allowed")
        if len(prompt) + 1 > self._context:
            return _error(400, f"This model's maximum context length is {self._context} tokens.")
        engine = self._engine_for(name, prompt)
        events = self._events(name, engine, prompt, body)
        return StreamingResponse(events, media_type="text/event-stream")

    async def _hang(self, request: Request) -> None:
        """Wait until the client disconnects, or the server stops."""
        while not await request.is_disconnected():
            await asyncio.sleep(0.02)
            if not self.faults.hangs:
                return

    def _engine_for(self, name: str, prompt: tuple[int, ...]) -> Engine:
        block = prompt[:_BLOCK]
        if self.faults.stale and len(block) == _BLOCK:
            name = self._answered.get(block, name)
        else:
            self._answered[block] = name
        return self._base_engine if name == self._model else self.adapters[name][1]

    async def _chunks(
        self, name: str, engine: Engine, prompt: tuple[int, ...], params: SamplingParams
    ) -> AsyncGenerator[TokenChunk]:
        self._busy[name] = self._busy.get(name, 0) + 1
        self.log.running += 1
        done = False
        try:
            async with aclosing(engine.stream(prompt, params)) as chunks:
                async for chunk in chunks:
                    await asyncio.sleep(self.faults.slow_s)
                    self._steps += 1
                    done = chunk.stop_reason is not None
                    yield chunk
        finally:
            self._busy[name] -= 1
            self.log.running -= 1
            self.log.aborted += not done

    async def _events(
        self, name: str, engine: Engine, prompt: tuple[int, ...], body: Mapping[str, Any]
    ) -> AsyncIterator[bytes]:
        """Events per token and choice; choices go on side by side."""
        params = _params(body)
        sampled, cached = 0, 0
        if self.faults.breaks_after == 0:
            raise ConnectionError("the process dies")
        if self.faults.ends_after == 0:
            return
        seeds = [None if params.seed is None else params.seed + i for i in range(body["n"])]
        going = {
            i: self._chunks(name, engine, prompt, replace(params, seed=seed))
            for i, seed in enumerate(seeds)
        }
        try:
            while going:
                chunks = await asyncio.gather(*(anext(one) for one in going.values()))
                for i, chunk in zip(list(going), chunks, strict=True):
                    sampled, cached = sampled + 1, chunk.cached_tokens
                    yield _event(choices=[_choice(i, chunk)])
                    if sampled == self.faults.breaks_after:
                        raise ConnectionError("the process dies")
                    if sampled == self.faults.ends_after:
                        return
                    if chunk.stop_reason is not None:
                        await going.pop(i).aclose()
        finally:
            for one in going.values():
                await one.aclose()
        yield _event(choices=[], usage=_usage(len(prompt), sampled, cached))
        yield b"data: [DONE]\n\n"


@contextmanager
def inference_servers(
    base: BaseModel, count: int, **settings: Any
) -> Iterator[list[InferenceServer]]:
    servers = [InferenceServer(base, **settings).start() for _ in range(count)]
    try:
        yield servers
    finally:
        for server in servers:
            server.stop()


def _params(body: Mapping[str, Any]) -> SamplingParams:
    return SamplingParams(
        max_tokens=body["max_tokens"],
        temperature=body["temperature"],
        top_p=body["top_p"],
        top_k=body["top_k"] or None,
        seed=body.get("seed"),
        stop_tokens=tuple(body.get("stop_token_ids") or ()),
        student_topk=body["logprobs"],
        cache_salt=body["cache_salt"],
    )


def _choice(index: int, chunk: TokenChunk) -> dict[str, Any]:
    (token,), (logprob,) = chunk.tokens, chunk.logprobs
    pairs = zip(chunk.topk_ids, chunk.topk_logprobs, strict=True)
    top = {i: value for ids, values in pairs for i, value in zip(ids, values, strict=True)}
    row = {token: logprob} | top
    reasons = {None: None, StopReason.STOP: "stop", StopReason.LENGTH: "length"}
    return {
        "index": index,
        "text": "",
        "logprobs": {
            "text_offset": [0],
            "token_logprobs": [_written(logprob)],
            "tokens": [f"token_id:{token}"],
            "top_logprobs": [{f"token_id:{i}": _written(value) for i, value in row.items()}],
        },
        "finish_reason": reasons[chunk.stop_reason],
        "stop_reason": token if chunk.stop_reason is StopReason.STOP else None,
        "prompt_token_ids": None,
        "token_ids": [token],
    }


def _written(logprob: float) -> float:
    return -9999.0 if math.isinf(logprob) else logprob


def _usage(prompt: int, sampled: int, cached: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + sampled,
        "completion_tokens": sampled,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def _event(**fields: Any) -> bytes:
    body = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "m"} | fields
    return f"data: {json.dumps(body)}\n\n".encode()


def _error(status: int, message: str) -> JSONResponse:
    kind = {404: "NotFoundError", 400: "InvalidUserInput"}.get(status, "InternalServerError")
    body = {"message": message, "type": kind, "param": None, "code": status}
    return JSONResponse({"error": body}, status)


SLOW_S = 0.05
"""Seconds before each token, so that it can be stopped in a reply."""


class Stoppable:
    """One server in its process."""

    def __init__(self, model: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.inference_servers", model],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._process.stdout
        self.url: str = json.loads(self._process.stdout.readline())

    def stop(self) -> None:
        os.kill(self._process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


@contextmanager
def stoppable(model: str) -> Iterator[Stoppable]:
    server = Stoppable(model)
    try:
        yield server
    finally:
        server.end()


def main(model: str) -> None:
    torch.set_num_threads(1)
    if model == "tiny":
        server = InferenceServer(tiny_base())
    else:
        base = open_base(str(MODEL_DIR), device="cpu", dtype="float32", threads=1)
        server = InferenceServer(base, model="demo-base", context=4096)
    server.faults.slow_s = SLOW_S
    server.start()
    print(json.dumps(server.url), flush=True)
    sys.stdin.read()
    server.stop()


if __name__ == "__main__":
    main(sys.argv[1])
