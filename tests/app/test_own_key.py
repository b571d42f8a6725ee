"""A gateway on loopback makes and asks for a key where others have accounts on the machine."""

from __future__ import annotations

import json
import os
import pwd
import resource
import stat
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

from tests.support.lives import Fate, Life, life
from tinker_claw.cli import main
from tinker_claw.config import own_key
from tinker_claw.config.load import load
from tinker_claw.errors import LedgerError

DEMO = ("--model-name", "demo", "--backend", "local")
NAMED = "TINKER_CLAW_GATEWAY__API_KEY"
UNSET = {NAMED: ""}
BODY = {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


def account(name: str, uid: int, shell: str) -> pwd.struct_passwd:
    return pwd.struct_passwd((name, "x", uid, uid, "", f"/home/{name}", shell))


ME = account("me", os.getuid(), "/bin/bash")
DAEMONS = (account("www", 33, "/bin/sh"), account("nobody", 65534, "/usr/sbin/nologin"))
LOCKED = account("locked", 1001, "/bin/false")
ANNA = account("anna", 4321, "")


def alone() -> Sequence[pwd.struct_passwd]:
    return [ME, *DAEMONS, LOCKED]


def with_anna() -> Sequence[pwd.struct_passwd]:
    return [*alone(), ANNA]


@pytest.fixture(autouse=True)
def nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(NAMED, raising=False)


def among(accounts: object) -> Fate:
    return Fate(constants={"tinker_claw.config.own_key:accounts": accounts})


def asks(running: Life, key: str | None) -> int:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    url = f"{running.url}/chat/completions"
    return httpx.post(url, json=BODY, headers=headers, timeout=240).status_code


def test_a_full_disk_leaves_no_half_of_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = (*DEMO, "--data-dir", str(tmp_path / "data"))
    monkeypatch.setattr(own_key, "accounts", with_anna)
    settings = load(flags)
    file = settings.key_file
    assert file is not None
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, most))
    try:
        with pytest.raises(LedgerError, match="cannot be written"):
            own_key.make(settings, file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    assert load(flags).key_file == file, "the next start makes one"


@pytest.mark.parametrize(
    ("flags", "accounts", "before"),
    [
        (("--api-key", "none"), with_anna, False),
        ((), alone, False),
        ((), with_anna, True),
    ],
    ids=["refused", "nobody else", "a directory of before"],
)
def test_elsewhere_nothing_changes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    flags: Sequence[str],
    accounts: object,
    before: bool,
) -> None:
    data = tmp_path / "data"
    monkeypatch.setattr(own_key, "accounts", accounts)
    if before:
        data.mkdir()
        (data / "metrics.jsonl").touch()
    settings = load([*DEMO, "--data-dir", str(data), *flags])
    assert (settings.gateway.api_key, settings.key_file) == (None, None)


def test_a_key_that_was_given_is_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = [*DEMO, "--data-dir", str(tmp_path)]
    (tmp_path / "api-key").write_text("a-key-of-the-gateway-itself\n")

    def key() -> str | None:
        found = load(flags).gateway.api_key
        return found and found.get_secret_value()

    assert key() == "a-key-of-the-gateway-itself"
    monkeypatch.setenv(NAMED, "a-key-that-somebody-gave")
    assert key() == "a-key-that-somebody-gave"
    monkeypatch.setenv(NAMED, "none")
    assert key() is None


def test_data_dir_is_enough_for_every_command(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The gateway has a port that nobody named, and a key that only its directory has."""
    data = tmp_path / "data"
    with life(data, fate=among(with_anna), env=UNSET) as running:
        assert running.serves()
        file = data / "api-key"
        (event,) = running.events("key.created")
        assert (event["file"], event["because_of"]) == (str(file), ["anna"])
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        key = file.read_text().strip()
        token = json.loads((data / "control.json").read_text())["token"]
        sent = (None, "wrong", token, key)
        assert [asks(running, secret) for secret in sent] == [401, 401, 401, 200]
        assert list(running.health()) == ["status"], "strangers learn no more"
        for words in (
            ["status"],
            ["status", "--json"],
            ["log", "turns"],
            ["explain", "1"],
            ["versions"],
            ["lessons"],
            ["export", "--jsonl", str(tmp_path / "out")],
            ["pin", "0"],
            ["unpin"],
            ["openclaw-config", *DEMO],
            ["doctor", *DEMO],
            ["forget", "turn", "1", "--yes"],
        ):
            status = main.main([*words, "--data-dir", str(data)])
            out, wrong = capfd.readouterr()
            assert status == 0, (words, out, wrong)
            if words == ["status"]:
                assert running.url.removesuffix("/v1") in out
            if words[0] == "openclaw-config":
                assert running.url in out
                assert '"apiKey": "${CLAW_GATEWAY_KEY}"' in out
            assert key not in out + wrong
        assert key not in running.said()
        assert running.stop() == 0
