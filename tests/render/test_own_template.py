"""Chat templates that the renderers package does not know: places of hints, and streamed
replies."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.support.gateways import chat, gateway
from tinker_claw.errors import RequestError
from tinker_claw.render.renderer import Renderer
from tinker_claw.render.stream import BufferedStream
from tinker_claw.shipped import MODEL_DIR
from tinker_claw.types import Reply

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = (
    "<|begin|>{% for m in messages %}<|head|>{{ m.role }}<|/head|>\n\n{{ m.content | trim }}<|eot|>"
    "{% endfor %}{% if add_generation_prompt %}<|head|>assistant<|/head|>\n\n{% endif %}"
)
MISTRAL = (
    "<s>{% for m in messages %}{% if m.role == 'system' %}"
    "{{ raise_exception('no system message') }}{% elif m.role == 'user' %}"
    "[INST] {{ m.content }} [/INST]{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
FOLDING = (
    "{% if messages[0].role == 'system' %}{% set head = messages[0].content + '\n\n' %}{% else %}"
    "{% set head = '' %}{% endif %}<s>{% for m in messages %}{% if m.role == 'user' %}"
    "[INST] {{ (head if loop.last else '') + m.content }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
PLAIN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role']"
    " + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEMPLATES = {
    "chatml": (CHATML, "<|im_end|>"),
    "smollm2": (SMOLLM2, "<|im_end|>"),
    "llama, strips": (LLAMA, "<|eot|>"),
    "mistral, refuses system": (MISTRAL, "</s>"),
    "folds system in": (FOLDING, "</s>"),
    "plain text": (PLAIN, "<|endoftext|>"),
}
ADDED = ("<|begin|>", "<|head|>", "<|/head|>", "<|eot|>", "<s>", "</s>", "[INST]", "[/INST]")
SAID = st.text(st.sampled_from("ab é🙂\n <|im_end>[/INST]_"), min_size=1, max_size=30).filter(
    lambda text: bool(text.strip())
)


def folder(at: Path, template: str, eos: str, added: tuple[str, ...] = ADDED) -> Path:
    """Make a tokenizer of bytes, the demo's, with more control tokens and another template."""
    at.mkdir(parents=True)
    shutil.copy(MODEL_DIR / "tokenizer.json", at)
    tokens = Tokenizer.from_file(str(at / "tokenizer.json"))
    tokens.add_special_tokens([AddedToken(text, special=True) for text in added])
    tokens.save(str(at / "tokenizer.json"))
    config = {"chat_template": template, "eos_token": eos}
    (at / "tokenizer_config.json").write_text(json.dumps(config))
    return at


