"""The routes of Tinker's REST client for checkpoints, and what needs no key.

Rule: a download link carries its own signature; everything else here that touches the store needs
the key.
"""

from __future__ import annotations

from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import FileResponse

from local_gpu.serve import asks
from local_gpu.serve.service import Service
from local_gpu.serve.store import KINDS, Place
from tinker_claw.errors import RequestError

routes = APIRouter(prefix="/api/v1")
without_key = APIRouter(prefix="/api/v1")
OPEN_PATHS = ("/api/v1/healthz", "/api/v1/downloads/")
"""Of the routes without a key."""
_EXTERNAL = "external_weights"


def _service(request: Request) -> Service:
    return request.app.state.service


Served = Depends(_service)


@without_key.get("/healthz")
async def healthz() -> dict[str, str]:
    return {"status": "ok"}


@routes.post("/weights_info")
async def weights_info(ask: asks.OfPath, service: Service = Served) -> dict[str, Any]:
    record = service.shop.store.read(Place.at(ask.tinker_path))
    return {
        "base_model": record.base_model,
        "optimizer_config": {"type": "adamw"},
        "is_lora": True,
        "lora_rank": record.rank,
        "train_unembed": False,
        "train_mlp": True,
        "train_attn": True,
    }


@routes.get("/training_runs/{run}/checkpoints")
async def list_checkpoints(run: str, service: Service = Served) -> dict[str, Any]:
    store = service.shop.store

    def read() -> list[dict[str, Any]]:
        return [
            {
                "checkpoint_id": f"{place.kind}/{place.name}",
                "checkpoint_type": KINDS[place.kind],
                "time": record.time,
                "tinker_path": place.path,
                "size_bytes": store.size_bytes(place),
                "expires_at": record.expires_at,
                "user_metadata": record.user_metadata,
            }
            for place, record in store.of_run(run)
            if not record.ephemeral
        ]

    return {"checkpoints": await service.shop.torch.run(read)}


@routes.delete("/training_runs/{run}/checkpoints/{kind}/{name}")
async def delete_checkpoint(run: str, kind: str, name: str, service: Service = Served) -> Response:
    place = Place.of(run, kind, name)
    service.shop.store.read(place)
    await service.delete(place)
    return Response(status_code=HTTPStatus.NO_CONTENT)


@routes.get(f"/training_runs/{{run}}/checkpoints/{_EXTERNAL}/{{name}}/external_weights_urls")
async def external_weights_urls(
    run: str, name: str, request: Request, service: Service = Served
) -> dict[str, Any]:
    files = service.shop.store.files(Place.of(run, _EXTERNAL, name))
    root = f"{request.base_url}api/v1/downloads"
    expires = datetime.fromtimestamp(service.links.until(), UTC)
    urls = {file: service.links.link(root, run, name, file) for file in files}
    return {"urls": urls, "expires": expires.isoformat()}


@without_key.get("/downloads/{run}/{name}/{file}")
async def download(
    run: str, name: str, file: str, until: int, signature: str, service: Service = Served
) -> Response:
    if not service.links.good(run, name, file, until, signature):
        raise RequestError(
            "This link is not signed by this server, or its hour is over.",
            status=HTTPStatus.FORBIDDEN,
        )
    return FileResponse(service.shop.store.files(Place.of(run, _EXTERNAL, name))[file])
