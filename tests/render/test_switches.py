"""Effects of chat_template_kwargs and reasoning_effort in several chat formats."""

from __future__ import annotations

from typing import Any

import pytest
import renderers
from renderers.base import load_tokenizer

from tests.support.gateways import chat
from tinker_claw.errors import ConfigError, RequestError
from tinker_claw.render.format import ChatFormat
from tinker_claw.render.renderer import Renderer
from tinker_claw.render.switches import Decides, Switches, Thinking
from tinker_claw.shipped import MODEL_DIR


def thinking(family: str, own: str = "", *, opens: bool = False) -> Thinking:
    return Thinking.of(renderers.config_from_name(family), own, opens=opens)


def of(family: str, effort: str | None = None, **template: Any) -> Switches:
    return thinking(family).switches(template, effort)[0]


@pytest.mark.parametrize(
    ("family", "effort", "template", "expected"),
    [
        ("qwen3", None, {}, {"enable_thinking": False}),  # who asks nothing gets no thinking
        ("qwen3.5", None, {}, {"enable_thinking": False}),
        ("qwen3.8", None, {"reasoning_effort": "low"}, {"reasoning_effort": "low"}),
        ("gemma4", None, {}, {}),
        ("qwen3", None, {"enable_thinking": False}, {"enable_thinking": False}),
        ("qwen3", None, {"enable_thinking": True}, {}),  # what the template does anyway
        ("qwen3", "none", {}, {"enable_thinking": False}),
        ("qwen3", "high", {}, {}),
        ("qwen3.5", "low", {}, {"enable_thinking": True}),  # its own default goes by size
        ("qwen3.8", "medium", {}, {"reasoning_effort": "medium", "enable_thinking": True}),
        ("qwen3.8", "minimal", {}, {"enable_thinking": False}),
        ("gpt-oss", "high", {}, {"reasoning_effort": "high"}),
        ("llama-3", "none", {}, {}),  # asked not to think, which it never does
        ("kimi-k2.5", "none", {}, {"thinking": False}),
        ("deepseek-v4", "high", {}, {"reasoning_effort": "high", "enable_thinking": True}),
        ("hy3", "high", {}, {"reasoning_effort": "high"}),
        ("glm-4.5", "minimal", {}, {"enable_thinking": False}),
    ],
)
def test_switches(
    family: str, effort: str | None, template: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert of(family, effort, **template) == tuple(sorted(expected.items()))


@pytest.mark.parametrize(
    ("family", "effort", "template", "param"),
    [
        ("qwen3", None, {"tone": "kind"}, "chat_template_kwargs.tone"),
        ("qwen3", None, {"enable_thinking": "no"}, "chat_template_kwargs.enable_thinking"),
        ("qwen3", None, {"thinking_retention": "all"}, "chat_template_kwargs.thinking_retention"),
        ("qwen3", "none", {"enable_thinking": True}, "reasoning_effort"),
        ("gpt-oss", None, {"reasoning_effort": "huge"}, "chat_template_kwargs.reasoning_effort"),
        ("gpt-oss", "none", {}, "reasoning_effort"),
        ("llama-3", "low", {}, "reasoning_effort"),
        ("default", None, {"anything": True}, "chat_template_kwargs.anything"),
    ],
)
def test_what_a_format_cannot_do_is_named(
    family: str, effort: str | None, template: dict[str, Any], param: str
) -> None:
    with pytest.raises(RequestError, match=r"switch|level|value|contradicts") as raised:
        of(family, effort, **template)
    assert raised.value.param == param


QWEN3 = "{%- if add_generation_prompt %}<|im_start|>assistant\n{%- if enable_thinking is false %}"
INSTRUCT = "{{ reasoning_content }}</think>{%- if add_generation_prompt %}<|im_start|>assistant\n"
ALWAYS = "{%- if add_generation_prompt %}<|im_start|>assistant\n<think>\n"


@pytest.mark.parametrize(
    ("family", "own", "opens", "thinks", "silent"),
    [
        ("qwen3", QWEN3, False, True, True),
        ("qwen3", INSTRUCT, False, False, False),  # Qwen3-4B-Instruct-2507
        ("qwen3", ALWAYS, False, True, False),  # Qwen3-4B-Thinking-2507
        ("qwen3", "", False, True, True),
        ("hy3", "", False, True, True),
        ("gpt-oss", "", False, True, False),
        ("glm-5.3", "", True, True, False),
        ("deepseek-r1", "", True, True, False),
        ("llama-3", "", False, False, False),
        ("default", INSTRUCT, False, False, False),
        ("default", QWEN3, False, True, False),  # its switch is out of reach
    ],
)
def test_a_model_thinks_or_not_by_its_format_and_its_own_template(
    family: str, own: str, opens: bool, thinks: bool, silent: bool
) -> None:
    found = thinking(family, own, opens=opens)
    assert (found.on is not None, found.off is not None) == (thinks, silent)
    for decides, can in (("on", thinks), ("off", silent or not thinks)):
        if can:
            found.check(decides, "this model")
        else:
            says = "cannot think" if decides == "on" else "always thinks"
            with pytest.raises(ConfigError, match=f"^--thinking {decides}: this model {says}"):
                found.check(decides, "this model")
    if not thinks:
        assert found.efforts == ()
        assert found.switches({}) == found.switches({}, "none") == ((), False)


@pytest.mark.parametrize(
    ("decides", "effort", "template", "expected", "overrules"),
    [
        ("on", None, {}, {"enable_thinking": True}, False),
        ("on", "none", {}, {"enable_thinking": True}, True),
        ("on", "low", {}, {"enable_thinking": True, "reasoning_effort": "low"}, False),
        ("off", None, {}, {"enable_thinking": False}, False),
        ("off", "low", {}, {"enable_thinking": False}, True),
        ("off", None, {"enable_thinking": True}, {"enable_thinking": False}, True),
        ("off", None, {"preserve_thinking": False}, None, False),
        ("auto", None, {"enable_thinking": True}, {"enable_thinking": True}, False),
    ],
)
def test_what_the_flag_says_goes_before_what_a_client_asks(
    decides: Decides,
    effort: str | None,
    template: dict[str, Any],
    expected: dict[str, Any] | None,
    overrules: bool,
) -> None:
    expected = {"enable_thinking": False, **template} if expected is None else expected
    qwen = thinking("qwen3.8")
    found = qwen.switches(template, effort, decides=decides)
    assert found == (tuple(sorted(expected.items())), overrules)


def test_formats_with_switches_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A switch may be any text, so that a client could cause thousands of formats to be formats."""
    tokenizer = load_tokenizer(str(MODEL_DIR))
    added = ("begin_of_text", "end_of_text", "start_header_id", "end_header_id", "eot_id", "eom_id")
    tokenizer.add_special_tokens({"additional_special_tokens": [f"<|{name}|>" for name in added]})
    formats = list[None]()

    def counted(*parts: Any) -> ChatFormat:
        formats.append(None)
        return ChatFormat(*parts)

    monkeypatch.setattr("tinker_claw.render.renderer.ChatFormat", counted)
    llama = Renderer(tokenizer, renderers.config_from_name("llama-3"))
    days = [f"{day} May 2026" for day in range(1, 25)]
    for day in [*days, days[0]]:
        asked, _ = llama.thinking.switches({"date_string": day})
        assert day in llama.decode(llama.prompt(chat("hi"), switches=asked).tokens)
    assert len(formats) == 1 + len(days) + 1, "the first was not kept"
    assert days[0] not in llama.decode(llama.prompt(chat("hi")).tokens)