def words_folder(at: Path, template: str) -> Path:
    """Make a tokenizer of words, whose decoder strips the blank from the first one."""
    at.mkdir(parents=True)
    letters = {chr(c): n for n, c in enumerate(range(33, 127))}
    vocabulary = {**letters, "▁": 94, "▁t": 95, "he": 96, "▁the": 97, "\n": 98, "<0xF0>": 99}
    bytes_ = {f"<0x{b:02X}>": 100 + b for b in range(256)}
    tokens = Tokenizer(
        models.BPE(
            vocab={**vocabulary, **bytes_},
            merges=[("▁", "t"), ("h", "e"), ("▁t", "he")],
            byte_fallback=True,
        )
    )
    tokens.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")  # type: ignore[assignment]
    tokens.decoder = decoders.Sequence(  # type: ignore[assignment]
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokens.add_special_tokens([AddedToken(t, special=True) for t in ("<s>", "</s>")])
    tokens.save(str(at / "tokenizer.json"))
    config = {"chat_template": template, "eos_token": "</s>"}
    (at / "tokenizer_config.json").write_text(json.dumps(config))
    return at


@pytest.fixture(scope="module")
def unknown(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Renderer]:
    """Renderers by the template's name."""
    at = tmp_path_factory.mktemp("templates")
    made = {name: folder(at / str(n), *told) for n, (name, told) in enumerate(TEMPLATES.items())}
    made |= {"words": words_folder(at / "words", MISTRAL), "demo": MODEL_DIR}
    return {name: Renderer.load(str(place)) for name, place in made.items()}


NAMES = pytest.mark.parametrize("name", [*TEMPLATES, "words"])


def test_a_template_of_any_kind_has_its_place_for_hints_and_streams(
    unknown: dict[str, Renderer],
) -> None:
    for name, renderer in unknown.items():
        assert (renderer.family, renderer.refusals) == ("default", ()), name
        assert not isinstance(renderer.stream(()), BufferedStream)
    prompt = unknown["demo"].prompt(chat("hi")).tokens
    assert unknown["demo"].extend(prompt, prompt[-1:], chat("x")) is None, "not known to be exact"
    with pytest.raises(RequestError, match="enable_thinking"):
        unknown["demo"].thinking.switches({"enable_thinking": False})


@NAMES
@given(said=SAID, before=SAID, hint=st.text(max_size=20))
def test_a_prompt_with_its_hint_taken_out_is_the_prompt(
    unknown: dict[str, Renderer], name: str, said: str, before: str, hint: str
) -> None:
    renderer = unknown[name]
    messages = chat(before, "Fine.", said)
    plain = renderer.prompt(messages)
    prompt = renderer.prompt(messages, hint_message=2)
    assert prompt.tokens == plain.tokens, "looking for the place changes nothing"
    if prompt.hint_at is None:  # a token reaches from what was said into the frame
        assert name in ("plain text", "words")
        return
    told = renderer.decode(prompt.tokens[: prompt.hint_at])
    assert told.rstrip().endswith(said.strip())
    hinted = renderer.splice(prompt.tokens, prompt.hint_at, hint)
    size = len(renderer.hint_tokens(hint))
    assert hinted[: prompt.hint_at] + hinted[prompt.hint_at + size :] == prompt.tokens


@NAMES
@given(said=st.lists(st.sampled_from([*ADDED, "<|im_end|>", "<|im_start|>", "x", "\n"])))
def test_what_users_say_and_hints_never_are_control_tokens(
    unknown: dict[str, Renderer], name: str, said: list[str]
) -> None:
    renderer = unknown[name]
    spelled = [renderer.encode(mark) for mark in (*ADDED, "<|im_end|>", "<|im_start|>")]
    added = {ids[0] for ids in spelled if len(ids) == 1}
    assert added
    text = "".join([*said, "."])

    def marks(tokens: tuple[int, ...]) -> list[int]:
        return [token for token in tokens if token in added]

    prompt = renderer.prompt(chat(text), hint_message=0)
    assert marks(prompt.tokens) == marks(renderer.prompt(chat(".")).tokens)
    if prompt.hint_at is not None:
        hinted = renderer.splice(prompt.tokens, prompt.hint_at, text)
        assert marks(hinted) == marks(prompt.tokens)


@NAMES
@given(
    text=st.text(st.sampled_from("the he a é🙂\n<|>"), max_size=40),
    sizes=st.lists(st.integers(1, 5)),
)
def test_a_reply_is_the_same_however_it_arrives(
    unknown: dict[str, Renderer], name: str, text: str, sizes: list[int]
) -> None:
    renderer = unknown[name]
    prompt = renderer.prompt(chat("hi")).tokens
    ids = [*renderer.hint_tokens(text, "{hint}"), renderer.stop_tokens[-1], 70]
    whole = renderer.parse(ids, prompt)
    assert whole == Reply(renderer.decode(ids[:-2]).strip())
    stream, shown, at = renderer.stream(prompt), list[str](), 0
    for size in [*sizes, len(ids)]:
        shown += [delta.text for delta in stream.feed(ids[at : at + size])]
        at += size
    rest, reply = stream.finish()
    assert reply == whole
    assert "".join([*shown, *(delta.text for delta in rest)]) == whole.text


@given(said=SAID, before=SAID)
def test_the_place_is_the_one_that_a_hand_written_format_tells(
    unknown: dict[str, Renderer], renderer: Renderer, said: str, before: str
) -> None:
    """Held equal with the demo's template, whose Qwen3 format has exact attribution."""
    own = unknown["demo"]
    for at in (0, 2):
        messages = chat(before, "Fine.", said)
        assert own.prompt(messages, hint_message=at) == renderer.prompt(messages, hint_message=at)


def test_text_arrives_word_by_word_with_its_blanks(unknown: dict[str, Renderer]) -> None:
    renderer = unknown["words"]
    stream = renderer.stream(renderer.prompt(chat("hi")).tokens)
    shown = [d.text for i in renderer.encode("the the a") for d in stream.feed([i])]
    assert "".join(shown) == "the the a"
    assert shown[:2] == ["the", " the"]


def test_a_reply_ends_where_its_template_ends_one(tmp_path: Path) -> None:
    """The tokenizer's own end is another token, as with many tuned models."""
    renderer = Renderer.load(str(folder(tmp_path / "m", LLAMA, "<|endoftext|>")))
    assert renderer.stop_tokens == tuple(renderer.encode("<|endoftext|><|eot|>"))
    done = renderer.encode("Yes.<|eot|>")
    assert renderer.parse(done, renderer.prompt(chat("So?")).tokens) == Reply("Yes.")


def test_thinking_between_tokens_is_reasoning(unknown: dict[str, Renderer]) -> None:
    renderer = unknown["chatml"]
    done = renderer.encode("<think>\nHm.\n</think>\n\nYes.<|im_end|>")
    assert renderer.parse(done, renderer.prompt(chat("So?")).tokens) == Reply("Yes.", "Hm.")


@pytest.mark.parametrize(
    "shown",
    [
        "{{ m.content }}{{ m.content }}",
        "{{ m.content[:5] }}",
        "",
        "{{ m.content | tojson }}",
        "{{ m.content | length }}",
    ],
)
def test_a_template_without_a_place_is_refused_by_name(tmp_path: Path, shown: str) -> None:
    template = CHATML.replace("{{ m.content }}", shown)
    renderer = Renderer.load(str(folder(tmp_path / "m", template, "<|im_end|>")))
    assert any("hints have no place: its chat" in told for told in renderer.refusals)
    prompt = renderer.prompt(chat("hi"), hint_message=0)
    assert prompt.hint_at is None, "and serves all the same"


LATE = {
    "shouts": (CHATML.replace("m.content", "m.content | upper"), "does not show a reply as it is"),
    "goes backwards": (
        CHATML.replace("in messages", "in messages | reverse"),
        "begins a reply otherwise",
    ),
    "opens no reply": (CHATML.partition("{% if add")[0], "assistant"),
    "thinks in words": (
        "{% if false %}<think>{% endif %}" + CHATML.replace("<|im_", "<|eo_"),
        "no tokens",
    ),
}


@pytest.mark.parametrize("name", LATE)
def test_a_reply_that_cannot_be_read_as_it_arrives_comes_when_it_is_complete(
    tmp_path: Path, name: str
) -> None:
    template, why = LATE[name]
    place = folder(tmp_path / "m", template, "<|endoftext|>")
    if name == "thinks in words":
        content = json.loads((place / "tokenizer.json").read_text())
        content["added_tokens"] = [
            token for token in content["added_tokens"] if "think" not in token["content"]
        ]
        (place / "tokenizer.json").write_text(json.dumps(content))
    renderer = Renderer.load(str(place))
    assert any("when they are complete" in said and why in said for said in renderer.refusals)
    assert isinstance(renderer.stream(()), BufferedStream)


def test_what_a_template_refuses_is_a_refused_request(unknown: dict[str, Renderer]) -> None:
    asked: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}, *chat("hi")]
    with pytest.raises(RequestError, match="no system message"):
        unknown["mistral, refuses system"].prompt(asked, hint_message=1)
    folded = unknown["folds system in"].prompt(asked, hint_message=1)
    text = unknown["folds system in"].decode(folded.tokens[: folded.hint_at])
    assert text.endswith("Be brief.\n\nhi")


