"""Whether this model can do what a request asks of its chat format.

Rule: what the format would leave out is refused by name, never left out in silence.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from tinker_claw.errors import RequestError
from tinker_claw.render import Renderer, switches
from tinker_claw.wire import ChatRequest


def suited(renderer: Renderer, request: ChatRequest) -> ChatRequest:
    """The request, with the switches of its prompt.

    Raises:
        RequestError: the chat format has no place for something in it.
    """
    for i, message in enumerate(request.messages):
        # The name of a tool stands in the call that its result answers.
        named = "name" in message and message["role"] != "tool"
        if named and not _shows_names(renderer, message["role"]):
            raise RequestError(
                f"messages[{i}].name: this model's chat format shows no names; "
                "put it into the content.",
                param=f"messages[{i}].name",
            )
    if not request.template and request.reasoning_effort is None:
        return request
    found = switches(renderer.config, request.template, request.reasoning_effort)
    return replace(request, switches=found)


@lru_cache(maxsize=64)
def _shows_names(renderer: Renderer, role: str) -> bool:
    """Whether a message's name makes a difference to the prompt, by trying it."""

    def tokens(said: dict[str, str]) -> tuple[int, ...]:
        asked = {"role": "user", "content": "So?"}
        return renderer.prompt([said, asked] if said["role"] != "user" else [said]).tokens

    said = {"role": role, "content": "Well."}
    try:
        return tokens(said) != tokens({**said, "name": "Zoe"})
    except RequestError:
        return False
