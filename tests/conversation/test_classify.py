"""Classification of agents' requests: session, kind and next state."""

from __future__ import annotations

import json
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.chats import parse_chat
from tests.support.openclaw import (
    CLOCK,
    EVENT,
    HEARTBEAT,
    NUDGE,
    POLL,
    REMINDER,
    SYSTEM,
    TOOLS,
    TRACE,
    VOLATILE,
    WAKE,
    announced,
    assistant,
    openclaw,
    retried,
    runtime,
    stamped,
    tool,
    tools,
    user,
    utility,
)
from tests.support.pictures import picture
from tinker_claw.conversation.attribution import (
    attribute,
    is_result,
    last_request_index,
    newest_message_with_words,
    read,
    without_volatile,
)
from tinker_claw.conversation.classify import Identity, RequestKind, identify
from tinker_claw.conversation.harnesses import HARNESSES
from tinker_claw.conversation.history import (
    Conversation,
    digest,
    find_next_state,
    reply_digest,
    same,
)
from tinker_claw.errors import RequestError
from tinker_claw.formats.base import GenerationRequest
from tinker_claw.formats.parts import with_parts
from tinker_claw.images import Image, MessagePart
from tinker_claw.served import Surface
from tinker_claw.types import Kind, Message, NextState, Reply, ToolCall


def digests_of(messages: Any) -> tuple[str, ...]:
    return Conversation.of(messages).digests


def parsed(body: dict[str, Any]) -> GenerationRequest:
    return parse_chat(json.dumps({"model": "m"} | body).encode())


def told(body: dict[str, Any], **headers: str) -> Identity:
    names = {
        name.replace("_", "-") if name.startswith("x_") else name: v for name, v in headers.items()
    }
    return identify(parsed(body), names)


NUDGES = next(harness.nudges for harness in HARNESSES if harness.nudges)


def words(text: str) -> str:
    return read({"content": text}).words


def of(*parts: MessagePart) -> Message:
    """A user's message of these parts."""
    return with_parts({"role": "user"}, parts)


def last_words(messages: Any) -> str:
    last = newest_message_with_words(messages)
    return read(last).words if last else ""


def sayings(text: str) -> list[str]:
    return read({"content": text}).sayings


def next_state(messages: Any, replied: Any = MappingProxyType({})) -> NextState | None:
    def named(message: Any) -> Any:
        return attribute(message, Surface(), lambda _: True)

    return find_next_state(messages, named, replied).state


PLAIN = {"messages": [{"role": "user", "content": "hi"}]}


def test_the_evidence_for_a_session_has_an_order() -> None:
    body = openclaw("hi", prompt_cache_key="cache:0")
    everything = {"x_session_id": "own:0", "session_id": "aff:0", "x_session_affinity": "other:0"}
    assert told(body, **everything).key == "own:0"
    del everything["x_session_id"]
    assert told(body, **everything).key == "aff"
    del everything["session_id"]
    assert told(body, **everything).key == "other"
    assert told(body, x_client_request_id="9").key == "cache", "other clients number requests so"
    del body["prompt_cache_key"]
    assert told(body).key == "s"
    assert told(body).reason.endswith("session from the Runtime line")
    assert told(PLAIN | {"prompt_cache_key": "user:1"}).key == "user:1", "taken as it is"
    assert told(PLAIN, session_id="a:2").key == "a:2"
    assert told(PLAIN | {"prompt_cache_key": ""}).key == told(PLAIN).key, "none is named"


def test_a_session_stays_one_when_it_is_compacted_or_affinity_is_switched_on() -> None:
    line = runtime(session_id="Sess_X.1")
    names = [
        told(openclaw("hi", line=line)),
        told(openclaw("hi", line=line), session_id="Sess_X.1:0"),
        told(openclaw("hi", line=line), session_id="Sess_X.1:12"),
        told(openclaw("hi", line=line), session_id="openclaw-webchat-0c1f"),
        told(utility("You are a context summarization assistant", "x"), session_id="Sess_X.1"),
    ]
    assert {identity.key for identity in names} == {"Sess_X.1"}
    long = "x" * 70
    cut = told(openclaw("hi", line=runtime(session_id=long)), session_id=f"{long}:0"[:64])
    assert cut.key == long


