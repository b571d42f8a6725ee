"""Patterns of secrets and personal data: Kingfisher's maintained rules, and our own.

Secrets of some hundred services are found by Kingfisher's rules.

Rule: only rules of high confidence are used, and only the position of a match; no service is asked.
A text is searched in pieces, so that the time stays proportional to its length.

Our own forms of secrets and of personal data follow. Rule: every repetition is bounded and every
pattern begins where no longer match is under way, so that a text costs time in proportion to its
length. Rules rather miss a secret without a recognisable form than match a hash, an id or a line of
code.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kingfisher_sdk import Scanner


_PIECE = 65_536
"""Characters of a text searched at once."""
_OVERLAP = 4_096
"""Characters that consecutive pieces share; no secret is longer, except private keys, which our own
rules find."""
_SHORTEST = 20
"""Shortest text in characters that can hold a secret by these rules."""


def search(text: str) -> Iterator[tuple[int, int, str]]:
    """Yield start, end and name of the secrets in a text."""
    for at in range(0, max(len(text) - _OVERLAP, 1), _PIECE):
        piece = text[at : at + _PIECE + _OVERLAP]
        if len(piece) >= _SHORTEST:
            for start, end, name in _in_piece(piece):
                yield at + start, at + end, name


def _in_piece(piece: str) -> Iterator[tuple[int, int, str]]:
    encoded = piece.encode(errors="replace")
    at = offset = 0  # characters, and the bytes that they take
    findings = [finding for finding in scanner().scan(encoded) if finding.visible]
    for finding in sorted(findings, key=lambda finding: finding.location["start_offset"]):
        begin = finding.location["start_offset"]
        at, offset = at + len(encoded[offset:begin].decode(errors="ignore")), begin
        start = piece.find(finding.secret, at)
        if start >= 0:
            name = finding.rule_id.rpartition(".")[2].replace("-", " ")
            yield start, start + len(finding.secret), name


@cache
def scanner() -> Scanner:
    """Load Kingfisher's rules, in a second if they have been compiled before, else in several."""
    from kingfisher_sdk import Rules, Scanner  # not needed by most commands

    return Scanner(Rules(confidence="high"), base64=False)


SECRETS = "secrets"
EMAIL = "email"
PHONE = "phone"
CARD = "card"
IBAN = "iban"
KINDS = (SECRETS, EMAIL, PHONE, CARD, IBAN)

Match = re.Match[str]


@dataclass(frozen=True, slots=True)
class Rule:
    """One form of a secret or of personal data."""

    kind: str
    """Kind as named in --redact."""
    name: str
    pattern: re.Pattern[str]
    """Pattern whose group `cut` is removed; without that group, the whole match."""
    begins: tuple[str, ...] = ()
    """Lower-case literals with which every match begins; (): every position is tried."""
    holds: Callable[[Match], bool] = bool
    """Returns whether a match of the pattern is genuine; every match is true."""


def _secret(name: str, pattern: str, *begins: str, valid: Callable[[Match], bool] = bool) -> Rule:
    """Return a rule of a secret; see `Rule`."""
    return Rule(SECRETS, name, re.compile(pattern), begins, valid)


def _mixed(text: str) -> bool:
    """Return whether a text mixes digits and letters, as keys do and words do not."""
    digits = sum(map(str.isdigit, text))
    return digits > 1 and digits < len(text)


_PLACEHOLDER = re.compile(
    r"(?i)x{4}|\*{3}|\.{3}|…|your|example|placeholder|change.?me|dummy|redacted|"
    r"process\.env|environ|(?:secrets?|config|settings|self|this|req|options)\."
)
_ELSEWHERE = re.compile(r"[~.]{0,2}/|[A-Za-z]:[\\/]|[a-z]{2,10}://")
"""A path or a URL."""
_NAME = re.compile(r"[A-Za-z_.-]{1,200}\d{0,2}[A-Za-z_]{0,3}")
"""A name in code, perhaps with a number: token2, API_KEY_V1."""
_COLOUR = re.compile(r"#[0-9a-fA-F]{6,8}")
_KEY_OF = re.compile(
    r"(?i)(?:api|access|private|auth|secret|signing|encryption|account|master|shared|client)"
    r"[ _-]?\Z"
)
"""Words before `key` where it is a secret."""
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")
_SENTENCE = re.compile(
    r"(?i)\b(?:an?|the|is|are|was|be|must|should|can|will|may|not|no|your?|my|its?|this|that|at|"
    r"least|most|of|for|to|in|on|by|with|from|or|and|if|as|when|which|characters|long|required|"
    r"optional|field|value|enter|used?|der|die|das|ist|und|eine?|mit|nicht|muss)\b"
)
"""Common words of sentences about a password; a passphrase consists of others."""
_SPECIAL = "!@#%^&*?~+"


