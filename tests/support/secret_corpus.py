"""Secrets in their usual forms and places, and texts that hold none.

Rule: nothing here is a secret. What looks like one is drawn when the tests run, so that no scanner
takes this file for a leak; what holds none is read from the packages that are installed.
"""

from __future__ import annotations

import base64
import random
import re
import string
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

_SETS = {
    "A": string.ascii_letters + string.digits,  # any letter or digit
    "U": string.ascii_uppercase + string.digits,
    "L": string.ascii_lowercase + string.digits,
    "h": "0123456789abcdef",
    "d": string.digits,
    "w": string.ascii_letters + string.digits + "-_",
    "b": string.ascii_letters + string.digits + "+/",
    "z": string.ascii_lowercase,
}
_DRAWN = re.compile(r"\{([AULhdwbz])(\d+)\}")

FORMS = """
sk-{A48}
sk-proj-{w74}T3BlbkFJ{w74}
sk-ant-api03-{w93}AA
sk-or-v1-{h64}
sk_{h48}
xai-{A80}
pplx-{A48}
gsk_{A52}
r8_{A37}
nvapi-{w64}
tskey-auth-{A16}-{A32}
hf_{A34}
AIza{w35}
ya29.{w120}
GOCSPX-{w28}
1//0{d1}{w60}
AKIA{U16}
ASIA{U16}
ABIA{U16}
ghp_{A36}
gho_{A36}
ghs_{A36}
github_pat_{A22}_{A59}
glpat-{w20}
glpat-{w27}.01.{L9}
gldt-{w20}
glrt-{w20}
glrt-t1_{w20}
glptt-{h40}
glcbt-64_{w20}
glimt-{w25}
glft-{w20}
glsoat-{w20}
glagent-{w50}
gloas-{h64}
glffct-{w20}
GR1348941{w20}
xoxb-{d12}-{d13}-{A24}
xoxp-{d12}-{d12}-{d13}-{h32}
xoxc-{d12}-{d13}-{d13}-{h64}
xoxd-{A20}%2F{A30}%2B{A40}%3D%3D
xoxe.xoxp-1-{A160}
xapp-1-A{U10}-{d13}-{h64}
https://hooks.slack.com/services/T{U10}/B{U10}/{A24}
https://discord.com/api/webhooks/{d18}/{w68}
https://outlook.webhook.office.com/webhookb2/{h8}-{h4}-{h4}-{h4}-{h12}@{h8}-{h4}-{h4}-{h4}-{h12}/IncomingWebhook/{h32}/{h8}-{h4}-{h4}-{h4}-{h12}
MT{A22}.G{w5}.{w38}
secret_{A43}
ntn_{d11}{A35}
lin_api_{A40}
lin_oauth_{h64}
hvs.CAES{w90}
hvs.{w24}
hvb.{w140}
hvr.{w140}
dapi{h32}
dapi{h32}-3
glsa_{A32}_{h8}
glc_eyJv{b120}=
eyJrIjoi{A90}
shpat_{h32}
shpca_{h32}
shppa_{h32}
shpss_{h32}
sk_live_{A24}
sk_live_51{A97}
rk_live_{A24}
whsec_{b32}
SK{h32}
SG.{w22}.{w43}
key-{h32}
{h32}-us{d2}
npm_{A36}
pypi-AgEIcHlwaS5vcmc{w150}
dckr_pat_{w27}
rubygems_{h48}
cio{A32}
oy2{L43}
dop_v1_{h64}
doo_v1_{h64}
HRKU-{w60}
pscale_tkn_{w43}
pscale_pw_{w43}
sbp_{h40}
sb_secret_{w31}
nfp_{A36}
fo1_{w43}
rnd_{A32}
pat{A14}.{h64}
ATATT3xFfGF0{w170}={U8}
ATCTT3xFfGN0{w170}={U8}
figd_{w40}
sl.{w136}
NRAK-{U27}
sntrys_eyJ{b100}_{b43}
sntryu_{h64}
dp.pt.{A43}
pul-{h40}
{A14}.atlasv1.{w64}
PMAK-{h24}-{h34}
sq0atp-{w22}
sq0csp-{w43}
EAAA{w60}
EAACEdEose0cBA{A100}
sdk-{h8}-{h4}-{h4}-{h4}-{h12}
v1.0-{h24}-{h146}
ops_eyJ{w250}
sgp_{h40}
CCIPAT_{A22}_{h40}
bkua_{h40}
shippo_live_{h40}
EZAK{A54}
FLWSECK-{h32}-X
rzp_live_{A14}
tfp_{w44}_{w14}
rdme_{L70}
pnu_{A36}
CLOJARS_{h60}
LTAI{A20}
AKID{A32}
AKCp8{A68}
pat-na1-{h8}-{h4}-{h4}-{h4}-{h12}
sk.eyJ1Ijoi{A60}.{A22}
AGE-SECRET-KEY-1{U58}
{d10}:AA{w33}
t1.9eu{w40}.{w86}
lsv2_pt_{h32}_{h10}
pcsk_{A6}_{A63}
tvly-{A32}
re_{A8}_{A24}
pk_{d8}_{U32}
phx_{A43}
dt0c01.{U24}.{U64}
access-production-{h8}-{h4}-{h4}-{h4}-{h12}
sk_test_{A24}
xkeysib-{h64}-{A16}
fw_{A24}
tml-{A40}
"""
"""Tokens with a recognisable form, one a line; {A48}: 48 letters and digits."""

