"""The page over a real ledger: permissions, origins, and texts that stay texts."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import html
import re
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from jinja2 import Environment, PackageLoader
from pydantic import SecretStr
from starlette.applications import Starlette

from tests.support.ledger import COMPLETION, new_turn, sample_counts
from tinker_claw.config.settings import Training, User
from tinker_claw.errors import UndoError
from tinker_claw.gateway.auth import Keys
from tinker_claw.learner.gate import REFUSED
from tinker_claw.learner.rollback import RollbackOperations
from tinker_claw.ledger.feedback import About, Feedback
from tinker_claw.ledger.figures import read_overview
from tinker_claw.ledger.ledger import Ledger
from tinker_claw.ledger.steps import Void
from tinker_claw.methods import BatchItem
from tinker_claw.methods.base import BINARY
from tinker_claw.page import read, routes
from tinker_claw.page.charts import Point, curve
from tinker_claw.turn_state import Reason, TurnRefusal
from tinker_claw.types import Attempt, Kind, LessonBlock, NextState
from tinker_claw.words import run_fields

HOST = "http://127.0.0.1:30000"
ANNA, ROOT_KEY = "anna-0123456789abcdef", "root-0123456789abcdef"
USERS = (
    User(name="anna", key=SecretStr(ANNA)),
    User(name="root", key=SecretStr(ROOT_KEY), role="admin"),
)
XSS = (
    "<script>alert(1)</script>",
    "</pre><img src=x onerror=alert(1)>",
    '"><svg onload=alert(1)>',
    "'><iframe srcdoc='<script>alert(1)</script>'>",
    "javascript:alert(1)",
    "{{ 7 * 7 }}{% raw %}",
    "<a hx-get='/ui/logout' hx-trigger='load'>",
    "</title></script><base href=//evil.example/>",
    "\u202e<style>*{display:none}</style>",
)


GATE = {"unasked": XSS[2]}


class Undoes:
    """A learner that records orders instead of carrying them out."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.orders: list[tuple[str, int | None]] = []

    async def pin(self, version: int) -> None:
        if version == 9:
            raise UndoError("there is no v9")
        self.orders.append(("pin", version))

    async def unpin(self) -> int:
        self.orders.append(("unpin", None))
        return 0

    async def roll_back(self, version: int) -> None:
        self.orders.append(("rollback", version))


class Page:
    """A browser at the page of a ledger."""

    def __init__(self, ledger: Ledger, users: tuple[User, ...]) -> None:
        keys = Keys(None, users)
        self.ledger, self.undo = ledger, Undoes(ledger)
        self.deps = routes.PageDeps(
            ledger=ledger.path,
            training=Training(),
            keys=keys,
            local=not keys.needed,
            health=lambda: {
                "data_dir": "/runs/it is",
                **{"status": "degraded", "wrong": ["judge"], "meaning": XSS[0]},
                **{"judge_error": XSS[1], "spending_paused": None, "spent_usd": 0.5},
                **{"budget_usd": None, "month_usd": None, "spending_near": None},
            },
            decode=lambda tokens: "".join(XSS[token % len(XSS)] for token in tokens),
            say=ledger.feedback.give,
            undo=cast("RollbackOperations", self.undo),
            redact=lambda text: text.replace("swordfish", "[redacted: password]"),
        )
        self.app = Starlette(routes=routes.create_page(self.deps))
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url=HOST)

    async def get(self, path: str, **headers: str) -> httpx.Response:
        return await self.client.get(f"/ui{path}", headers=headers)

    async def post(self, path: str, origin: str = HOST, **fields: str) -> httpx.Response:
        """Send a form, as a browser that shows a page of this origin does."""
        return await self.client.post(f"/ui{path}", data=fields, headers={"origin": origin})

    def log_in(self, key: str) -> None:
        """Answer what the browser asks for, as it does from then on."""
        self.client.auth = httpx.BasicAuth("whoever", key)


