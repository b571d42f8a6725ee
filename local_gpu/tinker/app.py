"""Tinker's HTTP routes.

Rule: a route reads a body and returns the answer of `Service`; it computes nothing. Error statuses
are ones that Tinker's SDK does not retry (never 409, 429 or 5xx).
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from http import HTTPStatus
from typing import Any, Final

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import FileResponse
from google.protobuf.message import DecodeError
from pydantic import BaseModel, Field
from tinker import types
from tinker.proto import tinker_public_pb2 as pb

from local_gpu.tinker import messages
from local_gpu.tinker.checkpoints import path_of
from local_gpu.tinker.futures import Answer
from local_gpu.tinker.service import Json, Service
from tinker_claw.errors import RequestError
from tinker_claw.origin import refuse_pages

POLL_S = 20.0
"""Seconds that retrieve_future waits; the SDK gives it 45 s."""
_CHECKPOINTS: Final = "/training_runs/{run}/checkpoints"
_FILES: Final = _CHECKPOINTS + "/external_weights/{name}/external_weights_urls"


class _Numbered(BaseModel, extra="allow", protected_namespaces=()):
    """A request in a model's order. The rest is checked in its turn: one that is refused on arrival
    would leave a gap that all later ones wait for."""

    model_id: str
    seq_id: int = Field(ge=1)


def create_app(service: Service) -> FastAPI:
    """Create the application over a running service."""
    app = FastAPI(openapi_url=None)
    app.add_exception_handler(RequestError, _refuse)
    app.add_exception_handler(DecodeError, _refuse)
    routes = APIRouter(prefix="/api/v1", dependencies=[Depends(_refuse_pages)])

    @routes.post("/client/config")
    @routes.post("/telemetry")
    async def nothing(response: Response) -> Json:
        response.headers["Connection"] = "close"  # the SDK asks over one that it never closes
        return {}

    @routes.post("/client/dynamic_config")
    async def dynamic_config() -> Json:
        return {"sample_cancel_enabled": True}

    routes.get("/get_server_capabilities")(service.get_server_capabilities)
    routes.get("/samplers/{sampler_id}")(service.get_sampler)
    routes.post("/sessions/{session_id}/finish")(service.finish)
    for answer in (
        service.create_session,
        service.session_heartbeat,
        service.create_model,
        service.load_weights,
        service.get_info,
        service.create_sampling_session,
        service.asample,
    ):
        routes.post(f"/{answer.__name__}")(answer)

    def in_turn(name: str, kind: type[BaseModel], work: Callable[[Any], Awaitable[Answer]]) -> None:
        async def submit(ask: _Numbered) -> Json:
            check = partial(messages.checked, kind, ask.model_dump())
            return service.in_turn(ask.model_id, ask.seq_id, lambda: work(check()))

        routes.post(f"/{name}")(submit)

    save, export = types.SaveWeightsForSamplerRequest, types.SaveWeightsExternalRequest
    in_turn("optim_step", types.OptimStepRequest, service.optim_step)
    in_turn("save_weights", types.SaveWeightsRequest, partial(service.save, "weights"))
    in_turn("save_weights_for_sampler", save, partial(service.save, "sampler_weights"))
    in_turn("save_weights_external", export, partial(service.save, "external_weights"))

    @routes.post("/forward_backward")
    async def forward_backward(request: Request) -> Json:
        message = pb.ForwardBackwardRequest.FromString(await request.body())
        if message.seq_id < 1:
            raise RequestError(f"seq_id is {message.seq_id}, not at least 1.")
        work = partial(service.forward_backward, message)
        return service.in_turn(message.model_id, message.seq_id, work)

    @routes.post("/retrieve_future")
    async def retrieve_future(ask: types.FutureRetrieveRequest) -> Response:
        answer = await service.futures.retrieve(ask.request_id, POLL_S)
        if isinstance(answer, bytes):
            return Response(answer, media_type="application/x-protobuf")
        pending = {"type": "try_again", "request_id": ask.request_id, "queue_state": "active"}
        return _json(pending if answer is None else answer)

    @routes.post("/cancel_future")
    async def cancel_future(ask: types.FutureRetrieveRequest) -> None:
        if ":sample:" in ask.request_id:  # a step cannot be cancelled
            service.futures.cancel(ask.request_id)

    routes.get(_CHECKPOINTS)(service.store.list_checkpoints)
    routes.delete(_CHECKPOINTS + "/{kind}/{name}")(service.store.delete_checkpoint)

    @routes.get(_FILES)
    async def external_weights_urls(run: str, name: str, request: Request) -> Json:
        folder = service.store.existing(path_of(run, "external_weights", name))
        urls = {file.name: f"{request.url}/{file.name}" for file in folder.iterdir()}
        return {"urls": urls, "expires": "9999-12-31T00:00:00Z"}

    @routes.get(_FILES + "/{file}")
    async def download(run: str, name: str, file: str) -> Response:
        path = service.store.existing(path_of(run, "external_weights", name)) / file
        if not path.is_file():
            raise RequestError(f"There is no file {file} here.", status=HTTPStatus.NOT_FOUND)
        return FileResponse(path)

    app.include_router(routes)
    return app


def _refuse_pages(request: Request) -> None:
    """Raise RequestError for requests of web pages in a browser."""
    refuse_pages(request.headers, local=True)


async def _refuse(_: Request, error: Exception) -> Response:
    body = {"error": str(error), "category": "user"}
    return _json(body, getattr(error, "status", HTTPStatus.BAD_REQUEST))


def _json(content: Mapping[str, Any], status: int = HTTPStatus.OK) -> Response:
    """Answer in ASCII, which can hold any string that JSON brought, even a lone surrogate."""
    return Response(json.dumps(content), status, media_type="application/json")