def _looks_made_up(value: str, *, password: bool) -> bool:
    """Return whether a value without blanks looks like a chosen or generated secret, not a name."""
    if _PLACEHOLDER.search(value) or _ELSEWHERE.match(value) or _COLOUR.fullmatch(value):
        return False
    letters, digits = any(map(str.isalpha, value)), any(map(str.isdigit, value))
    if not letters or not (digits or any(c in _SPECIAL for c in value)):
        return False
    return not _NAME.fullmatch(value) or (password and "pass" not in value.lower())


def _is_passphrase(value: str) -> bool:
    words = value.lower().split()
    return (
        3 <= len(words) <= 10
        and any(map(str.isdigit, value))
        and not _SENTENCE.search(value)
        and all(word.rstrip("!?").isalnum() for word in words)
    )


_PASSWORD = re.compile(
    r"pass(?:w(?:or[dt]|d)|phrase|code|e)?|kennwort|pwd?|psk|contrase[ñn]a|senha|пароль|密码", re.I
)
_BEGINS = (
    "pass",
    "kennwort",
    "pwd",
    "pw:",
    "pw=",
    "psk",
    "contrase",
    "senha",
    "пароль",
    "密码",
    "pin:",
    "pin=",
    "puk:",
    "puk=",
    "secret",
    "key",
    "token",
)
_SHORT = ("pass", "pw", "psk", "pin", "puk")
"""Words for passwords that also end other words: bypass, spin."""
_NAMED = re.compile(
    r"(?:(?:\s|\A)--?[\w-]{0,20}|\blogin[ \t]+\S{1,100}\s+|require|\bwith |\boption "
    r"|\b(?:env|arg|setx?)[ \t]+\w{0,40})\Z",
    re.IGNORECASE,
)
"""Text before a word whose value follows without a sign: options, netrc, Dockerfiles."""
_AFTER = re.compile(r"(?![ \t]{1,3}[=(])(?=[\s;&|<\"'`]|\.?\Z|\\[nrt\"'])")
"""Text that may follow an unquoted value."""


def _assigned(match: Match) -> bool:
    """Return whether the value assigned to a password or key looks like one, not like code."""
    value, word, sign, quote = match["cut"], match["word"].lower(), match["sign"], match["quote"]
    text, end, password = match.string, match.end(), _PASSWORD.fullmatch(word) is not None
    if not (text.startswith(quote, end) if quote else _AFTER.match(text, end)):
        return False
    if sign.strip() == ">" and not text.startswith("</", end):
        return False
    before = text[max(0, match.start() - 12) : match.start()]
    if word == "key" and not _KEY_OF.search(before):
        return False
    if word in _SHORT and before[-1:].isalpha() and not sign.isspace():
        return False
    if word in ("pin", "puk"):
        return value.isdigit() and len(value) <= 8 and not sign.isspace()
    if " " in value:
        return password and not sign.isspace() and _is_passphrase(value)
    if not _looks_made_up(value, password=password):
        return False
    if sign.isspace():
        return _NAMED.search(text, max(0, match.start() - 130), match.start()) is not None
    if quote or sign not in (" = ", " := "):
        return True
    # Spaces around the sign and no quotes suggest code, where the value may be a name.
    digits = sum(map(str.isdigit, value))
    long = len(value) >= (10 if password else 16)
    return long and (digits > 2 or not _IDENTIFIER.fullmatch(value))


