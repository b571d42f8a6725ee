"""Switches of a model's chat template: what a request sets, and whether the model thinks first.

Rules: a switch is set exactly as asked or refused by name. A template's default is expressed by
omitting the switch, so that requests which mean the same have the same prompt. Whether a model that
can do both thinks is what `--thinking` says; with auto it is what the client asks, and where the
client asks nothing the model does not think.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import renderers
from renderers.base import merge_chat_template_kwargs

from tinker_claw.errors import ConfigError, RequestError
from tinker_claw.types import EFFORTS

Switches: TypeAlias = tuple[tuple[str, Any], ...]
"""Names and values, sorted by name; () leaves all to the template."""
Decides: TypeAlias = Literal["auto", "on", "off"]
"""Value of `--thinking`."""

_ON_OFF = ("enable_thinking", "thinking")
_EFFORT = "reasoning_effort"
_OFF = ("none", "minimal")
_NO_THINKING = "no_think"
_BEGINS = "<think>"


@dataclass(frozen=True, slots=True)
class Thinking:
    """Switches that make a model think before it replies, or keep it from that."""

    config: Any
    """The chat format's config, of the `renderers` package."""
    on: Mapping[str, Any] | None
    """Switches with which it thinks; None: it cannot think."""
    off: Mapping[str, Any] | None
    """Switches with which it does not; None: it cannot be told that."""

    @classmethod
    def of(cls, config: Any, own: str, *, opens: bool) -> Thinking:
        """Find out how one model thinks.

        Args:
            own: its tokenizer's own chat template, "" where there is none. Models of one format
                differ: Qwen3-4B-Instruct-2507 never thinks, and its template has no switch.
            opens: whether the format's prompt opens the thinking.
        """
        field_names = renderers.template_field_names(config)
        switch = next((name for name in _ON_OFF if name in field_names), None)
        if switch is not None and (not own or switch in own):
            return cls(config, {switch: True}, {switch: False})
        if switch is None and _EFFORT in field_names:
            silent = (level for level in (_NO_THINKING, "none") if _takes(config, {_EFFORT: level}))
            off = next(silent, None)
            on = {_EFFORT: "high"} if off and getattr(config, _EFFORT) == off else {}
            return cls(config, on, {_EFFORT: off} if off else None)
        hidden = config.name == "default" and _ON_OFF[0] in own  # a switch out of reach
        always = opens or hidden or _BEGINS in own.rpartition("add_generation_prompt")[2]
        return cls(config, {} if always else None, None)

    @classmethod
    def named(cls, family: str, own: str) -> Thinking:
        """As `of`, where only the name of the format is known."""
        return cls.of(renderers.config_from_name(family), own, opens=False)

    @property
    def efforts(self) -> tuple[str, ...]:
        """Efforts that a request may ask for, by the names of OpenAI's field."""
        if self.on is None:
            return ()
        return tuple(e for e in EFFORTS if _of_effort(self.config, e) is not None)

    def check(self, decides: Decides, model: str) -> None:
        """Raise ConfigError where this model cannot do as `--thinking` says."""
        if decides == "on" and self.on is None:
            raise ConfigError(f"--thinking on: {model} cannot think; leave it out")
        if decides == "off" and self.on is not None and self.off is None:
            raise ConfigError(
                f"--thinking off: {model} always thinks; leave it out, or name another model"
            )

    def switches(
        self,
        template: Mapping[str, Any],
        effort: str | None = None,
        effort_at: str = _EFFORT,
        decides: Decides = "auto",
    ) -> tuple[Switches, bool]:
        """Return the switches of a request's prompt, and whether `--thinking` overrules it.

        Args:
            template: the request's chat_template_kwargs.
            effort: reasoning effort that the request asks for.
            effort_at: the field that holds it.

        Raises:
            RequestError: this chat format has no such switch, or does not take the value.
        """
        options = {**template, **self._requested(template, effort, effort_at)}
        wanted = _thinks(options)
        thinks = {"on": True, "off": False}.get(decides, bool(wanted))
        decided = self.on if thinks else self.off
        if wanted is not thinks and decided is not None:
            others = {name: options[name] for name in options if name not in (*_ON_OFF, _EFFORT)}
            options = {**others, **decided}
        switches = tuple(
            (name, options[name])
            for name in sorted(options)
            if options[name] != getattr(self.config, name)
        )
        return switches, wanted is not None and wanted is not thinks

    def _requested(
        self, template: Mapping[str, Any], effort: str | None, effort_at: str
    ) -> Mapping[str, Any]:
        """Check what a request asks; return the switches that its effort means."""
        for name, value in template.items():
            where = f"chat_template_kwargs.{name}"
            if name not in renderers.template_field_names(self.config):
                raise RequestError(f"{where} is not a switch of this model.", param=where)
            if not _takes(self.config, {name: value}):
                raise RequestError(f"{where} does not take this value.", param=where)
        if effort is None or (effort in _OFF and self.on is None):
            return {}  # nothing is asked, or not to think of a model that cannot
        implied = _of_effort(self.config, effort)
        if implied is None:
            raise RequestError(
                f"{effort_at} {effort} is not a level of this model.", param=effort_at
            )
        for name, value in implied.items():
            if template.get(name, value) != value:
                raise RequestError(
                    f"{effort_at} {effort} contradicts chat_template_kwargs.{name}.",
                    param=effort_at,
                )
        return implied if self.on is not None else {}


def _thinks(switches: Mapping[str, Any]) -> bool | None:
    """Return whether switches ask for thinking; None: they leave it open."""
    values = [switches[name] for name in (*_ON_OFF, _EFFORT) if name in switches]
    return not any(value in (False, _NO_THINKING, "none") for value in values) if values else None


def _of_effort(config: Any, effort: str) -> Mapping[str, Any] | None:
    """Return the switches nearest to an effort: a level where there are any, else on or off; None:
    the model has no such level."""
    field_names = renderers.template_field_names(config)
    switch = next((name for name in _ON_OFF if name in field_names), None)
    off = effort in _OFF
    if _EFFORT in field_names:
        level = {_EFFORT: effort}
        if _takes(config, level):
            return level if switch is None else {**level, switch: not off}
        if off and _takes(config, {_EFFORT: _NO_THINKING}):
            return {_EFFORT: _NO_THINKING}
        if not off:
            return None
    return {switch: not off} if switch is not None else None


def _takes(config: Any, options: Mapping[str, Any]) -> bool:
    try:
        merged = merge_chat_template_kwargs(config, options)
    except (ValueError, TypeError):
        return False
    # The package reads "no" and 0 as False; here a value is taken literally.
    return all(
        getattr(merged, name) == value
        and isinstance(getattr(merged, name), bool) is isinstance(value, bool)
        for name, value in options.items()
    )
