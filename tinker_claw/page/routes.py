"""The page's addresses, all below /ui. Every one can be read without a script.

Rule: what is shown is read from the ledger file in a thread, a few at a time, so no reply waits for
it; what is changed goes the way that commands and /v1/feedback go.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from time import monotonic
from typing import Any, Final, TypeVar
from urllib.parse import parse_qs, urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.convertors import IntegerConvertor, register_url_convertor
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from tinker_claw.config.settings import Training
from tinker_claw.errors import ClawError, LedgerError, RequestError, UndoError
from tinker_claw.gateway import errors
from tinker_claw.gateway.limits import read_body
from tinker_claw.learner.rollback import Rollback
from tinker_claw.ledger.database import Rows, reading
from tinker_claw.ledger.feedback import About, Feedback, Given
from tinker_claw.ledger.outcome import moment, step_word
from tinker_claw.ledger.views import Filter, Record
from tinker_claw.origin import refuse_pages
from tinker_claw.page import read
from tinker_claw.page.access import Access, Visitor
from tinker_claw.telemetry import log

ROOT: Final = "/ui"
_STATIC: Final = Path(__file__).parent / "static"
_FILES: Final = {
    "page.css": "text/css",
    "htmx-2.0.11.min.js": "text/javascript",
    "icon.svg": "image/svg+xml",
}
_HEADERS: Final = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; form-action 'self'; frame-ancestors 'none'; "
    "base-uri 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}
_MOST_BYTES: Final = 4096
"""Of a form."""
_PAUSE: Final = 3.0
"""After a page, in the times that it took to make: whoever reloads in a hurry waits for
themselves, and serving has the rest of the processor."""
_LONGEST_PAUSE_S: Final = 0.5
FRESH_S = 2.0
"""So long all who look are shown the same overview: its sums take a third of a second of a
processor where there are 100,000 turns."""
_PAGES: Final = (
    ("overview", "", False),
    ("turns", "/turns", False),
    ("episodes", "/episodes", False),
    ("steps", "/steps", True),
    ("versions", "/versions", True),
)
"""Name, address, and whether it is for admins alone."""
_METHODS: Final = ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
_VERDICTS: Final = ("1", "0", "-1", "none")


class _Row(IntegerConvertor):
    """A number that a row can have: longer ones are none to SQLite, or to Python itself."""

    regex = "[0-9]{1,18}"


register_url_convertor("row", _Row())

T = TypeVar("T")
Serve = Callable[[Request, Visitor], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class PageDeps:
    """What the page shows, and what it can have done."""

    ledger: Path
    """The file."""
    training: Training
    access: Access
    local: bool
    """Bound to loopback, and no key is needed."""
    health: Callable[[], Mapping[str, Any]]
    decode: read.Decode
    say: Callable[[str, About, Feedback], Given | None]
    """Records what a user has said; None: they have no such turn."""
    undo: Rollback


def create_page(deps: PageDeps) -> list[Route]:
    """The routes, for the gateway's application."""
    page = _Page(deps)
    visitors: Mapping[tuple[str, str], Serve] = {
        ("GET", ""): page.overview,
        ("GET", "/turns"): page.turns,
        ("GET", "/episodes"): page.episodes,
        ("GET", "/groups/{number:row}"): page.group,
        ("GET", "/turns/{number:row}"): page.turn,
        ("POST", "/turns/{number:row}/feedback"): page.feedback,
        ("POST", "/logout"): page.log_out,
    }
    admins: Mapping[tuple[str, str], Serve] = {
        ("GET", "/steps"): page.steps,
        ("GET", "/steps/{number:row}"): page.step,
        ("GET", "/versions"): page.versions,
        ("GET", "/versions/{number:row}/{what:str}"): page.confirm,
        ("POST", "/versions/{number:row}/{what:str}"): page.change,
    }
    return [
        *(page.route(key, serve, admin=False) for key, serve in visitors.items()),
        *(page.route(key, serve, admin=True) for key, serve in admins.items()),
        Route(f"{ROOT}/login", page.ask_key, methods=["GET"]),
        Route(f"{ROOT}/login", page.log_in, methods=["POST"]),
        Route(f"{ROOT}/static/{{name:str}}", page.static, methods=["GET"]),
        Route(f"{ROOT}/{{rest:path}}", page.elsewhere, methods=_METHODS),
    ]


