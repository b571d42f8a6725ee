"""Requests of chat completions, parsed."""

from __future__ import annotations

from tinker_claw.formats.base import GenerationRequest
from tinker_claw.formats.chat import Chat


def parse_chat(body: bytes) -> GenerationRequest:
    """Read a body as the first request of a gateway."""
    chat = Chat()
    return chat.parse(body, chat.routes[0], "")