PLACES = """
password={pw}
PASSWORD: {pw}
DB_PASSWORD={pw}
export PGPASSWORD='{pw}'
my password is {pw}
The password for the router is: {pw}
Passwort: {pw}
Das Passwort lautet {pw}
Kennwort: {pw}
mot de passe : {pw}
contraseña: {pw}
senha: {pw}
пароль: {pw}
密码：{pw}
passphrase = "{words} {d2}"
password: "{words} {d2}!"
"password": "{words} {d2}"
'password' => '{pw}',
<password>{pw}</password>
<add key="Password" value="{pw}" />
Server=db;Database=app;User Id=sa;Password={pw};Encrypt=true
jdbc:postgresql://db/app?user=me&password={pw}
postgres://me:{pw}@db.example.net:5432/app
mongodb+srv://app:{pw}@cluster0.ab1cd.mongodb.net/x
amqp://svc:{pw}@mq:5672/
https://me:{pw}@git.example.net/me/repo.git
redis://:{pw}@cache:6379/0
machine api.example.net login me password {pw}
machine api.example.net⏎  login me⏎  password {pw}
default login me password {pw}
curl -u me:{pw} https://api.example.net/v1
curl --user 'me:{pw}' https://api.example.net/v1
curl -sS -u "me:{pw}" -X POST https://api.example.net
curl -H "X-Api-Key: {h40}" https://api.example.net
curl -H 'xi-api-key: {h32}' https://api.elevenlabs.io/v1/voices
curl -H "Authorization: Token {h40}" https://api.example.net
curl -H "Authorization: Basic {b40}=" https://api.example.net
Authorization: Bearer {A40}
authorization: bearer {w60}
"Authorization": "Bearer {A64}"
Private-Token: {w20}
Cookie: sessionid={L32}; csrftoken={A32}
Cookie: _ga=GA1.2.3; connect.sid=s%3A{w32}.{A43}
Set-Cookie: session={b120}; HttpOnly; Secure
Set-Cookie: auth_token={h40}; Path=/
curl -b 'SID={w71}' https://example.net
mysql -u root -p{pw} app
sshpass -p {pw} ssh root@10.0.0.7
sshpass -p '{pw}' ssh root@10.0.0.7
docker login -u me -p {pw} registry.example.net
wget --user=me --password={pw} https://example.net/x
redis-cli -h cache -a {pw} ping
smbclient //nas/share -U me%{pw}
openssl rsa -in k.pem -passin pass:{pw}
net use Z: \\\\nas\\share /user:me {pw}
https://acc.blob.core.windows.net/c/f?sv=2022-11-02&se=2026-12-01&sr=b&sp=r&sig={sig}
SharedAccessSignature sr=hub&sig={sig}&se=1790000000
DefaultEndpointsProtocol=https;AccountName=acc;AccountKey={b86}==;EndpointSuffix=core.windows.net
Endpoint=sb://bus.servicebus.windows.net/;SharedAccessKeyName=Root;SharedAccessKey={b43}=
AZURE_CLIENT_SECRET={A3}8Q~{w34}
https://maps.example.net/js?api_key={h32}&v=3
https://example.net/cb?access_token={w60}&state=1
https://example.net/hook?token={A32}
GET /v1/data?apikey={h32} HTTP/1.1
aws_secret_access_key = {b40}
"SecretAccessKey": "{b40}",
"client_secret": "{A40}"
client_secret: {w36}
API_KEY = "{h32}"
api_key: {h40}
apiKey: '{A32}',
const apiToken = "{A40}";
OPENAI_API_KEY={A48}
secret_key_base: {h128}
SECRET_KEY = '{A50}'
token = "{A250}"
TOKEN={b400}
private_key = "{b900}"
"refresh_token": "{w100}"
"id_token": "{w300}"
//registry.npmjs.org/:_authToken={A36}
_auth={b60}=
"auth": "{b44}="
    client-key-data: {b400}
    token: {A60}
psk="{words} {d2}"
wpa_passphrase={pw}
WLAN-Passwort: {pw}
WiFi password: {pw}
otpauth://totp/me?secret={U32}&issuer=x
encryption_key={h64}
master key: {h64}
db.example.net:5432:app:me:{pw}
user: admin / pass: {pw}
login: admin, pw: {pw}
credentials: admin / {pw}
ssh password = {pw}
spring.datasource.password={pw}
ansible_become_pass: {pw}
set-option password "{pw}"
IDENTIFIED BY '{pw}'
CREATE USER app WITH PASSWORD '{pw}';
requirepass {pw}
--password {pw}
--token {A40}
--api-key={A40}
-e MYSQL_ROOT_PASSWORD={pw}
ENV API_TOKEN {A40}
PIN: {d6}, puk: {d8}
"""
"""Places of secrets without a form of their own; {pw} is a password, {words} are words, ⏎ ends a
line."""


