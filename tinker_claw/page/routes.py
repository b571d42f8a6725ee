"""Routes of the page, all below /ui. Every page can be read without a script.

Rule: what is shown is read from the ledger file in a thread, a few at a time, so no reply waits for
it; changes use the code of commands and /v1/feedback.
"""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from time import monotonic
from typing import Any, Final, Literal, TypeVar, cast
from urllib.parse import parse_qsl

from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.convertors import IntegerConvertor, StringConvertor, register_url_convertor
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from tinker_claw.config.settings import Training
from tinker_claw.errors import ClawError, LedgerError, RequestError, UndoError
from tinker_claw.evidence import in_words
from tinker_claw.gateway import errors
from tinker_claw.gateway.limits import read_body
from tinker_claw.learner.rollback import Rollback
from tinker_claw.ledger.database import Rows, reading
from tinker_claw.ledger.feedback import About, Feedback, Given
from tinker_claw.ledger.lessons import Rule, read_lessons
from tinker_claw.ledger.outcome import moment, step_word
from tinker_claw.ledger.views import Filter
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
"""Most bytes of a form."""
_FORM: Final = "This form cannot be read: load the page again, and send it once more."
_PAUSE: Final = 3.0
"""Pause after a page, as a multiple of the time it took to make: frequent reloads delay only
themselves, and serving keeps the rest of the processor."""
_LONGEST_PAUSE_S: Final = 0.5
_PAGES: Final = (
    ("overview", "", False),
    ("turns", "/turns", False),
    ("lessons", "/lessons", False),
    ("episodes", "/episodes", False),
    ("steps", "/steps", True),
    ("versions", "/versions", True),
)
"""Name, address, and whether it is for admins only."""
_VERDICTS: Final = ("1", "0", "-1", "none")


class _Row(IntegerConvertor):
    """A number that a row can have; longer ones overflow SQLite."""

    regex = "[0-9]{1,18}"


class _Change(StringConvertor):
    """An operation on a version."""

    regex = "pin|half|unpin|rollback"


class _Rule(StringConvertor):
    """A user's decision about a lesson."""

    regex = "keep|edit|drop|add"


register_url_convertor("row", _Row())
register_url_convertor("rule", _Rule())
register_url_convertor("change", _Change())

T = TypeVar("T")
Serve = Callable[[Request, Any], Awaitable[Response]]
"""Answers a request of a `Visitor`, or of None at addresses for anybody."""
Look = Callable[[Rows, int, Filter], Mapping[str, Any]]
"""Reads a template's data, given the number in the address and the filter in the query."""


@dataclass(frozen=True, slots=True)
class PageDeps:
    """Data and operations that the page needs."""

    ledger: Path
    """Path of the ledger file."""
    training: Training
    access: Access
    local: bool
    """Whether the gateway is bound to loopback and needs no key."""
    health: Callable[[], Mapping[str, Any]]
    decode: read.Decode
    say: Callable[[str, About, Feedback], Given | None]
    """Records a user's feedback; returns None where they have no such turn."""
    undo: Rollback
    redact: Callable[[str], str] = str
    """Removes secrets from what a visitor writes."""