_ASSIGNMENT = _secret(
    "password or key",
    rf"(?i)(?P<word>{_PASSWORD.pattern}|pin|puk|secret(?:_key_base)?|key(?:-data)?|token)"
    r"[\"'`*\\]{0,4}"
    r"(?: (?:for|of|to|für|vom|zum) [^\n:=\"']{1,40}?(?= is\b| ist\b|:))?"
    r"(?P<sign>[ \t]{0,3}(?::=|=>|[:=：]|is\b:?|ist\b:?|lautet:?|>)(?:\*\*)?[ \t]{0,3}"
    r"|[ \t]value=|[ \t]{1,3})"
    r"(?P<quote>\\?[\"'`])?"
    r"(?P<cut>(?(quote)[^\"'`\n\\]{6,4000}|[^\s\"'`,;()<>\[\]{}$|\\&]{6,4000}))",
    *_BEGINS,
    valid=_assigned,
)
_GIVEN_TO = {
    "-u": re.compile(r"\b(?:curl|http|smb\w*|rpcclient)\b"),
    "--user": re.compile(r"\bcurl\b"),
    "-p": re.compile(r"\b(?:my\w*|maria\w*|sshpass|login|mongo\w*|7z|unzip|zip|ldap\w*)\b"),
    "-a": re.compile(r"\bredis-cli\b"),
    "-b": re.compile(r"\bcurl\b"),
    "/user:": re.compile(r"\bnet use\b"),
}
"""Programs that take a password with this option; the name comes earlier in the line."""


def _option_password(match: Match) -> bool:
    text, start = match.string, match.start()
    if not _looks_made_up(match["cut"], password=True):
        return False
    option = (match["option"] or match["flag"] or match["share"]).lower()
    begin = max(text.rfind("\n", max(0, start - 300), start) + 1, start - 300, 0)
    return _GIVEN_TO[option].search(text[begin:start].lower()) is not None


_COMMAND = _secret(
    "password in a command",
    r"(?i) (?:(?P<option>-u|--user|-b)[ =]?[\"']?[^\s:%=\"']{1,100}[:%=]"
    r"|(?P<flag>-p|-a) ?|(?P<share>/user:)\S{1,100} )"
    r"[\"']?(?P<cut>[^\s\"'`;|&<>]{4,400})",
    " -u",
    " --user",
    " -p",
    " -a",
    " -b",
    " /user:",
    valid=_option_password,
)


def _key_block(match: Match) -> bool:
    return sum(map(str.isalnum, match["cut"])) >= 40


def _url_password(match: Match) -> bool:
    value = match["cut"]
    words = ("password", "pass", "pwd", "passwd", "secret", "token", "pw")
    return value.lower() not in words and not _PLACEHOLDER.search(value) and value[0] not in "<${["


_COOKIE_VALUE = re.compile(r"=[ \t\"]{0,2}([A-Za-z0-9%._~+/-]{16,4000})")


def _cookies(match: Match) -> bool:
    return any(
        _mixed(value[1]) and not _PLACEHOLDER.search(value[1])
        for value in _COOKIE_VALUE.finditer(match["cut"])
    )


_PREFIXES = (
    "sk-",
    "sk_",
    "rk_live_",
    "whsec_",
    "tml-",
    "xai-",
    "hf_",
    "fw_",
    "tvly-",
    "tskey-",
    "npm_",
    "AKIA",
    "ASIA",
    "ABIA",
    "AIza",
    "ya29.",
    "GOCSPX-",
    "1//0",
    "xoxd-",
    "xoxe.",
    "secret_",
    "ghp_",
    "gho_",
    "ghu_",
    "ghs_",
    "ghr_",
    "github_pat_",
    "glpat-",
    "xoxb-",
    "xoxp-",
    "xapp-",
    "SG.",
    "hvs.",
    "hvr.",
    "dop_v1_",
    "lin_oauth_",
)
"""Beginnings of common API keys, which Kingfisher finds only where they are exactly in form."""

