"""The forms of secrets and of personal data.

Rule: every repetition is bounded and every pattern begins where nothing longer is under way, so
that a text costs time in proportion to its length. A rule would rather miss a secret that has no
form of its own than take a hash, an id or a line of code for one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

SECRETS: Final = "secrets"
EMAIL: Final = "email"
PHONE: Final = "phone"
CARD: Final = "card"
IBAN: Final = "iban"
KINDS: Final = (SECRETS, EMAIL, PHONE, CARD, IBAN)

Match = re.Match[str]


@dataclass(frozen=True, slots=True)
class Rule:
    """One form."""

    kind: str
    """The word in --redact."""
    name: str
    pattern: re.Pattern[str]
    """Its group `cut` is what must not be kept; without that group it is all."""
    begins: tuple[str, ...] = ()
    """Lower case; a match begins with one of them. (): every place of a text is tried."""
    valid: Callable[[Match], bool] | None = None
    """Whether a match is one; None: always."""

    @property
    def what(self) -> str:
        """For a sentence."""
        return f"a secret ({self.name})" if self.kind == SECRETS else f"personal data ({self.name})"


def _mixed(text: str) -> bool:
    """Digits and letters, as keys have and words have not."""
    digits = sum(map(str.isdigit, text))
    return digits > 1 and digits < len(text)


def _token(name: str, *prefixes: str, body: str = "[A-Za-z0-9_-]{16,250}") -> Rule:
    """A token that announces itself, and does so not in the middle of something longer."""
    starts = "|".join(map(re.escape, prefixes))
    return Rule(
        SECRETS,
        name,
        re.compile(rf"(?<![A-Za-z0-9_+/=-])(?:{starts}){body}"),
        tuple(prefix.lower() for prefix in prefixes),
        lambda found: _mixed(found[0]),
    )


_PLACEHOLDER = re.compile(
    r"(?i)x{4}|\*{3}|\.{3}|…|your|example|placeholder|change.?me|dummy|redacted|"
    r"process\.env|environ|(?:secrets?|config|settings|self|this|req|options)\."
)
_ELSEWHERE = re.compile(r"[~.]{0,2}/|[A-Za-z]:[\\/]|[a-z]{2,10}://")
"""A path or an address."""
_NAME = re.compile(r"[A-Za-z_.-]{1,200}\d{0,2}[A-Za-z_]{0,3}")
"""A name in code, perhaps with a number: token2, API_KEY_V1."""
_COLOUR = re.compile(r"#[0-9a-fA-F]{6,8}")
_KEY_OF = re.compile(
    r"(?i)(?:api|access|private|auth|secret|signing|encryption|account|master|shared)[ _-]?\Z"
)
"""What stands before `key` where that opens something."""
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")


def _assigned(found: Match) -> bool:
    """Whether what is assigned to a password or a key looks like one, rather than like code."""
    value, word = found["cut"], found["word"].lower()
    before = found.string[max(0, found.start() - 12) : found.start()]
    if word.startswith("key") and not _KEY_OF.search(before):
        return False
    if _PLACEHOLDER.search(value) or _ELSEWHERE.match(value) or _COLOUR.fullmatch(value):
        return False
    letters, digits = any(map(str.isalpha, value)), sum(map(str.isdigit, value))
    if not letters or not (digits or any(c in "!@#%^&*?~+" for c in value)):
        return False
    secret_word = word.startswith(("pass", "pwd")) and "pass" not in value.lower()
    if _NAME.fullmatch(value) and not secret_word:
        return False
    if found["quote"] or found["sign"] not in (" = ", " := "):
        return True
    # Spaces around the sign, and no quotes: code, where a name stands for what it is.
    return len(value) >= 16 and (digits > 2 or not _IDENTIFIER.fullmatch(value))


_ASSIGNMENT = Rule(
    SECRETS,
    "password or key",
    re.compile(
        r"(?P<word>pass(?:word|wd|phrase|code)|pwd|secret|key|token)"
        r"[\"'`*\\]{0,4}(?P<sign>[ \t]{0,3}(?::=|=>|[:=]|is\b)[ \t]{0,3})"
        r"(?P<quote>\\?[\"'`])?(?P<cut>[^\s\"'`,;()<>\[\]{}$|\\&]{6,200})"
        r"(?(quote)\\?[\"'`]|(?:(?=[\s;&]|\.?\Z))(?![ \t]{1,3}[=(]))",
        re.IGNORECASE,
    ),
    ("pass", "pwd", "secret", "key", "token"),
    _assigned,
)


def _key_block(found: Match) -> bool:
    return sum(map(str.isalnum, found["cut"])) >= 40


def _url_password(found: Match) -> bool:
    value = found["cut"]
    words = ("password", "pass", "pwd", "passwd", "secret", "token", "pw")
    return value.lower() not in words and not _PLACEHOLDER.search(value) and value[0] not in "<${["


_SECRETS = (
    _token("API key", "sk-", "tml-", "xai-", "pplx-", "nvapi-", "gsk_", "r8_", "tskey-", "fw_"),
    _token("Stripe key", "sk_live_", "sk_test_", "rk_live_", "rk_test_", "whsec_"),
    _token("GitHub token", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "glpat-"),
    _token("Slack token", *(f"xox{letter}-" for letter in "abeoprs"), "xapp-"),
    _token("AWS key", "AKIA", "ASIA", body=r"[A-Z0-9]{16}(?![A-Za-z0-9+/=_-])"),
    _token("Google key", "AIza", body=r"[A-Za-z0-9_-]{35}(?![A-Za-z0-9+/=_-])"),
    _token("Google token", "ya29.", "GOCSPX-"),
    _token("Hugging Face token", "hf_", body="[A-Za-z0-9]{30,60}"),
    _token("package registry token", "npm_", "pypi-", "dckr_pat_", body="[A-Za-z0-9_-]{27,250}"),
    _token(
        "cloud token", "dop_v1_", "SG.", body=r"[A-Za-z0-9_-]{16,64}(?:\.[A-Za-z0-9_-]{16,64})?"
    ),
    Rule(
        SECRETS,
        "Telegram token",
        re.compile(r"(?<=\d{8}):AA[A-Za-z0-9_-]{33}(?![\w-])"),
        (":aa",),
    ),
    Rule(
        SECRETS,
        "webhook",
        re.compile(
            r"(?:hooks\.slack\.com/services|discord(?:app)?\.com/api/webhooks)/"
            r"(?P<cut>[A-Za-z0-9/_-]{20,200})"
        ),
        ("hooks.slack.com/", "discord.com/", "discordapp.com/"),
    ),
    Rule(
        SECRETS,
        "private key",
        re.compile(
            r"-----BEGIN [A-Z0-9 ]{0,30}PRIVATE KEY(?: BLOCK)?-----"
            r"(?P<cut>(?:(?!-----)[\s\S]){0,20000})(?:-----END [A-Z0-9 ]{0,40}-----)?"
        ),
        ("-----begin ",),
        _key_block,
    ),
    Rule(
        SECRETS,
        "JSON Web Token",
        re.compile(
            r"(?<![A-Za-z0-9_+/=.-])eyJ[A-Za-z0-9_-]{8,4000}\.[A-Za-z0-9_-]{8,8000}\."
            r"[A-Za-z0-9_-]{16,1000}"
        ),
        ("eyj",),
    ),
    Rule(
        SECRETS,
        "authorization header",
        re.compile(
            r"\b(?:bearer|authorization[\"']{0,2}:[ \t]{0,3}[\"']?basic)[ \t]{1,3}"
            r"(?P<cut>[A-Za-z0-9._~+/=-]{16,4000})",
            re.IGNORECASE,
        ),
        ("bearer", "authorization"),
        lambda found: _mixed(found["cut"]) and not _PLACEHOLDER.search(found["cut"]),
    ),
    Rule(
        SECRETS,
        "password in an address",
        re.compile(r"://[^\s/:@\"'<>]{0,100}:(?P<cut>[^\s/:@\"'<>]{3,200})@(?=[\w\[])"),
        ("://",),
        _url_password,
    ),
    _ASSIGNMENT,
)


def _digits(text: str) -> str:
    return "".join(filter(str.isdigit, text))


def _luhn(found: Match) -> bool:
    digits = [int(c) for c in _digits(found[0])]
    if not 13 <= len(digits) <= 19 or len(set(digits)) == 1:
        return False
    doubled = [sum(divmod(2 * d, 10)) for d in digits[-2::-2]]
    return (sum(digits[-1::-2]) + sum(doubled)) % 10 == 0


def _iban(found: Match) -> bool:
    text = found[0].replace(" ", "")
    if not 15 <= len(text) <= 34:
        return False
    return int("".join(str(int(c, 36)) for c in text[4:] + text[:4])) % 97 == 1


def _phone(found: Match) -> bool:
    return 8 <= len(_digits(found[0])) <= 15


_PERSONAL = (
    Rule(
        EMAIL,
        "e-mail address",
        re.compile(
            r"(?<![\w.%+@:/-])[A-Za-z0-9._%+-]{1,64}@(?:[A-Za-z0-9-]{1,63}\.){1,5}[A-Za-z]{2,24}\b"
        ),
    ),
    Rule(
        IBAN,
        "IBAN",
        re.compile(
            r"(?<![A-Za-z0-9])[A-Z]{2}\d{2}(?: ?[A-Z0-9]{4}){2,7}(?: ?[A-Z0-9]{1,3})?(?!\w)"
        ),
        valid=_iban,
    ),
    Rule(
        CARD,
        "card number",
        # In one piece, or in fours (American Express: 4-6-5); not inside a number or an id.
        re.compile(
            r"(?<![\w.+/-])(?:[3-6]\d{12,18}|[3-6]\d{3}(?:[ -]\d{4}){3}|3\d{3}[ -]\d{6}[ -]\d{5})"
            r"(?![\w/-]|\.\d)"
        ),
        valid=_luhn,
    ),
    Rule(
        PHONE,
        "phone number",
        # With a country code, or in the groups of a local one: (030) 1234-567, 030/1234567.
        re.compile(
            r"(?<![\w.+/=-])(?:(?:\+|00(?=[1-9]\d{1,2}[ ./-]))[1-9]\d{0,2}"
            r"(?:[ ./-]?\(?\d{1,5}\)?){2,6}"
            r"|\(0?\d{2,5}\) ?\d{3,4}[ -]?\d{3,5}|0\d{2,5}[ /-]\d{3,4}[ -]?\d{3,5})(?![\w/-]|\.\d)"
        ),
        valid=_phone,
    ),
)

RULES: Final = (*_SECRETS, *_PERSONAL)
