"""Detection of secrets and personal data: what is found, what is not, and its cost."""

from __future__ import annotations

import base64
import io
import json
import math
import random
import string
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.captures import load
from tests.support.secret_corpus import harmless, planted
from tinker_claw.config.load import load as load_settings
from tinker_claw.errors import ConfigError
from tinker_claw.privacy.marker import Marker, Privacy, marked, mentioned
from tinker_claw.privacy.redact import Redactor
from tinker_claw.privacy.rules import KINDS
from tinker_claw.telemetry import configure, log

SECRETS = Redactor(["secrets"])
ALL = Redactor(KINDS)
# Put together here, so that no scanner takes this file for a leak.
LETTERS = "a1B2c3D4e5F6g7H8i9J0k1L2m3N4o5P6q7R8s9T0"
KEY_BLOCK = f"-----BEGIN RSA PRIVATE KEY-----\n{LETTERS}\n{LETTERS}\n-----END RSA PRIVATE KEY-----"
CASES = [
    ("sk-" + LETTERS, "API key"),
    ("sk-proj-" + LETTERS, "API key"),
    ("tml-" + LETTERS, "API key"),
    ("ghp_" + LETTERS[:36], "API key"),
    ("github_pat_" + LETTERS, "API key"),
    ("xoxb-1234567890-" + LETTERS, "API key"),
    ("AKIA" + "Z9Y8X7W6V5U4T3S2", "API key"),
    ("AIza" + LETTERS[:35], "API key"),
    ("hf_" + LETTERS[:34], "API key"),
    ("sk_live_" + LETTERS[:24], "API key"),
    (KEY_BLOCK, "private key"),
    ("https://hooks.slack.com/services/T0123/B0123/" + LETTERS[:24], "webhook"),
]
ASSIGNED = [
    ("password=", "hunter2"),
    ("password: ", "Tr0ub4dor&3"[:9]),
    ("DB_PASSWORD=", "s3cr3tS4uce"),
    ('"password": "', "correct!horse"),
    ("api_key: ", "9f8e7d6c5b4a39281706"),
    ('API_KEY = "', "9f8e7d6c5b4a39281706"),
    ("aws_secret_access_key = ", "wJalrXUtnF3MI/K7MDENG/bPxRfi9"),
    ("my password is ", "hunter2"),
    ("- **Password:** ", "hunter2"),
    ("Authorization: Bearer ", "abcdef1234567890abcdef"),
    ("postgres://me:", "s3cr3tS4uce"),
]
NOTHING = [
    "password = get_password()",
    "def login(user: str, password: str, token: Token2 = None) -> None:",
    "api_key = os.environ['API_KEY_1']",
    'token = config.token2 if token1 else "none"',
    '{"type": "string", "description": "The password: at least 8 characters"}',
    "max_tokens: 4096, total_tokens=123456789012",
    "password: required",
    "PWD=/home/user1/project2",
    'Token: "#dcdccc"',
    'token="your_token_123456"',
    "task-0123456789abcdef0123456789 and disk-image-2026-11-21-00-19-utc",
    "git commit 247d52c1b2a3f4e5d6c7b8a9f0e1d2c3b4a59687",
    "postgres://user:password@localhost/db and http://127.0.0.1:30000/v1@x",
    "key: value1, secret sauce 123, press any key: F12",
    "sk-learn-is-the-scikit-package-name",
    "Bearer authentication is described in RFC 6750",
    "-----BEGIN PRIVATE KEY----- is how such a file begins",
    "call me at 5pm, 12 of 34, 2026-11-21 00:19:07, version 1.2.3.4, 192.168.100.200",
]
PERSONAL = [
    ("email", "write to anna.b+c@mail.example.org, please", "e-mail address"),
    ("phone", "ring +49 30 1234567 or", "phone number"),
    ("phone", "ring (030) 123-4567.", "phone number"),
    ("card", "card 4111 1111 1111 1111.", "card number"),
    ("card", "card 378282246310005", "card number"),
    ("iban", "pay to DE89 3704 0044 0532 0130 00 now", "IBAN"),
    ("iban", "GB82WEST12345698765432", "IBAN"),
]


