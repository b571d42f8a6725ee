"""Tinker's HTTP routes.

Rule: a route checks the key, reads a body, and returns the answer of `Service`; it computes
nothing. Error statuses are ones that Tinker's SDK does not retry (never 409 or 5xx, which it
retries for minutes, and 429 only where that helps).
"""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from local_gpu.tinker import checkpoints, requests
from local_gpu.tinker.auth import PROTOBUF, Door
from local_gpu.tinker.checkpoints import Json, Served
from local_gpu.tinker.config import tokenizer_of
from local_gpu.tinker.service import Service
from tinker_claw.errors import ClawError, RequestError

routes = APIRouter(prefix="/api/v1")


class Ascii(JSONResponse):
    """JSON in ASCII, which can hold any string that JSON brought, even a lone surrogate."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()


def create_app(service: Service) -> FastAPI:
    """Create the application over a running service."""
    app = FastAPI(title="Tinker on your own GPU", openapi_url=None, default_response_class=Ascii)
    app.state.service = service
    app.add_middleware(Door, config=service.shared.config)
    app.include_router(checkpoints.without_key)
    app.include_router(checkpoints.routes)
    app.include_router(routes)
    app.add_exception_handler(ClawError, _refuse)
    app.add_exception_handler(RequestValidationError, _refuse_body)
    app.add_exception_handler(HTTPStatus.NOT_FOUND, _refuse_route)
    return app


async def _refuse_route(request: Request, error: Exception) -> JSONResponse:
    sentence = f"{request.method} {request.url.path} is not served here."
    return Ascii({"error": sentence, "category": "user"}, HTTPStatus.NOT_FOUND)


async def _refuse(_: Request, error: Exception) -> JSONResponse:
    status = error.status if isinstance(error, RequestError) else HTTPStatus.UNPROCESSABLE_ENTITY
    return Ascii({"error": str(error), "category": "user"}, status)


async def _refuse_body(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    field = ".".join(map(str, first["loc"][1:])) or "the body"
    return await _refuse(request, ClawError(f"{field}: {first['msg']}."))


@routes.post("/client/config")
async def client_config(response: Response, service: Served) -> Json:
    # The SDK asks over a connection that it never closes.
    response.headers["Connection"] = "close"
    config = service.shared.config
    return {
        "parallel_fwdbwd_chunks": True,
        "fwdbwd_max_chunk_len": config.chunk_datums,
        "fwdbwd_max_chunk_bytes_count": config.chunk_bytes,
    }


@routes.post("/client/dynamic_config")
async def client_dynamic_config() -> Json:
    return {"sample_cancel_enabled": True}


@routes.post("/telemetry")
async def telemetry() -> Json:
    return {"status": "accepted"}


@routes.get("/get_server_capabilities")
async def get_server_capabilities(service: Served) -> Json:
    model = {
        "model_name": service.shared.config.offered,
        "max_context_length": service.shared.backend.serving.context_tokens,
        "trainable": True,
        "sampleable": True,
    }
    return {"supported_models": [model]}


@routes.post("/create_session")
async def create_session(ask: requests.CreateSession, service: Served) -> Json:
    told = "This server runs on your own hardware; telemetry sent to it is dropped, not kept."
    session = service.sessions.create()
    return {"type": "create_session", "session_id": session.id, "info_message": told}


@routes.post("/session_heartbeat")
async def session_heartbeat(ask: requests.OfSession, service: Served) -> Json:
    service.sessions.get(ask.session_id)
    return {"type": "session_heartbeat"}


@routes.post("/sessions/{session_id}/finish")
async def finish(session_id: str, service: Served) -> Response:
    await service.end_session(session_id)
    return Response(status_code=HTTPStatus.NO_CONTENT)


@routes.post("/create_model")
async def create_model(ask: requests.CreateModel, service: Served) -> Json:
    model_id = f"{ask.session_id}:train:{ask.model_seq_id}"
    return {"request_id": service.models.create(ask), "model_id": model_id}


@routes.post("/get_info")
async def get_info(ask: requests.OfModel, service: Served) -> Json:
    run = service.sessions.run(ask.model_id)
    offered = service.shared.config.offered
    data = {
        "arch": service.card.arch,
        "model_name": offered,
        "tokenizer_id": tokenizer_of(service.shared.config.local.model),
    }
    return {
        "type": "get_info",
        "model_id": run.id,
        "model_data": data,
        "model_name": offered,
        "is_lora": True,
        "lora_rank": run.rank,
        "optimizer_config": {"type": "adamw"},
    }


@routes.post("/forward_backward")
async def forward_backward(request: Request, service: Served) -> Json:
    if request.headers.get("Content-Encoding", "identity") != "identity":
        raise RequestError(
            "Compressed bodies are not read here.", status=HTTPStatus.UNSUPPORTED_MEDIA_TYPE
        )
    return {"request_id": service.models.forward_backward(await request.body())}


@routes.post("/optim_step")
async def optim_step(ask: requests.OptimStep, service: Served) -> Json:
    return {"request_id": service.models.optim_step(ask)}


@routes.post("/save_weights")
async def save_weights(ask: requests.SaveWeights, service: Served) -> Json:
    return {"request_id": service.models.save_weights(ask)}


@routes.post("/save_weights_for_sampler")
async def save_for_sampler(ask: requests.SaveForSampler, service: Served) -> Json:
    return {"request_id": service.models.save_weights_for_sampler(ask)}


@routes.post("/save_weights_external")
async def save_external(ask: requests.SaveExternal, service: Served) -> Json:
    return {"request_id": service.models.save_weights_external(ask)}


@routes.post("/load_weights")
async def load_weights(ask: requests.LoadWeights, service: Served) -> Json:
    return {"request_id": service.models.load_weights(ask)}


@routes.post("/create_sampling_session")
async def create_sampling_session(ask: requests.CreateSamplingSession, service: Served) -> Json:
    sampler_id = service.create_sampling_session(ask)
    return {"type": "create_sampling_session", "sampling_session_id": sampler_id}


@routes.get("/samplers/{sampler_id}")
async def get_sampler(sampler_id: str, service: Served) -> Json:
    sampler = service.sessions.sampler(sampler_id)
    base = service.shared.config.offered
    return {"sampler_id": sampler.id, "base_model": base, "model_path": sampler.model_path}


@routes.post("/asample")
async def asample(ask: requests.SampleRequest, service: Served) -> Json:
    request_id = service.sample(ask)
    sequence_ids = [f"{request_id}-{i}" for i in range(ask.num_samples)]
    return {"request_id": request_id, "sample_sequence_ids": sequence_ids}


@routes.post("/retrieve_future")
async def retrieve_future(ask: requests.OfRequest, service: Served) -> Response:
    answer = await service.promises.wait(ask.request_id, service.shared.config.poll_s)
    if answer is None:
        pending = {"type": "try_again", "request_id": ask.request_id, "queue_state": "active"}
        return Ascii(pending)
    if isinstance(answer, bytes):
        return Response(answer, media_type=PROTOBUF)
    return Ascii(dict(answer))


@routes.post("/cancel_future")
async def cancel_future(ask: requests.OfRequest, service: Served) -> Response:
    service.promises.cancel(ask.request_id)
    return Response(status_code=HTTPStatus.NO_CONTENT)
