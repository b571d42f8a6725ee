"""OpenAI's chat format: bytes in, a validated request out, and the JSON that goes back.

Rule: what cannot be honoured is refused with a sentence that names the field; nothing is dropped
in silence. Pure functions; no state, no I/O.
"""

from tinker_claw.wire.chunks import DONE, ReplyChunks
from tinker_claw.wire.messages import Joined, parts_of
from tinker_claw.wire.reply import ReplyHead, Usage, error_body, model_list, model_object, sse
from tinker_claw.wire.request import ChatRequest, parse_chat

__all__ = [
    "DONE",
    "ChatRequest",
    "Joined",
    "ReplyChunks",
    "ReplyHead",
    "Usage",
    "error_body",
    "model_list",
    "model_object",
    "parse_chat",
    "parts_of",
    "sse",
]
