"""Every top-level field of a chat request, and what becomes of it.

Rule: a field is in exactly one of the tables below. Honoured fields are read, neutral ones may only
hold a value that changes nothing, ignored ones could not change a reply; any other is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tinker_claw.errors import RequestError
from tinker_claw.wire.values import shown

HONOURED = frozenset(
    {
        "model",
        "messages",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "stream",
        "stream_options",
        "max_tokens",
        "max_completion_tokens",
        "temperature",
        "top_p",
        "top_k",
        "seed",
        "stop",
        "reasoning_effort",
        "chat_template_kwargs",
        "prompt_cache_key",
    }
)

IGNORED = frozenset(
    {
        "user",
        "safety_identifier",
        "metadata",
        "store",  # the ledger keeps every turn anyway
        "service_tier",
        "prompt_cache_retention",
        "prompt_cache_options",
        "prediction",  # makes a reply faster where it is used, never another one
    }
)


@dataclass(frozen=True, slots=True)
class Neutral:
    """A field that may be sent as long as it asks for nothing."""

    values: tuple[Any, ...]
    """Besides null."""
    because: str
    """Why no other value can be honoured."""


_UNTEMPERED = "replies are drawn from the model's own distribution"
_TEXT_ONLY = "this model writes text only"
_UNCONSTRAINED = "replies are not constrained to a format; ask for it in the prompt"
_TOOLS = "use tools and tool_choice"

NEUTRAL: Mapping[str, Neutral] = {
    "n": Neutral((1,), "one turn has one reply; send the request again for another"),
    "logprobs": Neutral(
        (False,), "a reply's tokens include thinking and calls, which its text does not show"
    ),
    "top_logprobs": Neutral((0,), "logprobs are not sent"),
    "logit_bias": Neutral(({},), _UNTEMPERED),
    "presence_penalty": Neutral((0,), _UNTEMPERED),
    "frequency_penalty": Neutral((0,), _UNTEMPERED),
    "repetition_penalty": Neutral((1,), _UNTEMPERED),
    "min_p": Neutral((0,), _UNTEMPERED),
    "response_format": Neutral(({"type": "text"},), _UNCONSTRAINED),
    "modalities": Neutral((["text"],), _TEXT_ONLY),
    "audio": Neutral((), _TEXT_ONLY),
    "functions": Neutral(([],), _TOOLS),
    "function_call": Neutral(("auto", "none"), _TOOLS),
    "verbosity": Neutral(("medium",), "ask for it in the prompt"),
    "web_search_options": Neutral((), "this server searches nothing; offer a tool that does"),
    "moderation": Neutral((), "nothing is moderated here"),
}


def refuse_unknown(fields: Mapping[str, Any]) -> None:
    """Raises RequestError, naming the first field that cannot be honoured."""
    for name, value in fields.items():
        if name in HONOURED or name in IGNORED:
            continue
        neutral = NEUTRAL.get(name)
        if neutral is None:
            known = shown(name)
            raise RequestError(f"{known} is not a field that this server knows.", param=known)
        if not any(_same(value, allowed) for allowed in neutral.values):
            raise RequestError(
                f"{name} is not supported with this value: {neutral.because}.", param=name
            )


def _same(value: Any, allowed: Any) -> bool:
    """Equal, and not as True equals 1."""
    return value == allowed and isinstance(value, bool) == isinstance(allowed, bool)