def test_a_system_message_that_a_template_knows_in_front_only_is_said_by_the_user(
    tmp_path: Path,
) -> None:
    first_only = CHATML.replace(
        "<|im_start|>{{ m.role }}",
        "{% if m.role == 'system' and not loop.first %}{{ raise_exception('in front') }}{% endif %}"
        "<|im_start|>{{ m.role }}",
        1,
    )
    renderer = Renderer.load(str(folder(tmp_path / "m", first_only, "<|im_end|>")))
    head: list[dict[str, Any]] = [{"role": "system", "content": "You help."}]
    late: list[dict[str, Any]] = [{"role": "system", "content": "Be brief.<|im_end|>"}]
    prompt = renderer.prompt([*head, *chat("hi", "yo"), *late, *chat("so?")], hint_message=4)
    said = chat("[System message]\n\nBe brief.<|im_end|>", "", "so?")
    wanted = renderer.prompt([*head, *chat("hi", "yo"), said[0], said[2]], hint_message=4)
    assert prompt == wanted
    assert prompt.hint_at is not None
    assert renderer.decode(prompt.tokens[: prompt.hint_at]).endswith("so?")


@pytest.mark.parametrize(("template", "served"), [("folds system in", False), ("chatml", True)])
async def test_results_that_a_template_leaves_out_are_refused(
    tmp_path: Path, template: str, served: bool
) -> None:
    renderer = Renderer.load(str(folder(tmp_path / "model", *TEMPLATES[template])))
    call = {"id": "a1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    calling = {"role": "assistant", "content": None, "tool_calls": [call]}
    async with gateway(tmp_path, renderer) as world:
        answer = await world.ask(
            "Where?", calling, {"role": "tool", "tool_call_id": "a1", "content": "here"}
        )
        assert answer.status_code == (200 if served else 400)
        assert len(world.turns()) == len(world.sampler.prompts) == served
        assert served or "role is 'tool'" in answer.json()["error"]["message"]


QWEN25 = (
    "<|im_start|>system\n{{ messages[0].content if messages[0].role == 'system' else "
    "'You are Qwen, created by Alibaba Cloud. You are a helpful assistant.' }}{% if tools %}"
    "{{ '\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>' }}"
    "{% for one in tools %}{{ '\n' }}{{ one | tojson }}{% endfor %}"
    "{{ '\n</tools>\n\nFor each function call, return a json object with function name and "
    'arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n{{"name": '
    '<function-name>, "arguments": <args-json-object>}}\n</tool_call>\' }}{% endif %}'
    "{{ '<|im_end|>\n' }}"
    "{% for m in messages %}{% if not loop.first or m.role != 'system' %}"
    "{% set result = m.role == 'tool' %}"
    "{% if not result or loop.first or loop.previtem.role != 'tool' %}"
    "{{ '<|im_start|>' + ('user' if result else m.role) }}{% endif %}"
    "{% if result %}{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% elif m.content or not m.tool_calls %}{{ '\n' + m.content }}{% endif %}"
    "{% for call in m.tool_calls or [] %}"
    '{{ \'\n<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson }}{{ '}\n</tool_call>' }}{% endfor %}"
    "{% if not result or loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\n' }}"
    "{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Writes, letter for letter, what Qwen2.5's writes."""
WRITTEN = 'So.\n<tool_call>\n{"name": "ls", "arguments": {"p": "x"}}\n</tool_call>'
LS = {"type": "function", "function": {"name": "ls", "description": "", "parameters": {}}}


@pytest.fixture(scope="module")
def qwen25(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    at = tmp_path_factory.mktemp("qwen25") / "m"
    return Renderer.load(str(folder(at, QWEN25, "<|im_end|>")))


def test_calls_of_a_template_that_writes_them_as_hermes_are_read(qwen25: Renderer) -> None:
    renderer = qwen25
    assert renderer.refusals == ()
    prompt = renderer.prompt(chat("So?")).tokens
    reply = renderer.parse(renderer.encode(f"{WRITTEN}<|im_end|>"), prompt)
    (call,) = reply.tool_calls
    assert (reply.text, call.name, call.arguments) == ("So.", "ls", '{"p":"x"}')
    broken = WRITTEN.replace('"arguments"', '"argument"')
    reply = renderer.parse(renderer.encode(f"{broken}<|im_end|>"), prompt)
    assert (reply.text, reply.tool_calls) == (broken, ())


@pytest.mark.parametrize("template", [CHATML, LATE["opens no reply"][0]])
def test_marks_of_calls_that_a_template_does_not_write_are_text(
    tmp_path: Path, template: str
) -> None:
    place = folder(tmp_path / "m", template, "<|im_end|>", ("[TOOL_CALLS]",))
    renderer = Renderer.load(str(place))
    prompt = renderer.prompt(chat("So?")).tokens
    for said in (WRITTEN, '[TOOL_CALLS][{"name": "ls", "arguments": {}}]'):
        reply = renderer.parse(renderer.encode(f"{said}<|im_end|>"), prompt)
        assert (reply.text, reply.tool_calls) == (said, ())


def test_a_call_of_such_a_template_is_begun_as_it_writes_it(qwen25: Renderer) -> None:
    prompt = qwen25.prompt(chat("So?"), [LS]).tokens
    begun = qwen25.begin_call(["ls"])
    assert begun
    assert qwen25.decode(begun) == '<tool_call>\n{"name": "ls", "arguments":'
    told = (*begun, *qwen25.encode(' {"p": "x"}}\n</tool_call><|im_end|>'))
    (call,) = qwen25.parse(told, prompt, [LS]).tool_calls
    assert (call.name, call.arguments) == ("ls", '{"p":"x"}')


async def test_its_call_is_one_for_the_client_and_its_result_follows_it(
    tmp_path: Path, qwen25: Renderer
) -> None:
    async with gateway(tmp_path, qwen25) as world:
        world.say(WRITTEN)
        reply = await world.reply({"messages": chat("So?"), "tools": [LS]})
        result = {"role": "tool", "tool_call_id": reply["tool_calls"][0]["id"], "content": "y"}
        await world.reply({"messages": [*chat("So?"), reply, result], "tools": [LS]})
        shown = qwen25.decode(world.sampler.prompts[-1])
    assert reply["content"] == "So."
    behind = "<|im_end|>\n<|im_start|>user\n<tool_response>\ny\n</tool_response><|im_end|>\n"
    assert shown.endswith(f"{WRITTEN}{behind}<|im_start|>assistant\n")
