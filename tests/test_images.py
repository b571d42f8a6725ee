"""Images: what is read, what is refused with flat memory, and what is left of a file."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from io import BytesIO
from pathlib import Path

import pytest
from PIL import Image as Pillow
from PIL.ExifTags import Base

from tests.pictures import gif_of_nothing, jpeg_of_nothing, picture, png_of_nothing, url_of
from tinker_claw.errors import RequestError
from tinker_claw.formats.base import Joined
from tinker_claw.images import MOST_BYTES, Image, Pictured, images_in, read_data, read_url, split

AT = "messages[0].content[1].image_url.url"


def opened(image: Image) -> Pillow.Image:
    return Pillow.open(BytesIO(image.clean()))


@pytest.mark.parametrize(
    ("format", "becomes"), [("PNG", "png"), ("JPEG", "jpeg"), ("WEBP", "png"), ("GIF", "png")]
)
def test_four_formats_are_read_and_two_are_handed_on(format: str, becomes: str) -> None:
    image = read_url(url_of(picture(48, 32, format)), AT)
    assert (image.width, image.height, image.format) == (48, 32, becomes)
    found = opened(image)
    assert (found.size, found.mode, found.format) == ((48, 32), "RGB", becomes.upper())
    assert image.clean() is image.clean()
    assert str(image) == f"[image, 48 x 32 pixels, {image.digest[:12]}]"


def test_nothing_but_pixels_is_handed_on() -> None:
    exif = Pillow.Exif()
    exif[Base.Orientation], exif[Base.Make] = 6, "secret camera"
    file = picture(48, 32, "JPEG", exif=exif, comment=b"secret words", icc_profile=b"secret" * 40)
    assert b"secret camera" in file
    assert b"secret words" in file
    image = Image(file, AT)
    assert b"secret" not in image.clean()
    assert opened(image).size == (32, 48)  # turned upright
    text = Pillow.new("RGB", (8, 8))
    text.info = {"icc_profile": b"secret" * 40, "Comment": "secret"}
    out = BytesIO()
    text.save(out, "PNG", icc_profile=b"secret" * 40)
    assert b"iCCP" in out.getvalue()
    assert b"iCCP" not in Image(out.getvalue(), AT).clean()


def test_transparent_parts_are_white() -> None:
    clear = Pillow.new("RGBA", (8, 8), (0, 0, 0, 0))
    out = BytesIO()
    clear.save(out, "PNG")
    assert opened(Image(out.getvalue(), AT)).getpixel((3, 3)) == (255, 255, 255)


def test_of_an_animation_the_first_frame_is_shown() -> None:
    frames = [Pillow.new("RGB", (16, 16), colour) for colour in ("red", "blue", "blue")]
    for format in ("GIF", "WEBP", "PNG"):
        out = BytesIO()
        options = {"lossless": True} if format == "WEBP" else {}
        frames[0].save(out, format, save_all=True, append_images=frames[1:], **options)
        assert opened(Image(out.getvalue(), AT)).getpixel((3, 3)) == (255, 0, 0)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("https://example.org/cat.png", "nothing is fetched here"),
        ("HTTP://169.254.169.254/latest", "nothing is fetched here"),
        ("file:///etc/passwd", "must be an image as data:"),
        ("data:image/png,abc", "must be an image as data:"),
        ("data:image/png;base64,%%%", "not valid base64"),
        (url_of(b"no image at all"), "no image that is read here"),
        (url_of(picture(8, 8, "TIFF"), "image/tiff"), "no image that is read here"),
        (url_of(b"<svg xmlns='http://www.w3.org/2000/svg'/>"), "no image that is read here"),
    ],
)
def test_what_is_no_image_is_refused_by_its_place(url: str, why: str) -> None:
    with pytest.raises(RequestError, match=why) as raised:
        read_url(url, AT)
    assert raised.value.param == AT


def test_a_file_that_breaks_off_is_refused_when_it_is_decoded() -> None:
    for format in ("PNG", "JPEG"):
        file = picture(200, 200, format)
        image = Image(file[: len(file) * 2 // 3], AT)
        with pytest.raises(RequestError, match="is a damaged image"):
            image.clean()


_REFUSE = """
import json, resource, sys
from pathlib import Path
from tinker_claw.errors import RequestError
from tinker_claw.images import Image
Image(Path(sys.argv[1]).read_bytes(), "at")  # Pillow itself, and its plug-ins
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
said = []
for file in sys.argv[2:]:
    try:
        Image(Path(file).read_bytes(), "at")
        said.append("read")
    except RequestError as error:
        said.append(str(error))
print(json.dumps([said, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before]))
"""


def test_bombs_of_each_kind_are_clear_errors_with_flat_memory(tmp_path: Path) -> None:
    webp = BytesIO()
    Pillow.new("1", (16_383, 2_000)).convert("RGB").save(webp, "WEBP", lossless=True)
    bombs = {
        "a.png": png_of_nothing(30_000, 30_000),
        "b.png": png_of_nothing(12_000, 12_000),
        "c.gif": gif_of_nothing(60_000, 60_000),
        "d.jpeg": jpeg_of_nothing(60_000, 60_000),
        "e.webp": webp.getvalue(),
    }
    files = [tmp_path / name for name in ("small.png", *bombs)]
    files[0].write_bytes(picture())
    for file, data in zip(files[1:], bombs.values(), strict=True):
        assert len(data) < 1_000_000
        file.write_bytes(data)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _REFUSE, *map(str, files)],
        capture_output=True, check=True, text=True,
    )  # fmt: skip
    said, grown_kb = json.loads(done.stdout)
    assert all("pixels" in one for one in said), said
    assert grown_kb < 20_000


def test_a_large_file_is_not_even_opened() -> None:
    with pytest.raises(RequestError, match="10,000,001 bytes; at most 10,000,000 are read"):
        read_data(base64.b64encode(bytes(MOST_BYTES + 1)).decode(), AT)


def test_text_knows_its_images_through_every_joining() -> None:
    one, two = (Image(picture(n, n), AT) for n in (8, 16))
    inner = Joined.of(["See: ", Pictured.showing(one), " and "])
    text = Joined.of(["Error: ", inner, Pictured.showing(two)])
    assert text == f"Error: See: {one} and {two}"
    assert split(text) == ["Error: See: ", one, " and ", two]
    assert images_in([{"content": "none"}, {"content": text}]) == [one, two]
    assert split(str(text)) == [str(text)]  # whoever writes such a line shows no image
