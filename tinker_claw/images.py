"""Images in messages: parsed from requests, limited in size, and re-encoded without metadata.

Rule: size and format are read from the header, and bounds are checked, before a pixel is decoded.
The result is a PNG or JPEG that we encoded: no EXIF, no comment, no colour profile.
"""

from __future__ import annotations

import base64
import binascii
import ctypes
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any, Literal

from tinker_claw.errors import RequestError

MOST_BYTES = 10_000_000
"""Largest file of an image."""
MOST_PIXELS = 25_000_000
"""Most pixels of an image: decoded it takes three or four bytes a pixel, twice for a moment."""
_LARGE = 1_000_000
"""Pixels of an image after which the C library is told to give memory back."""
MOST_SCANS = 100
"""Most scans of a JPEG. A progressive one has about ten; each goes over all pixels again."""
_SCAN = b"\xff\xda"
"""Marker of a scan, which stands nowhere within one."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
"""Formats of Pillow that are read; of an animation the first frame."""
_JPEG = ("JPEG", "MPO")
_QUALITY = 95
_AWAY = ("http:", "https:")


class Image:
    """An image in a message. Its pixels are decoded by `clean`, which takes a thread's time."""

    def __init__(self, data: bytes, at: str) -> None:
        """Read the header of a file.

        Args:
            at: place of the image in the request, for error messages.

        Raises:
            RequestError: it is too large, or not in a supported format.
        """
        self.at = at
        self._data = data
        if len(data) > MOST_BYTES:
            raise self.wrong(f"is an image of {len(data):,} bytes; at most {MOST_BYTES:,} are read")
        with self._opened() as opened:
            self.width, self.height = opened.size
            self.format: Literal["png", "jpeg"] = "jpeg" if opened.format in _JPEG else "png"
            self.kind = f"image/{'jpeg' if opened.format in _JPEG else opened.format.lower()}"
        if self.width * self.height > MOST_PIXELS:
            raise self.wrong(
                f"is an image of {self.width} x {self.height} pixels; at most {MOST_PIXELS:,} in "
                "all are read: send it smaller"
            )
        if self.format == "jpeg" and data.count(_SCAN) > MOST_SCANS:
            raise self.wrong(
                f"is a JPEG of more than {MOST_SCANS} scans, which take too long to decode: send "
                "it as a plain JPEG or as PNG"
            )
        self.size = len(data)
        self.digest = hashlib.sha256(data).hexdigest()
        self._clean: bytes | None = None

    def __str__(self) -> str:
        """Line of text that stands for the image wherever only text is read."""
        return f"[image, {self.width} x {self.height} pixels, {self.digest[:12]}]"

    def wrong(self, why: str) -> RequestError:
        """Return an error about the image. `why`: the rest of the sentence."""
        return RequestError(f"{self.at} {why}.", param=self.at)

    def clean(self) -> bytes:
        """Return the image as a file of `format` without metadata, upright and on white; decoded
        once.

        Raises:
            RequestError: the file is damaged.
        """
        if self._clean is None:
            self._clean, self._data = self._encoded(), b""
            if self.width * self.height > _LARGE:
                _give_back()
        return self._clean

    def _encoded(self) -> bytes:
        from PIL import ImageOps

        try:
            with self._opened() as opened:
                upright = ImageOps.exif_transpose(opened)
                if upright.mode.startswith("I"):  # 16 bits of grey, which `convert` clips
                    upright = upright.point(lambda grey: grey / 256)
                plain = _on_white(upright).convert("RGB")
            plain.info = {}
            out = BytesIO()
            plain.save(out, self.format.upper(), quality=_QUALITY, compress_level=1)
        except RequestError:
            raise
        except Exception as error:  # Pillow raises many types for a damaged file
            raise self.wrong(f"is a damaged image: {error}") from error
        return out.getvalue()

    def _opened(self) -> Any:
        from PIL import Image as Pillow  # most gateways never see an image

        try:
            return Pillow.open(BytesIO(self._data), formats=FORMATS)
        except (Pillow.DecompressionBombError, Pillow.DecompressionBombWarning) as error:
            raise self.wrong(f"is an image of more than {MOST_PIXELS:,} pixels") from error
        except Exception as error:
            formats = ", ".join(FORMATS)
            raise self.wrong(f"is no image that is read here ({formats}), or damaged") from error


def _on_white(image: Any) -> Any:
    """Return one of Pillow's images with white behind it."""
    from PIL import Image as Pillow

    if not image.has_transparency_data:
        return image
    white = Pillow.new("RGBA", image.size, "white")
    return Pillow.alpha_composite(white, image.convert("RGBA"))


def _give_back() -> None:
    """Return freed memory to the system, which the C library else keeps for this thread."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Error for a part of a message that cannot be read."""

    error: RequestError
    digest: str
    """Of the part as it was sent."""


@dataclass(frozen=True, slots=True)
class MessagePart:
    """A part of a message's content, as its client sent it."""

    text: str
    image: Image | None = None
    """The image whose line `text` is; None: it is text."""
    attached: bool = False
    """Nobody typed it: it is the text of a document, or a line in place of something that the model
    is not shown. It is data, whoever sent the message."""
    refusal: Refusal | None = None
    """Why it is refused in the user's message that asks; None: it is read there."""


def parts_of(message: Mapping[str, Any]) -> Sequence[MessagePart]:
    """Return the parts of a message's content; a plain string is one."""
    return getattr(message, "parts", ()) or (MessagePart(message["content"]),)


def images_in(messages: Iterable[Mapping[str, Any]]) -> list[Image]:
    """Return all images of a conversation, in order."""
    return [
        part.image
        for message in messages
        for part in getattr(message, "parts", ())
        if part.image is not None
    ]


def read_url(url: str, at: str) -> Image:
    """Read the image in a data: URL; see `Image`. Nothing is fetched: anyone who can write to the
    agent could make this machine request any URL."""
    kind, comma, data = url.partition(",")
    if kind.lower().startswith("data:") and comma and kind.endswith(";base64"):
        try:
            return Image(base64.b64decode(data, validate=True), at)
        except (binascii.Error, ValueError) as error:
            raise RequestError(f"{at} is not valid base64.", param=at) from error
    if url.lower().startswith(_AWAY):
        raise RequestError(
            f"{at} is at a URL, and nothing is fetched here. Send the image itself, as "
            "data:image/png;base64,…",
            param=at,
        )
    raise RequestError(f"{at} must be an image as data:image/png;base64,…", param=at)
