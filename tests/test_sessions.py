"""Session, kind and next state, from what agents send."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.agents import (
    SYSTEM,
    VOLATILE,
    assistant,
    openclaw,
    runtime,
    stamped,
    tool,
    user,
    utility,
)
from tinker_claw.errors import RequestError
from tinker_claw.sessions import (
    Identity,
    digest,
    digests,
    extension,
    identify,
    last_user_index,
    last_user_words,
    next_state,
    reply_digest,
    without_volatile,
)
from tinker_claw.types import Kind, NextState, Reply, ToolCall
from tinker_claw.wire import ChatRequest, parse_chat


def parsed(body: dict[str, Any]) -> ChatRequest:
    return parse_chat(json.dumps({"model": "m"} | body).encode())


def told(body: dict[str, Any], **headers: str) -> Identity:
    names = {
        name.replace("_", "-") if name.startswith("x_") else name: v for name, v in headers.items()
    }
    return identify(parsed(body), names)


PLAIN = {"messages": [{"role": "user", "content": "hi"}]}


def test_the_evidence_for_a_session_has_an_order() -> None:
    body = openclaw("hi", prompt_cache_key="cache:0")
    everything = {"x_session_id": "own", "session_id": "aff:0", "x_session_affinity": "other:0"}
    assert told(body, **everything).key == "own"
    del everything["x_session_id"]
    assert told(body, **everything).key == "aff:0"
    del everything["session_id"]
    assert told(body, **everything).key == "other:0"
    assert told(body).key == "cache:0"
    del body["prompt_cache_key"]
    assert told(body).key == "s"
    assert told(body).reason.endswith("session from the Runtime line")


def test_the_runtime_line_is_found_wherever_it_stands() -> None:
    second = [{"type": "text", "text": "summary"}, {"type": "text", "text": runtime()}]
    compacted = openclaw("x", line="")
    compacted["messages"][1]["content"] = second
    assert told(compacted).key == "s"
    in_system = openclaw("x", line="")
    in_system["messages"][0]["content"] += runtime(session_id="sys")
    assert told(in_system).key == "sys"


def test_a_runtime_line_that_the_user_pastes_does_not_count() -> None:
    pasted = "see " + runtime(session_id="theirs").strip() + "\nwhat is this?"
    assert told(openclaw(pasted)).key == "s"


def test_an_isolated_cron_job_has_a_session_without_an_id() -> None:
    line = runtime("agent:main:cron:77", session_id=None)
    identity = told(openclaw("[cron:77 job] do it", line=line))
    assert (identity.key, identity.kind) == ("agent:main:cron:77", Kind.SIDE)


def test_clients_without_a_session_are_told_apart_by_how_they_open() -> None:
    same = told({"messages": [*PLAIN["messages"], assistant("yo"), user("and?")]})
    assert told(PLAIN).key == same.key
    other = {"messages": [{"role": "system", "content": "x"}, *PLAIN["messages"]]}
    assert told(other).key != same.key
    assert told(PLAIN).kind is Kind.MAIN


HEARTBEAT = "Follow the heartbeat monitor scratch context when provided."
FLUSH = user("Pre-compaction memory flush. Write down what matters.")
REMINDER = {"role": "user", "content": "A scheduled reminder has been triggered. It says: x"}
ANNOUNCEMENT = user("A background task completed. Use this result.")
LOOP = (assistant("", ("c", "ls", "{}")), tool("c", "a"))

MAIN: list[tuple[str, dict[str, Any], dict[str, str]]] = [
    ("first turn", openclaw("hi"), {}),
    ("later turn", openclaw("hi", assistant("yo"), user("go on")), {}),
    ("tool loop", openclaw("hi", *LOOP), {"session_id": "s:0"}),
    ("retry", openclaw("[Queued user message from a previous active turn; x]\nhi"), {}),
    ("another program", PLAIN, {}),
    ("X-Turn-Type", openclaw("hi", tools=[]), {"x_turn_type": " Main "}),
]
SIDE: list[tuple[str, dict[str, Any], dict[str, str]]] = [
    ("activity recap", utility("Write an Activity recap for", "{}"), {}),
    ("session title", utility("Generate a concise session title (3-6", "x"), {}),
    (
        "compaction summary",
        utility("You are a context summarization assistant", "<conversation>"),
        {"session_id": "s"},
    ),
    ("without tools", openclaw("hi", tools=[]), {}),
    ("memory flush", openclaw("x", assistant("y"), FLUSH), {}),
    ("memory flush", openclaw("x", line=runtime("agent:main:internal-session-effects:1")), {}),
    ("heartbeat", openclaw(HEARTBEAT), {}),
    ("heartbeat", openclaw("hi", assistant("yo"), user(HEARTBEAT), *LOOP), {}),
    ("cron in the main session", openclaw("hi", assistant("yo"), REMINDER), {}),
    ("isolated cron job", openclaw("do", line=""), {"session_id": "openclaw-cron-1f"}),
    (
        "subagent",
        openclaw("[Subagent Context] You", line=runtime("agent:main:subagent:6c")),
        {},
    ),
    ("announcement", openclaw("hi", assistant("yo"), ANNOUNCEMENT), {}),
    ("X-Turn-Type", PLAIN, {"x_turn_type": "side"}),
]


@pytest.mark.parametrize(("what", "body", "headers"), MAIN, ids=[c[0] for c in MAIN])
def test_main_turns(what: str, body: dict[str, Any], headers: dict[str, str]) -> None:
    assert told(body, **headers).kind is Kind.MAIN


@pytest.mark.parametrize(("what", "body", "headers"), SIDE, ids=[c[0] for c in SIDE])
def test_side_turns_say_why(what: str, body: dict[str, Any], headers: dict[str, str]) -> None:
    identity = told(body, **headers)
    assert identity.kind is Kind.SIDE
    assert what in identity.reason


def test_a_user_of_another_program_may_say_anything() -> None:
    body = {"messages": [{"role": "user", "content": "A background task completed. Nice!"}]}
    assert told(body).kind is Kind.MAIN


def test_the_end_of_a_session_is_told_by_a_header() -> None:
    assert told(PLAIN, x_session_done="TRUE").done
    assert not told(PLAIN, x_session_done="0").done
    assert not told(PLAIN).done


def test_a_turn_type_must_exist() -> None:
    with pytest.raises(RequestError):
        told(PLAIN, x_turn_type="middle")


def test_the_users_words_come_without_openclaws() -> None:
    messages = parsed(openclaw("what time is it?")).messages
    assert last_user_words(messages) == "what time is it?"
    assert last_user_index(messages) == 1
    retried = (
        "[Queued user message from a previous active turn; preserved as context only.]\n"
        "what time\nis it?\n\nContinue the current task from the existing transcript, preserving x."
    )
    assert last_user_words(parsed(openclaw(retried)).messages) == "what time\nis it?"
    assert last_user_words([{"role": "system", "content": "x"}]) == ""
    assert last_user_index([{"role": "system", "content": "x"}]) is None


def test_only_the_last_messages_can_be_volatile() -> None:
    messages = parsed(openclaw("hi")).messages
    assert len(without_volatile(messages)) == 2
    nudge = user("The previous attempt did not produce a user-visible answer. Continue.")
    nudged = parsed(openclaw("hi", nudge)).messages
    assert without_volatile(nudged) == without_volatile(messages)
    assert last_user_words(nudged) == "hi"
    assert without_volatile([]) == []
    body = openclaw("hi", VOLATILE, assistant("yo"), user("go on"))
    assert len(without_volatile(parsed(body).messages)) == 5


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
    assert digest(tool("a", "x")) == digest(tool("b", "x")) != digest(tool("a", "x "))


def test_a_reply_has_the_digest_of_the_message_that_comes_back() -> None:
    reply = Reply("hi", reasoning="hm", tool_calls=(ToolCall("c", "ls", '{"n":1}'),))
    assert reply_digest(reply) == digest(assistant("hi ", ("x", "ls", '{"n": 1.0}')))


FIRST = parsed(openclaw("hi")).messages
HISTORY, REPLY = digests(FIRST), reply_digest(Reply("yo"))


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
    ],
)
def test_extension(rest: list[dict[str, Any]], new: list[str] | None) -> None:
    got = extension(HISTORY, REPLY, parsed(openclaw("hi", *rest)).messages)
    assert (got and [m["content"] for m in got]) == new


def test_another_conversation_is_no_extension() -> None:
    body = openclaw("hello", assistant("yo"), user("thanks"))
    assert extension(HISTORY, REPLY, parsed(body).messages) is None


def test_the_next_state_of_a_user_reply_is_his_words() -> None:
    said = [{"role": "user", "content": stamped("no, shorter" + runtime())}]
    assert next_state(said) == NextState("user", "no, shorter")


def test_all_tool_results_are_the_next_state_in_order() -> None:
    replied = assistant("", ("a", "read", "{}"), ("b", "exec", "{}"))
    assert next_state([tool("a", "BANANA"), tool("b", "exit 1")], replied) == NextState(
        "tool", "[result 1 of 2, read]\nBANANA\n\n[result 2 of 2, exec]\nexit 1"
    )
    assert next_state([tool("z", "out")]) == NextState("tool", "[result 1 of 1, tool]\nout")


def test_the_user_counts_before_tool_results() -> None:
    assert next_state([tool("a", "x"), user("stop!")]) == NextState("user", "stop!")


def test_nothing_said_is_no_next_state() -> None:
    assert next_state([user("  ")]) is None
    assert next_state([{"role": "system", "content": SYSTEM}]) is None
