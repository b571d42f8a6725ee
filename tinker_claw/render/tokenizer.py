"""A model's tokenizer and chat template, read from its folder.

Rule: torch is not imported for it, nor is transformers, which imports torch wherever it is
installed: seconds and half a gigabyte for a gateway whose model is elsewhere. The model was trained
with its `tokenizer.json`; a folder without one is left to transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, NoReturn, cast

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from renderers.base import load_tokenizer
from tokenizers import AddedToken, Tokenizer

from tinker_claw.render.eyes import read_json


def load(model: str) -> Any:
    """Load the tokenizer of a local folder or hub id.

    Raises:
        OSError, ValueError, ...: there is none, or it cannot be read.
    """
    folder = Path(model)
    config = read_json(folder / "tokenizer_config.json")
    if not (folder / "tokenizer.json").exists() or "auto_map" in config:
        return load_tokenizer(model)
    return FileTokenizer(folder, config)


class FileTokenizer:
    """The tokenizer interface of the `renderers` package, over the file's tokenizer."""

    is_fast = True

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        self.name_or_path = str(folder)
        self.backend_tokenizer = _backend(folder / "tokenizer.json", config)
        named = {**read_json(folder / "special_tokens_map.json"), **config}
        self._named = {
            name: text
            for name, value in named.items()
            if name.endswith("_token") and (text := _content(value)) is not None
        }
        self.chat_template = _templates(folder, config)
        self.eos_token_id = self._id_of("eos_token")
        self.unk_token_id = self._id_of("unk_token")

    @cached_property
    def all_special_tokens(self) -> list[str]:
        known = self.backend_tokenizer.get_added_tokens_decoder().values()
        return [token.content for token in known if token.special]

    def get_added_vocab(self) -> dict[str, int]:
        known = self.backend_tokenizer.get_added_tokens_decoder()
        return {token.content: at for at, token in known.items()}

    def convert_tokens_to_ids(self, token: str) -> int | None:
        """Return a token's id; for a text that is no token the unknown token's id, or None."""
        found = self.backend_tokenizer.token_to_id(token)
        return self.unk_token_id if found is None else found

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return self.backend_tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        tokenize: bool = False,
        **given: Any,
    ) -> str:
        """Return the template's text; `tokenize` is accepted as in transformers."""
        templates = self.chat_template
        name = "tool_use" if tools and "tool_use" in templates else "default"
        if name not in templates:
            raise ValueError("the tokenizer has no chat template")
        return _compiled(templates[name]).render(
            messages=[_both_names(message) for message in messages],
            tools=tools,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **{**self._named, **given},
        )

    def _id_of(self, name: str) -> int | None:
        return self.backend_tokenizer.token_to_id(self._named.get(name, ""))


def _backend(file: Path, config: Mapping[str, Any]) -> Tokenizer:
    try:
        backend = Tokenizer.from_file(str(file))
    except Exception as error:  # it raises nothing more specific
        raise ValueError(f"{file} cannot be read: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    listed: Mapping[str, Mapping[str, Any]] = config.get("added_tokens_decoder") or {}
    missing = [
        AddedToken(**{k: v for k, v in token.items() if k != "__type"})
        for _, token in sorted(listed.items(), key=lambda entry: int(entry[0]))
        if backend.token_to_id(token["content"]) is None
    ]
    backend.add_tokens(missing)
    known = backend.get_added_tokens_decoder().values()
    if backend.normalizer is None or not any(token.normalized for token in known):
        return backend
    # If found in normalised text, a token could have other spellings than its own.
    told = json.loads(backend.to_str())
    told["added_tokens"] = [token | {"normalized": False} for token in told["added_tokens"]]
    return Tokenizer.from_str(json.dumps(told))


def _templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the templates by name; "default" is for everything without a template of its own."""
    told = config.get("chat_template")
    if isinstance(told, str):
        told = [{"name": "default", "template": told}]
    found = {one["name"]: one["template"] for one in told or ()}
    for file in (folder / "additional_chat_templates").glob("*.jinja"):
        found[file.stem] = file.read_text(encoding="utf-8")
    if (file := folder / "chat_template.jinja").exists():
        found["default"] = file.read_text(encoding="utf-8")
    return found


def _both_names(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Add reasoning as `thinking`, too, which some templates call it."""
    reasoning = message.get("reasoning_content")
    return message if reasoning is None else {"thinking": reasoning, **message}


def _content(value: Any) -> str | None:
    """Return a token's text, which is written in two ways."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


class _Generation(Extension):
    """{% generation %} marks the assistant's part; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


_ENVIRONMENT = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
)
"""What chat templates are written for."""
# Without jinja2's escapes for web pages.
_ENVIRONMENT.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
_ENVIRONMENT.globals.update(cast("Any", {"raise_exception": _raise, "strftime_now": _now}))


@lru_cache(maxsize=8)
def _compiled(template: str) -> Template:
    return _ENVIRONMENT.from_string(template)