FRAMES = (
    "{}",
    "Please use this from now on:\n\n{}\n\nand tell me when you are done.",
    "$ cat notes.txt\n# things\n{}\nend of file\n",
    '{{"role": "tool", "content": "{}"}}',
    "| key | {} |",
)


@dataclass(frozen=True, slots=True)
class Planted:
    """A text, and the part of it that must not be kept."""

    text: str
    secret: str
    about: str


def planted(seed: int = 0) -> Iterator[Planted]:
    """One text for each form and place, the forms in changing surroundings."""
    rng = random.Random(seed)
    forms = FORMS.split("\n")[1:-1]
    for number, form in enumerate(forms):
        secret = _drawn(form, rng)
        text = FRAMES[number % len(FRAMES)].format(secret)
        yield Planted(text, _core(form, secret), form)
    for kind in ("RSA ", "OPENSSH ", "EC ", "", "ENCRYPTED "):
        body = "\n".join(_drawn("{b64}", rng) for _ in range(12))
        text = f"-----BEGIN {kind}PRIVATE KEY-----\n{body}\n-----END {kind}PRIVATE KEY-----"
        yield Planted(text, body, f"{kind}PRIVATE KEY")
        yield Planted(text.replace("\n", "\\n"), body.replace("\n", "\\n"), f"{kind}KEY in JSON")
    parts = ('{"alg":"HS256","typ":"JWT"}', '{"sub":"%s"}' % _drawn("{A20}", rng))  # noqa: UP031
    jwt = ".".join(base64.urlsafe_b64encode(p.encode()).decode().rstrip("=") for p in parts)
    signature = _drawn("{w43}", rng)
    yield Planted(f"jwt {jwt}.{signature} ok", signature, "JSON Web Token")
    for place in PLACES.split("\n")[1:-1]:
        for _ in range(2):
            yield _in_place(place.replace("⏎", "\n"), rng)


