"""Routes of the page, all below /ui. Every page can be read without a script.

Rule: a browser sends what other people's pages make it send, a key that it was given among it. So
every change needs the Origin header of our own pages, and no other page may do anything. What is
shown is read from the ledger file in a thread, a few at a time, so no reply waits for it; changes
use the code of commands and /v1/feedback.
"""

from __future__ import annotations

import asyncio
import re
from base64 import b64decode
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from pathlib import Path
from shlex import quote
from time import monotonic
from typing import Any, TypeVar, cast, get_args
from urllib.parse import parse_qsl

from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.convertors import IntegerConvertor, register_url_convertor
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from tinker_claw.config.settings import Training
from tinker_claw.errors import ClawError, LedgerError, RequestError, UndoError
from tinker_claw.evidence import in_words
from tinker_claw.gateway import errors
from tinker_claw.gateway.auth import Keys, Principal
from tinker_claw.gateway.limits import read_body
from tinker_claw.learner.rollback import RollbackOperations
from tinker_claw.ledger.database import Rows, open_read_only
from tinker_claw.ledger.feedback import LONGEST_TEXT, About, Feedback, Given
from tinker_claw.ledger.lessons import Rule
from tinker_claw.ledger.views import VERDICTS, Filter
from tinker_claw.origin import refuse_pages
from tinker_claw.page import read
from tinker_claw.telemetry import log
from tinker_claw.types import Kind
from tinker_claw.words import moment

