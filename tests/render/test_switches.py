"""Effects of chat_template_kwargs and reasoning_effort in several chat formats."""

from __future__ import annotations

from typing import Any

import pytest
import renderers
from renderers.base import load_tokenizer

from tests.gateways import chat
from tinker_claw.errors import RequestError
from tinker_claw.render.format import Switches, switches
from tinker_claw.render.renderer import Renderer
from tinker_claw.shipped import MODEL_DIR


def of(family: str, effort: str | None = None, **template: Any) -> Switches:
    return switches(renderers.config_from_name(family), template, effort)


@pytest.mark.parametrize(
    ("family", "effort", "template", "expected"),
    [
        ("qwen3", None, {}, {}),
        ("qwen3", None, {"enable_thinking": False}, {"enable_thinking": False}),
        ("qwen3", None, {"enable_thinking": True}, {}),  # what the template does anyway
        ("qwen3", "none", {}, {"enable_thinking": False}),
        ("qwen3", "minimal", {"enable_thinking": False}, {"enable_thinking": False}),
        ("qwen3", "high", {}, {}),
        ("qwen3.5", "low", {}, {"enable_thinking": True}),  # its own default goes by size
        ("qwen3.8", "medium", {}, {"reasoning_effort": "medium", "enable_thinking": True}),
        ("qwen3.8", "minimal", {}, {"enable_thinking": False}),
        ("gpt-oss", "high", {}, {"reasoning_effort": "high"}),
        ("gpt-oss", "medium", {}, {}),
        ("kimi-k2.5", "none", {}, {"thinking": False}),
        ("deepseek-v4", "high", {}, {"reasoning_effort": "high", "enable_thinking": True}),
        ("hy3", "none", {}, {}),
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
        ("qwen3", None, {"enable_thinking": 0}, "chat_template_kwargs.enable_thinking"),
        ("qwen3", None, {"thinking_retention": "all"}, "chat_template_kwargs.thinking_retention"),
        ("qwen3", "none", {"enable_thinking": True}, "reasoning_effort"),
        ("gpt-oss", None, {"reasoning_effort": "huge"}, "chat_template_kwargs.reasoning_effort"),
        ("gpt-oss", "none", {}, "reasoning_effort"),
        ("gpt-oss", "max", {}, "reasoning_effort"),
        ("llama-3", "low", {}, "reasoning_effort"),
        ("default", "low", {}, "reasoning_effort"),
        ("default", None, {"anything": True}, "chat_template_kwargs.anything"),
    ],
)
def test_what_a_format_cannot_do_is_named(
    family: str, effort: str | None, template: dict[str, Any], param: str
) -> None:
    with pytest.raises(RequestError, match=r"switch|level|value|contradicts") as raised:
        of(family, effort, **template)
    assert raised.value.param == param


def test_formats_with_switches_do_not_pile_up() -> None:
    """A switch may be any text, so that a client could cause thousands of formats to be made."""
    tokenizer = load_tokenizer(str(MODEL_DIR))
    added = ("begin_of_text", "end_of_text", "start_header_id", "end_header_id", "eot_id", "eom_id")
    tokenizer.add_special_tokens({"additional_special_tokens": [f"<|{name}|>" for name in added]})
    llama = Renderer(tokenizer, renderers.config_from_name("llama-3"))
    days = [f"{day} May 2026" for day in range(1, 25)]
    for day in [*days, days[0]]:
        asked = switches(llama.config, {"date_string": day}, None)
        assert day in llama.decode(llama.prompt(chat("hi"), switches=asked).tokens)
    assert llama._format.cache_info().currsize <= 16
    assert days[0] not in llama.decode(llama.prompt(chat("hi")).tokens)
