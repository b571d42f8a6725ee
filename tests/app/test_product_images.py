"""The running product learns from a turn with a picture, and forgets both."""

from __future__ import annotations

from base64 import b64encode
from binascii import hexlify
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image as Pillow
from safetensors.torch import load_file

from tests.support.ledger import everything, read
from tests.support.lives import product, until
from tests.support.models import tiny_qwen3_vl
from tests.support.pictures import picture, shown
from tests.support.stories import run
from tinker_claw.images import Image

pytestmark = pytest.mark.slow
FLAGS = ("--images", "train", "--batch-size", "4", "--lora-rank", "4", "--learning-rate", "1e-3")


def noise(folder: Path) -> bytes:
    """A picture whose bytes nothing else has."""
    Pillow.effect_noise((96, 64), 90).convert("RGB").save(folder / "noise.png")
    return (folder / "noise.png").read_bytes()


def test_a_picture_is_answered_judged_trained_and_forgotten(tmp_path: Path) -> None:
    model, data = tiny_qwen3_vl(tmp_path / "vl"), tmp_path / "data"
    named = ("--model-name", str(model), "--renderer", "qwen3-vl", "--gate=off", "--recipe=paper")
    secret, other = noise(tmp_path), picture(64, 64)
    with product(data, *named, *FLAGS) as running:
        name = httpx.get(f"{running.url}/models").json()["data"][0]["id"]
        place = running.url.removesuffix("/v1") + "/v1/feedback"

        def reply(session: str, said: list[dict[str, Any]], score: float, why: str = "") -> str:
            body = {"model": name, "messages": said, "max_tokens": 12}
            headers = {"X-Session-Id": session}
            url = f"{running.url}/chat/completions"
            answer = httpx.post(url, json=body, headers=headers, timeout=240)
            assert answer.status_code == 200, answer.text
            told = {"response_id": answer.json()["id"], "score": score, "text": why}
            assert httpx.post(place, json=told).json()["counts"]
            return answer.json()["choices"][0]["message"]["content"]

        for session, file in (("secret", secret), ("other", other)):
            said = [shown(file, "What is this? ")]
            text = reply(session, said, -0.5)
            said += [{"role": "assistant", "content": text}, {"role": "user", "content": "Sure?"}]
            reply(session, said, -1.0, "Name what it shows.")
        until(lambda: running.health()["policy_version"] == 1, seconds=60)
        trained = "SELECT COUNT(*), COUNT(hint) FROM samples WHERE step_id IS NOT NULL"
        assert read(data, trained) == [(4, 2)], "the teacher saw the pictures, too"
        kept = "SELECT COUNT(DISTINCT image_id), COUNT(*) FROM turn_images"
        assert read(data, kept) == [(2, 4)]
        clean = Image(secret, "").clean()
        assert clean[200:240] in everything(data)
        done = run("forget", "session", "secret", "--yes", directory=data)
        assert done.returncode == 0, done.stderr
        until(lambda: read(data, kept) == [(1, 2)])
        assert running.stop() == 0
    assert run("forget", "leftovers", directory=data).returncode == 0
    left = everything(data)
    assert not any(clean[at : at + 40] in left for at in range(0, len(clean) - 40, 40))
    adapters = [load_file(file) for file in sorted(data.rglob("adapter_model.safetensors"))]
    moved = [any(t.any() for n, t in one.items() if ".lora_B." in n) for one in adapters]
    assert any(moved)
    log = running.log.read_text()
    assert "Traceback" not in log
    out = tmp_path / "out.jsonl"
    assert run("export", "--jsonl", str(out), "--tokens", directory=data).returncode == 0
    kept_file = Image(other, "").clean()
    assert kept_file[60:90] in left
    exported = out.read_bytes()
    assert b"trained" in exported
    assert not any(form(kept_file)[80:110] in exported for form in (bytes, b64encode, hexlify))
