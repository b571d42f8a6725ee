"""The track of a web page: what is right is graded so, the browser reaches nothing outside, and
nothing of it is left behind."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import socket
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright", reason="playwright is not installed")

from playwright.async_api import Error

from examples.tracks import TrackError, environments
from examples.tracks.gui import PROGRAMS, Errand, Gui, Window
from examples.tracks.track import Track
from tests.support.lives import until
from tests.tracks.scripted import Script, Scripted, naming, runner

needs_chromium = pytest.mark.skipif(
    not any(map(shutil.which, PROGRAMS)), reason="chromium is not installed"
)
KINDS = {"note", "tick", "settle", "order", "clear", "price"}


def names(env: Gui) -> dict[str, Errand]:
    """One errand of each kind, by name."""
    return {env.task(number).name.split()[0]: env.task(number) for number in range(60)}


@asynccontextmanager
async def office() -> AsyncGenerator[Gui]:
    async with environments.prepared(Track(environment="gui")) as env:
        assert isinstance(env, Gui)
        yield env


def element(page: str, role: str, name: str) -> str:
    """Name of an element on the page."""
    found = re.search(rf'- {role} "{re.escape(name)}"[^\n]*\[(e\d+)\]', page)
    assert found, f"no {role} {name} in {page}"
    return found[1]


def clerk(wish: str, attempt: int = 0) -> Script:
    """Do any errand at the first try; at others forget the last action."""
    words = wish.removeprefix("You work in the pages of an office. ")
    done: list[tuple[str, dict[str, str]]] = []
    page = yield "look", {}

    def see(name: str) -> tuple[str, dict[str, str]]:
        return "click", {"element": element(page, "link", name)}

    if found := re.match(r"Put '(.*)' on the list", words):
        field = element(page, "textbox", "New item")
        page = yield "type", {"element": field, "text": found[1]}
        done.append(("click", {"element": element(page, "button", "Add")}))
    elif found := re.match(r"Tick '(.*)' and '(.*)' off", words):
        page = yield "click", {"element": element(page, "checkbox", found[1])}
        done.append(("click", {"element": element(page, "checkbox", found[2])}))
    elif found := re.match(r"Set the language of the profile to (\w+) and", words):
        page = yield see("Profile")
        list_ = element(page, "combobox", "Language")
        page = yield "select", {"element": list_, "option": found[1]}
        page = yield "click", {"element": element(page, "checkbox", "Newsletter")}
        done.append(("click", {"element": element(page, "button", "Save")}))
    elif found := re.match(r"Order the (\w+) in the shop, (\d+) times", words):
        page = yield see("Shop")
        page = yield see(found[1])
        page = yield "type", {"element": element(page, "textbox", "Number"), "text": found[2]}
        done.append(("click", {"element": element(page, "button", "Order")}))
    elif found := re.match(r"Delete the mail from (\w+ about \w+)\.", words):
        page = yield see("Mail")
        while found[1] + "\n" not in page:
            assert "Scroll down for more" in page
            page = yield "scroll", {"direction": "down"}
        rest = page[page.index(found[1] + "\n") :]
        done.append(("click", {"element": element(rest, "button", "Delete")}))
    elif found := re.match(r"What do the (\w+) and the (\w+) cost together", words):
        page = yield see("Shop")
        total = 0
        for name in found.groups():
            page = yield see(name)
            price = re.search(r"Price: (\d+)", page)
            assert price
            total += int(price[1])
            page = yield "back", {}
        return f"Together that is {total if attempt == 0 else total + 1}."
    if attempt == 0:
        yield done[0]
    return "Done."


async def play(window: Window, script: Script) -> str:
    """Follow a script in the window; return its last reply."""
    try:
        call = next(script)
        while True:
            call = script.send(await window.call(*call))
    except StopIteration as end:
        return end.value


def test_errands_are_drawn_from_the_seed_and_held_out_ones_are_others() -> None:
    env, again, other = (Gui(seed, "chromium") for seed in (0, 0, 1))
    tasks = [env.task(number) for number in range(100)]
    kept = [env.held_out(number).before for number in range(100)]
    named = [task.name for task in tasks]
    assert named == [again.task(n).name for n in range(100)]
    assert named != [other.task(n).name for n in range(100)]
    assert {name.split()[0] for name in named} == KINDS
    for task in tasks:
        assert task.before not in kept
        assert (task.before == task.after) == (task.answer is not None)


@pytest.mark.slow
@needs_chromium
async def test_every_kind_of_errand_is_done_by_the_right_actions_and_by_no_others() -> None:
    async with office() as env:
        found = names(env)
        assert found.keys() == KINDS
        for task in found.values():
            wish = str(task.messages[0]["content"])
            for attempt in (0, 1):
                async with task.attempt() as window:
                    assert not await window.solved("Done.")
                    said = await play(window, clerk(wish, attempt))
                    assert await window.solved(said) == (attempt == 0), wish


@needs_chromium
async def test_an_errand_that_did_more_than_it_should_is_not_done() -> None:
    async with office() as env:
        task = names(env)["note"]
        async with task.attempt() as window:
            await play(window, clerk(str(task.messages[0]["content"])))
            page = await window.call("look", {})
            first = task.before["todo"][0]["text"]
            await window.call("click", {"element": element(page, "button", f"Delete {first}")})
            assert not await window.solved("Done.")


@needs_chromium
async def test_what_a_model_gets_wrong_is_told_to_it_at_once() -> None:
    async with office() as env, env.task(0).attempt() as window:

        async def said(name: str, **arguments: Any) -> str:
            return await window.call(name, arguments)

        assert await said("click", element="e5") == "error: there is no e5 in the page"
        page = await said("look")
        add, field = element(page, "button", "Add"), element(page, "textbox", "New item")
        assert "no tool open" in await said("open")
        assert "element must be a text" in await said("click", element=5)
        assert "element must be a name" in await said("click", element="body, html")
        assert "no field for text" in await said("type", element=add, text="x")
        assert "at most 200" in await said("type", element=field, text="x" * 201)
        assert "no list to choose from" in await said("select", element=add, option="x")
        assert "up or down" in await said("scroll", direction="left")
        assert await said("back") == "error: there is no page before this one"
        page = await said("click", element=element(page, "link", "Profile"))
        language = element(page, "combobox", "Language")
        wrong = await said("select", element=language, option="Latin")
        assert wrong == "error: its options are English, French, German, Spanish"
        assert 'heading "To do"' in await said("back")


@needs_chromium
async def test_what_is_typed_is_text_and_the_same_calls_show_the_same_page() -> None:
    bad = '<img src=x onerror="state.todo=[]"><script>state.todo=[]</script>'

    async def seen(window: Window) -> list[str]:
        pages = [await window.call("look", {})]
        field = element(pages[0], "textbox", "New item")
        pages.append(await window.call("type", {"element": field, "text": bad}))
        add = element(pages[1], "button", "Add")
        return [*pages, await window.call("click", {"element": add})]

    async with office() as env, env.task(0).attempt() as one, env.task(0).attempt() as other:
        pages, again = await asyncio.gather(seen(one), seen(other))
        known = await one.page.evaluate("state.todo.map(item => item.text)")
        assert known[-1] == bad
        assert await one.page.locator("main img, main script").count() == 0
    assert pages == again
    assert "onerror" in pages[2]


@needs_chromium
async def test_browser_reaches_nothing_outside() -> None:
    """Neither the page's own rules, nor the routes, nor an address let it out."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        address = f"127.0.0.1:{server.getsockname()[1]}"
        tries = f"""async () => {{
          const image = new Image(); image.src = "http://{address}/image";
          navigator.sendBeacon("http://{address}/beacon", "x");
          const all = [
            fetch("http://{address}/fetch"), fetch("http://localhost:{address.split(":")[1]}/"),
            new Promise((_, fail) => {{
              const socket = new WebSocket("ws://{address}/"); socket.onerror = fail; }}),
          ];
          return (await Promise.allSettled(all)).map(one => one.status);
        }}"""
        async with office() as env, env.task(0).attempt() as window:
            await window.call("look", {})
            # A page without rules of its own: the routes and the browser's flags are left.
            bare = await window.page.context.new_page()
            assert await window.page.evaluate(tries) == ["rejected"] * 3
            assert await bare.evaluate(tries) == ["rejected"] * 3
            browser = window.page.context.browser
            assert browser
            page = await browser.new_page()  # without routes: the flags alone are left
            assert await page.evaluate(tries) == ["rejected"] * 3
        with pytest.raises(BlockingIOError):
            server.accept()