@asynccontextmanager
async def page(tmp_path: Path, *users: User) -> AsyncIterator[Page]:
    ledger = Ledger(tmp_path)
    ledger.bind({"model": XSS[0], "method": "binary", "backend": "local"})
    version = ledger.versions.add_first(state_ref="s0", sampler_ref="p0")
    turns = [write(ledger, user, f"{name}{user}") for name in XSS for user in ("anna", "ben")]
    samples = [ledger.samples.add(turn, 1 - turn % 2 * 2, None) for turn in turns[:4]]
    step = ledger.steps.begin(0, samples)
    taken = [BatchItem(one) for one in ledger.samples.load()[:4]]
    ledger.steps.store_advantages(step, BINARY.prepare(taken, Training()).stored, None)
    metrics = {"reward_mean": 0.25, "rule": {"method": "binary"}, "gate": GATE}
    ledger.steps.commit(step, version, state_ref="s1", sampler_ref="p1", metrics=metrics)
    ledger.steps.void(ledger.steps.begin(1, []), f"{REFUSED}: {XSS[3]}", Void.REFUSED)
    for number in range(2):
        for user in ("anna", "ben"):
            attempt(ledger, user, f"{number}", 1 - 2 * number)
    ledger.lessons.rule("add", "anna", None, XSS[1])
    ledger.groups.release(time.time(), 128)
    opened = Page(ledger, users)
    try:
        yield opened
    finally:
        await opened.client.aclose()
        ledger.close()


@pytest.fixture
async def opened(tmp_path: Path) -> AsyncIterator[Page]:
    """A page that nobody needs a key for."""
    async with page(tmp_path) as opened:
        yield opened


def write(ledger: Ledger, user: str, text: str) -> int:
    """Add a judged turn whose texts are all this one."""
    told: Any = {
        "kind_reason": text,
        "request_text": text,
        "reply_text": text,
        "request_kind": text,
    }
    session = ledger.turns.session(user, text)
    turn = ledger.turns.add(new_turn(ledger, session_id=session, **told))
    ledger.turns.add_next_state(turn, NextState("user", text))
    ballots = [(text, -1)]
    ledger.judgements.add(turn, value=-1, ballots=ballots, hints=[text])
    assert ledger.feedback.give(user, About("turn", turn), Feedback(-0.5, text))
    return turn


def attempt(ledger: Ledger, user: str, name: str, score: float) -> None:
    """Add one of two ended episodes of the same task."""
    session = ledger.turns.session(user, f"episode {name}")
    assert ledger.turns.enrol(session, user, Attempt(XSS[0], XSS[1], 2, episode=True))
    turn = ledger.turns.add(new_turn(ledger, session_id=session))
    place = About("session", f"episode {name}")
    assert ledger.feedback.give(user, place, Feedback(score, final=True))
    ledger.samples.add(turn, None, None)


