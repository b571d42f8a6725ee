"""Tool calls of every family of chat formats: written by its own template and read back, damaged in
every way that models damage them, and cut off."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

import pytest
import renderers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.render.test_prompt_cache import tokenizer_for
from tests.support.gateways import chat
from tinker_claw.render.calls import FAMILIES
from tinker_claw.render.outside_text import CutTokenizer, Guard
from tinker_claw.render.renderer import Renderer
from tinker_claw.types import Delta, Reply

MARKED = (
    "deepseek-v3",
    "glm-4.5",
    "glm-5",
    "hy3",
    "kimi-k2",
    "kimi-k2.5",
    "laguna-xs.2",
    "laguna-xs-2.1",
    "minimax-m2",
    "nemotron-3",
    "nemotron-3.5",
    "prime-qwen3",
    "qwen3",
    "qwen3-vl",
    "qwen3.5",
    "qwen3.6",
    "qwen3.8",
)
LATE = ("deepseek-v4", "gemma4", "inkling", "llama-3")
"""Families that the package reads, when their replies are complete."""
XML = ("minimax-m2", "nemotron-3", "nemotron-3.5", "prime-qwen3", "qwen3.5", "qwen3.6", "qwen3.8")
TYPES: dict[str, Any] = {
    "text": {"type": "string"},
    "n": {"type": "integer"},
    "x": {"type": "number"},
    "on": {"type": "boolean"},
    "none": {"type": "null"},
    "list": {"type": "array"},
    "map": {"type": "object"},
    "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "any": {},
}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "",
            "parameters": {"type": "object", "properties": TYPES},
        },
    }
    for name in ("write", "list_all")
]
PIECES = (
    "\n", "  ", "\t", "\r\n", "a b", "é", "🙂", "\\n", '"', "'", "{", "}", "[1]", "12", "True",
    "null", "<", ">", "&lt;", "</think>", "<think>", "<tool_call>", "</tool_call>", "<|im_end|>",
    "</function>", "<function=f>", "</invoke>", "</arg_value>", "<arg_key>", "```", "x=1",
    "<parameter>", "</parameter>", "<parameter=a>", '<parameter name="a">', "<parameter/>",
    "<|tool_call_end|>", "<｜tool▁sep｜>", "<minimax:tool_call>", "call:f{", "<|end_message|>",
)  # fmt: skip
TEXTS = st.one_of(st.text(max_size=30), st.lists(st.sampled_from(PIECES), max_size=8).map("".join))
KEYS = st.text("ab", min_size=1, max_size=2)
JSONS = st.recursive(
    st.none() | st.booleans() | st.integers(-999, 999) | st.text("ab \né", max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=5,
)
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "text": TEXTS,
        "n": st.integers(),
        "x": st.floats(allow_nan=False, allow_infinity=False, width=32).map(lambda x: round(x, 3)),
        "on": st.booleans(),
        "none": st.none(),
        "list": st.lists(JSONS, max_size=3),
        "map": st.dictionaries(KEYS, JSONS, max_size=3),
        "maybe": TEXTS,
        "any": TEXTS,
    },
)


@cache
def renderer_of(family: str) -> Renderer:
    return Renderer(tokenizer_for(family), renderers.config_from_name(family))


@cache
def package_of(family: str) -> tuple[Any, Guard]:
    """The package alone, and a guard that keeps texts from it that are control tokens."""
    tokenizer, config = tokenizer_for(family), renderers.config_from_name(family)
    package = renderers.create_renderer(CutTokenizer(tokenizer), config)  # type: ignore[arg-type]
    return package, Guard(tokenizer.get_added_vocab())


def written(
    renderer: Renderer, calls: list[tuple[str, dict[str, Any]]], text: str = "So."
) -> tuple[list[int], list[int]]:
    """Return a prompt, and the reply with these calls as the family's own template writes it."""
    package, guard = package_of(renderer.family)
    sent = [
        {
            "id": f"functions.{name}:{at}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
        }
        for at, (name, arguments) in enumerate(calls)
    ]
    question = chat("Well?")
    reply = {"role": "assistant", "content": text, "tool_calls": sent}

    def rendered(messages: Any, reply_follows: bool) -> list[int]:
        return package.render_ids(
            guard.messages(messages), tools=guard.tools(TOOLS), add_generation_prompt=reply_follows
        )

    prompt = rendered(question, True)
    for thought in ({}, {"reasoning_content": ""}, {"reasoning_content": "Hm"}):
        whole = rendered([*question, {**reply, **thought}], False)
        if whole[: len(prompt)] == prompt:
            return prompt, ended(renderer, whole[len(prompt) :])
    raise AssertionError("the template continues no prompt")