def _in_place(place: str, rng: random.Random) -> Planted:
    """Draw a text for a place; the last thing that is drawn is the secret."""
    drawn, secret = "", ""
    for part in re.split(r"(\{[a-zA-Z]+\d*\})", place):
        if not part.startswith("{"):
            drawn += part
            continue
        text = _filled(part, rng)
        words_before = secret if part == "{d2}" else ""
        secret = f"{words_before} {text}".strip()
        drawn += text
    return Planted(drawn, secret, place)


def _filled(part: str, rng: random.Random) -> str:
    if part == "{pw}":
        return _password(rng)
    if part == "{words}":
        return " ".join(_drawn("{z5}", rng) for _ in range(4))
    if part == "{sig}":
        return quote(_drawn("{b43}=", rng), safe="")
    return _drawn(part, rng)


def _password(rng: random.Random) -> str:
    """Draw a password as people make them up."""
    word = _drawn("{z3}", rng).capitalize() + _drawn("{z4}", rng)
    return rng.choice(
        (
            f"{word}{rng.randrange(10, 9999)}",
            f"{word}{rng.randrange(10, 99)}!",
            f"{word[:3]}-{rng.randrange(100, 999)}-{word[3:]}",
            _drawn("{A14}", rng) + str(rng.randrange(10)),
            f"{word}#{_drawn('{A4}', rng)}{rng.randrange(10)}",
        )
    )


def _drawn(form: str, rng: random.Random) -> str:
    def draw(found: re.Match[str]) -> str:
        letters, count = _SETS[found[1]], int(found[2])
        text = "".join(rng.choices(letters, k=count))
        # As keys are: not by chance a word, and beginning and ending in a letter or digit.
        if count > 8 and letters[-1] in "-_/":
            text = f"{rng.choice('abcXYZ')}{rng.randrange(10)}{text[2:-2]}{rng.randrange(10)}k"
        return text

    return _DRAWN.sub(draw, form)


def _core(form: str, secret: str) -> str:
    """Drawn part of a secret, from the longest drawn piece on."""
    fixed = max(re.split(_DRAWN.pattern, form)[0::3], key=len)
    return secret.replace(fixed, "", 1)[-12:] if fixed else secret[-12:]


SUFFIXES = {"", ".md", ".rst", ".txt", ".py", ".pyi", ".toml", ".cfg", ".ini", ".yaml", ".yml"}
SUFFIXES |= {".json", ".js", ".html", ".css", ".sh", ".h", ".c", ".cpp", ".proto", ".jinja"}
_LONGEST = 60_000


def harmless(count: int, seed: int = 0) -> Iterator[tuple[str, str]]:
    """Names and texts of files of installed packages, only a few of each package."""
    root = Path(sysconfig.get_paths()["purelib"])
    rng, by_kind = random.Random(seed), dict[tuple[str, str], list[Path]]()
    for file in sorted(root.rglob("*")):
        if file.suffix.lower() in SUFFIXES and file.is_file() and file.stat().st_size > 200:
            package = file.relative_to(root).parts[0]
            by_kind.setdefault((package, file.suffix), []).append(file)
    chosen = [rng.sample(files, min(len(files), 12)) for files in by_kind.values()]
    files = [file for some in chosen for file in some]
    rng.shuffle(files)
    for file in files[:count]:
        yield str(file.relative_to(root)), file.read_text(errors="replace")[:_LONGEST]