def test_an_answer_that_is_asked_for_again_without_a_system_prompt_is_of_its_session() -> None:
    """OpenClaw's pass where a tool's result has filled the window: its transcript begins anew."""
    cut = [user("(session bootstrap)"), *LOOP]
    for nudge in NUDGES:
        asked = {"messages": [*cut, user(f"{nudge} Continue from the current transcript.")]}
        assert told(asked, session_id="a:27").key == "a"
    assert told({"messages": cut}, session_id="a:27").key == "a:27"
    typed = {"messages": [*cut, assistant("Done."), user(f"{NUDGES[0]} Continue.")]}
    assert told(typed, session_id="a:27").key == "a:27", "somebody typed it"


def test_the_runtime_line_is_found_wherever_it_stands() -> None:
    second = [{"type": "text", "text": "summary"}, {"type": "text", "text": runtime()}]
    compacted = openclaw("x", line="")
    compacted["messages"][1]["content"] = second
    assert told(compacted).key == "s"
    in_system = openclaw("x", line="")
    in_system["messages"][0]["content"] += runtime(session_id="sys") + "\nmore"
    assert told(in_system).key == "sys"
    in_parts = openclaw("x", line="")
    texts = (SYSTEM, runtime(session_id="part").strip(), "more")
    in_parts["messages"][0]["content"] = [{"type": "text", "text": text} for text in texts]
    assert told(in_parts).key == "part"


def test_a_runtime_line_that_the_user_pastes_does_not_count() -> None:
    line = runtime(session_id="theirs").strip()
    for pasted in (f"see {line}\nwhat is this?", f"{line}\nwhat is this?"):
        assert told(openclaw(pasted)).key == "s"
    later = openclaw("hi", assistant("yo"), user(f"look:\n{line}"))
    assert told(later).key == "s"
    of_another = told({"messages": [{"role": "user", "content": f"what is this?\n\n{line}"}]})
    assert of_another.request_kind is RequestKind.CLIENT
    assert of_another.key.startswith("opening:")


def test_codex_names_its_threads_and_a_thread_of_its_own_is_no_turn_of_its_user() -> None:
    tree = PLAIN | {"prompt_cache_key": "root"}
    asked = told(tree, **{"session-id": "root", "thread-id": "root"})
    child = {"session-id": "root", "thread-id": "child", "x-codex-parent-thread-id": "root"}
    helper = told(tree, **child)
    assert (asked.key, asked.kind) == ("root", Kind.MAIN)
    assert (helper.key, helper.kind) == ("child", Kind.SIDE)
    assert told(PLAIN, **{"session-id": "root"}).key == "root"


def test_clients_without_a_session_are_told_apart_by_how_they_open() -> None:
    same = told({"messages": [*PLAIN["messages"], assistant("yo"), user("and?")]})
    assert told(PLAIN).key == same.key
    other = {"messages": [{"role": "system", "content": "x"}, *PLAIN["messages"]]}
    assert told(other).key != same.key
    assert told(PLAIN).kind is Kind.MAIN


def test_a_trace_is_taken_only_from_a_well_formed_header() -> None:
    trace = "249bcabc7ccc7f4ba4d1b65ab40d5bb3"
    assert told(PLAIN, **TRACE).trace == trace
    for bad in ("", "x", f"00-{trace}-1-01", f"00-{'0' * 32}-4c2579d44019cb92-01", "00-é-1-01"):
        assert told(PLAIN, traceparent=bad).trace is None


def test_headers_of_a_turns_type_and_of_a_sessions_end() -> None:
    for says, kind in ((" Main ", Kind.MAIN), ("side", Kind.SIDE)):
        assert told(PLAIN, x_turn_type=says).kind is kind
        assert told(PLAIN, x_turn_type=says).reason.startswith("X-Turn-Type says so")
    with pytest.raises(RequestError):
        told(PLAIN, x_turn_type="middle")
    assert told(PLAIN, x_session_done="TRUE").done
    assert not told(PLAIN, x_session_done="0").done


SDK = {"user-agent": "OpenAI/JS 7.15.0"}
RECAP = "Write an Activity recap for"
SUMMARISE = "You are a context summarization assistant"
FLUSH = "Pre-compaction memory flush. Write down what matters."
FLUSHING = runtime("agent:main:internal-session-effects:1", "internal-session-effects-1")
CLINES = {"role": "user", "content": "[SYSTEM] This run is not complete until you call it."}
LOOP = (assistant("", ("c", "ls", "{}")), tool("c", "a"))
OPENCODE = ({"role": "system", "content": "You are a title generator. You output ONLY a thread"},)
BILLED = {
    "role": "system",
    "content": "x-anthropic-billing-header: cc_version=2.1.332.1b2; cc_entrypoint=sdk-cli; "
    "cc_is_subagent=true;\nYou are a Claude agent",
}
NO_CLOCK = {"role": "user", "content": HEARTBEAT["content"].removesuffix(CLOCK)}
EVENTFUL = openclaw("hi", assistant("yo"), announced("42"))
EVENTFUL["messages"][-1] = EVENT
UNSTAMPED = openclaw("x", tools=[])
UNSTAMPED["messages"][1]["content"] = f"Name the file.{runtime()}"

