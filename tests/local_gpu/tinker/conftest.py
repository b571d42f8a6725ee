"""A server of a tiny model, and the SDK's client of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import tinker

from tests.support.tinker import KEY, TinkerServer, wire_server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinkerServer]:
    with wire_server(tmp_path_factory.mktemp("wire")) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: TinkerServer) -> Iterator[Any]:
    service = tinker.ServiceClient(base_url=server.url, api_key=KEY)
    yield service
    service.close("success").result(180)
