"""The routes of Tinker's REST client and command line for runs and checkpoints.

Rule: the address of a download has a random part, by which it is known; everything else here that
touches the store needs the key.
"""

from __future__ import annotations

import secrets
from datetime import UTC, datetime, timedelta
from functools import partial
from http import HTTPStatus
from typing import Annotated, Any, TypeAlias

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import FileResponse

from local_gpu.tinker import requests
from local_gpu.tinker.service import Service
from local_gpu.tinker.store import KINDS, Place, Record
from tinker_claw.errors import RequestError

routes = APIRouter(prefix="/api/v1")
without_key = APIRouter(prefix="/api/v1")
OPEN_PATHS = ("/api/v1/healthz", "/api/v1/downloads/")
"""Paths that need no key."""
_EXTERNAL = "external_weights"
Limit = Annotated[int, Query(ge=0, le=1000)]
Offset = Annotated[int, Query(ge=0, lt=1 << 53)]
Json: TypeAlias = dict[str, Any]


def _service(request: Request) -> Service:
    return request.app.state.service


Served = Annotated[Service, Depends(_service)]


@without_key.get("/healthz")
async def healthz() -> dict[str, str]:
    return {"status": "ok"}


@routes.post("/weights_info")
async def weights_info(ask: requests.OfPath, service: Served) -> Json:
    record = service.shared.store.read(Place.at(ask.tinker_path))
    return {
        "base_model": record.base_model,
        "optimizer_config": {"type": "adamw"},
        "is_lora": True,
        "lora_rank": record.rank,
        "train_unembed": record.train_unembed,
        "train_mlp": record.train_mlp,
        "train_attn": record.train_attn,
    }


@routes.get("/training_runs")
async def list_runs(service: Served, limit: Limit = 20, offset: Offset = 0) -> Json:
    runs = await service.shared.backend.aside(lambda: _runs(service))
    return {
        "training_runs": runs[offset : offset + limit],
        "cursor": {"offset": offset, "limit": limit, "total_count": len(runs)},
    }


@routes.get("/training_runs/{run_id}")
async def training_run(run_id: str, service: Served) -> Json:
    runs = await service.shared.backend.aside(lambda: _runs(service))
    for run in runs:
        if run["training_run_id"] == run_id:
            return run
    raise RequestError(f"There is no training run {run_id}.", status=HTTPStatus.NOT_FOUND)


@routes.get("/training_runs/{run}/checkpoints")
async def list_checkpoints(run: str, service: Served) -> Json:
    found = await service.shared.backend.aside(partial(service.shared.store.all, run))
    return {"checkpoints": [_json(service, *one) for one in found if _kept(one)]}


@routes.get("/checkpoints")
async def list_all_checkpoints(service: Served, limit: Limit = 100, offset: Offset = 0) -> Json:
    kept = [
        one for one in await service.shared.backend.aside(service.shared.store.all) if _kept(one)
    ]
    return {
        "checkpoints": [_json(service, *one) for one in kept[offset : offset + limit]],
        "cursor": {"offset": offset, "limit": limit, "total_count": len(kept)},
    }


@routes.put("/training_runs/{run}/checkpoints/{kind}/{name}/ttl")
async def ignore_ttl(run: str, kind: str, name: str, service: Served) -> Response:
    """Accept a lifetime, although nothing expires: the SDK gives one to an export that it downloads
    and then deletes."""
    service.shared.store.read(Place.of(run, kind, name))
    return Response(status_code=HTTPStatus.NO_CONTENT)


@routes.delete("/training_runs/{run}/checkpoints/{kind}/{name}")
async def delete_checkpoint(run: str, kind: str, name: str, service: Served) -> Response:
    place = Place.of(run, kind, name)
    service.shared.store.read(place)
    await service.delete(place)
    return Response(status_code=HTTPStatus.NO_CONTENT)


@routes.get(f"/training_runs/{{run}}/checkpoints/{_EXTERNAL}/{{name}}/external_weights_urls")
async def external_weights_urls(run: str, name: str, request: Request, service: Served) -> Json:
    place = Place.of(run, _EXTERNAL, name)
    files, token = service.shared.store.files(place), secrets.token_urlsafe(32)
    service.links[token] = place
    urls = {file: f"{request.base_url}api/v1/downloads/{token}/{file}" for file in files}
    until = datetime.now(UTC) + timedelta(days=1)  # in truth while this process lives
    return {"urls": urls, "expires": until.isoformat()}


@without_key.get("/downloads/{token}/{file}")
async def download(token: str, file: str, service: Served) -> Response:
    place = service.links.get(token)
    files = {} if place is None else service.shared.store.files(place)
    if file not in files:
        raise RequestError(f"There is no download of {file} here.", status=HTTPStatus.NOT_FOUND)
    return FileResponse(files[file])


def _runs(service: Service) -> list[Json]:
    """All runs, last used first. All are the caller's: there is one key, or none."""
    stored: dict[str, list[tuple[Place, Record]]] = {}
    for one in filter(_kept, service.shared.store.all()):
        stored.setdefault(one[0].run, []).append(one)
    facts = {
        run_id: (newest.base_model, newest.rank, newest.time, newest.run_metadata)
        for run_id, ((_, newest), *_) in stored.items()
    }
    offered = service.shared.config.offered
    for run in [run for session in service.sessions for run in tuple(session.runs.values())]:
        if run.rank is not None:
            facts[run.id] = offered, run.rank, run.asked_at.isoformat(), run.metadata

    def newest(run_id: str, kind: str) -> Json | None:
        found = next((one for one in stored.get(run_id, []) if one[0].kind == kind), None)
        return found and _json(service, *found)

    runs: list[Json] = [
        {
            "training_run_id": run_id,
            "base_model": base_model,
            "model_owner": "local",
            "is_lora": True,
            "corrupted": False,
            "lora_rank": rank,
            "last_request_time": asked_at,
            "last_checkpoint": newest(run_id, "weights"),
            "last_sampler_checkpoint": newest(run_id, "sampler_weights"),
            "user_metadata": metadata,
        }
        for run_id, (base_model, rank, asked_at, metadata) in facts.items()
    ]
    return sorted(runs, key=lambda run: run["last_request_time"], reverse=True)


def _json(service: Service, place: Place, record: Record) -> Json:
    return {
        "checkpoint_id": f"{place.kind}/{place.name}",
        "checkpoint_type": KINDS[place.kind],
        "time": record.time,
        "tinker_path": place.path,
        "size_bytes": service.shared.store.size_bytes(place),
        "public": False,
        "user_metadata": record.user_metadata,
    }


def _kept(one: tuple[Place, Record]) -> bool:
    """Whether a client has named this checkpoint; others belong to their session."""
    return not one[1].ephemeral