CALLS: list[tuple[RequestKind, str, dict[str, Any], dict[str, str]]] = [
    (RequestKind.USER, "first turn", openclaw("hi"), {}),
    (RequestKind.USER, "later turn", openclaw("hi", assistant("yo"), user("go on")), {}),
    (RequestKind.USER, "compacted", openclaw("Summary of what was said.", user("go on")), TRACE),
    (RequestKind.USER, "chat without tools", openclaw("hi", tools=[]), TRACE),
    (RequestKind.TOOL, "tool loop", openclaw("hi", *LOOP), {"session_id": "s:0"}),
    (RequestKind.RETRY, "retry", openclaw(retried("hi")), {}),
    (RequestKind.TOOL, "tool loop of a retry", openclaw(retried("hi"), *LOOP), {}),
    (RequestKind.REASK, "re-ask", openclaw("hi", user(NUDGE)), {}),
    (RequestKind.REASK, "re-ask after tools", openclaw("hi", *LOOP, user(NUDGE)), {}),
    (RequestKind.CLIENT, "another program", PLAIN, {}),
    (RequestKind.CLIENT, "the SDK alone", PLAIN, SDK),
    (RequestKind.TOOL, "another program's loop", {"messages": [*PLAIN["messages"], *LOOP]}, {}),
    (RequestKind.RECAP, "recap", utility(RECAP, "{}"), {}),
    (RequestKind.TITLE, "title", utility("Generate a concise session title (3-6", "x"), {}),
    (
        RequestKind.TITLE,
        "opencode's title",
        {"messages": [*OPENCODE, user("Generate a title for this conversation:"), user("hi")]},
        {"x_session_id": "s"},
    ),
    (RequestKind.CLIENT, "a title and an answer", {"messages": [*OPENCODE, *LOOP[:1]]}, {}),
    (RequestKind.CLIENT, "a recap in a trace", utility(RECAP, "{}"), TRACE),
    (RequestKind.COMPACTION, "compaction", utility(SUMMARISE, "x"), TRACE | {"session_id": "s"}),
    (RequestKind.USER, "no tools, no trace", openclaw("hi", tools=[]), {}),
    (RequestKind.USER, "its later turn", openclaw("hi", assistant("yo"), user("b"), tools=[]), {}),
    (RequestKind.RETRY, "its retry", openclaw(retried("hi"), tools=[]), {}),
    (RequestKind.UTILITY, "no tools, no stamp", UNSTAMPED, {}),
    (RequestKind.UTILITY, "its trace alone", UNSTAMPED, TRACE),
    (RequestKind.SUBAGENT, "Codex's child", PLAIN, {"x-codex-parent-thread-id": "a"}),
    (RequestKind.SUBAGENT, "Codex's review", PLAIN, {"x-openai-subagent": "review"}),
    (RequestKind.CLIENT, "no child", PLAIN, {"x-openai-subagent": "compact"}),
    (RequestKind.SUBAGENT, "Claude Code's child", PLAIN, {"x-claude-code-agent-id": "a12"}),
    (RequestKind.SUBAGENT, "its billing line", {"messages": [BILLED, *PLAIN["messages"]]}, {}),
    (RequestKind.SUBAGENT, "opencode's child", PLAIN, {"x-parent-session-id": "ses_1"}),
    (
        RequestKind.UTILITY,
        "slug",
        openclaw("x", line=runtime(session_id="slug-generator-0a-1")),
        {},
    ),
    (
        RequestKind.FLUSH,
        "flush",
        openclaw("x", user(FLUSH), line=FLUSHING, tools=tools("read")),
        {},
    ),
    (
        RequestKind.FLUSH,
        "flush by its tools",
        openclaw("x", user(FLUSH), tools=tools("read", "write")),
        {},
    ),
    (RequestKind.HEARTBEAT, "heartbeat", openclaw("hi", assistant("yo"), HEARTBEAT), {}),
    (RequestKind.HEARTBEAT, "its loop", openclaw("hi", assistant("yo"), HEARTBEAT, *LOOP), {}),
    (RequestKind.CRON, "cron", openclaw("hi", assistant("yo"), REMINDER), {}),
    (
        RequestKind.AUTOMATED,
        "new prompt",
        openclaw("hi", {"role": "user", "content": f"Go!{CLOCK}"}),
        {},
    ),
    (
        RequestKind.ALONE,
        "isolated cron",
        openclaw("do", line=""),
        {"session_id": "openclaw-cron-1f"},
    ),
    (RequestKind.SUBAGENT, "subagent", openclaw("x", line=runtime("agent:main:subagent:6c")), {}),
    (RequestKind.ANNOUNCEMENT, "announcement", EVENTFUL, {}),
    (
        RequestKind.ANNOUNCEMENT,
        "its loop",
        openclaw("hi", assistant("yo"), announced("42"), *LOOP),
        {},
    ),
    (
        RequestKind.NUDGE,
        "nudge",
        {"messages": [*PLAIN["messages"], assistant("yo"), CLINES]},
        {},
    ),
    (RequestKind.VERDICT, "thumb", openclaw("hi", assistant("yo"), user("\N{THUMBS UP SIGN}")), {}),
    (
        RequestKind.VERDICT,
        "thumb behind a note",
        {
            "messages": [
                *PLAIN["messages"],
                assistant("yo"),
                {"role": "user", "content": "<environment_context>x</environment_context>"},
                {"role": "user", "content": "\N{THUMBS UP SIGN}"},
            ]
        },
        {},
    ),
    (
        RequestKind.CLIENT,
        "thumb behind another message",
        {"messages": [*PLAIN["messages"], {"role": "user", "content": "\N{THUMBS UP SIGN}"}]},
        {},
    ),
]
TYPED: list[tuple[str, dict[str, Any]]] = [
    ("memory flush", openclaw("hi", assistant("yo"), user(FLUSH))),
    ("memory flush, first", openclaw(FLUSH)),
    ("heartbeat", openclaw("hi", assistant("yo"), user(HEARTBEAT["content"]))),
    ("heartbeat, no clock", openclaw("hi", assistant("yo"), NO_CLOCK)),
    ("poll", openclaw("hi", assistant("yo"), user(POLL))),
    ("cron", openclaw("hi", assistant("yo"), user(REMINDER["content"]))),
    ("isolated cron", openclaw("[cron:77 job] do it")),
    ("subagent", openclaw("[Subagent Context] You")),
    ("announcement", openclaw("hi", assistant("yo"), announced("42"))),
    ("announcement, short", openclaw("hi", assistant("yo"), user("A background task completed."))),
    ("nudge", openclaw("hi", assistant("yo"), user(NUDGE))),
    ("nudge, first", openclaw(NUDGE)),
    ("recap", openclaw(RECAP)),
    ("compaction", openclaw(SUMMARISE)),
    (
        "session id",
        openclaw("hi", line=runtime("agent:main:explicit:a:subagent:b", "a:subagent:b")),
    ),
]


