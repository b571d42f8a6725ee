"""Prompts at the cost of what is new in them, equal to the package's own full render."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from typing import Any

import pytest
import renderers
from hypothesis import given, settings
from hypothesis import strategies as st
from renderers.base import load_tokenizer

from tests.support.captures import load
from tests.support.chats import parse_chat
from tests.support.openclaw import VOLATILE, assistant, openclaw, tool, user
from tinker_claw.conversation.attribution import last_request_index
from tinker_claw.errors import RequestError
from tinker_claw.images import images_in
from tinker_claw.render.format import ChatFormat
from tinker_claw.render.outside_text import CutTokenizer, Guard
from tinker_claw.render.prompt_cache import PromptCache
from tinker_claw.render.renderer import Renderer
from tinker_claw.served import Prompt
from tinker_claw.shipped import MODEL_DIR
from tinker_claw.types import Message

FAMILIES = (
    "deepseek-v3",
    "gemma4",
    "glm-4.5",
    "glm-5",
    "hy3",
    "kimi-k2",
    "kimi-k2.5",
    "llama-3",
    "minimax-m2",
    "nemotron-3",
    "qwen3",
    "qwen3-vl",
    "qwen3.5",
    "qwen3.6",
    "qwen3.8",
)
LONG = "Read the files below. " * 400
CALLS = (("call1", "ls", '{"path":"x"}'), ("call2", "read", '{"path":"y"}'))


def tokenizer_for(family: str) -> Any:
    """The shipped tokenizer, with the control tokens that the format wants."""
    tokenizer = load_tokenizer(str(MODEL_DIR))
    for _ in range(60):
        try:
            renderers.create_renderer(tokenizer, renderers.config_from_name(family))
        except (AssertionError, ValueError, KeyError) as error:
            quoted = re.findall(r"'([^']+)'", str(error))
            named = quoted or re.findall(r"<[^'\"]*>|\[[^'\"]*\]", str(error))
            tokenizer.add_tokens(named[:1], special_tokens=True)
        else:
            return tokenizer
    raise AssertionError(family)


@pytest.fixture(scope="module")
def hub() -> Any:
    """The shipped tokenizer, as transformers loads it."""
    return load_tokenizer(str(MODEL_DIR))


def format_of(tokenizer: Any, config: Any, cache: PromptCache | None = None) -> ChatFormat:
    guard = Guard(tokenizer.get_added_vocab())
    return ChatFormat(
        CutTokenizer(tokenizer), guard, PromptCache() if cache is None else cache, config
    )


def full_render(
    tokenizer: Any, config: Any, messages: Sequence[Message], tools: Any, hint: int | None
) -> Prompt:
    """The package alone, nothing of ours in between."""
    chat = renderers.create_renderer(tokenizer, config)
    rendered = chat.render(
        [dict(m) for m in messages],  # type: ignore[misc]
        tools=list(tools) or None,
        add_generation_prompt=True,
    )
    own = [
        at + 1
        for at, (index, content) in enumerate(
            zip(rendered.message_indices, rendered.is_content, strict=True)
        )
        if index == hint and content
    ]
    return Prompt(tuple(rendered.token_ids), own[-1] if own else None)


def parsed(messages: Sequence[Any]) -> Sequence[Message]:
    return parse_chat(json.dumps({"model": "demo", "messages": messages}).encode()).messages


def test_every_captured_request_is_what_the_package_renders(renderer: Renderer, hub: Any) -> None:
    config, compared = renderers.config_from_name("qwen3"), 0
    for one in load():
        request = parse_chat(one.encoded())
        if images_in(request.messages):
            continue
        messages, tools = request.messages, request.tools
        hint = last_request_index(messages)
        expected = full_render(hub, config, messages, tools, hint)
        found = renderer.prompt(messages, tools, hint_message=hint)
        assert found == expected, one.name
        compared += found.hint_at is not None
    assert compared == 59


def growing(body: dict[str, Any]) -> list[tuple[Message, ...]]:
    """The messages of requests that go on from each other, each with what is dropped at its end."""
    sought = assistant("", CALLS[0]) | {"reasoning_content": "Where?"}
    said = {"role": "assistant", "content": "There.", "reasoning_content": "Easily found."}
    head, found = body["messages"][0], tool("call1", "grüße 🙂\n")
    history: list[dict[str, Any]] = [head]
    requests = list[list[dict[str, Any]]]()
    for number in range(3):
        for new in (
            [user(f"look {number}")],
            [sought, found],
            [assistant("Also:", *CALLS), found, tool("call2", f"b{number}\n")],
            [said, user("thanks"), user("And?")],
            [assistant("Nothing."), user("user")],
            [said],
        ):
            history += new
            requests += [[*history, VOLATILE], list(history)]
        if number == 0:  # its beginning is replaced by a summary
            history = [head, user("Summary: all is well."), assistant("Good."), *history[-5:]]
        if number == 1:  # a message in the middle is another
            history[4] = user("something else")
    return [parsed(request) for request in requests]


@pytest.mark.parametrize(
    ("family", "switches"),
    [
        *((family, {}) for family in FAMILIES),
        ("qwen3", {"enable_thinking": False}),
        ("qwen3.8", {"preserve_thinking": False}),
        ("gemma4", {"preserve_thinking": True}),
        ("glm-5", {"clear_thinking": False}),
        ("kimi-k2.5", {"thinking": False}),
        ("nemotron-3", {"truncate_history_thinking": False}),
    ],
)
def test_requests_that_go_on_from_each_other_are_what_they_are_alone(
    family: str, switches: dict[str, Any]
) -> None:
    tokenizer: Any = tokenizer_for(family)
    config: Any = renderers.config_from_name(family)
    config = config.model_copy(update=switches)
    chat = format_of(tokenizer, config)
    tools = openclaw("hello")["tools"]
    for number, messages in enumerate(growing(openclaw("hello"))):
        users = [i for i, message in enumerate(messages) if message["role"] == "user"]
        for hint in (last_request_index(messages), users[0] if number % 3 else None):
            try:
                expected = full_render(tokenizer, config, messages, tools, hint)
            except (ValueError, KeyError):
                with pytest.raises(RequestError):
                    chat.plan(messages, tools, hint).encode()
                continue
            assert chat.plan(messages, tools, hint).encode() == expected


def test_what_is_known_is_not_encoded_again(hub: Any) -> None:
    chat = format_of(hub, renderers.config_from_name("qwen3"))
    history = [user("look"), assistant("I will.", *CALLS[:1]), tool("call1", "a.txt")]
    for turn in range(50):
        history += [assistant(f"Answer {turn}."), user(f"Question {turn}?")]
        asked = [*history, user("volatile")]
        assert turn == 0 or chat.plan(asked, None, None).size < 400
        chat.plan(asked, None, len(history) - 1).encode()


@pytest.mark.parametrize("family", FAMILIES)
def test_system_messages_and_tools_are_encoded_once(family: str) -> None:
    tokenizer, config = tokenizer_for(family), renderers.config_from_name(family)
    chat = format_of(tokenizer, config)
    head, tools = [{"role": "system", "content": LONG.strip()}], openclaw("hello")["tools"]
    histories = (
        [user("look")],
        [user("What?"), assistant("", *CALLS[:1]), tool("call1", "a.txt")],
        [user("look"), assistant("Yes."), user("Again?")],
    )
    for number, history in enumerate(histories):
        assert (chat.plan([*head, *history], tools, None).size > len(LONG)) is (number == 0)
        prompt = chat.plan([*head, *history], tools, 1).encode()
        assert prompt == full_render(tokenizer, config, [*head, *history], tools, 1)


def test_a_private_request_leaves_nothing(hub: Any) -> None:
    config = renderers.config_from_name("qwen3")
    chat = format_of(hub, config)
    history = [user("look"), assistant("Yes."), user("Again?")]
    chat.plan(history, None, None).encode()
    for longer in (
        [*history, assistant("No. " + LONG), user("And now?")],
        [{"role": "system", "content": LONG}, *history],
    ):
        at = len(longer) - 1
        new = chat.plan(longer, None, at).size
        prompt = chat.plan(longer, None, at, remembers=False).encode()
        assert prompt == full_render(hub, config, longer, [], at)
        assert chat.plan(longer, None, at).size == new > len(LONG)


def test_what_is_remembered_is_bounded_in_bytes(hub: Any) -> None:
    cache, config = PromptCache(capacity=20_000), renderers.config_from_name("qwen3")
    chat = format_of(hub, config, cache)

    def ask(number: int) -> bool:
        """Render a conversation; return whether it was known."""
        said = [user("look"), assistant(f"{number} " + LONG[:2000]), user("Again?")]
        known = chat.plan(said, None, None).size < 1000
        chat.plan(said, None, None).encode()
        return known

    ask(0)
    for number in range(1, 60):
        assert not ask(number)
        assert ask(0), "what is in use stays"
    assert ask(59)
    assert not ask(1)
    cache.clear()
    assert not ask(0)
    messages = [user(LONG * 9), assistant("So: " + LONG * 9), user("user")]
    prompt = chat.plan(messages, None, 2).encode()
    assert prompt == full_render(hub, config, messages, [], 2), "more than there is room for"


TEXTS = st.one_of(
    st.sampled_from(["", " ", "\n", "user", "user\n", "a", "<|im_end|", "<think", "é", "\u0301"]),
    st.text(max_size=20),
).filter(lambda text: not re.search("<[|/a-z_]+>", text))  # which the plain package lets through
TURNS = st.lists(
    st.one_of(
        st.builds(lambda text: {"role": "user", "content": text}, TEXTS),
        st.builds(lambda text: {"role": "assistant", "content": text}, TEXTS),
        st.builds(lambda text: tool("c1", text), TEXTS),
        st.builds(lambda text: {"role": "system", "content": text}, TEXTS),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=150, deadline=None)
@given(messages=TURNS, data=st.data())
def test_however_a_conversation_goes_on_the_prompt_is_the_full_render(
    renderer: Renderer, hub: Any, messages: list[Message], data: st.DataObject
) -> None:
    config = renderers.config_from_name("qwen3")
    for _ in range(5):
        messages = messages + data.draw(TURNS)
        if data.draw(st.integers(0, 4)) == 0:
            at = data.draw(st.integers(0, len(messages) - 1))
            messages = [*messages[:at], data.draw(TURNS)[0], *messages[at + 1 :]]
        if data.draw(st.integers(0, 4)) == 0:
            messages = messages[data.draw(st.integers(0, len(messages) - 1)) :]
        told = messages + data.draw(st.sampled_from([[], [user("volatile")]]))
        users = [i for i, m in enumerate(told) if m["role"] == "user"]
        hint = data.draw(st.sampled_from([None, *users]))
        assert renderer.prompt(told, hint_message=hint) == full_render(hub, config, told, [], hint)


def test_format_that_looks_into_its_ids_is_rendered_as_it_is(
    hub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, config = hub, renderers.config_from_name("qwen3")
    chat = type(renderers.create_renderer(tokenizer, config))
    plain_encode = chat._encode

    def dropping(self: Any, text: str) -> list[int]:
        """As a format would that drops what it takes for padding."""
        return [i for i in plain_encode(self, text) if i >= 0]

    monkeypatch.setattr(chat, "_encode", dropping)
    laid = format_of(tokenizer, config)
    messages = [user("hello"), assistant("hi"), user("bye")]
    for _ in range(2):
        expected = full_render(tokenizer, config, messages, [], len(messages) - 1)
        assert laid.plan(messages, None, len(messages) - 1).encode() == expected
        messages += [assistant("oh"), user("so")]


class Counting:
    """The real tokenizer; counts what it encodes."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.is_fast = True
        self.backend_tokenizer = self
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode_batch(self, texts: list[str], add_special_tokens: bool) -> list[Any]:
        self.asked += texts
        return self._tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)

    encode_batch_fast = encode_batch