def create_page(deps: PageDeps) -> list[Route]:
    """Return the routes for the gateway's application."""
    page, training = _Page(deps), deps.training
    visitors: Mapping[str, Serve] = {
        "": page.overview,
        "/": page.overview,
        "/turns": page.shows("turns", lambda rows, _, w: read.read_turns(rows, w)),
        "/turns/{number:row}": page.shows(
            "turn", lambda rows, n, w: read.read_one(rows, n, w.user, training, deps.decode)
        ),
        "/episodes": page.shows(
            "episodes", lambda rows, _, w: read.read_episodes(rows, w.user, w.before)
        ),
        "/lessons": page.shows(
            "lessons", lambda rows, _, w: {"lessons": read_lessons(rows, w.user)}
        ),
    }
    change = "/versions/{number:row}/{what:change}"
    admins: Mapping[str, Serve] = {
        "/steps": page.shows("steps", lambda rows, _, __: read.read_steps(rows)),
        "/steps/{number:row}": page.shows("step", lambda rows, n, _: read.read_step(rows, n)),
        "/versions": page.shows("versions", lambda rows, _, w: read.read_versions(rows, w.before)),
        change: page.shows("confirm", lambda rows, n, _: read.read_version(rows, n)),
    }
    return [
        *(page.route("GET", path, serve) for path, serve in visitors.items()),
        *(page.route("GET", path, serve, "admin") for path, serve in admins.items()),
        page.route("POST", "/turns/{number:row}/feedback", page.feedback),
        page.route("POST", "/lessons/{rule:rule}", page.rule_lesson),
        page.route("POST", "/logout", page.log_out),
        page.route("POST", change, page.change, "admin"),
        page.route("GET", "/login", page.ask_key, "anybody"),
        page.route("POST", "/login", page.log_in, "anybody"),
        page.route("GET", "/static/{name:str}", page.static, "anybody"),
    ]