@pytest.mark.parametrize(("secret", "name"), CASES, ids=[case[:6] for case, _ in CASES])
@pytest.mark.parametrize("frame", ["{}", "it is {} .", '{{"a": "{}"}}', "x\n{}\ny", "<{}>"])
def test_secret_is_cut_out_whole(secret: str, name: str, frame: str) -> None:
    text = frame.format(secret)
    left = SECRETS.redact(text)
    assert LETTERS[:20] not in left
    assert f"[redacted: {name}]" in left
    assert SECRETS.holds(text) == f"a secret ({name})"
    assert SECRETS.redact(left) == left
    assert SECRETS.holds(left) is None


@pytest.mark.parametrize(("before", "secret"), ASSIGNED)
def test_what_is_assigned_to_a_password_or_key_is_cut_out(before: str, secret: str) -> None:
    quote = before[-1] if before[-1] == '"' else ""
    after = "@box/db" if "://" in before else f"{quote}\nmore"
    left = SECRETS.redact(f"first {before}{secret}{after}")
    assert secret not in left
    assert left.startswith(f"first {before}[redacted: ")
    assert left.endswith(after)


@pytest.mark.parametrize("text", NOTHING)
def test_code_and_prose_are_left_as_they_are(text: str) -> None:
    assert ALL.redact(text) == text


@pytest.mark.parametrize(("kind", "text", "name"), PERSONAL)
def test_personal_data_is_cut_out_where_it_was_asked_for(kind: str, text: str, name: str) -> None:
    assert SECRETS.holds(text) is None
    assert Redactor([kind]).holds(text) == f"personal data ({name})"
    assert f"[redacted: {name}]" in Redactor([kind]).redact(text)


def test_numbers_that_fail_their_check_are_no_cards_and_no_accounts() -> None:
    for text in ("4111 1111 1111 1112", "DE88 3704 0044 0532 0130 00", "1234567890123456"):
        assert Redactor(["card", "iban"]).redact(text) == text


def strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for one in value:
            yield from strings(one)
    elif isinstance(value, dict):
        for one in value.values():
            yield from strings(one)


def test_an_agents_own_requests_hold_nothing() -> None:
    for captured in load(None):
        for text in strings(captured.body):
            assert SECRETS.redact(text) == text, captured.name
            assert Redactor(["phone", "card", "iban"]).redact(text) == text, captured.name


def test_code_hashes_ids_and_encoded_bytes_hold_nothing() -> None:
    rng = random.Random(0)
    blobs = [base64.b64encode(rng.randbytes(200_000)).decode()]
    blobs += [base64.urlsafe_b64encode(rng.randbytes(200_000)).decode()]
    blobs += [f"{uuid.UUID(int=rng.getrandbits(128))} " * 1 for _ in range(3000)]
    blobs += [rng.randbytes(n).hex() for n in (16, 20, 32) for _ in range(2000)]
    for blob in blobs:
        assert SECRETS.redact(blob) == blob
    root = Path(__file__).parents[2]
    code = [p for room in ("tinker_claw", "local_gpu") for p in (root / room).rglob("*.py")]
    assert len(code) > 100
    for file in code:
        text = file.read_text()
        assert SECRETS.redact(text) == text, file
        assert Redactor(["card", "iban"]).redact(text) == text, file


HOSTILE = [
    "sk-", "eyJ", "eyJ.", "a.eyJa", "-----BEGIN PRIVATE KEY-----", "-----BEGIN ", "://", "://a:",
    "://a:b@", "password=", "password: '", "token", "key=", "api_key", "secret\\\"", "bearer ",
    "+49 ", "(030) ", "00", "4", "4111 ", "DE89 ", "DE89", "A1", "a@", "a.", "@a.", "a" * 63 + ".",
    ":AA", "12345678:AA", "hooks.slack.com/services/", " ", "\t=", "İ", "=", "\\", "'\"`",
]  # fmt: skip