async def test_long_text_that_many_bring_at_once_is_encoded_once(hub: Any) -> None:
    counting, config = Counting(hub), renderers.config_from_name("qwen3")
    renderer = Renderer(counting, config)
    messages = [{"role": "system", "content": LONG}, user("look")]
    impatient = asyncio.ensure_future(renderer.prompt_aside(messages))
    await asyncio.sleep(0)
    impatient.cancel()
    async with asyncio.TaskGroup() as group:
        asked = [group.create_task(renderer.prompt_aside(messages)) for _ in range(20)]
    assert sum(LONG in text for text in counting.asked) == 1
    expected = full_render(hub, config, messages, [], None)
    assert all(task.result() == expected for task in asked)
    renderer.forget()
    renderer.prompt(messages)
    assert sum(LONG in text for text in counting.asked) == 2, "it was forgotten"


@pytest.mark.parametrize("family", ["nemotron-3", "kimi-k2.5"])
def test_what_a_format_trips_over_is_refused(family: str) -> None:
    tokenizer, config = tokenizer_for(family), renderers.config_from_name(family)
    parameters = {"type": "object", "properties": [1]}
    tools = [{"type": "function", "function": {"name": "ls", "parameters": parameters}}]
    with pytest.raises(RequestError, match="does not take these messages"):
        format_of(tokenizer, config).plan([user("look")], tools, 0).encode()


