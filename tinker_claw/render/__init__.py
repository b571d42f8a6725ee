"""Messages to tokens and sampled tokens to replies, over the `renderers` package.

Rule: sampled ids are never encoded again; a prompt is either rendered in full or is the sampled
stream with new tokens behind it.
"""

from tinker_claw.render.layout import Layout, Prompt
from tinker_claw.render.renderer import Renderer, family_of
from tinker_claw.render.stops import CutStream
from tinker_claw.render.stream import Delta, ReplyStream
from tinker_claw.render.switches import Switches, switches

__all__ = [
    "CutStream",
    "Delta",
    "Layout",
    "Prompt",
    "Renderer",
    "ReplyStream",
    "Switches",
    "family_of",
    "switches",
]