@pytest.mark.parametrize("piece", HOSTILE)
def test_time_grows_with_the_length_and_no_faster(piece: str) -> None:
    def seconds(characters: int) -> float:
        text = (piece * (characters // len(piece) + 1))[:characters]
        best = math.inf
        for _ in range(3):
            started = time.process_time()
            ALL.holds(text)
            ALL.redact(text)
            best = min(best, time.process_time() - started)
        return best

    short, long = seconds(10_000), seconds(160_000)
    assert long < max(0.05, 64 * short), "sixteen times the length, and a factor of four"


def test_nearly_all_secrets_are_cut_out_whatever_their_form_and_surroundings() -> None:
    texts = list(planted())
    assert len(texts) > 350
    left = [(text, SECRETS.redact(text.text)) for text in texts]
    missed = [text.about for text, kept in left if text.secret[:12] in kept]
    print(f"{len(texts) - len(missed)} of {len(texts)} found; missed: {missed}")
    assert len(missed) <= 0.1 * len(texts)
    assert all(SECRETS.redact(kept) == kept for _, kept in left)


@pytest.mark.slow
def test_hardly_any_text_of_others_is_taken_to_hold_one() -> None:
    """At most one text in a hundred: a prompt that seems to hold a secret is not learned from."""
    texts = list(harmless(1000))
    assert len(texts) > 500
    alarms = [(name, held) for name, text in texts if (held := SECRETS.holds(text))]
    print(f"{len(alarms)} of {len(texts)}: {alarms}")
    assert len(alarms) <= 0.01 * len(texts)


@pytest.mark.parametrize("length", [150, 250, 1000, 3900])
def test_long_secrets_are_cut_out_whole(length: int) -> None:
    secret = "".join(random.Random(length).choices(string.ascii_letters + string.digits, k=length))
    for before, after in (("TOKEN=", ""), ('"api_key": "', '"'), ("password: ", "\n")):
        left = SECRETS.redact(f"a {before}{secret}{after} b")
        assert not any(secret[at : at + 8] in left for at in range(0, length - 8, 8))


def test_pieces_in_which_a_long_text_is_searched_hide_nothing() -> None:
    secret = "dapi" + "".join(random.Random(5).choices("0123456789abcdef", k=32))
    for at in (0, 65_500, 65_520, 65_536, 131_050):
        for filler in ("word ", "wört "):
            text = (filler * 30_000)[:at] + f" {secret} " + filler * 20_000
            assert secret[:20] not in SECRETS.redact(text), (at, filler)


def test_commands_do_not_load_the_rules() -> None:
    done = "import sys, tinker_claw.cli.main; sys.exit('kingfisher_sdk' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", done], check=False).returncode == 0


EXACT = ["/private", "  /Private  ", "/PRIVATE", "\n/private\nmy knee hurts", "/private\u00a0"]
EXACT += ["/private\n/private off"]
NEAR = [
    "/private.",
    "/private!",
    "/private?",
    "/private,",
    "/private…",
    "/private - my knee",
    "/private on",
    "/private On!",
    "/private please",
    "/private mode",
    "/private, thanks",
    "/private: my knee hurts",
    "/private my knee hurts",
    "/private—my knee",
    "/private=on",
    "`/private`",
    "```\n/private\n```",
    '"/private"',
    "'/private'",
    "“/private”",
    "«/private»",
    "(/private)",
    "[/private]",
    "**/private**",
    "_/private_",
    "> /private",
    "- /private",
    "1. /private",
    "🤫 /private",
    "/private 🤫",
    "/private@claw_bot",
    "/private\u200b",
    "\u200b/private",
    "\ufeff/private",
    "/pri\u200bvate",
    "/pri\u00advate",
    "\u2060/private on",
    "/private\u00a0on",
    "/private\u2028my knee",
    "/private\x0bmy knee",
    "／private",
    "／ｐｒｉｖａｔｅ",
    "⁄private",
    "∕private",
    "/prívate",
    "/private私の膝",
    "hello\n/private",
    "hello\n\n  /private  \nmy knee",
    "hello\r\n/private",
    "x\n`/private`.",
    "/ private",
    "/privat",
    "/pivate",
    "/prviate on",
    "/privates",
    "/private off.",
    "/private off!",
    "/private off please",
    "/private off the record",
    "/private off\u200b",
    "`/private off`",
    "x\n/private off",
    "/private off\n/private",
    "/private of",
    "／private off",
]
"""Texts that people type who mean the line; also all but its exact end."""
NO_COMMAND = [
    "hello",
    "private",
    "this is private",
    "what does /private do?",
    "What is /private",
    "please /private",
    "turn on /private",
    "Done. /private",
    "//private",
    "\\private",
    "how do I use /private?",
    "Explain the /private command",
    "is /private on?",
    "does /private work in groups?",
    "my /private folder is full",
    "the flag --private",
    "/private/",
    "/private/var",
    "/private/var/log is full",
    "/private/var\n/private/etc",
    "look at /private/etc/hosts",
    "ls /private",
    "cd /private && ls",
    "~/private",
    "./private",
    "../private",
    "/home/private",
    "C:\\private",
    "/private.txt",
    "/private_key",
    "/private-notes",
    "https://example.com/private",
    "/privateer",
    "/privatize",
    "/privacy",
    "/pirate",
    "/prime",
    "// private helpers\nint x;\n//private\nint y;",
    "x = 3 // private",
    "/* private */",
]


