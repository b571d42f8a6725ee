"""Routing of requests by what servers have cached and by what they have to do."""

from __future__ import annotations

from local_gpu.sample.routing import BLOCK, REQUEST_COST, Prefix, RecentPrompts, Routes, keys_of

IDLE = {0: 0, 1: 0, 2: 0}


def text(length: int, salt: int = 0) -> tuple[int, ...]:
    return tuple((i * i + salt * 7919 + i * salt) % 151_936 for i in range(length))


def sent(
    routes: Routes, prompt: tuple[int, ...], in_flight: dict[int, int], name: str = "v1"
) -> int:
    """Route a prompt as the pool does."""
    keys = keys_of(prompt)
    server = routes.choose(name, keys, len(prompt), in_flight)
    routes.note(name, keys, len(prompt), server)
    return server


def test_a_conversation_moves_when_its_server_is_busier_by_more_than_its_prompt_is_worth() -> None:
    routes, prompt = Routes(), text(8 * REQUEST_COST)
    where = sent(routes, prompt, IDLE)
    ahead = dict.fromkeys(IDLE, 0)
    for requests, stays in ((0, True), (7, True), (9, False)):
        keys = keys_of(prompt)
        chosen = routes.choose("v1", keys, len(prompt), ahead | {where: requests})
        assert (chosen == where) is stays


def test_a_short_prompt_goes_where_there_is_least_to_do() -> None:
    routes, prompt = Routes(), text(900)
    where = sent(routes, prompt, IDLE)
    busy = {server: int(server == where) for server in IDLE}
    assert routes.choose("v1", keys_of(prompt), 900, busy) != where


def test_what_one_version_has_cached_is_nothing_to_another() -> None:
    routes, prompt = Routes(), text(5000)
    where = sent(routes, prompt, IDLE)
    assert sent(routes, prompt, IDLE, name="v2") != where  # the one that has got least
    routes.forget_name("v1")
    busy = dict.fromkeys(IDLE, 0) | {where: 1}
    assert routes.choose("v1", keys_of(prompt), 5000, busy) != where


def test_what_was_not_asked_for_in_a_long_time_is_forgotten() -> None:
    routes, prompt = Routes(most_keys=40), text(10 * BLOCK)
    where = sent(routes, prompt, IDLE)
    busy = {server: int(server == where) for server in IDLE}
    for salt in range(1, 4):
        sent(routes, text(10 * BLOCK, salt), IDLE)
    assert routes.choose("v1", keys_of(prompt), len(prompt), busy) == where
    for salt in range(4, 8):
        sent(routes, text(10 * BLOCK, salt), IDLE)
    assert routes.choose("v1", keys_of(prompt), len(prompt), busy) != where


def recent(*prompts: tuple[int, ...]) -> RecentPrompts:
    seen = RecentPrompts(recent=6)
    for server, prompt in enumerate(prompts):
        seen.note(prompt, keys_of(prompt), None, server)
    return seen


def test_a_conversation_that_goes_on_is_one_prompt_and_the_newest_come_first() -> None:
    system = text(4 * BLOCK)
    one, other = ((*system, *text(2 * BLOCK, salt)) for salt in (3, 4))
    longer = (*one, *text(400, salt=5))
    seen = recent(one, other, longer)
    assert seen.prefixes(4) == [Prefix(longer[: 7 * BLOCK]), Prefix(other)]
    assert seen.prefixes(1) == [Prefix(longer[: 7 * BLOCK])]


def test_what_one_salt_has_is_nothing_to_another() -> None:
    routes, prompt = Routes(), text(10 * BLOCK)
    assert not set(keys_of(prompt, "anna")) & {*keys_of(prompt, "ben"), *keys_of(prompt)}
    idle = {0: 0, 1: 0}
    where = routes.choose("v1", keys_of(prompt, "anna"), 3000, idle)
    routes.note("v1", keys_of(prompt, "anna"), 3000, where)
    assert routes.choose("v1", keys_of((*prompt, 1), "anna"), 3000, idle) == where
    assert routes.choose("v1", keys_of(prompt, "ben"), 3000, idle) != where
