"""HTTP as clients write it: upgrades, compressed bodies, byte order marks, odd paths, late
readers."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import zlib
from codecs import BOM_UTF8
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import zstandard

from tests.gateway.test_gateway_refusals import assert_error
from tests.support.gateways import MODEL, World
from tinker_claw.errors import RequestError
from tinker_claw.gateway.coding import decode
from tinker_claw.gateway.limits import MAX_BODY_BYTES

CHAT = "/chat/completions"


def body(text: str = "hi", **more: Any) -> bytes:
    return json.dumps(
        {"model": MODEL, "messages": [{"role": "user", "content": text}]} | more
    ).encode()


def raw_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(data) + packer.flush()


CODINGS = {
    "gzip": gzip.compress,
    "x-gzip": gzip.compress,
    "GZip": gzip.compress,
    "identity, gzip": gzip.compress,
    "deflate": zlib.compress,
    "Deflate": raw_deflate,
    "zstd": zstandard.ZstdCompressor().compress,
    "identity": bytes,
    "": bytes,
}


async def test_a_request_for_h2c_keeps_its_body(world: World) -> None:
    """What Java sends, without Java; the body comes behind the head."""
    place = urlsplit(world.url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    sent = body()
    head = (
        f"POST /v1{CHAT} HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\n"
        f"Content-Length: {len(sent)}\r\nHost: {place.netloc}\r\nHTTP2-Settings: AAEAAEAA\r\n"
        "Upgrade: h2c\r\nContent-Type: application/json\r\n\r\n"
    )
    for piece in (head.encode(), sent[:5], sent[5:]):
        writer.write(piece)
        await writer.drain()
        await asyncio.sleep(0.02)
    async with asyncio.timeout(60):
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    writer.close()


async def send(world: World, content: bytes, coding: str, path: str = CHAT) -> httpx.Response:
    headers = {"content-encoding": coding, "content-type": "application/json"}
    return await world.http.post(path, content=content, headers=headers)


async def test_compressed_bodies_are_read_as_if_they_were_not(world: World) -> None:
    whole = body("a long word " * 200)
    for coding, pack in CODINGS.items():
        bodies = [pack(whole), pack(BOM_UTF8 + whole)]
        if coding in ("gzip", "zstd"):  # members, and frames
            bodies.append(pack(whole[:9]) + pack(whole[9:]))
        for content in bodies:
            answer = await send(world, content, coding)
            assert answer.status_code == 200, (coding, answer.text)
        rating = await send(world, pack(b'{"turn": 1, "score": 1}'), coding, "/feedback")
        assert rating.status_code == 200, rating.text
    assert len({turn.prompt for turn in world.turns()}) == 1


async def test_gzip_of_very_many_members_is_refused(world: World) -> None:
    """Empty ones decode to nothing, so that no bound on bytes would ever end them."""
    whole, empty = body(), gzip.compress(b"")
    first, last = gzip.compress(whole[:9]), gzip.compress(whole[9:])
    assert (await send(world, first + empty * 900 + last, "gzip")).status_code == 200
    refused = await send(world, first + empty * 3000 + last, "gzip")
    assert_error(refused, 400)
    assert "members" in refused.json()["error"]["message"]
    assert len(world.turns()) == 1


def noise(size: int) -> str:
    """Text that packs badly, so that it is decoded in several pieces."""
    return "".join(chr(33 + one % 90) for one in random.Random(7).randbytes(size))


@pytest.mark.parametrize("coding", ["gzip", "deflate", "Deflate", "zstd"])
async def test_a_long_body_is_decoded_to_its_last_byte(coding: str) -> None:
    for size in (65_500, 65_536, 81_000, 300_000):
        whole = noise(size).encode()
        packed = CODINGS[coding](whole)
        assert await decode(packed, coding.lower(), len(whole)) == whole
        with pytest.raises(RequestError, match="longer than"):
            await decode(packed, coding.lower(), len(whole) - 1)
        if coding == "gzip":
            assert await decode(packed * 2, "gzip", 2 * len(whole)) == whole * 2


async def test_a_bomb_is_a_413(world: World) -> None:
    for coding in ("gzip", "deflate", "Deflate", "zstd"):
        bomb = CODINGS[coding](b"[" + b" " * (4 * MAX_BODY_BYTES))
        assert len(bomb) < 70_000
        assert_error(await send(world, bomb, coding), 413, code="request_too_large")
    assert (await world.ask("hi")).status_code == 200


async def test_a_zstd_frame_that_asks_for_a_huge_window_is_refused(world: World) -> None:
    wide = zstandard.ZstdCompressionParameters(window_log=30)
    packer = zstandard.ZstdCompressor(compression_params=wide).compressobj()
    assert_error(await send(world, packer.compress(body()) + packer.flush(), "zstd"), 400)


async def test_other_codings_and_several_are_a_415_that_names_what_is_read(world: World) -> None:
    content = gzip.compress(body())
    for coding in ("br", "gzip, gzip", "gzip, deflate", "compress", "gzip;q=1"):
        refused = await send(world, content, coding)
        assert_error(refused, 415, code="unsupported_content_encoding")
        message = refused.json()["error"]["message"]
        assert all(name in message for name in ("gzip", "deflate", "zstd", coding)), message
    for first in ("gzip", "zstd", "br", "identity"):
        coded = [("content-encoding", first), ("content-encoding", "gzip")]
        headers = [("content-type", "application/json"), *coded]
        answer = await world.http.post(CHAT, content=content, headers=headers)
        if first == "identity":
            assert answer.status_code == 200, answer.text
        else:
            assert_error(answer, 415, code="unsupported_content_encoding")


def zstd_with_checksum(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_checksum=True).compress(data)


def zstd_in_blocks(data: bytes) -> bytes:
    """A frame that ends with an empty block, and does not say how long it is."""
    packer = zstandard.ZstdCompressor().compressobj()
    return packer.compress(data) + packer.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK) + packer.flush()


@pytest.mark.parametrize(
    ("coding", "pack"),
    [
        ("gzip", gzip.compress),
        ("deflate", zlib.compress),
        ("zstd", zstd_with_checksum),
        ("zstd", zstd_in_blocks),
    ],
)
async def test_damaged_and_cut_bodies_are_a_400(world: World, coding: str, pack: Any) -> None:
    """All of the JSON may have come where the last bytes are missing, and nobody can say so."""
    whole = pack(body("word " * 999))
    cut = [whole[:-missing] for missing in (1, 2, 3, len(whole) // 2)]
    for content in (*cut, b"\x00\x01\x02 no such thing", body()):
        assert_error(await send(world, content, coding), 400)
    assert world.turns() == []
    assert (await send(world, whole, coding)).status_code == 200


async def test_paths_with_odd_slashes_and_versions_lead_to_the_wires(world: World) -> None:
    root = world.url.removesuffix("/v1")
    message = {"role": "user", "content": "hi"}
    for path, sent in {
        "chat/completions": {"messages": [message]},
        "responses": {"input": "hi"},
        "messages": {"messages": [message], "max_tokens": 9},
    }.items():
        for before in ("/v1//", "//v1/", "/", "//", "/v1/v1/", "/v1/v1/v1//"):
            for after in ("", "/", "//"):
                url = f"{root}{before}{path}{after}"
                told = await world.http.post(url, json={"model": MODEL, **sent})
                assert told.status_code == 200, (url, told.text)
    for path in ("/models", "/v1/models/", "/v1//models", "/v1/v1/models"):
        told = await world.http.get(f"{root}{path}")
        assert told.json()["data"][0]["id"] == MODEL, path
    for path in (f"/models/{MODEL}", f"/v1/v1/models/{MODEL}", f"/v1/models/{MODEL}/"):
        assert (await world.http.get(f"{root}{path}")).json()["id"] == MODEL, path


async def test_a_folder_as_the_models_name_keeps_its_slashes(world: World) -> None:
    told = await world.http.get("/models//data/no-such-folder")
    assert_error(told, 404, code="model_not_found")
    assert "/data/no-such-folder" in told.json()["error"]["message"]


@pytest.mark.parametrize("chunked", [False, True])
async def test_the_413_reaches_a_client_that_writes_first(world: World, chunked: bool) -> None:
    """It writes all of a body that is far too large before it reads a byte."""
    place = urlsplit(world.url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    size = 30_000_000
    length = "transfer-encoding: chunked" if chunked else f"content-length: {size}"
    head = f"POST /v1/feedback HTTP/1.1\r\nhost: {place.netloc}\r\n{length}\r\n\r\n"
    writer.write(head.encode())
    piece = b" " * 100_000
    framed = b"186a0\r\n" + piece + b"\r\n" if chunked else piece
    async with asyncio.timeout(60):
        for _ in range(size // len(piece)):
            writer.write(framed)
            await writer.drain()
        if chunked:
            writer.write(b"0\r\n\r\n")
        told = await reader.readuntil(b"\r\n\r\n")
    assert told.startswith(b"HTTP/1.1 413")
    writer.close()