@needs_chromium
async def test_a_browser_that_broke_ends_the_run_in_a_sentence() -> None:
    async with office() as env:

        async def play_on() -> None:
            async with env.task(0).attempt() as window:
                await window.call("look", {})
                browser = window.page.context.browser
                assert browser
                session = await browser.new_browser_cdp_session()
                with pytest.raises(Error):
                    await session.send("Browser.crash")
                await window.call("look", {})

        with pytest.raises(TrackError, match="browser failed, and the same command goes on"):
            await play_on()


def test_where_there_is_no_chromium_the_track_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(TrackError, match=r"no Chromium here.*package chromium"):
        environments.environment(Track(environment="gui"))


TRACK = """\
environment = "gui"
model = "demo"
concurrency = 4
group_size = 2
groups = 3
exam_tasks = 2
max_turns = 10
"""


@pytest.mark.slow
@needs_chromium
def test_a_clerk_is_told_from_one_who_forgets_and_a_kill_leaves_no_browser(tmp_path: Path) -> None:
    temporary = tempfile.mkdtemp()  # a short name: the browser's sockets lie there
    environment = os.environ | {"TMPDIR": temporary}
    fake = Scripted(clerk)
    with fake.serving():
        first = runner(tmp_path, fake.url, TRACK, environment)
        until(lambda: bool(fake.outcomes))
        assert naming(temporary), "the browser's profile lies there"
        first.send_signal(signal.SIGKILL)
        assert first.wait() == -signal.SIGKILL
        until(lambda: not naming(temporary))
        second = runner(tmp_path, fake.url, TRACK, environment)
        assert second.wait(timeout=600) == 0, (tmp_path / "runner.log").read_text()
    assert not naming(temporary)
    shutil.rmtree(temporary)
    outcomes = dict(fake.outcomes)
    assert len(outcomes) == 6
    for session, score in outcomes.items():
        assert score == (1.0 if session.endswith("-0") else -1.0)
    assert "| v0 | 2 | 1.00 |" in (tmp_path / "out" / "report.md").read_text()
