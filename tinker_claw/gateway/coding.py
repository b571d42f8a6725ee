"""Bodies of requests that clients compress.

Rule: the bound of a body holds for what it decodes to, while it is decoded.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from io import BytesIO
from typing import Final

from tinker_claw.errors import RequestError

_GZIP: Final = 16 + zlib.MAX_WBITS
_ZSTD_WINDOW: Final = 8 * 2**20
"""Largest window in bytes, as RFC 9659 has it for HTTP; a frame could ask for gigabytes."""
_MOST_MEMBERS: Final = 1_000
"""Most members of a gzip body: parallel packers begin one for each 64 kB."""
_PIECE: Final = 65_536
"""Bytes that zlib is given at once."""
_END: Final = b"the end of a body"
"""What is packed behind a zstd body, and must come out again."""
_thread = ThreadPoolExecutor(1, "tinker-claw-decoding")
"""One at a time: together they could take much memory that nothing counts."""


def too_large(most: int) -> RequestError:
    """Return the error of a body of more bytes than are allowed."""
    return RequestError(
        f"The body is longer than {most} bytes.",
        status=HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        code="request_too_large",
    )


def coding_of(header: str) -> str:
    """Return the one coding of a Content-Encoding header; "" where the body is not compressed.

    Raises:
        RequestError: 415, it is none that is read here, or there are several.
    """
    named = [name.strip().lower() for name in header.split(",")]
    codings = [name for name in named if name not in ("", "identity")]
    if not codings:
        return ""
    if len(codings) > 1 or codings[0] not in _DECODERS:
        raise RequestError(
            f"Content-Encoding {header[:100]!r} is not read here: send the body as it is, or in "
            f"one of {', '.join(_DECODERS)}.",
            status=HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            code="unsupported_content_encoding",
            headers={"accept-encoding": ", ".join(_DECODERS)},
        )
    return codings[0]


async def decode(body: bytes, coding: str, most: int) -> bytes:
    """Decode a body in a thread.

    Args:
        coding: as `coding_of` returns it.
        most: bytes.

    Raises:
        RequestError: it is damaged, or decodes to more.
    """
    if not body:
        return body
    loop = asyncio.get_running_loop()
    try:
        decoded = await loop.run_in_executor(_thread, _DECODERS[coding], body, most)
    except ValueError as error:
        raise RequestError(
            f"The body is not valid {coding}, which its Content-Encoding names: {error}."
        ) from error
    if len(decoded) > most:
        raise too_large(most)
    return decoded


def _gzip(body: bytes, most: int) -> bytes:
    """Decode gzip of one or several members, to at most one byte more than `most`."""
    out, left, members = bytearray(), memoryview(body), 0
    while left and len(out) <= most:
        if members == _MOST_MEMBERS:
            raise ValueError(f"it has more than {_MOST_MEMBERS} members")
        member, left = _inflate(left, _GZIP, most + 1 - len(out))
        out += member
        members += 1
    return bytes(out)


def _deflate(body: bytes, most: int) -> bytes:
    """Decode zlib, which is what HTTP means, or the bare deflate that some clients send."""
    wrapped = (
        len(body) > 1 and body[0] & 0x0F == zlib.DEFLATED and not (body[0] << 8 | body[1]) % 31
    )
    window = zlib.MAX_WBITS if wrapped else -zlib.MAX_WBITS
    return bytes(_inflate(memoryview(body), window, most + 1)[0])


def _inflate(body: memoryview, window: int, most: int) -> tuple[bytearray, memoryview]:
    """Return what one stream decodes to, cut at `most`, and what follows it."""
    stream, out, at = zlib.decompressobj(window), bytearray(), 0
    try:
        while not stream.eof and len(out) < most and at < len(body):
            # In pieces: zlib copies all that it was given and that is not of this stream.
            out += stream.decompress(body[at : at + _PIECE], most - len(out))
            at += _PIECE
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if not stream.eof and len(out) < most:
        raise ValueError("its end is missing")
    return out, body[min(at, len(body)) - len(stream.unused_data) :]


def _zstd(body: bytes, most: int) -> bytes:
    import zstandard  # most clients send no such body

    # The reader takes a frame that is cut for a whole one, but then not what follows it.
    last = zstandard.ZstdCompressor(write_checksum=True).compress(_END)
    decoder = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW)
    try:
        with decoder.stream_reader(BytesIO(body + last), read_across_frames=True) as reader:
            decoded = reader.read(most + 1 + len(_END))
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from error
    if len(decoded) <= most + len(_END) and not decoded.endswith(_END):
        raise ValueError("its end is missing")
    return decoded.removesuffix(_END)


_DECODERS: Final[dict[str, Callable[[bytes, int], bytes]]] = {
    "gzip": _gzip,
    "x-gzip": _gzip,
    "deflate": _deflate,
    "zstd": _zstd,
}