MAIN = {
    RequestKind.USER,
    RequestKind.TOOL,
    RequestKind.RETRY,
    RequestKind.REASK,
    RequestKind.CLIENT,
    RequestKind.VERDICT,
}


@pytest.mark.parametrize(
    ("call", "body", "headers"), [c[:1] + c[2:] for c in CALLS], ids=[c[1] for c in CALLS]
)
def test_every_kind_of_call_is_recognised(
    call: RequestKind, body: dict[str, Any], headers: dict[str, str]
) -> None:
    """No header makes a side call trainable, one makes any call a side call, and no reason quotes
    what was said."""
    kind = Kind.MAIN if call in MAIN else Kind.SIDE
    for says in ({}, {"x_turn_type": "main"}):
        identity = told(body, **headers, **says)
        assert (identity.request_kind, identity.kind) == (call, kind), identity.reason
        if kind is Kind.SIDE or not says:
            assert identity.reason.startswith(f"{call}: ")
    assert told(body, **headers, x_turn_type="side").kind is Kind.SIDE
    secret = json.loads(json.dumps(body).replace("hi", "geheim"))
    assert "geheim" not in told(secret, **headers).reason


def test_kinds_of_calls_have_a_case_each() -> None:
    assert {call for call, *_ in CALLS} == set(RequestKind)


@pytest.mark.parametrize("body", [c[1] for c in TYPED], ids=[c[0] for c in TYPED])
def test_what_a_user_types_does_not_make_a_side_turn(body: dict[str, Any]) -> None:
    identity = told(body, **TRACE, session_id="s:0")
    assert (identity.request_kind, identity.kind) == (RequestKind.USER, Kind.MAIN), identity.reason