class Tags(HTMLParser):
    """Elements and attributes that a browser would find."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.addresses: set[str] = set()
        self.scripts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        for name, value in attrs:
            if name in ("href", "src", "action", "hx-get"):
                self.addresses.add(value or "")
        if tag == "script":
            self.scripts.append(dict(attrs).get("src") or "inline")


class Slow:
    """A word that takes until it is let go to be written into a page."""

    def __init__(self) -> None:
        self.begun, self.goes_on = threading.Event(), threading.Event()

    def __str__(self) -> str:
        self.begun.set()
        assert self.goes_on.wait(20), "nothing else was served meanwhile"
        return "slow"


async def test_others_are_answered_while_a_page_is_rendered(opened: Page) -> None:
    word, known = Slow(), opened.deps.health()
    deps = replace(opened.deps, health=lambda: {**known, "status": word})
    app = Starlette(routes=routes.create_page(deps))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url=HOST) as client:
        asked = asyncio.create_task(client.get("/ui"))
        assert await asyncio.to_thread(word.begun.wait, 60)
        assert (await client.get("/ui/static/page.css")).status_code == 200
        assert not asked.done()
        word.goes_on.set()
        assert "slow" in (await asked).text


PATHS = (
    "",
    "/",
    "/turns",
    "/turns/1",
    "/turns/3",
    "/turns/5",
    "/versions",
    "/turns/999",
    *(f"/turns?session={httpx.QueryParams({'s': text})['s']}" for text in ("x", XSS[2])),
)


async def test_no_text_becomes_an_element_an_address_or_a_script(opened: Page) -> None:
    for path in PATHS:
        answer = await opened.get(path)
        assert answer.status_code == (404 if "999" in path else 200)
        found = Tags()
        found.feed(answer.text)
        assert found.scripts == ["/ui/static/htmx-2.0.11.min.js"]
        assert not found.tags & {"img", "iframe", "style", "base", "object", "embed"}
        assert not [n for n in found.attributes if n.startswith("on") or n == "style"]
        assert all(address.startswith(("/ui", "#")) for address in found.addresses)
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy


async def test_reply_is_coloured_by_the_advantage_of_its_tokens(opened: Page) -> None:
    up, down = (await opened.get("/turns/2")).text, (await opened.get("/turns/1")).text
    assert 'class="up-' in up.split("<dt>next")[0].split("<dt>reply")[1]
    assert re.search(r'class="down-\d" title="-', down)
    assert len(re.findall(r"<span[^>]* title=", up)) == len(COMPLETION.tokens)
    assert "> [end]</span></pre>" in up, "the stop token, which is no text"
    untrained = (await opened.get("/turns/9")).text
    assert "title=" not in untrained.split("<dt>reply")[1]


async def test_turn_names_who_came_next(opened: Page) -> None:
    roles: dict[Any, str] = {"user": "owner", "tool": "tool", "other": "other"}
    for role, name in roles.items():
        turn = opened.ledger.turns.add(new_turn(opened.ledger, role))
        opened.ledger.turns.add_next_state(turn, NextState(role, "No."))
        assert f"<dt>next</dt><dd>{name}" in (await opened.get(f"/turns/{turn}")).text


async def test_user_sees_their_own_turns_and_nothing_else(tmp_path: Path) -> None:
    async with page(tmp_path, *USERS) as opened:
        opened.log_in(ANNA)
        mine, theirs, none = [(await opened.get(f"/turns/{n}")) for n in (1, 2, 999)]
        assert mine.status_code == 200
        assert (theirs.status_code, theirs.text) == (none.status_code, none.text)
        for path in ("", "/turns", "/turns?user=ben", "/turns?session=2"):
            shown = (await opened.get(path)).text
            assert set(re.findall(r"/ui/turns/(\d*[02468])\"", shown)) == set(), "Ben's"
            assert "/ui/versions" not in shown
        mine = told(await opened.get(""))
        assert "accepted: 0% (0% to 41%) of 9 by the base model: too few to compare" in mine
        assert "ben" not in mine
        assert "spent" not in mine
        assert (await opened.get("/versions")).status_code == 403
        for what in ("pin", "rollback"):
            assert (await opened.post(f"/versions/0/{what}")).status_code == 403
        assert (await opened.post("/turns/2/feedback", score="1")).status_code == 404
        assert opened.undo.orders == []


async def test_a_key_is_the_password_and_nothing_else_opens_the_page(tmp_path: Path) -> None:
    paths = ("", "/turns", "/turns/1", "/versions", "/static/page.css")
    async with page(tmp_path, *USERS) as opened:
        name = base64.b64encode(f"{ROOT_KEY}:".encode()).decode()
        strangers: tuple[dict[str, Any], ...] = (
            {},
            {"authorization": f"Bearer {ROOT_KEY}"},
            {"authorization": f"Basic {ROOT_KEY}"},
            {"authorization": f"Basic {name}"},
            {"authorization": "Basic \u00ff".encode("latin-1")},
            {"authorization": "Basic"},
            {"x-api-key": ROOT_KEY},
            {"cookie": f"tinker-claw-30000={ROOT_KEY}"},
        )
        for sent in strangers:
            for path in paths:
                refused = await opened.client.get(f"/ui{path}", headers=sent)
                assert refused.status_code == 401
                assert refused.headers["www-authenticate"].startswith('Basic realm="tinker-claw"')
                assert "set-cookie" not in refused.headers
                assert "as the password the key that your agent sends" in told(refused)
            changed = await opened.client.post(
                "/ui/versions/0/rollback", headers=sent | {"origin": HOST}
            )
            assert changed.status_code == 401
        opened.log_in("nobody")
        assert (await opened.get("")).status_code == 401
        opened.log_in(ROOT_KEY)
        for path in paths:
            assert (await opened.get(path)).status_code == 200
        assert opened.undo.orders == []


async def test_admin_changes_what_answers_by_our_own_forms_alone(tmp_path: Path) -> None:
    async with page(tmp_path, *USERS) as opened:
        opened.log_in(ROOT_KEY)
        for what, order in (("pin", 1), ("unpin", None), ("rollback", 1)):
            before = len(opened.undo.orders)
            assert (await opened.get(f"/versions/1/{what}")).status_code == 405
            bare = await opened.client.post(f"/ui/versions/1/{what}")
            assert bare.status_code == 403, "no page of ours sent it"
            assert len(opened.undo.orders) == before
            assert (await opened.post(f"/versions/1/{what}")).status_code == 303
            assert opened.undo.orders[-1] == (what, order)
        refused = await opened.post("/versions/9/pin")
        assert (refused.status_code, "there is no v9" in refused.text) == (409, True)


async def test_a_rollback_says_first_what_it_drops_and_versions_lead_back(
    opened: Page, tmp_path: Path
) -> None:
    ledger = opened.ledger
    first, second = ledger.versions.get(0), ledger.versions.get(1)
    assert first is not None
    assert second is not None
    for name in ("states/s0", "states/s1", "adapters/p0", "adapters/p1"):
        (tmp_path / name).mkdir(parents=True)
    for number in range(3):
        turn = ledger.turns.add(new_turn(ledger, f"new {number}", policy_version=1))
        ledger.samples.add(turn, 1, None)

    async def drops(number: int) -> str:
        shown = told(await opened.get("/versions"))
        return shown.split(f"Roll back to v{number}: ")[1].split(" takes it back.")[0]

    lost = await drops(0)
    assert lost.startswith("v1 will be left behind, with what 4 samples taught.")
    assert lost.endswith("rolling back to v1")
    assert "Roll back to v1" not in told(await opened.get("/versions")), "it learns from there"
    ledger.versions.roll_back(first)
    assert "0 samples taught" in await drops(1)
    ledger.versions.roll_back(second)
    assert "v3 from v1" in told(await opened.get("/versions"))
    assert sample_counts(ledger)["expired"] == 3, "as it was said"


async def test_whoever_loads_without_end_waits_for_themselves(tmp_path: Path) -> None:
    """150 loops of one user run; another user only waits for a page or two of theirs."""
    async with page(tmp_path, *USERS) as opened, asyncio.TaskGroup() as group:
        opened.log_in(ROOT_KEY)
        made, begun = 0, asyncio.Event()

        async def load() -> None:
            nonlocal made
            async with httpx.AsyncClient(
                transport=httpx.ASGITransport(opened.app), base_url=HOST, auth=("anna", ANNA)
            ) as browser:
                while True:
                    assert (await browser.get("/ui/turns")).status_code == 200
                    made += 1
                    begun.set()

        loops = [group.create_task(load()) for _ in range(150)]
        await begun.wait()
        for _ in range(3):
            before = made
            assert (await opened.get("/versions")).status_code == 200
            assert made <= before + 2
        for loop in loops:
            loop.cancel()


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "http://127.0.0.1:1", "https://127.0.0.1:30000"]
)
async def test_another_origin_is_refused_whatever_it_carries(opened: Page, origin: str) -> None:
    for change in ("/turns/1/feedback", "/lessons/add", "/versions/0/rollback"):
        assert (await opened.post(change, origin, score="1", text="x")).status_code == 403
    assert opened.undo.orders == []
    assert (await opened.get("", origin=origin)).status_code == 403
    assert (await opened.get("", host="evil.example")).status_code == 403, "a name led here"


async def test_behind_a_proxy_that_speaks_tls_our_own_forms_count(tmp_path: Path) -> None:
    async with page(tmp_path, *USERS) as opened:
        opened.log_in(ANNA)
        for origin, status in (
            ("https://evil.example", 403),
            ("https://claw.example:1", 403),
            ("https://claw.example", 303),
        ):
            told = await opened.client.post(
                "/ui/turns/1/feedback",
                data={"score": "1"},
                headers={"origin": origin, "host": "claw.example"},
            )
            assert told.status_code == status


async def test_long_texts_are_cut(opened: Page) -> None:
    long, turns = "word " * 50_000, opened.ledger.turns
    told = new_turn(opened.ledger, request_text=long, reply_text=long)
    turn = turns.add(told)
    turns.add_next_state(turn, NextState("tool", long))
    assert len((await opened.get(f"/turns/{turn}")).text) < 5 * read.LONGEST


async def test_thumbs_are_feedback_like_any_other_and_a_reason_is_the_hint(opened: Page) -> None:
    turn = write(opened.ledger, "anna", "new")
    address = f"/turns/{turn}/feedback"
    assert (await opened.post(address, score="1")).status_code == 303
    verdict = opened.ledger.judgements.verdict(turn)
    assert verdict is not None
    assert verdict.value == 1
    assert 'aria-pressed="true"' in (await opened.get(f"/turns/{turn}")).text
    for score in ("2", "", "nan"):
        assert (await opened.post(address, score=score)).status_code == 400
    reason = "Say the price first, not swordfish."
    assert (await opened.post(address, score="-1", text=reason)).status_code == 303
    redacted = "Say the price first, not [redacted: password]."
    assert redacted in opened.ledger.judgements.hints(turn)
    assert redacted in told(await opened.get(f"/turns/{turn}"))


async def test_a_user_keeps_edits_drops_and_adds_their_own_lessons(tmp_path: Path) -> None:
    async with page(tmp_path, *USERS) as browser:
        lessons = browser.ledger.lessons
        lessons.rule("drop", "anna", 1, "")
        lessons.rule("add", "ben", None, "Praise Ben.")
        browser.log_in(ANNA)
        added = await browser.post("/lessons/add", text=XSS[0])
        assert (added.status_code, added.headers["location"]) == (303, "/ui#lessons")
        shown = (await browser.get("")).text
        assert html.escape(XSS[0]) in shown
        assert XSS[0] not in shown
        assert "Praise Ben." not in shown
        assert "/ui/versions" not in shown, "which is for admins"
        await browser.post("/lessons/edit", lesson="3", text="Log in with swordfish.")

        def third() -> Any:
            return next(one for one in lessons.of_user("anna") if one.id == 3)

        assert third().text == "Log in with [redacted: password]."
        await browser.post("/lessons/edit", lesson="3", text="Be brief.")
        await browser.post("/lessons/drop", lesson="3", text="Be long.")
        mine = third()
        assert (mine.text, mine.state.value) == ("Be brief.", "dropped")
        await browser.post("/lessons/keep", lesson="3")
        assert "Told." in (await browser.get("")).text
        assert (await browser.post("/lessons/drop", lesson="2")).status_code == 409
        assert (await browser.post("/lessons/drop", "http://evil", lesson="3")).status_code == 403
        assert third().state.value == "told"
        browser.log_in(ROOT_KEY)
        assert "Praise Ben." in (await browser.get("")).text


async def test_a_turn_names_the_lessons_that_it_was_told(opened: Page) -> None:
    number = opened.ledger.lessons.rule("add", "anna", None, XSS[0])
    session = opened.ledger.turns.session("anna", "told")
    one = new_turn(opened.ledger, session_id=session, told=LessonBlock((number,), 1, 2))
    shown = (await opened.get(f"/turns/{opened.ledger.turns.add(one)}")).text
    assert f'<a href="/ui#lesson-{number}">{number}</a>' in shown
    assert html.escape(XSS[0]) in shown
    assert f'id="lesson-{number}"' in (await opened.get("")).text


async def test_list_of_turns_shows_what_main_turns_were_asked(opened: Page) -> None:
    requests = {"main": "What is the " + "x" * 99, "side": "Summarise all"}
    for kind, words in requests.items():
        one = new_turn(opened.ledger, f"of {kind}", kind=Kind(kind), request_text=words)
        because = TurnRefusal(Reason.SIDE) if kind == "side" else None
        opened.ledger.turns.add(replace(one, untrained_because=because))
    shown, whole = [told(await opened.get(f"/turns{q}")) for q in ("", "?kind=all")]
    assert requests["main"][:80] in shown
    assert requests["main"][:81] not in shown
    assert "Summarise" not in whole
    row = "not trained: side turn"
    assert (row in shown, row in whole) == (False, True), "main turns unless asked"


async def test_share_accepted_stands_beside_roll_back(opened: Page) -> None:
    """Of a version left behind, too."""
    ledger = opened.ledger
    for n in range(6):
        turn = ledger.turns.add(new_turn(ledger, f"new {n}", policy_version=1))
        ledger.turns.add_next_state(turn, NextState("user", "so it is"))
        ledger.judgements.add(turn, value=1 if n else -1, ballots=(), hints=())
    ledger.versions.roll_back(ledger.versions.get(0))
    shown = told(await opened.get("/versions"))
    newest, behind, first = re.split(r" v[10] (?:from|,)", shown)
    assert "No first turn was judged" in newest
    assert "First judged turns accepted: 83% (27% to 100%) of 6" in behind
    assert "First judged turns accepted: 0% (0% to 24%) of 18" in first


async def test_addresses_bear_numbers_that_no_row_has(opened: Page) -> None:
    for digits in (19, 20, 5000):
        many = "9" * digits
        assert (await opened.get(f"/turns/{many}")).status_code == 404
        for path in (f"/turns/{many}/feedback", f"/versions/{many}/pin"):
            assert (await opened.post(path, score="1")).status_code == 404
    assert (await opened.get("/turns/" + "9" * 18)).status_code == 404
    assert (await opened.get("/turns?before=" + "9" * 30)).status_code == 200
    shown = await opened.get("/turns?verdict=-1&trained=no&kind=main")
    assert shown.status_code == 200
    assert "No turns fit" not in shown.text


async def test_what_is_vendored_is_what_was_published(opened: Page) -> None:
    served = await opened.get("/static/htmx-2.0.11.min.js")
    assert (
        hashlib.sha256(served.content).hexdigest()
        == "d6fdc75f204e6bdefa99b69bf1e6d4ac69b8a364f77929f45c13476b4000f717"
    )
    for name in ("..%2f..%2froutes.py", "htmx-LICENSE", "none"):
        assert (await opened.get(f"/static/{name}")).status_code == 404


def test_curve_draws_numbers_alone() -> None:
    some = [Point(1, 0.5, 0.2, 0.9), Point(2, float("nan")), Point(3, 0.75)]
    drawn = curve(some, "step", "%")
    assert [interval is not None for _, _, interval in drawn["points"]] == [True, False]
    assert "nan" not in str(drawn)
    assert curve([Point(1, float("inf"))], "step", "nats") == {}
    template = Environment(loader=PackageLoader("tinker_claw.page")).get_template("curve.html")
    svg = template.module.curve(drawn)  # type: ignore[attr-defined]
    assert (svg.count("<circle"), svg.count('class="interval"')) == (2, 1)


# What the console says


def told(answer: httpx.Response) -> str:
    """Text of a page, as one reads it."""
    return " ".join(html.unescape(re.sub("<[^>]*>", " ", answer.text)).split())


async def test_page_says_what_the_console_says(opened: Page, tmp_path: Path) -> None:
    shown = told(await opened.get(""))
    seen = read_overview(tmp_path, Training().batch_size)
    for name, line in run_fields(seen):
        assert " ".join(line.split()) in shown, name
    assert [one["user"] for one in seen["headlines"]] == ["anna", "ben"]
    for one in seen["headlines"]:
        assert shown.index(one["said"]) < shown.index("Progress")
    for share in seen["accepted"][-2:]:
        assert f"v{share['version']}: {share['share']:.0%}" in shown, "beside its curve"


async def test_overview_has_the_results_of_the_gate(opened: Page) -> None:
    shown = told(await opened.get(""))
    assert f"v1 answers although the gate could not ask it: {' '.join(XSS[2].split())}" in shown
    assert f"{REFUSED}: {XSS[3]}" in shown


async def test_long_list_of_versions_has_pages(opened: Page) -> None:
    newest = opened.ledger.versions.newest()
    assert newest is not None
    for _ in range(read.ROWS):
        opened.ledger.versions.roll_back(newest)
    first = (await opened.get("/versions")).text
    (rest,) = re.findall(r"/ui/versions\?(before=\d+)", first)
    second = (await opened.get(f"/versions?{rest}")).text
    numbers = [re.findall(r"<strong>v(\d+)</strong>", text) for text in (first, second)]
    assert [len(some) for some in numbers] == [read.ROWS, 2]
    assert numbers[1] == ["1", "0"]


# What to do, and what cannot be done


async def test_an_empty_ledger_says_what_to_do_next(tmp_path: Path) -> None:
    async with page(tmp_path / "other", *USERS) as opened:
        (tmp_path / "empty").mkdir()
        ledger = Ledger(tmp_path / "empty")
        ledger.bind({"model": "demo", "method": "binary", "backend": "local"})
        deps = replace(opened.deps, ledger=ledger.path)
        transport = httpx.ASGITransport(Starlette(routes=routes.create_page(deps)))
        for key in (ANNA, ROOT_KEY):
            async with httpx.AsyncClient(
                transport=transport, base_url=HOST, auth=("any", key)
            ) as client:
                shown, turns = [told(await client.get(f"/ui{path}")) for path in ("", "/turns")]
                assert f"the address {HOST}/v1 and the model demo" in shown
                command = "tinker-claw openclaw-config --data-dir '/runs/it is' --write --primary"
                assert (command in html.unescape(shown)) is (key == ROOT_KEY)
                assert "what to do next" in turns
        ledger.close()
        opened.log_in(ROOT_KEY)
        assert "what to do next" not in told(await opened.get("")).lower()
        assert "No turns fit" in told(await opened.get("/turns?session=none"))


async def test_a_rating_says_what_it_does_to_a_trained_turn(opened: Page) -> None:
    before = told(await opened.get("/turns/1"))
    assert "trains nothing more" in before
    assert "trains nothing more" not in told(await opened.get("/turns/9"))
    await opened.post("/turns/1/feedback", score="1")
    after = told(await opened.get("/turns/1"))
    assert "trains nothing: the reply was trained already" in after
    verdict = opened.ledger.judgements.verdict(1)
    assert verdict is not None
    assert verdict.value == 1, "as it says"


async def test_a_refused_form_says_why(opened: Page) -> None:
    long = "Be brief & plain. " * 300
    for path, fields, why in (
        ("/lessons/add", {"text": long}, "at most 300 characters"),
        ("/turns/1/feedback", {"score": "-1", "text": long}, "at most 4000 characters"),
        ("/lessons/keep", {"lesson": "77"}, "there is no lesson 77"),
        ("/versions/9/pin", {}, "there is no v9"),
    ):
        refused = await opened.post(path, **fields)
        assert refused.status_code in (400, 409), path
        assert why in told(refused)
    for path in ("/lessons/burn", "/versions/1/burn"):
        assert (await opened.post(path, lesson="1")).status_code == 404


async def test_a_version_that_cannot_be_gone_back_to_says_why(opened: Page, tmp_path: Path) -> None:
    (tmp_path / "adapters/p0").mkdir(parents=True)
    shown = told(await opened.get("/versions"))
    assert "No way back to v0: its state is deleted." in shown
    assert "Roll back" not in shown


async def test_lessons_say_that_they_are_off(opened: Page) -> None:
    texts = list[str]()
    for lessons in ("off", "on"):
        deps = replace(opened.deps, training=Training.model_validate({"lessons": lessons}))
        transport = httpx.ASGITransport(Starlette(routes=routes.create_page(deps)))
        async with httpx.AsyncClient(transport=transport, base_url=HOST) as client:
            texts.append(told(await client.get("/ui")))
    assert ["Lessons are off" in text for text in texts] == [True, False]


# What goes wrong


async def test_ledger_that_cannot_be_read_is_not_one_that_cannot_be_written(
    opened: Page, tmp_path: Path
) -> None:
    opened.ledger.path.rename(tmp_path / "away")
    for path in ("", "/turns", "/turns/1", "/versions"):
        answer = await opened.get(path)
        assert answer.status_code == 503
        assert "cannot read the ledger" in told(answer)
