"""Tasks in a web page: an office with a list, a form, a shop and mails, in a headless Chromium.

The model sees the page as the browser's accessibility tree, in text, and acts on elements by the
names in it. One browser serves all attempts; each has a context for itself.

Rule: the browser reaches nothing outside: the one page comes from this folder, every other request
is refused, and no host name is resolved. What a model types is text in the page, never code. The
grade compares the page's last state, or the answer, with what was wanted.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Any, Self

from playwright.async_api import Browser, Error, Page, Route, async_playwright

from examples.tracks import TrackError
from examples.tracks.environments import tool
from examples.tracks.track import Track

SITE = Path(__file__).parent / "site.html"
URL = "http://office.test/"
_ELEMENT = "its name in the page, such as e5"
TOOLS = (
    tool("look", "Shows the page."),
    tool("click", "Clicks on an element.", element=_ELEMENT),
    tool(
        "type",
        "Puts a text into a field, in place of what it holds.",
        element=_ELEMENT,
        text="what to put",
    ),
    tool("select", "Chooses an option of a list.", element=_ELEMENT, option="as it reads"),
    tool("scroll", "Scrolls by the height of the window.", direction="up or down"),
    tool("back", "Goes back to the page before."),
)
_NEEDS: Mapping[str, Sequence[str]] = {
    function["name"]: function["parameters"]["required"]
    for function in (described["function"] for described in TOOLS)
}
PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
_FLAGS = (
    "--host-resolver-rules=MAP * ~NOTFOUND",  # beside the routes: they do not see everything
    "--disable-gpu",
    "--disable-smooth-scrolling",
)
_PATIENCE_MS = 120_000.0
"""Timeout of an action: 64 pages share a few processors. Errors of the model are returned at
once."""
OPENED = 4
"""Pages that open at the same time: each starts a process."""
_LONGEST = 200
"""Most characters typed at once."""
_SETTLED = "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
_LOADED = re.compile(r"\[ref=((?:f\d+)?)e\d+\]")
_ACTIVE = "link|button|textbox|checkbox|combobox"
_NOISE = (
    (re.compile(r" \[(?:cursor=pointer|active)\]|:\n *- /url: .*"), ""),
    (re.compile(rf"^( *- (?!{_ACTIVE})[^\n]*?) \[ref=\w+\]", re.MULTILINE), r"\1"),
    (re.compile(r"\[ref=(?:f\d+)?(e\d+)\]"), r"[\1]"),
)
"""Patterns removed from an accessibility tree: elements that cannot be acted on get no name."""
_WORDS = ("pear", "plum", "kite", "mug", "shell", "stamp", "bead", "key", "box", "lamp", "rope")
_NAMES = ("Nora", "Hugo", "Ida", "Emil", "Ruth", "Otto")
_LANGUAGES = ("English", "French", "German", "Spanish")


@dataclass(frozen=True, slots=True)
class Errand:
    """A task in the office."""

    name: str
    wish: str
    before: Mapping[str, Any]
    """State of the page at the start."""
    after: Mapping[str, Any]
    """State that the page must have in the end."""
    answer: str | None
    """Number that the last reply must end with; None: any reply."""
    office: Gui

    @property
    def messages(self) -> Sequence[Mapping[str, Any]]:
        return ({"role": "user", "content": f"You work in the pages of an office. {self.wish}"},)

    @asynccontextmanager
    async def attempt(self) -> AsyncGenerator[Window]:
        async with self.office.page() as page:
            with _alive():
                await page.evaluate("known => begin(known)", deepcopy(dict(self.before)))
            yield Window(self, page)


@dataclass(slots=True)
class Window:
    """An attempt in a browser page."""

    errand: Errand
    page: Page
    loaded: str = ""
    """Prefix of the browser's element names in a page that was loaded again. The model sees names
    without it, which are the same at every attempt."""

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        wanted = _NEEDS.get(name)
        if wanted is None:
            return f"error: there is no tool {name}, but {', '.join(_NEEDS)}"
        for argument in wanted:
            if not isinstance(arguments.get(argument), str):
                return f"error: {argument} must be a text"
        with _alive():
            wrong = await self._act(name, arguments)
            return f"error: {wrong}" if wrong else await self._tree()

    async def solved(self, answer: str) -> bool:
        if self.errand.answer is not None and re.findall(r"\d+", answer)[-1:] != [
            self.errand.answer
        ]:
            return False
        with _alive():
            return await self.page.evaluate("state") == self.errand.after

    async def _act(self, name: str, arguments: Mapping[str, str]) -> str | None:
        """Carry out an action; return what was wrong with it, if anything."""
        match name:
            case "click" | "type" | "select":
                return await self._touch(name, arguments)
            case "scroll":
                if arguments["direction"] not in ("up", "down"):
                    return "direction must be up or down"
                sign = "-" if arguments["direction"] == "up" else ""
                await self.page.evaluate(f"scrollBy(0, {sign}innerHeight)")
            case "back":
                if await self.page.evaluate("depth") == 0:
                    return "there is no page before this one"
                await self.page.evaluate(
                    "() => new Promise(done => {"
                    "addEventListener('hashchange', done, {once: true}); history.back() })"
                )
            case _:
                pass
        return None

    async def _touch(self, name: str, arguments: Mapping[str, str]) -> str | None:
        element = arguments["element"]
        if not re.fullmatch(r"e\d{1,6}", element):
            return "element must be a name such as e5"
        target = self.page.locator(f"aria-ref={self.loaded}{element}")
        if await target.count() != 1:
            return f"there is no {element} in the page"
        kind = str(await target.evaluate("it => it.tagName + ' ' + it.type"))
        if name == "click":
            await target.click()
        elif name == "type":
            if kind != "INPUT text":
                return f"{element} is no field for text"
            if len(arguments["text"]) > _LONGEST:
                return f"a text has at most {_LONGEST} characters"
            await target.fill(arguments["text"])
        elif not kind.startswith("SELECT"):
            return f"{element} is no list to choose from"
        else:
            options = await target.evaluate("it => Array.from(it.options, one => one.label)")
            if arguments["option"] not in options:
                return f"its options are {', '.join(options)}"
            await target.select_option(label=arguments["option"])
        return None

    async def _tree(self) -> str:
        await self.page.evaluate(_SETTLED)
        tree = await self.page.locator("body").aria_snapshot(mode="ai")
        if (match := _LOADED.search(tree)) is not None:
            self.loaded = match[1]
        for noise, instead in _NOISE:
            tree = noise.sub(instead, tree)
        return tree


class Gui:
    """Environment with six kinds of errands in the office, with other words each time.

    It is a context manager, which keeps the browser open.
    """

    def __init__(self, seed: int, program: str) -> None:
        self._seed = seed
        self._program = program
        self._stack = AsyncExitStack()
        self._browser: Browser | None = None
        self._opening = asyncio.Semaphore(OPENED)
        self._left: list[Page] = []
        """Pages that are free for an attempt."""

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        return TOOLS

    @classmethod
    def of(cls, track: Track) -> Gui:
        for name in PROGRAMS:
            if (program := shutil.which(name)) is not None:
                return cls(track.seed, program)
        raise TrackError("There is no Chromium here. Install one (Debian's package chromium).")

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as opening:
            playwright = await opening.enter_async_context(async_playwright())
            with _alive():
                self._browser = await playwright.chromium.launch(
                    executable_path=self._program,
                    args=_FLAGS,
                    chromium_sandbox=os.geteuid() != 0,  # it has none for root
                    timeout=_PATIENCE_MS,
                )
            opening.push_async_callback(self._browser.close)
            self._stack = opening.pop_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._stack.aclose()

    @asynccontextmanager
    async def page(self) -> AsyncGenerator[Page]:
        """Open a fresh page in a context of its own, which can reach only this project's page.

        Pages are reused: a new one costs a process, and loading a page again clears its state, as
        it stores nothing.
        """
        with _alive():
            page = self._left.pop() if self._left else await self._opened()
            await page.goto(URL)
        yield page
        self._left.append(page)

    async def _opened(self) -> Page:
        assert self._browser is not None, "an attempt outside of `async with`"
        async with self._opening:
            context = await self._browser.new_context(
                viewport={"width": 1024, "height": 600}, service_workers="block"
            )
            context.set_default_timeout(_PATIENCE_MS)
            await context.route("**/*", _serve)
            return await context.new_page()

    def task(self, number: int) -> Errand:
        return self._drawn(f"train {number}")

    def held_out(self, number: int) -> Errand:
        return self._drawn(f"exam {number}")

    def _drawn(self, which: str) -> Errand:
        rng = Random(f"{self._seed} {which}")
        kind = rng.choice(_KINDS)
        before = _office(rng)
        after = deepcopy(before)
        wish, answer = kind(rng, after)
        return Errand(f"{kind.__name__} {which}", wish, before, after, answer, self)


_Known = dict[str, Any]
_Kind = Callable[[Random, _Known], tuple[str, str | None]]
"""Changes the wanted state of the page; returns the wish and the answer that it asks for."""


def note(rng: Random, office: _Known) -> tuple[str, str | None]:
    text = f"buy {rng.choice(_WORDS)} {rng.randrange(100)}"
    office["todo"].append({"text": text, "done": False})
    return f"Put '{text}' on the list of things to do.", None


def tick(rng: Random, office: _Known) -> tuple[str, str | None]:
    first, second = rng.sample(office["todo"], 2)
    first["done"] = second["done"] = True
    return f"Tick '{first['text']}' and '{second['text']}' off the list of things to do.", None


def settle(rng: Random, office: _Known) -> tuple[str, str | None]:
    profile = office["profile"]
    language = rng.choice([name for name in _LANGUAGES if name != profile["language"]])
    profile["language"], profile["newsletter"] = language, not profile["newsletter"]
    switch = "on" if profile["newsletter"] else "off"
    return f"Set the language of the profile to {language} and its newsletter {switch}.", None


def order(rng: Random, office: _Known) -> tuple[str, str | None]:
    item, number = rng.choice(office["shop"]), rng.randint(2, 20)
    office["orders"].append({"name": item["name"], "number": number})
    return f"Order the {item['name']} in the shop, {number} times.", None


def clear(rng: Random, office: _Known) -> tuple[str, str | None]:
    mail = office["mail"].pop(rng.randrange(8, len(office["mail"])))
    return f"Delete the mail from {mail['from']} about {mail['about']}.", None


def price(rng: Random, office: _Known) -> tuple[str, str | None]:
    first, second = rng.sample(office["shop"], 2)
    wish = (
        f"What do the {first['name']} and the {second['name']} cost together? Answer with the sum."
    )
    return wish, str(first["price"] + second["price"])


_KINDS: Sequence[_Kind] = (note, tick, settle, order, clear, price)


def _office(rng: Random) -> _Known:
    """Draw the initial state of the page; no two entries of a list read alike."""
    pairs = [(name, word) for name in _NAMES for word in _WORDS]
    return {
        "todo": [{"text": f"fetch {word}", "done": False} for word in rng.sample(_WORDS, 4)],
        "profile": {
            "name": rng.choice(_NAMES),
            "language": rng.choice(_LANGUAGES),
            "newsletter": rng.random() < 0.5,
        },
        "shop": [{"name": word, "price": rng.randint(2, 99)} for word in rng.sample(_WORDS, 5)],
        "orders": [],
        "mail": [{"from": name, "about": word} for name, word in rng.sample(pairs, 24)],
    }


async def _serve(route: Route) -> None:
    if route.request.url == URL:
        await route.fulfill(path=SITE, content_type="text/html")
    else:
        await route.abort()


@contextmanager
def _alive() -> Generator[None]:
    try:
        yield
    except Error as error:
        raise TrackError(
            f"The browser failed, and the same command goes on: {error.message[:500]}"
        ) from error