def test_a_user_of_another_program_may_say_anything() -> None:
    for said in ("A background task completed. Nice!", FLUSH, HEARTBEAT["content"], NUDGE):
        assert told({"messages": [{"role": "user", "content": said}]}).kind is Kind.MAIN
    own = utility(RECAP, "hi")
    assert told(own | {"tools": TOOLS}).kind is Kind.MAIN, "a program with such a system prompt"
    assert told({"messages": [*own["messages"], assistant("yo"), user("?")]}).kind is Kind.MAIN


def test_side_calls_without_a_session_belong_to_their_trace() -> None:
    assert told(utility(SUMMARISE, "x"), **TRACE).by_trace
    assert told(openclaw("x", user(FLUSH), line=FLUSHING), **TRACE).by_trace
    named = told(openclaw("x", user(FLUSH), line=FLUSHING), **TRACE, session_id="s:0")
    assert (named.by_trace, named.key) == (False, "s")
    assert not told(utility(RECAP, "x")).by_trace
    assert not told(openclaw("hi"), **TRACE).by_trace


METADATA = 'Conversation info: ⟦openclaw:ctx⟧\n```json\n{"timestamp":"now"}\n```\n\n'


@pytest.mark.parametrize(
    "text",
    [
        stamped("what time\nis it?"),
        stamped("what time\nis it?") + runtime(),
        stamped(retried("what time\nis it?")) + runtime(),
        METADATA + stamped("what time\nis it?"),
        stamped(METADATA + "what time\nis it?"),
        METADATA + METADATA + "what time\nis it?",
    ],
    ids=["stamp", "line", "retry", "metadata first", "stamp first", "no stamp"],
)
def test_the_users_words_come_without_openclaws(text: str) -> None:
    messages = parsed({"messages": [{"role": "user", "content": text}]}).messages
    assert last_words(messages) == "what time\nis it?"
    assert next_state(messages) == NextState("user", "what time\nis it?")
    assert digest(messages[0]) == digest(user("what time\nis it?"))


def test_the_users_own_words_are_left_alone() -> None:
    line = runtime().strip()
    for said in (f"what is\n{line}\nhere?", "[Sat] hi", "[Queued user message]\nhi", "```json\n1"):
        for body in (openclaw(said), openclaw("hi", assistant("yo"), user(said))):
            assert last_words(parsed(body).messages) == said


def test_only_the_last_messages_can_be_volatile() -> None:
    messages = parsed(openclaw("hi")).messages
    assert len(without_volatile(messages)) == 2
    for text in (NUDGE, *(f"{text} Continue." for text in NUDGES)):
        nudged = parsed(openclaw("hi", user(text))).messages
        assert without_volatile(nudged) == without_volatile(messages)
        assert last_words(nudged) == "hi"
    assert without_volatile([]) == []
    body = openclaw("hi", VOLATILE, assistant("yo"), user("go on"))
    assert len(without_volatile(parsed(body).messages)) == 5


def test_a_volatile_message_that_stays_where_it_was_is_no_part_of_the_conversation() -> None:
    """OpenAI's Responses keep showing it until the user goes on."""
    looked = [assistant("I look."), user("go on")]
    stays = parsed(openclaw("hi", VOLATILE, *looked)).messages
    gone = parsed(openclaw("hi", *looked)).messages
    assert Conversation.of(stays).digests == Conversation.of(gone).digests
    calling = parsed(openclaw("hi", VOLATILE, assistant("I look."))).messages
    assert last_request_index(calling) == 1


def test_images_are_told_from_what_codex_and_openclaw_write_around_them() -> None:
    picture_file = Image(picture(96, 64), "at")
    image = MessagePart(str(picture_file), picture_file)
    begin = '<image name=[Image #1] path="/tmp/picture.png">'
    said = of(MessagePart(begin), image, MessagePart("</image>"), MessagePart("What is it?"))
    assert read(said).words == f"{image.text}\nWhat is it?"
    call = {"id": "a", "type": "function", "function": {"name": "read", "arguments": "{}"}}
    replied: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
    result: Message = {"role": "tool", "tool_call_id": "a", "content": "Read image file"}
    shows = of(MessagePart("Image(s) from tool result #1 (read):"), image)
    state = NextState.of_tools([("read", f"Read image file\n{shows['content']}")])
    assert next_state([result, shows], replied) == state
    for mark in (mark for harness in HARNESSES for mark in harness.results):
        assert is_result(of(MessagePart(mark), image))
        unseen = MessagePart('ERROR: Cannot read "a.png" (this model does not see).')
        assert is_result(of(MessagePart(mark), unseen))
        assert not is_result({"role": "user", "content": f"{mark} none"})
    typed: Message = {"role": "user", "content": "Image(s) from tool result #1 (read): none"}
    assert next_state([result, typed], replied) == NextState("user", typed["content"])
    asked: Message = {"role": "user", "content": "hello"}
    known = Conversation.of([asked, replied, result, shows])
    assert list(known.messages) == [asked, replied, result, shows]
    dropped = Conversation.of([asked, replied, result]).digests
    assert same(known.digests, dropped), "it may be gone later"