class _Page:
    def __init__(self, deps: PageDeps) -> None:
        self._deps = deps
        self._one_page = asyncio.Lock()
        self._of_user = defaultdict[str, asyncio.Lock](asyncio.Lock)
        self._next_at = 0.0
        """When another page may be made."""
        self._seen: tuple[float, Record | None] = 0.0, None
        """When the figures of the overview were read, and what they were."""
        self._templates = Environment(
            loader=PackageLoader("tinker_claw.page"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._templates.filters |= {
            "moment": moment,
            "signed": _signed,
            "share": _share,
            "step_word": step_word,
        }

    # Around every address

    def route(self, key: tuple[str, str], serve: Serve, *, admin: bool) -> Route:
        async def answered(request: Request) -> Response:
            visitor: Visitor | None = None
            try:
                self._refuse_others(request)
                visitor = self._deps.access.visitor(request.headers)
                if visitor is None:
                    return RedirectResponse(f"{ROOT}/login", HTTPStatus.SEE_OTHER, _HEADERS)
                if admin and not visitor.who.admin:
                    raise RequestError(
                        "This is of all users: it is for admins.",
                        status=HTTPStatus.FORBIDDEN,
                        code="forbidden",
                    )
                if request.method == "GET":
                    return await self._in_turn(visitor.who.name, lambda: serve(request, visitor))
                return await serve(request, visitor)
            except ClawError as error:
                return self._failed(error, visitor)

        return Route(ROOT + key[1], answered, methods=[key[0]])

    async def _in_turn(self, user: str, make: Callable[[], Awaitable[Response]]) -> Response:
        """One page after the other, users in turn, and a pause that each has earned."""
        async with self._of_user[user], self._one_page:
            await asyncio.sleep(self._next_at - monotonic())
            began = monotonic()
            try:
                return await make()
            finally:
                ended = monotonic()
                self._next_at = ended + min(_PAUSE * (ended - began), _LONGEST_PAUSE_S)

    def _refuse_others(self, request: Request) -> None:
        host, headers, deps = request.headers.get("host", ""), request.headers, self._deps
        behind_tls = not deps.local and headers.get("origin") == f"https://{host}"
        own = f"{'https' if behind_tls else request.url.scheme}://{host}"
        refuse_pages(headers, local=deps.local, own=own)

    def _failed(self, error: ClawError, visitor: Visitor | None) -> Response:
        if isinstance(error, UndoError):
            error = RequestError(str(error), status=HTTPStatus.CONFLICT)
        problem = errors.told(error)
        return self._html("error.html", visitor, status=problem.status, said=str(problem))

    def _html(
        self, name: str, visitor: Visitor | None, *, status: int = HTTPStatus.OK, **shown: Any
    ) -> HTMLResponse:
        access = self._deps.access
        text = self._templates.get_template(name).render(
            root=ROOT,
            visitor=visitor,
            form_token=access.form_token(visitor),
            login=access.needed,
            pages=_PAGES,
            here=name.removesuffix(".html"),
            **shown,
        )
        return HTMLResponse(text, status, _HEADERS)

    async def _read(self, look: Callable[[Rows], T]) -> T:
        def there() -> T:
            with reading(self._deps.ledger) as ledger, ledger.moment():
                return look(ledger)

        try:
            return await asyncio.to_thread(there)
        except LedgerError as error:
            log.error("page.unread", error=str(error))
            raise RequestError(
                "The page cannot read the ledger at the moment; the gateway's log says why.",
                status=HTTPStatus.SERVICE_UNAVAILABLE,
            ) from error

    async def _form(self, request: Request) -> dict[str, str]:
        """The fields of a form that one of our pages has shown to this visitor."""
        self._refuse_others(request)
        body = await read_body(request, _MOST_BYTES)
        try:
            fields = parse_qs(body.decode(), max_num_fields=16)
        except ValueError as error:
            raise RequestError("This is no form of this page.") from error
        found = {name: values[0] for name, values in fields.items()}
        access = self._deps.access
        access.check(access.visitor(request.headers), found.get("token", ""))
        return found

    # Who looks

    async def ask_key(self, request: Request) -> Response:
        try:
            self._refuse_others(request)
        except ClawError as error:
            return self._failed(error, None)
        if self._deps.access.visitor(request.headers) is not None:
            return _to("")
        return self._html("login.html", None, wrong="")

    async def log_in(self, request: Request) -> Response:
        access = self._deps.access
        try:
            key = (await self._form(request)).get("key", "")
            try:
                # A proxy that speaks TLS speaks plain HTTP to us; the browser says what it sees.
                secure = request.headers.get("origin", "").startswith("https:")
                address = "" if request.client is None else request.client.host
                cookies = access.log_in(key, request.headers, address, secure=secure)
            except RequestError as error:
                answer = self._html("login.html", None, status=error.status, wrong=str(error))
                answer.headers.update(error.headers or {})
                return answer
        except ClawError as error:
            return self._failed(error, None)
        answer = _to("")
        for cookie in cookies:
            answer.headers.append("set-cookie", cookie)
        return answer

    async def log_out(self, request: Request, visitor: Visitor) -> Response:
        await self._form(request)
        return _to("/login", {"set-cookie": self._deps.access.log_out(visitor)})

    async def static(self, request: Request) -> Response:
        name = request.path_params["name"]
        if (kind := _FILES.get(name)) is None:
            return self._failed(read.missing("file"), None)
        headers = {**_HEADERS, "cache-control": "max-age=3600"}
        return FileResponse(_STATIC / name, media_type=kind, headers=headers)

    async def elsewhere(self, request: Request) -> Response:
        """Addresses that there are not, in place of what a client of the API is told."""
        if not request.path_params["rest"]:
            return _to("")
        try:
            self._refuse_others(request)
        except ClawError as error:
            return self._failed(error, None)
        return self._failed(read.missing("page"), self._deps.access.visitor(request.headers))

    # What is shown

    async def overview(self, request: Request, visitor: Visitor) -> Response:
        if not visitor.who.admin:
            wanted = Filter(user=visitor.user, kind="main")
            training = self._deps.training
            turns, _ = await self._read(lambda rows: read.read_turns(rows, wanted, training))
            health = {"status": self._deps.health()["status"]}
            return self._html("mine.html", visitor, health=health, turns=turns)
        training, health = self._deps.training, self._deps.health()
        at, seen = self._seen
        if seen is None or monotonic() - at >= FRESH_S:
            seen = await self._read(lambda rows: read.read_overview(rows, training))
            self._seen = monotonic(), seen
        return self._html("overview.html", visitor, health=health, seen=seen, gate_is=training.gate)

    async def turns(self, request: Request, visitor: Visitor) -> Response:
        asked = {name: value for name, value in request.query_params.items() if value}
        wanted = _filter(asked, visitor)
        turns, rest = await self._read(
            lambda rows: read.read_turns(rows, wanted, self._deps.training)
        )
        further = "" if rest is None else urlencode({**asked, "before": rest})
        return self._html("turns.html", visitor, turns=turns, asked=asked, further=further)

    async def episodes(self, request: Request, visitor: Visitor) -> Response:
        before = _number(request.query_params.get("before", ""))
        found, rest = await self._read(lambda rows: read.read_episodes(rows, visitor.user, before))
        further = "" if rest is None else urlencode({"before": rest})
        return self._html("episodes.html", visitor, episodes=found, further=further)

    async def group(self, request: Request, visitor: Visitor) -> Response:
        number = request.path_params["number"]
        found = await self._read(lambda rows: read.read_group(rows, number, visitor.user))
        return self._html("group.html", visitor, **found)

    async def turn(self, request: Request, visitor: Visitor) -> Response:
        number, deps = request.path_params["number"], self._deps
        found = await self._read(
            lambda rows: read.read_one(rows, number, visitor.user, deps.training, deps.decode)
        )
        return self._html("turn.html", visitor, **found)

    async def steps(self, request: Request, visitor: Visitor) -> Response:
        return self._html("steps.html", visitor, steps=await self._read(read.read_steps))

    async def step(self, request: Request, visitor: Visitor) -> Response:
        number = request.path_params["number"]
        found = await self._read(lambda rows: read.read_step(rows, number))
        return self._html("step.html", visitor, **found)

    async def versions(self, request: Request, visitor: Visitor) -> Response:
        before = _number(request.query_params.get("before", ""))
        found, rest = await self._read(lambda rows: read.read_versions(rows, before))
        further = "" if rest is None else urlencode({"before": rest})
        return self._html("versions.html", visitor, versions=found, further=further)

    async def confirm(self, request: Request, visitor: Visitor) -> Response:
        what = _change(request)
        number = request.path_params["number"]
        kept = await self._read(lambda rows: _version(rows, number))
        return self._html("confirm.html", visitor, version=kept, what=what)

    # What is changed

    async def feedback(self, request: Request, visitor: Visitor) -> Response:
        fields, number = await self._form(request), request.path_params["number"]
        score = {"1": 1.0, "-1": -1.0}.get(fields.get("score", ""))
        if score is None:
            raise RequestError("This is no form of this page.")
        owner = await self._read(
            lambda rows: rows.one(
                "SELECT user FROM turns JOIN sessions ON sessions.id = session_id "
                "WHERE turns.id = ?",
                number,
            )
        )
        mine = visitor.user is None or visitor.user == owner
        said = Feedback(score)
        if owner is None or not mine or self._deps.say(owner, About("turn", number), said) is None:
            raise read.missing("turn")
        return _to(f"/turns/{number}")

    async def change(self, request: Request, visitor: Visitor) -> Response:
        what, number = _change(request), request.path_params["number"]
        await self._form(request)
        match what:
            case "pin" | "half":
                await self._deps.undo.pin(number, half=what == "half")
            case "unpin":
                await self._deps.undo.unpin()
            case _:
                await self._deps.undo.roll_back(number)
        return _to("/versions")


def _filter(asked: Mapping[str, str], visitor: Visitor) -> Filter:
    trained = {"yes": True, "no": False}.get(asked.get("trained", ""))
    verdict = asked.get("verdict")
    return Filter(
        session=asked.get("session"),
        user=visitor.user or asked.get("user"),
        kind=asked.get("kind"),
        verdict=verdict if verdict in _VERDICTS else None,
        trained=trained,
        before=_number(asked.get("before", "")),
    )


def _number(text: str) -> int | None:
    """Of a row; None: it is none."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else None


def _change(request: Request) -> str:
    what: str = request.path_params["what"]
    if what not in ("pin", "half", "unpin", "rollback"):
        raise read.missing("page")
    return what


def _version(rows: Rows, number: int) -> Record:
    found, _ = read.read_versions(rows, number + 1)
    if not found or found[0][1]["id"] != number:
        raise read.missing("version")
    return found[0][1]


def _to(where: str, headers: Mapping[str, str] = {}) -> Response:
    return RedirectResponse(ROOT + where, HTTPStatus.SEE_OTHER, {**_HEADERS, **headers})


def _signed(value: float | None) -> str:
    return "–" if value is None else f"{value:+z.3g}"


def _share(value: float) -> str:
    return f"{value:.0%}"
