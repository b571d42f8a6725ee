"""The page in a real browser, Debian's Chromium: nothing from outside, nothing that a text starts,
readable without scripts, on a phone and in the dark, and to axe-core, which looks for barriers."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from axe_playwright_python.async_playwright import Axe
from fastapi import FastAPI
from playwright.async_api import BrowserContext, Locator, async_playwright

from tests.page.test_page import Page, page
from tests.support.ledger import new_turn
from tinker_claw.app.server import in_background
from tinker_claw.ledger.ledger import Ledger
from tinker_claw.types import LessonBlock, Wish

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian's package chromium)"),
]
PATHS = ("", "/turns", "/turns/1", "/turns/2", "/versions")


@asynccontextmanager
async def browser(
    tmp_path: Path, **options: Any
) -> AsyncIterator[tuple[BrowserContext, str, Page]]:
    """A browser window, the page's address, and the page; requests to other places fail."""
    async with (
        page(tmp_path) as opened,
        in_background(cast("FastAPI", opened.app)) as url,
        async_playwright() as playwright,
    ):
        root = url.removesuffix("/v1")
        learn(opened.ledger)
        chromium = await playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        context = await chromium.new_context(**options)
        context.set_default_timeout(120_000)
        try:
            yield context, root, opened
        finally:
            await chromium.close()


def learn(ledger: Ledger) -> None:
    """Add a lesson that a user said of a reply, and what became of it."""
    source = ledger.turns.session("anna", "source")
    none: Any = {"ballots": (), "hints": ()}
    turn = ledger.turns.add(new_turn(ledger, session_id=source))
    wish = Wish("Write plain sentences.", "no lists, please")
    ledger.judgements.add(turn, value=-1, wish=wish, **none)
    lesson = next(one for one in ledger.lessons.of_user("anna") if one.id == 2)
    for number in range(4):
        session = ledger.turns.session("anna", f"later {number}")
        ledger.lessons.begin(session, [lesson.id])
        told = LessonBlock((lesson.id,), 1, 2)
        turn = ledger.turns.add(new_turn(ledger, session_id=session, told=told))
        ledger.judgements.add(turn, value=1 if number else -1, **none)


async def test_lessons_are_kept_edited_dropped_and_added(tmp_path: Path) -> None:
    async with browser(tmp_path) as (context, root, opened):
        window, lessons = await context.new_page(), opened.ledger.lessons
        opened.ledger.lessons.rule("drop", "anna", 1, "")
        await window.goto(f"{root}/ui")
        first = window.get_by_role("region", name="Lesson 2", exact=True)
        text = await first.inner_text()
        assert "Hold this in later sessions?" in text
        assert "Write plain sentences." in text
        assert "no lists, please" in text

        async def press(place: Locator, name: str) -> None:
            async with window.expect_navigation():
                await place.get_by_role("button", name=name).click()
            assert (await Axe().run(window)).violations_count == 0

        def known() -> list[tuple[str, str]]:
            found = sorted(lessons.of_user(), key=lambda one: one.id)[1:]
            return [(one.text, one.state.value) for one in found]

        await press(first, "Keep")
        assert known() == [("Write plain sentences.", "told")]
        await first.get_by_label("New words").fill("Write at most two plain sentences.")
        await press(first, "Edit")
        assert known() == [("Write at most two plain sentences.", "told")]
        await press(first, "Drop")
        assert known() == [("Write at most two plain sentences.", "dropped")]
        assert lessons.of_session(opened.ledger.turns.session("anna", "later 3")) == [], "at once"
        assert await first.get_by_role("link", name="roll back to v0").count() == 1
        wanted = window.get_by_label("What you want of replies")
        await wanted.fill("Call me \u202eZoe.")
        await press(window.locator("main"), "Add")
        assert "U+202E" in await window.get_by_role("alert").inner_text()
        await window.go_back()
        assert await wanted.input_value() == "Call me \u202eZoe.", "as it was typed"
        await wanted.fill("Call me Zoe.")
        await press(window.locator("main"), "Add")
        assert known()[1] == ("Call me Zoe.", "told")
        assert "Told." in await window.get_by_label("Lesson 3").inner_text()


async def test_a_phone_s_first_screen_says_whether_it_helps(tmp_path: Path) -> None:
    async with browser(tmp_path, viewport={"width": 390, "height": 844}) as (context, root, _):
        window = await context.new_page()
        await window.goto(f"{root}/ui")
        line = window.get_by_text("First judged turns accepted:").first
        box = await line.bounding_box()
        assert box is not None
        assert box["y"] + box["height"] < 844 / 2
        assert box["x"] + box["width"] <= 390
        assert await window.evaluate("document.documentElement.scrollWidth") <= 390


async def test_it_asks_nobody_else_and_runs_no_text(tmp_path: Path) -> None:
    async with browser(tmp_path) as (context, root, _):
        asked, wrong = list[str](), list[str]()
        window = await context.new_page()
        context.on("request", lambda request: asked.append(request.url))
        window.on("dialog", lambda dialog: wrong.append(dialog.message))
        window.on("pageerror", lambda error: wrong.append(str(error)))
        window.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
        for path in PATHS:
            await window.goto(f"{root}/ui{path}")
        assert all(url.startswith(f"{root}/ui") for url in asked), asked
        assert wrong == []
        await window.goto(f"{root}/ui")
        before = len(asked)
        async with window.expect_response(lambda one: one.url == f"{root}/ui"):
            pass  # it keeps itself up to date
        await window.wait_for_selector("h1")
        assert len(asked) > before
        assert wrong == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_axe_finds_no_barrier(tmp_path: Path, scheme: str) -> None:
    async with browser(tmp_path, color_scheme=scheme) as (context, root, _):
        window = await context.new_page()
        for path in PATHS:
            await window.goto(f"{root}/ui{path}")
            found = await Axe().run(window)
            assert found.violations_count == 0, f"{path}: {found.generate_report()}"


async def test_it_is_read_and_used_without_scripts_on_a_phone(tmp_path: Path) -> None:
    phone = {"viewport": {"width": 360, "height": 700}, "java_script_enabled": False}
    async with browser(tmp_path, **phone) as (context, root, opened):
        window = await context.new_page()
        for path in PATHS:
            await window.goto(f"{root}/ui{path}")
            assert await window.locator("h1").count() == 1
            box = await window.locator("main").bounding_box()
            assert box is not None
            assert box["width"] <= 360
            assert await window.evaluate("document.documentElement.scrollWidth") <= 360, path
            for cell in await window.locator("td.became").all():
                of = await cell.bounding_box()
                assert of is not None
                assert of["x"] + of["width"] <= 360, "what became of a turn"
        await window.goto(f"{root}/ui/turns/1")
        await window.keyboard.press("Tab")
        await window.keyboard.press("Enter")  # skips to the content
        await window.get_by_label("Reason of 👎").fill("Say it in a word.")
        await window.get_by_label("Good reply").click()
        await window.wait_for_url(f"{root}/ui/turns/1*")
        verdict = opened.ledger.judgements.verdict(2)
        assert await window.get_by_label("Good reply").get_attribute("aria-pressed") == "true"
        assert verdict is not None
        for name in ("states/s0", "adapters/p0"):
            (tmp_path / name).mkdir(parents=True)
        await window.goto(f"{root}/ui/versions")
        drops = window.locator("#drops-0")
        assert "v1 will be left behind, with what 4 samples taught" in await drops.inner_text()
        async with window.expect_navigation():
            await window.get_by_role("button", name="Roll back v0").click()
        assert opened.undo.orders == [("rollback", 0)]