SILENT = [
    (HEARTBEAT, assistant("NO_REPLY")),
    (user(POLL), assistant("NO_REPLY")),
    (user(WAKE), assistant(" HEARTBEAT_OK\n")),
    (user(POLL),),
    (HEARTBEAT, *LOOP, assistant("NO_REPLY")),
    (announced("42"), assistant("NO_REPLY")),
    (HEARTBEAT, user(NUDGE), assistant("NO_REPLY")),
    (HEARTBEAT, user(NUDGE), user(WAKE)),
    (user(POLL), assistant("NO_REPLY"), user(WAKE), assistant("NO_REPLY")),
]
HEARD = [
    (user(POLL), assistant("Tea time!")),
    (user("poll"), assistant("NO_REPLY")),
    (HEARTBEAT, *LOOP),
    (announced("42"), assistant("It is 42.")),
]


@pytest.mark.parametrize("exchange", SILENT)
def test_what_no_user_sees_is_no_part_of_the_conversation(exchange: list[dict[str, Any]]) -> None:
    seen = digests_of(parsed(openclaw("hi", assistant("yo"), user("go on"))).messages)
    body = openclaw("hi", assistant("yo"), *exchange, user("go on"))
    assert digests_of(parsed(body).messages) == seen


@pytest.mark.parametrize("exchange", HEARD)
def test_what_a_user_sees_is_part_of_it(exchange: list[dict[str, Any]]) -> None:
    body = openclaw("hi", assistant("yo"), *exchange, user("go on"))
    assert len(digests_of(parsed(body).messages)) == 4 + len(exchange)


def test_a_prompt_means_the_same_once_it_is_history() -> None:
    said = assistant("Tea time!")
    for now, later in ((HEARTBEAT, POLL), (REMINDER, WAKE)):
        before = digests_of(parsed(openclaw("hi", assistant("yo"), now, said)).messages)
        assert (
            digests_of(parsed(openclaw("hi", assistant("yo"), user(later), said)).messages)
            == before
        )


def test_digests_go_by_meaning() -> None:
    one = assistant(" hi\n", ("call_1", "ls", '{"b": 1.0, "a": [1e3]}'))
    two = assistant("hi", ("call1", "ls", '{"a":[1000],"b":1}'))
    assert digest(one) == digest(two)
    assert digest(one) != digest(assistant("hi", ("call1", "ls", '{"a":[1000],"b":2}')))
    assert digest(one) != digest(assistant("hi"))
    assert digest(assistant("hi", ("c", "ls", "{oops"))) != digest(
        assistant("hi", ("c", "ls", "{"))
    )
    assert digest(user("hi")) == digest({"role": "user", "content": "hi" + runtime()})
    assert digest(user("hi")) != digest(user("hi!"))
    assert digest({"role": "system", "content": "Friday"}) == digest(
        {"role": "system", "content": "Saturday"}
    )
    assert digest(tool("a_1", "x")) == digest(tool("a1", "x")) != digest(tool("a_1", "x "))


def test_a_reply_has_the_digest_of_the_message_that_comes_back() -> None:
    reply = Reply("hi", reasoning="hm", tool_calls=(ToolCall("c", "ls", '{"n":1}'),))
    assert reply_digest(reply) == digest(assistant("hi ", ("c", "ls", '{"n": 1.0}')))
    renamed = assistant("hi ", ("x", "ls", '{"n": 1.0}'))
    assert same([reply_digest(reply)], [digest(renamed)])


FIRST = parsed(openclaw("hi")).messages
HISTORY, REPLY = digests_of(FIRST), reply_digest(Reply("yo"))


