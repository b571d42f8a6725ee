"""HTTP as clients write it: upgrades, compressed bodies, byte order marks, odd paths, late
readers."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import shutil
import zlib
from codecs import BOM_UTF8
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import zstandard

from tests.gateway.test_gateway_refusals import assert_error
from tests.support.gateways import MODEL, World
from tinker_claw.gateway.coding import TooLongError, decode
from tinker_claw.gateway.limits import MAX_BODY_BYTES

CHAT = "/chat/completions"
STOCK_JAVA = Path(__file__).parents[1] / "data" / "StockClient.java"


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


@pytest.mark.skipif(shutil.which("java") is None, reason="there is no java on the PATH")
async def test_a_stock_java_client_is_answered(world: World) -> None:
    """It asks for an upgrade to h2c with each request."""
    world.say("hello")
    pipe = asyncio.subprocess.PIPE
    client = await asyncio.create_subprocess_exec(
        "java",
        str(STOCK_JAVA),
        f"{world.url}{CHAT}",
        body().decode(),
        stdout=pipe,
        stderr=pipe,
    )
    out, wrong = await asyncio.wait_for(client.communicate(), 120)
    answers = out.decode().splitlines()
    assert len(answers) == 2, wrong.decode()
    for answer in answers:
        status, _, told = answer.partition(" ")
        assert status == "200", told
        assert json.loads(told)["choices"][0]["message"]["content"] == "hello"
    assert len(world.turns()) == 2


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


@pytest.mark.parametrize("coding", CODINGS)
async def test_compressed_bodies_are_read_as_if_they_were_not(world: World, coding: str) -> None:
    headers = {"content-encoding": coding, "content-type": "application/json"}
    sent = CODINGS[coding](body("a long word " * 200))
    for path in (CHAT, CHAT):
        told = await world.http.post(path, content=sent, headers=headers)
        assert told.status_code == 200, told.text
    plain, packed = world.turns()[0], world.turns()[1]
    assert plain.prompt == packed.prompt
    sent = CODINGS[coding](b'{"turn": 1, "score": 1}')
    told = await world.http.post("/feedback", content=sent, headers=headers)
    assert told.status_code == 200, told.text


async def test_gzip_of_several_members_and_zstd_of_several_frames_are_one_body(
    world: World,
) -> None:
    whole = body()
    for coding in ("gzip", "zstd"):
        sent = CODINGS[coding](whole[:9]) + CODINGS[coding](whole[9:])
        headers = {"content-encoding": coding, "content-type": "application/json"}
        assert (await world.http.post(CHAT, content=sent, headers=headers)).status_code == 200


async def test_gzip_of_very_many_members_is_refused(world: World) -> None:
    """Empty ones decode to nothing, so that no bound on bytes would ever end them."""
    headers = {"content-encoding": "gzip", "content-type": "application/json"}
    empty, whole = gzip.compress(b""), body()
    few = [whole[:9], *[b""] * 900, whole[9:]]
    sent = b"".join(gzip.compress(piece) for piece in few)
    assert (await world.http.post(CHAT, content=sent, headers=headers)).status_code == 200
    sent = empty * 3000 + gzip.compress(whole)
    told = await world.http.post(CHAT, content=sent, headers=headers)
    assert_error(told, 400)
    assert "more than 1000 members" in told.json()["error"]["message"]
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
        with pytest.raises(TooLongError):
            await decode(packed, coding.lower(), len(whole) - 1)
        if coding == "gzip":
            assert await decode(packed * 2, "gzip", 2 * len(whole)) == whole * 2


@pytest.mark.parametrize("coding", ["gzip", "deflate", "Deflate", "zstd"])
async def test_a_bomb_is_a_413(world: World, coding: str) -> None:
    bomb = CODINGS[coding](b"[" + b" " * (4 * MAX_BODY_BYTES))
    assert len(bomb) < 70_000
    headers = {"content-encoding": coding, "content-type": "application/json"}
    told = await world.http.post(CHAT, content=bomb, headers=headers)
    assert_error(told, 413, code="request_too_large")
    assert (await world.ask("hi")).status_code == 200


async def test_a_zstd_frame_that_asks_for_a_huge_window_is_refused(world: World) -> None:
    wide = zstandard.ZstdCompressionParameters(window_log=30)
    packer = zstandard.ZstdCompressor(compression_params=wide).compressobj()
    sent = packer.compress(body()) + packer.flush()
    headers = {"content-encoding": "zstd", "content-type": "application/json"}
    told = await world.http.post(CHAT, content=sent, headers=headers)
    assert_error(told, 400)


@pytest.mark.parametrize("coding", ["br", "gzip, gzip", "gzip, deflate", "compress", "gzip;q=1"])
async def test_other_codings_and_several_are_a_415_that_names_what_is_read(
    world: World, coding: str
) -> None:
    headers = {"content-encoding": coding, "content-type": "application/json"}
    told = await world.http.post(CHAT, content=gzip.compress(body()), headers=headers)
    assert_error(told, 415, code="unsupported_content_encoding")
    message = told.json()["error"]["message"]
    assert all(name in message for name in ("gzip", "deflate", "zstd", coding)), message


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
async def test_a_body_whose_last_bytes_are_missing_is_a_400(
    world: World, coding: str, pack: Any
) -> None:
    """All of its JSON may have come, and nobody can say so."""
    headers = {"content-encoding": coding, "content-type": "application/json"}
    whole = pack(body())
    for missing in (1, 2, 3):
        told = await world.http.post(CHAT, content=whole[:-missing], headers=headers)
        assert_error(told, 400)
    assert world.turns() == []
    told = await world.http.post(CHAT, content=whole, headers=headers)
    assert told.status_code == 200, told.text


@pytest.mark.parametrize("first", ["gzip", "zstd", "br"])
async def test_a_header_that_comes_twice_names_two_codings(world: World, first: str) -> None:
    coded = [("content-encoding", first), ("content-encoding", "gzip")]
    headers = [("content-type", "application/json"), *coded]
    told = await world.http.post(CHAT, content=gzip.compress(body()), headers=headers)
    assert_error(told, 415, code="unsupported_content_encoding")
    headers[1] = ("content-encoding", "identity")
    told = await world.http.post(CHAT, content=gzip.compress(body()), headers=headers)
    assert told.status_code == 200, told.text


@pytest.mark.parametrize("coding", ["gzip", "deflate", "zstd"])
async def test_damaged_and_cut_bodies_are_a_400(world: World, coding: str) -> None:
    headers = {"content-encoding": coding, "content-type": "application/json"}
    whole = CODINGS[coding](body("word " * 999))
    for sent in (b"\x00\x01\x02 no such thing", whole[: len(whole) // 2], body()):
        told = await world.http.post(CHAT, content=sent, headers=headers)
        assert_error(told, 400)
    assert world.turns() == []


async def test_a_byte_order_mark_before_a_body_is_skipped(world: World) -> None:
    for coding, pack in CODINGS.items():
        headers = {"content-encoding": coding, "content-type": "application/json"}
        told = await world.http.post(CHAT, content=pack(BOM_UTF8 + body()), headers=headers)
        assert told.status_code == 200, told.text


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


async def test_other_paths_stay_unknown(world: World) -> None:
    root = world.url.removesuffix("/v1")
    for path in ("/v1/completions", "/v2/chat/completions", "/v1/chat", "/api/generate", "/v1"):
        told = await world.http.post(f"{root}{path}", content=body())
        assert_error(told, 404, code="unknown_url")


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
