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
from playwright.async_api import BrowserContext, async_playwright

from tests.page.test_page import Page, page
from tinker_claw.app.server import in_background

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian's package chromium)"),
]
PATHS = (
    *("", "/turns", "/turns/1", "/turns/2", "/steps", "/steps/1", "/versions", "/versions/1/pin"),
    *("/versions/0/half", "/episodes", "/groups/1"),
)


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
        chromium = await playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        context = await chromium.new_context(**options)
        context.set_default_timeout(120_000)
        try:
            yield context, root, opened
        finally:
            await chromium.close()


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
        await window.goto(f"{root}/ui/turns/1")
        await window.keyboard.press("Tab")
        await window.keyboard.press("Enter")  # skips to the content
        await window.get_by_label("Good reply").click()
        await window.wait_for_url(f"{root}/ui/turns/1")
        verdict = opened.ledger.judgements.verdict(2)
        assert await window.get_by_label("Good reply").get_attribute("aria-pressed") == "true"
        assert verdict is not None
        for name in ("states/s0", "adapters/p0"):
            (tmp_path / name).mkdir(parents=True)
        await window.goto(f"{root}/ui/versions")
        await window.get_by_role("link", name="Roll back").last.click()
        await window.get_by_role("button", name="Roll back").click()
        await window.wait_for_url(f"{root}/ui/versions")
        assert opened.undo.orders == [("rollback", 0)]
