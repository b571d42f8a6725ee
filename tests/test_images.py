"""Images: what is read, what is refused with flat memory, and what is left of a file."""

from __future__ import annotations

import json
import subprocess
import sys
from io import BytesIO
from pathlib import Path

import pytest
from PIL import Image as Pillow
from PIL.ExifTags import Base

from tests.support.pictures import ANIMATIONS, animated, bombs, picture, url_of
from tinker_claw.errors import RequestError
from tinker_claw.formats.parts import joined, with_parts
from tinker_claw.images import Image, MessagePart, images_in, parts_of, read_url

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


@pytest.mark.parametrize(
    ("file", "colour"),
    [
        (Pillow.new("RGBA", (8, 8), (0, 0, 0, 0)), (255, 255, 255)),
        (Pillow.new("I;16", (8, 8), 0x8000), (128, 128, 128)),
    ],
    ids=["transparent parts are white", "sixteen bits of grey stay grey"],
)
def test_colours(file: Pillow.Image, colour: tuple[int, ...]) -> None:
    out = BytesIO()
    file.save(out, "PNG")
    assert opened(Image(out.getvalue(), AT)).getpixel((3, 3)) == colour


def test_of_an_animation_the_first_frame_is_shown() -> None:
    for format, options in ANIMATIONS.items():
        file = animated(format, 2, **options)
        assert opened(Image(file, AT)).getpixel((3, 3)) == (255, 0, 0)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("https://example.org/cat.png", "nothing is fetched here"),
        ("HTTP://169.254.169.254/latest", "nothing is fetched here"),
        ("file:///etc/passwd", "must be an image as data:"),
        ("data:image/png,abc", "must be an image as data:"),
        ("data:image/png;base64,%%%", "not valid base64"),
    ],
)
def test_what_is_no_image_is_refused_by_its_place(url: str, why: str) -> None:
    with pytest.raises(RequestError, match=why) as raised:
        read_url(url, AT)
    assert raised.value.param == AT


_REFUSE = """
import json, resource, sys
from pathlib import Path
from tinker_claw.errors import RequestError
from tinker_claw.images import Image
Image(Path(sys.argv[1]).read_bytes(), "at").clean()  # Pillow itself, and its plug-ins
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
said = []
for file in sys.argv[2:]:
    try:
        Image(Path(file).read_bytes(), "at").clean()
        said.append("read")
    except RequestError as error:
        said.append(str(error))
print(json.dumps([said, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before]))
"""


@pytest.mark.slow
def test_bombs_of_each_kind_are_clear_errors_with_flat_memory(tmp_path: Path) -> None:
    thrown = bombs() | {
        format: (animated(format, **options), "read") for format, options in ANIMATIONS.items()
    }
    files = [tmp_path / str(n) for n in range(len(thrown) + 1)]
    for file, data in zip(files, (picture(), *(d for d, _ in thrown.values())), strict=True):
        file.write_bytes(data)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _REFUSE, *map(str, files)],
        capture_output=True, check=True, text=True,
    )  # fmt: skip
    said, grown_kb = json.loads(done.stdout)
    for name, why in zip(thrown, said, strict=True):
        assert thrown[name][1] in why, name
    # Pillow itself keeps up to 64 MB of texts.
    assert grown_kb < 90_000


def test_a_message_knows_its_images_through_every_joining() -> None:
    one, two = (Image(picture(n, n), AT) for n in (8, 16))
    inner = joined([MessagePart("See: "), MessagePart(str(one), one), MessagePart(" and ")])
    parts = joined([MessagePart("Error: "), *inner, MessagePart(str(two), two)], glued=True)
    message = with_parts({"role": "user"}, parts)
    assert message["content"] == f"Error: See: {one} and {two}"
    assert [part.image for part in parts_of(message)] == [None, None, one, None, two]
    assert images_in([{"content": "none"}, message]) == [one, two]
    assert images_in([{**message}]) == []  # whoever writes such a line shows no image


def many_scans(count: int) -> bytes:
    """A progressive JPEG whose last scan stands there so many times more."""
    out = BytesIO()
    Pillow.effect_noise((64, 64), 60).convert("RGB").save(out, "JPEG", progressive=True)
    file = out.getvalue()
    last = file.rindex(b"\xff\xda")
    return file[:-2] + file[last:-2] * count + file[-2:]


def test_a_jpeg_of_many_scans_is_refused_before_it_is_decoded() -> None:
    assert opened(Image(many_scans(10), AT)).size == (64, 64)
    with pytest.raises(RequestError, match="more than 100 scans"):
        Image(many_scans(5000), AT)


LARGE = """
import json
from concurrent.futures import ThreadPoolExecutor
from tests.test_images import AT, picture
from tinker_claw.images import Image


def rss_mb():
    with open("/proc/self/status") as lines:
        return next(int(one.split()[1]) for one in lines if one.startswith("VmRSS")) / 1024


files = [picture(5000, 4900, format) for format in ("JPEG", "PNG")]
with ThreadPoolExecutor(1) as thread:
    thread.submit(Image(picture(64, 48, "JPEG"), AT).clean).result()
    before = rss_mb()
    for file in files * 2:
        thread.submit(lambda file=file: len(Image(file, AT).clean())).result()
    print(json.dumps(rss_mb() - before))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_given_back_after_large_images() -> None:
    """Each takes about 75 MB for its pixels, twice for a moment."""
    run = subprocess.run(
        [sys.executable, "-c", LARGE], capture_output=True, check=True, timeout=240
    )
    assert json.loads(run.stdout) < 60