_SECRETS = (
    _secret(
        "API key",
        rf"(?<![A-Za-z0-9_.%+/=-])(?:{'|'.join(map(re.escape, _PREFIXES))})"
        r"[A-Za-z0-9_.%+/=-]{13,400}[A-Za-z0-9_=-]",
        *map(str.lower, _PREFIXES),
        valid=lambda match: _mixed(match[0]),
    ),
    _secret(
        "webhook",
        r"(?:hooks\.slack\.com/services|discord(?:app)?\.com/api/webhooks"
        r"|webhook\.office\.com/webhookb2)/(?P<cut>[A-Za-z0-9/@_-]{20,300}(?:/[\w/-]{20,200})?)",
        "hooks.slack.com/",
        "discord.com/",
        "discordapp.com/",
        "webhook.office.com/",
    ),
    _secret(
        "private key",
        r"-----BEGIN [A-Z0-9 ]{0,30}PRIVATE KEY(?: BLOCK)?-----"
        r"(?P<cut>(?:(?!-----)[\s\S]){0,20000})(?:-----END [A-Z0-9 ]{0,40}-----)?",
        "-----begin ",
        valid=_key_block,
    ),
    _secret(
        "authorization header",
        r"(?i)\b(?:bearer|authorization[\"']{0,2}:[ \t]{0,3}[\"']?(?:basic|token))[ \t]{1,3}"
        r"(?P<cut>[A-Za-z0-9._~+/=-]{16,4000})",
        "bearer",
        "authorization",
        valid=lambda match: _mixed(match["cut"]) and not _PLACEHOLDER.search(match["cut"]),
    ),
    _secret(
        "cookie",
        r"(?i)cookie[\"']?[ \t]{0,3}:[ \t]{0,3}[\"']?(?P<cut>[^\n\r\"'\\]{18,8000})",
        "cookie",
        valid=_cookies,
    ),
    _secret(
        "signature",
        r"(?i)(?<=[?&; ])sig=(?P<cut>[A-Za-z0-9%+/_-]{20,200}=?)",
        "sig=",
        valid=lambda match: _mixed(match["cut"]),
    ),
    _secret(
        "registry login",
        r"(?:\"auth\"[ \t]{0,3}:[ \t]{0,3}\"|\b_auth[ \t]{0,3}=[ \t]{0,3}\"?)"
        r"(?P<cut>[A-Za-z0-9+/]{16,2000}={0,2})",
        '"auth"',
        "_auth",
        valid=lambda match: _mixed(match["cut"]),
    ),
    _secret(
        "password in a list",
        r"(?i)(?:credentials?[ \t]{0,3}[:=][ \t]{0,3}[\w.@-]{1,60}[ \t]{0,2}[/|:][ \t]{0,2}"
        r"|:5432:[^\s:]{1,60}:[^\s:]{1,60}:)(?P<cut>[^\s\"'`,;()<>\[\]{}|\\]{6,200})",
        "credential",
        ":5432:",
        valid=lambda match: _looks_made_up(match["cut"], password=True),
    ),
    _secret(
        "password in an address",
        r"://[^\s/:@\"'<>]{0,100}:(?P<cut>[^\s/:@\"'<>]{3,200})@(?=[\w\[])",
        "://",
        valid=_url_password,
    ),
    _COMMAND,
    _ASSIGNMENT,
)


def _digits(text: str) -> str:
    return "".join(filter(str.isdigit, text))


def _luhn(match: Match) -> bool:
    digits = [int(c) for c in _digits(match[0])]
    if not 13 <= len(digits) <= 19 or len(set(digits)) == 1:
        return False
    doubled = [sum(divmod(2 * d, 10)) for d in digits[-2::-2]]
    return (sum(digits[-1::-2]) + sum(doubled)) % 10 == 0


def _iban(match: Match) -> bool:
    text = match[0].replace(" ", "")
    if not 15 <= len(text) <= 34:
        return False
    return int("".join(str(int(c, 36)) for c in text[4:] + text[:4])) % 97 == 1


def _phone(match: Match) -> bool:
    return 8 <= len(_digits(match[0])) <= 15


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
        holds=_iban,
    ),
    Rule(
        CARD,
        "card number",
        # In one piece, or in fours (American Express: 4-6-5); not inside a number or an id.
        re.compile(
            r"(?<![\w.+/-])(?:[3-6]\d{12,18}|[3-6]\d{3}(?:[ -]\d{4}){3}|3\d{3}[ -]\d{6}[ -]\d{5})"
            r"(?![\w/-]|\.\d)"
        ),
        holds=_luhn,
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
        holds=_phone,
    ),
)

RULES = (*_SECRETS, *_PERSONAL)