ROOT = "/ui"
_STATIC = Path(__file__).parent / "static"
_FILES = {
    "page.css": "text/css",
    "htmx-2.0.11.min.js": "text/javascript",
    "icon.svg": "image/svg+xml",
}
_HEADERS = {
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
_MOST_BYTES = 65_536
"""Most bytes of a form: room for the longest reason, however it is written."""
_FORM = "This form cannot be read: load the page again, and send it once more."
_PAUSE = 3.0
"""Pause after a page, as a multiple of the time it took to make: frequent reloads delay only
themselves, and serving keeps the rest of the processor."""
_LONGEST_PAUSE_S = 0.5
_PAGES = (
    ("overview", "", False),
    ("turns", "/turns", False),
    ("versions", "/versions", True),
)
"""Name, address, and whether it is for admins only."""
_ASKS = {"www-authenticate": 'Basic realm="tinker-claw", charset="UTF-8"'}
_WORDS = {
    # of health
    "ok": "All is well",
    "degraded": "Something is wrong",
    # of lessons
    "candidate": "Hold this in later sessions? Keep does; until then it is not told",
    "told": "Told",
    "aside": "Not told any more",
    "provisional": "Practised; your next sessions show whether it holds",
    "learned": "Learned: done without being told",
    "dropped": "Dropped",
}
"""Words for states and names."""


class _Row(IntegerConvertor):
    """A number that a row can have; longer ones overflow SQLite."""

    regex = "[0-9]{1,18}"


register_url_convertor("row", _Row())

T = TypeVar("T")
Serve = Callable[[Request, Principal], Awaitable[Response]]
Look = Callable[[Rows, int, Filter], Mapping[str, Any]]
"""Reads a template's data, given the number in the address and the filter in the query."""


@dataclass(frozen=True, slots=True)
class PageDeps:
    """Data and operations that the page needs."""

    ledger: Path
    """Path of the ledger file."""
    training: Training
    keys: Keys
    local: bool
    """Whether the gateway is bound to loopback and needs no key."""
    health: Callable[[], Mapping[str, Any]]
    decode: read.Decode
    say: Callable[[str, About, Feedback], Given | None]
    """Records a user's feedback; returns None where they have no such turn."""
    undo: RollbackOperations
    redact: Callable[[str], str] = str
    """Removes secrets from what a visitor writes."""


def create_page(deps: PageDeps) -> list[Route]:
    """Return the routes for the gateway's application."""
    page = _Page(deps)
    turns = page.shows("turns", lambda rows, _, w: read.read_turn_list(rows, w))
    turn = page.shows("turn", lambda rows, n, w: read.read_details(rows, n, w.user, deps.decode))
    versions = page.shows("versions", lambda rows, _, w: read.read_versions(rows, w.before))
    overview = page.shows(
        "overview", lambda rows, _, w: {"seen": read.read_overview(rows, deps.training, w.user)}
    )
    change = "/versions/{number:row}/{what:str}"
    return [
        page.route("GET", "", overview),
        page.route("GET", "/", overview),
        page.route("GET", "/turns", turns),
        page.route("GET", "/turns/{number:row}", turn),
        page.route("GET", "/versions", versions, admins=True),
        page.route("GET", "/static/{name:str}", page.static),
        page.route("POST", "/turns/{number:row}/feedback", page.feedback),
        page.route("POST", "/lessons/{rule:str}", page.rule_lesson),
        page.route("POST", change, page.change, admins=True),
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
            "in_words": _in_words,
            "quoted": quote,
        }

    # For every route

    def route(self, method: str, path: str, serve: Serve, *, admins: bool = False) -> Route:
        """Return a route below /ui, for everybody who may see the page, or for admins."""

        async def answered(request: Request) -> Response:
            visitor: Principal | None = None
            try:
                self._refuse_others(request)
                visitor = self._visitor(request)
                if admins and not visitor.admin:
                    raise RequestError(
                        "This page shows all users, so it is for admins only.",
                        status=HTTPStatus.FORBIDDEN,
                        code="forbidden",
                    )
                if request.method == "GET" and serve != self.static:
                    return await self._in_turn(visitor.name, lambda: serve(request, visitor))
                return await serve(request, visitor)
            except UndoError as error:
                refusal = RequestError(str(error), status=HTTPStatus.CONFLICT)
                return self._failed(refusal, visitor)
            except ClawError as error:
                return self._failed(error, visitor)

        return Route(ROOT + path, answered, methods=[method])

    def shows(self, name: str, look: Look) -> Serve:
        """Return a handler that fills a template with data from the ledger."""

        async def serve(request: Request, visitor: Principal) -> Response:
            number, wanted = request.path_params.get("number", 0), _filter(request, visitor)
            data = await self._read(lambda rows: look(rows, number, wanted))
            state = {
                "health": self._deps.health(),
                "training": self._deps.training,
                "longest": LONGEST_TEXT,
            }
            show = partial(self._html, name, visitor, request=request, **state)
            return await asyncio.to_thread(show, **data)

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
        if request.method == "POST" and "origin" not in headers:
            raise RequestError(
                "Only this page's own forms change something: the request has no Origin header.",
                status=HTTPStatus.FORBIDDEN,
                code="forbidden",
            )

    def _visitor(self, request: Request) -> Principal:
        """Return who sends a request: a key is the password of HTTP Basic, under any name.

        Raises:
            RequestError: 401, which makes a browser ask for it.
        """
        kind, _, sent = request.headers.get("authorization", "").partition(" ")
        key = ""
        if kind.lower() == "basic":
            with suppress(ValueError):
                key = b64decode(sent).decode().partition(":")[2]
        try:
            return self._deps.keys.principal(key)
        except RequestError as error:
            raise RequestError(
                "The page asks for a key: any name, and as the password the key that your agent "
                "sends.",
                status=HTTPStatus.UNAUTHORIZED,
                headers=_ASKS,
            ) from error

    def _failed(self, error: ClawError, visitor: Principal | None) -> Response:
        problem = errors.as_request_error(error)
        answer = self._html("error", visitor, status=problem.status, problem=str(problem))
        answer.headers.update(problem.headers or {})
        return answer

    def _html(
        self, name: str, visitor: Principal | None, *, status: int = HTTPStatus.OK, **values: Any
    ) -> HTMLResponse:
        text = self._templates.get_template(f"{name}.html").render(
            root=ROOT,
            visitor=visitor,
            pages=_PAGES,
            here=name,
            **values,
        )
        return HTMLResponse(text, status, _HEADERS)

    async def _read(self, look: Callable[[Rows], T]) -> T:
        def there() -> T:
            with open_read_only(self._deps.ledger) as ledger, ledger.moment():
                return look(ledger)

        try:
            return await asyncio.to_thread(there)
        except LedgerError as error:
            log.error("page.read_failed", error=str(error))
            raise RequestError(
                "The page cannot read the ledger at the moment; the gateway's log says why.",
                status=HTTPStatus.SERVICE_UNAVAILABLE,
            ) from error

    async def _form(self, request: Request) -> dict[str, str]:
        """Return the fields of a form."""
        body = await read_body(request, _MOST_BYTES)
        try:
            return dict(parse_qsl(body.decode(), max_num_fields=16))
        except ValueError as error:
            raise RequestError(_FORM) from error

    async def static(self, request: Request, visitor: Principal | None) -> Response:
        name = request.path_params["name"]
        if (kind := _FILES.get(name)) is None:
            raise read.missing("file")
        headers = {**_HEADERS, "cache-control": "max-age=3600"}
        return FileResponse(_STATIC / name, media_type=kind, headers=headers)

    # Changes

    async def feedback(self, request: Request, visitor: Principal) -> Response:
        number, fields = request.path_params["number"], await self._form(request)
        text = fields.get("text", "").strip()
        score = {"1": 1.0, "-1": -1.0}.get(fields.get("score", ""))
        if score is None:
            raise RequestError(_FORM)
        owner = await self._read(lambda rows: read.owner(rows, number))
        if owner is None or _user(visitor) not in (None, owner):
            raise read.missing("turn")
        if len(text) > LONGEST_TEXT:
            message = f"A reason has at most {LONGEST_TEXT} characters; this has {len(text)}."
            raise RequestError(message)
        feedback = Feedback(score, self._deps.redact(text))
        if self._deps.say(owner, About("turn", number), feedback) is None:
            raise read.missing("turn")
        return _to(f"/turns/{number}")

    async def rule_lesson(self, request: Request, visitor: Principal) -> Response:
        fields, rule = await self._form(request), cast("Rule", request.path_params["rule"])
        which = fields.get("lesson", "")
        if rule not in get_args(Rule):
            raise read.missing("page")
        number = int(which) if re.fullmatch(_Row.regex, which) else None
        user = visitor.name if rule == "add" else _user(visitor)
        text = self._deps.redact(fields.get("text", ""))
        self._deps.undo.ledger.lessons.rule(rule, user, number, text)
        return _to("#lessons")

    async def change(self, request: Request, visitor: Principal) -> Response:
        number = request.path_params["number"]
        match request.path_params["what"]:
            case "pin":
                await self._deps.undo.pin(number)
            case "unpin":
                await self._deps.undo.unpin()
            case "rollback":
                await self._deps.undo.roll_back(number)
            case _:
                raise read.missing("page")
        return _to("/versions")


def _user(visitor: Principal) -> str | None:
    """Return the user whose turns a visitor sees; None: everybody's."""
    return None if visitor.admin else visitor.name


def _filter(request: Request, visitor: Principal) -> Filter:
    query = {name: value for name, value in request.query_params.items() if value}
    verdict, before = query.get("verdict"), query.get("before", "")
    return Filter(
        session=query.get("session"),
        user=_user(visitor) or query.get("user"),
        kind=None if (kind := query.get("kind", Kind.MAIN)) == "all" else kind,
        verdict=verdict if verdict in VERDICTS else None,
        trained={"yes": True, "no": False}.get(query.get("trained", "")),
        before=int(before) if re.fullmatch(_Row.regex, before) else None,
    )


def _to(where: str) -> Response:
    return RedirectResponse(ROOT + where, HTTPStatus.SEE_OTHER, _HEADERS)


def _in_words(name: str) -> str:
    return _WORDS.get(name, name)


def _signed(value: float | None) -> str:
    return "–" if value is None else f"{value:+z.3g}"