@pytest.mark.parametrize(
    ("rest", "new"),
    [
        ([assistant("yo"), user("thanks")], ["[Sat 2026-11-21 00:19 UTC] thanks"]),
        ([assistant("yo\n"), tool("a", "1"), tool("b", "2")], ["1", "2"]),
        ([assistant("yo")], None),
        ([assistant("no"), user("thanks")], None),
        ([], None),
        ([user("thanks")], None),
        ([assistant("yo"), user("a"), assistant("b"), user("c")], None),
        ([user("hello"), assistant("yo"), user("thanks")], None),
    ],
)
def test_a_request_goes_on_from_the_turn_whose_reply_it_repeats(
    rest: list[dict[str, Any]], new: list[str] | None
) -> None:
    said = Conversation.of(parsed(openclaw("hi", *rest)).messages)
    kept, at = said.messages, said.reply_at
    found = at is not None and same((*HISTORY, REPLY), said.chain(0, at + 1))
    assert ([m["content"] for m in kept[(at or 0) + 1 :]] if found else None) == new


def chain(*messages: dict[str, Any]) -> list[str]:
    return [digest(message) for message in messages]


ASKED, CALLED = user("look"), assistant("", ("call_a1", "exec", '{"command":"seq"}'))
LONG = tool("call_a1", "1 2 3")
DONE = assistant("Done.")


@pytest.mark.parametrize(
    ("history", "equal"),
    [
        ((ASKED, CALLED, LONG, DONE), True),
        ((ASKED, CALLED, tool("calla1", "1 ... 3"), DONE), True),
        ((ASKED, CALLED, tool("call_a1", ""), DONE), True),
        ((ASKED, CALLED, DONE), True),
        (
            (ASKED, assistant("", ("b", "exec", '{"command":"seq"}')), tool("b", "1 2 3"), DONE),
            True,
        ),
        ((ASKED, assistant("", ("b", "exec", '{"command":"seq"}')), tool("b", "1"), DONE), False),
        ((ASKED, assistant("", ("call_a1", "exec", "{}")), LONG, DONE), False),
        ((user("see"), CALLED, LONG, DONE), False),
        ((ASKED, CALLED, LONG, CALLED, LONG, DONE), False),
        ((ASKED, CALLED, LONG, assistant("Done!")), False),
    ],
    ids=[
        "equal",
        "shortened",
        "emptied",
        "dropped",
        "renamed",
        "another branch",
        "another call",
        "other words",
        "a call more",
        "another reply",
    ],
)
def test_old_results_may_change_and_everything_else_is_compared(
    history: tuple[dict[str, Any], ...], equal: bool
) -> None:
    assert same(chain(*history), chain(ASKED, CALLED, LONG, DONE)) is equal


SUMMARY = (
    "The conversation history before this point was compacted into the following summary:\n\n"
    "<summary>\nMuch was said.\n</summary>"
)