@pytest.mark.parametrize("line", EXACT)
def test_the_line_makes_what_follows_private(line: str) -> None:
    assert marked(["hello", line, "and?"]) == Marker(Privacy.PRIVATE)
    assert mentioned([f"[User]: {line}"])


@pytest.mark.parametrize("line", NEAR)
def test_what_comes_near_the_line_is_private_too(line: str) -> None:
    near = Marker(Privacy.PRIVATE, exact=False)
    assert marked([line]) == marked(["/private off", line]) == near
    assert marked(["/private", line]) in (near, Marker(Privacy.PRIVATE))


@pytest.mark.parametrize("line", NO_COMMAND)
def test_a_path_or_a_question_about_the_word_is_no_command(line: str) -> None:
    assert marked([line]) is None
    assert marked(["/private", line]) == Marker(Privacy.PRIVATE), "nor does it end anything"


@pytest.mark.parametrize(
    "off", ["/private off", " /private  off ", "/Private Off", "/private off\nwhat is 2 + 3?"]
)
def test_only_the_exact_line_ends_it(off: str) -> None:
    assert marked(["/private", "x", off]) == Marker(Privacy.ONCE_PRIVATE)
    assert marked(["/private", off, "/private\nagain"]) == Marker(Privacy.PRIVATE)


@pytest.mark.parametrize(
    ("transcript", "private"),
    [
        ("[User]: /private.\n[Assistant]: fine", True),
        ("[User]: ／private on", True),
        ('{"user": "hello\\n/private\\nmy knee"}', True),
        ("[User]: /pri\u200bvate", True),
        ("[User]: see /private/var and /privateer", False),
    ],
)
def test_a_transcript_with_something_near_the_line_is_private(
    transcript: str, private: bool
) -> None:
    assert mentioned([transcript]) is private


def test_setting_names_what_is_redacted() -> None:
    assert load_settings([]).privacy.kinds == {"secrets"}
    assert load_settings(["--redact", "email, card"]).privacy.kinds == {"email", "card"}
    assert load_settings(["--redact", "all"]).privacy.kinds == set(KINDS)
    assert load_settings(["--redact", "none"]).privacy.kinds == frozenset()
    with pytest.raises(ConfigError, match="'emial' is none of secrets, email"):
        load_settings(["--redact", "secrets,emial"])


def test_errors_that_quote_a_key_are_logged_without_it() -> None:
    out = io.StringIO()
    configure(out, redact=SECRETS.redact)
    log.error("spend.failed", error=f"401: no such key sk-{LETTERS}", code=401)
    try:
        raise ValueError(f"sk-{LETTERS}")
    except ValueError:
        log.exception("part.failed")
    first, second = map(json.loads, out.getvalue().splitlines())
    assert (first["error"], first["code"]) == ("401: no such key [redacted: API key]", 401)
    assert first["level"] == "error"
    assert "ValueError: [redacted: API key]" in second["exception"]