class _Page:
    def __init__(self, deps: PageDeps) -> None:
        self._deps = deps
        self._one_page = asyncio.Lock()
        self._of_user = defaultdict[str, asyncio.Lock](asyncio.Lock)
        self._next_at = 0.0
        """Monotonic time from which on another page may be made."""
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
            "share": "{:.0%}".format,
            "rate": in_words,
            "step_word": step_word,
        }

    # For every route

    def route(
        self,
        method: str,
        path: str,
        serve: Serve,
        to: Literal["visitor", "admin", "anybody"] = "visitor",
    ) -> Route:
        """Return a route below /ui for the visitors allowed there."""

        async def answered(request: Request) -> Response:
            visitor: Visitor | None = None
            try:
                self._refuse_others(request)
                visitor = self._deps.access.visitor(request.cookies)
                if to == "anybody":
                    return await serve(request, visitor)
                if visitor is None:
                    return _to("/login")
                if to == "admin" and not visitor.who.admin:
                    raise RequestError(
                        "This page shows all users, so it is for admins only.",
                        status=HTTPStatus.FORBIDDEN,
                        code="forbidden",
                    )
                if request.method == "GET":
                    return await self._in_turn(visitor.who.name, lambda: serve(request, visitor))
                return await serve(request, visitor)
            except ClawError as error:
                return self._failed(error, visitor)

        return Route(ROOT + path, answered, methods=[method])

    def shows(self, name: str, look: Look) -> Serve:
        """Return a handler that fills a template with data from the ledger."""

        async def serve(request: Request, visitor: Visitor) -> Response:
            number, wanted = request.path_params.get("number", 0), _filter(request, visitor)
            found = await self._read(lambda rows: look(rows, number, wanted))
            return await asyncio.to_thread(self._html, name, visitor, request=request, **found)

        return serve

    async def _in_turn(self, user: str, make: Callable[[], Awaitable[Response]]) -> Response:
        """Make one page at a time, alternating between users, with a pause after each."""
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
        return self._html("error", visitor, status=problem.status, said=str(problem))

    def _html(
        self, name: str, visitor: Visitor | None, *, status: int = HTTPStatus.OK, **shown: Any
    ) -> HTMLResponse:
        access = self._deps.access
        text = self._templates.get_template(f"{name}.html").render(
            root=ROOT,
            visitor=visitor,
            form_token=access.form_token(visitor),
            login=access.needed,
            pages=_PAGES,
            here=name,
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

    async def _form(self, request: Request, visitor: Visitor | None) -> dict[str, str]:
        """Return the fields of a form that one of our pages has shown to this visitor."""
        body = await read_body(request, _MOST_BYTES)
        try:
            fields = dict(parse_qsl(body.decode(), max_num_fields=16))
        except ValueError as error:
            raise RequestError(_FORM) from error
        self._deps.access.check(visitor, fields.get("token", ""))
        return fields

    # Login and overview

    async def ask_key(self, request: Request, visitor: Visitor | None) -> Response:
        return self._html("login", None, wrong="") if visitor is None else _to("")

    async def log_in(self, request: Request, visitor: Visitor | None) -> Response:
        key = (await self._form(request, visitor)).get("key", "")
        # Behind a TLS proxy we see plain HTTP; the Origin header has the browser's scheme.
        secure = request.headers.get("origin", "").startswith("https:")
        try:
            cookie = self._deps.access.log_in(key, secure=secure)
        except RequestError as error:
            return self._html("login", None, status=error.status, wrong=str(error))
        return _to("", {"set-cookie": cookie})

    async def log_out(self, request: Request, visitor: Visitor) -> Response:
        await self._form(request, visitor)
        return _to("/login", {"set-cookie": self._deps.access.log_out(visitor)})

    async def static(self, request: Request, visitor: Visitor | None) -> Response:
        name = request.path_params["name"]
        if (kind := _FILES.get(name)) is None:
            raise read.missing("file")
        headers = {**_HEADERS, "cache-control": "max-age=3600"}
        return FileResponse(_STATIC / name, media_type=kind, headers=headers)

    async def overview(self, request: Request, visitor: Visitor) -> Response:
        training, health = self._deps.training, self._deps.health()
        if not visitor.who.admin:
            found = await self._read(lambda rows: read.read_mine(rows, visitor.user))
            return self._html("mine", visitor, status_word=health["status"], **found)
        seen = await self._read(lambda rows: read.read_overview(rows, training))
        return await asyncio.to_thread(
            self._html, "overview", visitor, health=health, seen=seen, gate_is=training.gate
        )

    # Changes

    async def feedback(self, request: Request, visitor: Visitor) -> Response:
        fields, number = await self._form(request, visitor), request.path_params["number"]
        score = {"1": 1.0, "-1": -1.0}.get(fields.get("score", ""))
        if score is None:
            raise RequestError(_FORM)
        owner = await self._read(lambda rows: read.owner(rows, number))
        mine, place = visitor.user in (None, owner), About("turn", number)
        if owner is None or not mine or self._deps.say(owner, place, Feedback(score)) is None:
            raise read.missing("turn")
        return _to(f"/turns/{number}")

    async def rule_lesson(self, request: Request, visitor: Visitor) -> Response:
        fields = await self._form(request, visitor)
        which, rule = fields.get("lesson", ""), cast("Rule", request.path_params["rule"])
        number = int(which) if re.fullmatch(_Row.regex, which) else None
        user = visitor.user or (visitor.who.name if rule == "add" else None)
        text = self._deps.redact(fields.get("text", ""))
        self._deps.undo.ledger.lessons.rule(rule, user, number, text)
        return _to("/lessons")

    async def change(self, request: Request, visitor: Visitor) -> Response:
        what, number = request.path_params["what"], request.path_params["number"]
        await self._form(request, visitor)
        match what:
            case "pin" | "half":
                await self._deps.undo.pin(number, half=what == "half")
            case "unpin":
                await self._deps.undo.unpin()
            case _:
                await self._deps.undo.roll_back(number)
        return _to("/versions")


def _filter(request: Request, visitor: Visitor) -> Filter:
    asked = {name: value for name, value in request.query_params.items() if value}
    verdict, before = asked.get("verdict"), asked.get("before", "")
    return Filter(
        session=asked.get("session"),
        user=visitor.user or asked.get("user"),
        kind=asked.get("kind"),
        verdict=verdict if verdict in _VERDICTS else None,
        trained={"yes": True, "no": False}.get(asked.get("trained", "")),
        before=int(before) if re.fullmatch(_Row.regex, before) else None,
    )


def _to(where: str, headers: Mapping[str, str] = {}) -> Response:
    return RedirectResponse(ROOT + where, HTTPStatus.SEE_OTHER, {**_HEADERS, **headers})


def _signed(value: float | None) -> str:
    return "–" if value is None else f"{value:+z.3g}"