def ended(renderer: Renderer, reply: list[int]) -> list[int]:
    """Return the reply up to its stop token, with one where the template leaves that to the next
    message."""
    stops = renderer.stop_tokens
    at = next((at for at, token in enumerate(reply) if token in stops), len(reply))
    return [*reply[:at], stops[0]]


def read(renderer: Renderer, prompt: list[int], ids: list[int], size: int = 1) -> Reply:
    """Read a reply in chunks of this size; check what was streamed."""
    stream, shown = renderer.stream(prompt, TOOLS), list[Delta]()
    for at in range(0, len(ids), size):
        shown += stream.feed(ids[at : at + size])
    rest, reply = stream.finish()
    shown += rest
    assert "".join(delta.text for delta in shown if delta.kind == "text") == reply.text
    assert "".join(d.text for d in shown if d.kind == "reasoning") == (reply.reasoning or "")
    assert tuple(delta.call for delta in shown if delta.call) == reply.tool_calls
    return reply


def calls_of(reply: Reply) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in reply.tool_calls]


def can_carry(family: str, arguments: dict[str, Any]) -> bool:
    """Whether the format tells these texts from its own tags.

    In the families of `XML` they must open what they close; Laguna's tags are text, too.
    """
    texts = [value for value in arguments.values() if isinstance(value, str)]
    if family.startswith("laguna"):
        return not re.search("</?arg_(key|value)>", "".join(texts))
    if family not in XML:
        return True
    for text in texts:
        depth = 0
        for tag in re.finditer(r"(</parameter>)|<parameter(?:=[^<>\n]*|\s[^<>]*)?>", text):
            depth += 0 if tag[0].endswith("/>") else -1 if tag[1] else 1
            if depth < 0:
                return False
        if depth:
            return False
    return True


@pytest.mark.parametrize("family", [*MARKED, *LATE])
@settings(max_examples=25, deadline=None)
@given(first=ARGUMENTS, second=ARGUMENTS)
@example(
    first={"text": "  def f():\n\n    pass\n\n"},
    second={"text": "\n", "maybe": "12", "any": "true"},
)
@example(first={"text": ""}, second={})
def test_a_call_is_read_back_as_its_own_template_writes_it(
    family: str, first: dict[str, Any], second: dict[str, Any]
) -> None:
    calls = [("write", first), ("list_all", second)][: 1 if family == "llama-3" else 2]
    if not all(can_carry(family, arguments) for _, arguments in calls):
        return
    renderer = renderer_of(family)
    prompt, ids = written(renderer, calls, "" if family == "llama-3" else "So.")
    reply = read(renderer, prompt, ids)
    assert calls_of(reply) == calls, renderer.decode(ids)
    assert reply.text == ("" if family == "llama-3" else "So.")


CALL = ("write", {"text": "one two\n  three", "n": 7, "on": True})
OTHER = ("list_all", {"text": "four five", "any": "six"})
TAG = re.compile(r"<\|[^<>|]*\|>|<｜[^<>｜]*｜>|<\|?/?[A-Za-z｜][^<>\n]*>|```(?:json)?|[{}]")
"""Tags and braces of every family, single tokens or not."""
CLOSERS = ("</parameter>", "</tool_call>", "</function>", "</arg_value>", "</invoke>", "}", "```")