def compacted(*rest: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A request after a compaction, as OpenClaw 2026.9.6 sends it."""
    body = openclaw("x", *rest, **fields)
    parts = [{"type": "text", "text": text} for text in (SUMMARY, runtime().strip())]
    body["messages"][1]["content"] = parts
    return body


def test_a_summary_is_openclaws_only_where_openclaw_puts_it() -> None:
    def summarised(messages: Any) -> int | None:
        return Conversation.of(messages).summarised

    assert summarised(parsed(compacted(user("so?"))).messages) == 1
    assert summarised(parsed(openclaw(SUMMARY)).messages) is None, "somebody typed it"
    assert summarised(parsed(openclaw("hi", user(SUMMARY))).messages) is None
    assert summarised([{"role": "system", "content": SUMMARY}]) is None


def test_a_flush_behind_a_summary() -> None:
    flush = compacted(user(FLUSH), tools=tools("read", "write"))
    flush["messages"][1]["content"][1]["text"] = FLUSHING.strip()
    assert told(flush, **TRACE).request_kind is RequestKind.FLUSH


def test_a_part_is_no_line_of_the_part_before_it() -> None:
    parts = [{"type": "text", "text": text} for text in ("see", runtime().strip(), "what is it?")]
    messages = parsed({"messages": [{"role": "user", "content": parts}]}).messages
    assert messages[0]["content"] == f"see\n{runtime().strip()}\nwhat is it?", (
        "as the model reads it"
    )
    assert last_words(messages) == "see\nwhat is it?"
    (whole,) = parsed({"messages": [{"role": "user", "content": messages[0]["content"]}]}).messages
    assert digest(messages[0]) != digest(whole)
    in_one = [{"type": "text", "text": f"see {runtime().strip()}"}]
    body = openclaw("hi", {"role": "user", "content": in_one})
    assert last_words(parsed(body).messages) == in_one[0]["text"]


QUEUED = (
    "[Queued user message from a previous active turn; preserved as context only. Continue with "
    "the active prompt below.]\n"
)


@pytest.mark.parametrize("line", ["", runtime()], ids=["later", "first"])
def test_words_in_the_frame_of_a_queue_are_unclear(line: str) -> None:
    body = openclaw("hi", user(f"{QUEUED}Tell me.\n\nNo, shorter.{line}"))
    messages = parsed(body).messages
    assert told(body).request_kind is RequestKind.USER
    assert last_words(messages) == "No, shorter.", "as later requests show it"
    assert read(messages[-2]).odd == "[Queued user message …]"
    assert next_state(messages[-2:-1]) is None


def test_all_that_a_user_says_in_a_frame_may_be_a_command() -> None:
    assert sayings(stamped(f"{QUEUED}a\n\n/private\n\nb")) == ["a", "/private", "b"]
    assert sayings(stamped("a\n\n/private")) == ["a\n\n/private"]
    assert sayings(stamped(retried("/private")))[0] == "/private"


def test_all_tool_results_are_the_next_state_in_order() -> None:
    replied = assistant("", ("a", "read", "{}"), ("b", "exec", "{}"))
    both = [tool("a", "BANANA"), tool("b", "exit 1")]
    told = "[result 1 of 2, read]\nBANANA\n\n[result 2 of 2, exec]\nexit 1"
    assert next_state(both, replied) == NextState("tool", told)
    assert next_state(both[::-1], replied) == NextState("tool", told), "in the order of the calls"
    strange = [*both, tool("c", "of another turn")]
    assert next_state(strange, replied) == NextState("tool", told)
    assert next_state(both[:1], replied) is None, "a result is missing"
    assert next_state(both, assistant("I called nothing.")) is None
    assert next_state([tool("a", "x"), user("stop!")]) == NextState("user", "stop!")


def test_what_nobody_says_is_no_next_state() -> None:
    for silent in (HEARTBEAT, REMINDER, user(POLL), user(WAKE), announced("42"), user("  ")):
        assert next_state([silent]) is None
        assert next_state([silent, user("thanks")]) == NextState("user", "thanks")
    assert next_state([{"role": "system", "content": SYSTEM}]) is None


PIECES = st.sampled_from(
    [
        SYSTEM,
        CLOCK,
        POLL,
        WAKE,
        NUDGE,
        "NO_REPLY",
        "\n",
        "]",
        "hi",
        METADATA,
        retried("x"),
        stamped(""),
        runtime(),
        "Runtime: agent=",
        HEARTBEAT["content"],
        EVENT["content"],
        announced("1")["content"],
        "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>",
        "```json\n",
    ]
)
TEXTS = st.lists(PIECES, max_size=4).map("".join)
MESSAGES = st.one_of(
    st.builds(lambda text: {"role": "user", "content": text}, TEXTS),
    st.builds(lambda text: {"role": "system", "content": text}, TEXTS),
    st.builds(assistant, TEXTS),
    st.builds(lambda text, call: assistant(text, (call, "ls", text)), TEXTS, st.sampled_from("ab")),
    st.builds(tool, st.sampled_from("ab"), TEXTS),
)


@settings(max_examples=400, deadline=None)
@given(st.lists(MESSAGES, min_size=1, max_size=8), st.booleans(), st.booleans())
def test_whatever_marks_stand_wherever_everything_is_read(
    messages: list[dict[str, Any]], traced: bool, equipped: bool
) -> None:
    body = {"messages": messages} | ({"tools": TOOLS} if equipped else {})
    request = parsed(body)
    identity = told(body, **(TRACE if traced else {}))
    assert identity.key
    assert identity.kind is identity.request_kind.kind
    said = Conversation.of(request.messages)
    kept = said.messages
    assert [said.chain(at, at + 1) for at in said.starts] == [(one,) for one in said.digests]
    left = iter(request.messages)
    assert all(any(one is message for one in left) for message in kept), "in their order"
    last_words(request.messages)
    if kept:
        goes_on = Conversation.of([*kept, assistant("yo"), user("thanks")])
        at = goes_on.reply_at
        if at is not None and len(goes_on.messages) == len(kept) + 2:
            chain = (*Conversation.of(kept).digests, reply_digest(Reply("yo")))
            assert same(goes_on.chain(0, at + 1), chain)