ONE_SYSTEM = ("minimax-m2", "nemotron-3", "qwen3-vl", "qwen3.5", "qwen3.6", "qwen3.8")
"""Formats that refuse a second system message, or leave it out."""


@pytest.mark.parametrize("family", FAMILIES)
def test_a_second_system_message_is_moved_only_where_it_is_not_shown(family: str) -> None:
    tokenizer, config = tokenizer_for(family), renderers.config_from_name(family)
    brief, kind = ({"role": "system", "content": text} for text in ("Be brief.", "Be kind."))
    moved = {"role": "user", "content": "[System message]\n\nBe brief."}
    joined = {"role": "system", "content": "Be brief.\n\nBe kind."}
    rest = [user("Hello!"), assistant("yo"), user("so?")]
    for sent, joined_or_moved, order in (
        ([*rest[:2], brief, rest[2]], [*rest[:2], moved, rest[2]], ("yo", "Be brief.", "so?")),
        ([brief, kind, *rest], [joined, *rest], ("Be brief.", "Be kind.", "Hello!")),
    ):
        one_system = family in ONE_SYSTEM
        wanted = joined_or_moved if one_system else sent
        prompt = format_of(tokenizer, config).plan(sent, None, len(sent) - 1).encode()
        assert prompt == full_render(tokenizer, config, wanted, (), len(wanted) - 1)
        text = tokenizer.decode(list(prompt.tokens))
        assert text.count("Be brief.") == 1
        if one_system or sent[0] is brief:
            assert sorted(order, key=text.index) == [*order]