def replies(family: str) -> tuple[list[int], str, str]:
    """Return a prompt, what the reply begins with, and its call, tokens spelled out."""
    renderer = renderer_of(family)
    prompt, ids = written(renderer, [CALL], "" if family in ("gemma4", "llama-3") else "So.")
    text = renderer.decode(ids[:-1])
    at = text.index("So.") + 3 if "So." in text else 0
    return prompt, text[:at], text[at:]


def damages(call: str) -> dict[str, tuple[str, str]]:
    """Return what models make of a call and the text that they mean, by what they did."""
    text, found = str(CALL[1]["text"]), dict[str, tuple[str, str]]()
    # Inkling's package puts what follows a part that ends early before it.
    inside = [*CLOSERS]
    for tag in TAG.finditer(call):
        begin, end, name = *tag.span(), f"{tag[0]} at {tag.start()}"
        if tag[0] != "<|end_message|>":
            inside.append(tag[0])
        for what, bent in {
            f"loses {name}": call[:begin] + call[end:],
            f"loses {name} and the newline": call[:begin] + call[end:].removeprefix("\n"),
            f"doubles {name}": call[:end] + call[begin:],
            f"misspells {name}": call[:begin] + tag[0].replace("<", "<x", 1) + call[end:],
        }.items():
            found[what] = bent, text
    for tag in inside:
        for put in (f"t{tag}wo", f"\n{tag}\nwo"):
            written = (
                json.dumps(put)[1:-1] if '"arg' in call or "```" in call or '{"' in call else put
            )
            found[f"writes {put!r}"] = call.replace("two", written), text.replace("two", put)
    for old, new in (("arguments", "parameters"), ("parameters", "arguments"), ("name", "nom")):
        found[f"writes {new} for {old}"] = call.replace(f'"{old}"', f'"{new}"'), text
    for at in range(1, len(call), 3):
        found[f"stops at {at}"] = call[:at], text
    return {what: one for what, one in found.items() if one[0] != call}


def meant(text: str) -> tuple[str, dict[str, Any]]:
    return CALL[0], CALL[1] | {"text": text}


def is_whole_or_text(
    renderer: Renderer, prompt: list[int], text: str, calls: list[tuple[str, Any]]
) -> str | None:
    """Return what is wrong with how a damaged reply is read; None: nothing."""
    ids = [*renderer.encode(text), renderer.stop_tokens[0]]
    reply, *others = (read(renderer, prompt, ids, size) for size in (1, 7, len(ids)))
    if any(parts(other) != parts(reply) for other in others):
        return "depends on the chunks"
    if calls_of(reply) == calls:
        return None
    if reply.tool_calls:
        return f"calls {calls_of(reply)}"
    shown, wanted = reply.text, renderer.decode(ids[:-1]).rpartition("</think>")[2].strip()
    if renderer.family == "inkling":  # whose every part is framed
        shown, wanted = (re.sub(r"<\|(message|content|end)_\w+\|>", "", t) for t in (shown, wanted))
    return None if shown == wanted else f"shows {shown!r} of {wanted!r}"


def parts(reply: Reply) -> tuple[Any, ...]:
    return reply.text, reply.reasoning, calls_of(reply)


@pytest.mark.parametrize("family", [*MARKED, *LATE])
def test_a_damaged_call_is_recovered_as_it_was_meant_or_is_text(family: str) -> None:
    renderer = renderer_of(family)
    prompt, head, call = replies(family)
    assert is_whole_or_text(renderer, prompt, head + call, [CALL]) is None
    wrong = {
        what: told
        for what, (bent, text) in damages(call).items()
        if (told := is_whole_or_text(renderer, prompt, head + bent, [meant(text)]))
    }
    assert wrong == {}


