"""A tokenizer from its folder: as `AutoTokenizer` reads it, without torch."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from renderers.base import load_tokenizer

from tests.support.lives import product
from tests.support.openclaw import assistant, tool, user
from tests.support.tinker import wire_process
from tinker_claw.render.outside_text import CutTokenizer
from tinker_claw.render.tokenizer import load
from tinker_claw.shipped import MODEL_DIR

MARKS = list(load_tokenizer(str(MODEL_DIR)).get_added_vocab())
TOOLS = [
    {"type": "function", "function": {"name": "ls", "description": "größe <b>", "strict": False}}
]
TALK = [
    {"role": "system", "content": "Be brief."},
    user("look"),
    {"reasoning_content": "I must.", **assistant("So.", ("call1", "ls", '{"path":"ü"}'))},
    tool("call1", "a.txt"),
    assistant("Done."),
]


def ours_in(folder: Path) -> CutTokenizer:
    ours = load(str(folder))
    return CutTokenizer(ours)


@pytest.fixture(scope="module")
def both() -> tuple[CutTokenizer, Any]:
    """Ours and that of transformers."""
    return ours_in(MODEL_DIR), load_tokenizer(str(MODEL_DIR))


@given(pieces=st.lists(st.one_of(st.sampled_from(MARKS), st.text()), max_size=6))
def test_text_to_ids_and_back_is_as_transformers_has_it(
    both: tuple[CutTokenizer, Any], pieces: list[str]
) -> None:
    ours, theirs = both
    text = "".join(pieces)
    given: dict[str, Any] = {"add_special_tokens": False}
    assert ours.encode(text) == theirs.encode(text, **given)
    given["return_offsets_mapping"] = True
    mine, other = ours(text, **given), theirs(text, **given)
    assert mine == {name: list(other[name]) for name in mine}
    for skip in (False, True):
        ids = ours.encode(text)
        assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(
            ids, skip_special_tokens=skip
        )


def test_what_is_known_of_tokens_is_as_transformers_has_it(
    both: tuple[CutTokenizer, Any],
) -> None:
    ours, theirs = both
    for name in ("name_or_path", "eos_token_id", "unk_token_id"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert ours.get_added_vocab() == theirs.get_added_vocab()
    assert set(ours.all_special_tokens) >= set(theirs.all_special_tokens)
    for token in ("<think>", "a", "no such token"):
        assert ours.convert_tokens_to_ids(token) == theirs.convert_tokens_to_ids(token)


FOR_ALL = (
    "{{ bos_token }}{% for m in messages %}\n  {%- if loop.index > 9 %}{% break %}{% endif %}"
    "[{{ m.role }}] {{ m.thinking }} {{ m.content }} {{ (m.tool_calls or []) | tojson }}\n"
    "{% generation %}{% set x = 1 %}!{% endgeneration %}{{ x is defined }}{% endfor %}"
    "{% if add_generation_prompt %}{{ eos_token }}{{ flag }}{{ documents }}{% endif %}"
)
WITH_TOOLS = FOR_ALL + "{{ tools | tojson(indent=2) }}"


def folder_with(folder: Path, settings: dict[str, Any], **files: str) -> Path:
    """Make the shipped tokenizer with other settings."""
    shutil.copy(MODEL_DIR / "tokenizer.json", folder)
    shipped = json.loads((MODEL_DIR / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**shipped, **settings}))
    for name, text in files.items():
        (folder / f"{name}.jinja").write_text(text)
    return folder


@pytest.mark.parametrize("form", ["shipped", "a string", "by name", "a file", "several files"])
def test_a_chat_template_says_what_it_says_in_transformers(tmp_path: Path, form: str) -> None:
    bos = {"content": "<|im_start|>", "__type": "AddedToken"}
    settings: dict[str, Any] = {"bos_token": bos}
    files: dict[str, str] = {}
    if form == "a string":
        settings["chat_template"] = FOR_ALL
    elif form == "by name":
        settings["chat_template"] = [
            {"name": "default", "template": FOR_ALL},
            {"name": "tool_use", "template": WITH_TOOLS},
        ]
    elif form != "shipped":
        files["chat_template"] = FOR_ALL
    folder = folder_with(tmp_path, settings, **files)
    if form == "several files":
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(WITH_TOOLS)
    ours, theirs = ours_in(folder), load_tokenizer(str(folder))
    for tools in (None, TOOLS):
        asked: dict[str, Any] = {"tools": tools, "add_generation_prompt": True, "flag": "x"}
        text = ours.template_text(TALK, **asked)
        assert text == theirs.apply_chat_template(TALK, tokenize=False, **asked)
        ids = theirs.apply_chat_template(TALK, tokenize=True, return_dict=False, **asked)
        assert ours.apply_chat_template(TALK, tokenize=True, return_dict=False, **asked) == ids


def test_tokens_that_only_the_settings_name_are_added(tmp_path: Path) -> None:
    names = {str(4096 + at): {"content": f"<|more{at}|>", "special": True} for at in range(3)}
    folder = folder_with(tmp_path, {"added_tokens_decoder": names})
    ours, theirs = ours_in(folder), load_tokenizer(str(folder))
    text = "a<|more1|>b"
    assert ours.encode(text) == theirs.encode(text, add_special_tokens=False)
    assert 4097 in ours.encode(text)


def test_a_folder_without_tokenizer_json_is_left_to_transformers(tmp_path: Path) -> None:
    backend = json.loads((MODEL_DIR / "tokenizer.json").read_text())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(backend["vocab"]))
    merges = "\n".join(" ".join(pair) for pair in backend["merges"])
    (tmp_path / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    found = load(str(tmp_path))
    assert found.encode("look") == ours_in(MODEL_DIR).encode("look")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel says what a process has loaded")
def test_the_running_gateway_over_tinker_has_not_loaded_torch(tmp_path: Path) -> None:
    env = {"TINKER_API_KEY": "tml-test", "TINKER_TELEMETRY": "0"}
    with wire_process(tmp_path / "box") as box:
        remote = ("--backend", "tinker", "--base-url", box.url)
        with product(tmp_path / "data", env=env, backend=remote, python=sys.executable) as running:
            maps = Path(f"/proc/{running.process.pid}/maps").read_text()
            assert "libtorch" not in maps
            assert "tokenizers" in maps, "it is the right process"
            assert running.stop() == 0
