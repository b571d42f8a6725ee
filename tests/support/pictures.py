"""Images for tests, a tokenizer with places for them, and requests that hold them."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image
from renderers.base import load_tokenizer

from tinker_claw.render.renderer import Renderer
from tinker_claw.shipped import MODEL_DIR

VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "size": {"shortest_edge": 64 * 64, "longest_edge": 512 * 512},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,  # vLLM normalises only by what stands in the file
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
"""Numbers of Qwen3-VL's image processor, with smaller bounds."""


def seeing_tokenizer(folder: Path) -> Path:
    """Write the shipped tokenizer with Qwen's vision tokens, and an image processor's numbers."""
    tokenizer = load_tokenizer(str(MODEL_DIR))
    known = tokenizer.get_vocab()
    wanted = (*VISION, "<tool_response>", "</tool_response>", "<think>", "</think>")
    new = [token for token in wanted if token not in known]
    tokenizer.add_special_tokens({"additional_special_tokens": new})
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return folder


def seeing_renderer(folder: Path, family: str = "qwen3-vl") -> Renderer:
    return Renderer.load(str(seeing_tokenizer(folder)), family)


def picture(
    width: int = 96, height: int = 64, format: str = "PNG", *, mode: str = "RGB", **options: Any
) -> bytes:
    """A picture whose pixels differ, as a file."""
    noise = Image.linear_gradient("L").resize((width, height))
    made = noise.convert(mode)
    out = BytesIO()
    made.save(out, format, **options)
    return out.getvalue()


def url_of(data: bytes, media: str = "image/png") -> str:
    return f"data:{media};base64,{base64.b64encode(data).decode()}"


def shown(data: bytes, *words: str) -> dict[str, Any]:
    """A user's message in chat completions: words, and an image behind them."""
    texts = [{"type": "text", "text": text} for text in words]
    image = {"type": "image_url", "image_url": {"url": url_of(data)}}
    return {"role": "user", "content": [*texts, image]}


def chunk(kind: bytes, data: bytes) -> bytes:
    """A chunk of a PNG."""
    body = kind + data
    return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))


def png_of_nothing(width: int, height: int) -> bytes:
    """A valid PNG of any size in a few bytes a row: one bit a pixel, all black."""

    squeeze = zlib.compressobj(9)
    row = bytes(1 + (width + 7) // 8)
    rows = b"".join(squeeze.compress(row) for _ in range(height)) + squeeze.flush()
    head = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    parts = chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


def gif_of_nothing(width: int, height: int) -> bytes:
    """A GIF that claims a size."""
    frame = b"\x2c" + struct.pack("<HHHHB", 0, 0, width, height, 0) + b"\x02\x02\x4c\x01\x00\x3b"
    return b"GIF89a" + struct.pack("<HHBBB", width, height, 0x80, 0, 0) + bytes(6) + frame


def png_with(*chunks: bytes, last: bool = False) -> bytes:
    """A small PNG with further chunks, before or behind its pixels."""
    file = picture()
    at = len(file) - 12 if last else 33
    return file[:at] + b"".join(chunks) + file[at:]


def animated(format: str, frames: int = 200, **options: Any) -> bytes:
    """An animation of which the first frame is red; decoded all at once it takes 150 MB."""
    colours = ("red", *("blue", "green") * (frames // 2))
    first, *others = (Image.new("RGB", (500, 500), colour) for colour in colours)
    out = BytesIO()
    first.save(out, format, save_all=True, append_images=others, **options)
    return out.getvalue()


ANIMATIONS = {"GIF": {}, "PNG": {}, "WEBP": {"lossless": True}}
"""Formats with frames, and how to write them."""


def bombs() -> dict[str, tuple[bytes, str]]:
    """Files of each kind that no picture is, or that would take much memory, and why each is
    refused."""
    webp, squeeze = BytesIO(), zlib.compressobj(9)
    Image.new("1", (16_383, 2_000)).convert("RGB").save(webp, "WEBP", lossless=True)
    packed = b"".join(squeeze.compress(bytes(1_000_000)) for _ in range(300)) + squeeze.flush()
    texts = [chunk(b"zTXt", b"a%d\0\0" % n + zlib.compress(bytes(900_000))) for n in range(200)]
    framed = gif_of_nothing(10, 10).replace(
        struct.pack("<HHHH", 0, 0, 10, 10), struct.pack("<HHHH", 0, 0, 60_000, 60_000)
    )
    unknown, damaged = "no image that is read here", "is a damaged image"
    return {
        "bytes": (bytes(10_000_001), "10,000,001 bytes; at most 10,000,000 are read"),
        "pixels of a PNG": (png_of_nothing(30_000, 30_000), "pixels"),
        "fewer pixels of a PNG": (png_of_nothing(12_000, 12_000), "25,000,000"),
        "pixels of a GIF": (gif_of_nothing(60_000, 60_000), "pixels"),
        "a frame larger than its GIF": (framed, "pixels"),
        "pixels of a JPEG": (jpeg_of_nothing(60_000, 60_000), "pixels"),
        "pixels of a WebP": (webp.getvalue(), "25,000,000"),
        "a packed text": (png_with(chunk(b"zTXt", b"a\0\0" + packed)), unknown),
        "a packed text at the end": (
            png_with(chunk(b"zTXt", b"a\0\0" + packed), last=True),
            damaged,
        ),
        "a packed profile": (png_with(chunk(b"iCCP", b"a\0\0" + packed)), unknown),
        "many packed texts": (png_with(*texts, last=True), damaged),
        "a PNG that breaks off": (picture(200, 200)[:-200], damaged),
        "a JPEG that breaks off": (picture(200, 200, "JPEG")[:-200], damaged),
        "a GIF that breaks off": (picture(200, 200, "GIF")[:-200], damaged),
        "a WebP that breaks off": (picture(200, 200, "WEBP")[:-20], unknown),
        "SVG": (b"<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'/>", unknown),
        "TIFF": (picture(8, 8, "TIFF"), unknown),
        "nothing": (b"GIF89a", unknown),
    }


def jpeg_of_nothing(width: int, height: int) -> bytes:
    """A JPEG whose header claims a size."""
    data = picture(16, 16, "JPEG")
    at = data.index(b"\xff\xc0") + 5
    return data[:at] + struct.pack(">HH", height, width) + data[at + 4 :]