@pytest.mark.parametrize("family", MARKED)
def test_a_call_in_closed_thinking_is_thinking(family: str) -> None:
    renderer = renderer_of(family)
    prompt, _, call = replies(family)
    begin, end = ("<think>", "</think>")
    if family == "hy3":
        begin, end = ("<think:opensource>", "</think:opensource>")
    opened = renderer.encode(begin)[0] == prompt[-1] or renderer.decode(prompt[-2:]) == f"{begin}\n"
    text = f"{'' if opened else begin}Perhaps {call}. No.{end}Done."
    ids = [*renderer.encode(text), renderer.stop_tokens[0]]
    for size in (1, len(ids)):
        reply = read(renderer, prompt, ids, size)
        assert (reply.text, reply.tool_calls) == ("Done.", ())
        assert reply.reasoning == f"Perhaps {call}. No."


@pytest.mark.parametrize("family", [*MARKED, "deepseek-v4", "gemma4"])
def test_no_half_of_a_call_that_the_token_limit_cuts_off_is_shown(family: str) -> None:
    renderer, both = renderer_of(family), [CALL, OTHER]
    prompt, ids = written(renderer, both, "" if family == "gemma4" else "So.")
    read_calls = list[list[tuple[str, Any]]]()
    for n in range(len(ids)):
        reply = read(renderer, prompt, ids[:n])
        assert reply.text.removesuffix("<").strip() in ("", "S", "So", "So.")
        read_calls.append(calls_of(reply))
        assert read_calls[-1] in ([], both[:1], both)
    assert read_calls == sorted(read_calls, key=len)
    assert read_calls[-1] == both


@pytest.mark.parametrize("family", [*MARKED, *LATE])
def test_without_leave_to_call_a_call_is_text(family: str) -> None:
    renderer = renderer_of(family)
    prompt, head, call = replies(family)
    ids = [*renderer.encode(head + call), renderer.stop_tokens[0]]
    stream = renderer.stream(prompt, TOOLS, may_call=False)
    shown = [delta for token in ids for delta in stream.feed([token])]
    rest, reply = stream.finish()
    assert reply.tool_calls == ()
    assert "one two" in reply.text
    assert "".join(delta.text for delta in [*shown, *rest] if delta.kind == "text") == reply.text


@pytest.mark.parametrize("family", ["qwen3", "qwen3.5", "glm-5", "minimax-m2"])
def test_what_follows_a_call_that_breaks_off_in_an_argument_is_text(family: str) -> None:
    """Examples of calls in the argument of one are not executed."""
    renderer = renderer_of(family)
    prompt, head, call = replies(family)
    end = FAMILIES[family].call[1]
    breaks = (f"if (x) {{ y }}{end} or {call}", f"like {end} or {call}", f"{call} or {call}")
    for quoted in breaks[: 1 if family == "qwen3" else 3]:
        quoting = call.replace("two", quoted, 1)
        assert is_whole_or_text(renderer, prompt, f"So.{quoting}", []) is None
    if family.startswith("qwen3"):
        both = head + call.replace("</tool_call>", "") + call
        assert is_whole_or_text(renderer, prompt, both, [CALL, CALL]) is None, "one is not closed"


@pytest.mark.parametrize("family", MARKED)
def test_json_in_the_tag_of_any_family_is_a_call(family: str) -> None:
    renderer = renderer_of(family)
    prompt, head, _ = replies(family)
    begin, end = FAMILIES[family].call
    for key in ("arguments", "parameters"):
        text = head + begin + json.dumps({"name": CALL[0], key: CALL[1]}) + end
        assert calls_of(read(renderer, prompt, ids_of(renderer, text))) == [CALL]
    for wrong in (
        {"name": "write"},
        {"name": "write", "text": "x"},
        {"name": "write", "argument": {}},
    ):
        text = begin + json.dumps(wrong) + end
        reply = read(renderer, prompt, ids_of(renderer, text))
        assert (reply.text[-len(text) :], reply.tool_calls) == (text, ())


def ids_of(renderer: Renderer, text: str) -> list[int]:
    return [*renderer.encode(text), renderer.stop_tokens[0]]
