"""Replies to an owner's past first messages, with a lesson or without it, and whether they follow
it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle

from tinker_claw.judge.endpoints import Endpoint
from tinker_claw.judge.following import NO, YES, follows, opposite, read_opposite
from tinker_claw.learner.parts import LoopParts
from tinker_claw.policy import Sampler
from tinker_claw.render.renderer import Renderer
from tinker_claw.tasks import together
from tinker_claw.types import Charge, Completion, StopReason, Turn, uncharged

TRIES = 3
"""Sentences sampled for each one that is wanted."""


@dataclass(frozen=True, slots=True)
class FirstMessage:
    """A past first message, without lessons in its prompt."""

    turn: Turn
    prompt: tuple[int, ...]
    opposite: str = ""
    """A request for the opposite of the lesson, behind the message; "": there is none."""


@dataclass(frozen=True, slots=True)
class LessonReply:
    """A reply to a message."""

    message: FirstMessage
    completion: Completion
    text: str
    score: float = 0.0
    """How much surer the base is, in nats, that it follows the lesson than that it does not."""

    @property
    def ended(self) -> bool:
        """The model ended it."""
        return self.completion.stop_reason is StopReason.STOP


class LessonReplies:
    """Samples replies, and asks the base about them, whose answers have probabilities."""

    def __init__(
        self,
        parts: LoopParts,
        renderer: Renderer,
        writer: Endpoint,
        *,
        context_tokens: int,
        soft: bool,
    ) -> None:
        """
        Args:
            writer: writes the requests for the opposite.
            soft: whether the backend trains on candidates with their probabilities.
        """
        self._parts = parts
        self._renderer = renderer
        self._writer = writer
        self._begun = renderer.begin_text()
        self._answers = [renderer.hint_tokens(word, "{hint}")[0] for word in (YES, NO)]
        self._context_tokens = context_tokens
        self.soft = soft and parts.training.opd_topk > 0
        """Whether replies have candidates to train on."""

    def fitting(self, turn_ids: Sequence[int], text: str) -> list[FirstMessage]:
        """Return these turns' messages; none whose prompt has no room or place for a text."""
        messages = list[FirstMessage]()
        for turn_id in turn_ids:
            turn = self._parts.ledger.turns.get(turn_id)
            prompt = turn.lesson_block.without(turn.prompt) if turn.lesson_block else turn.prompt
            if turn.lesson_block and turn.hint_at is not None:
                moved = turn.hint_at + len(prompt) - len(turn.prompt)
                turn = replace(turn, prompt=prompt, hint_at=moved, lesson_block=None)
            longer = self._renderer.with_system_text(prompt, text)
            most = min(self._parts.reply_tokens, turn.completion.params.max_tokens)
            if longer is not None and len(longer) + most <= self._context_tokens:
                messages.append(FirstMessage(turn, prompt))
        return messages

    async def sample(
        self,
        sampler: Sampler,
        messages: Sequence[FirstMessage],
        text: str | None = None,
        charge: Charge = uncharged,
    ) -> list[LessonReply]:
        """Return a reply to each message, at temperature 1.

        Args:
            text: the system prompt's last words; None: nothing is added.
        """

        async def reply(message: FirstMessage) -> LessonReply:
            params = message.turn.completion.params.to_learn_from(
                self._parts.reply_tokens, self._parts.training.opd_topk
            )
            prompt = message.prompt
            if text is not None:
                prompt = self._renderer.with_system_text(prompt, text) or prompt
            (done,) = await sampler.sample(prompt, params, charge=charge)
            return LessonReply(message, done, self._renderer.parse(done.tokens, prompt).text)

        return await together(map(reply, messages))

    def against(
        self, messages: Sequence[FirstMessage], opposites: Sequence[str]
    ) -> list[FirstMessage]:
        """Return the messages, each with a request for the opposite behind it; [] without any."""
        longer = list[FirstMessage]()
        for message, sentence in zip(messages, cycle(opposites), strict=False):
            at = message.turn.hint_at
            assert at is not None  # the ledger chose such turns
            prompt = self._renderer.splice(message.prompt, at, sentence, " {hint}")
            longer.append(replace(message, prompt=prompt, opposite=sentence))
        return longer

    async def scored(
        self,
        wish: str,
        sampler: Sampler,
        messages: Sequence[FirstMessage],
        text: str | None,
        charge: Charge,
    ) -> list[LessonReply]:
        """Return a reply to each message as `sample` does, with its score."""

        async def score(reply: LessonReply) -> LessonReply:
            question = follows(wish, reply.text)
            prompt = (*self._renderer.prompt(question, remembers=False).tokens, *self._begun)
            scored = await self._parts.base.logprobs(
                (*prompt, self._answers[0]),
                start=len(prompt),
                targets=[self._answers],
                charge=charge,
            )
            yes, no = scored.targets[0]
            return replace(reply, score=yes - no)

        replies = await self.sample(sampler, messages, text, charge)
        return await together(map(score, replies))

    async def opposites(self, wish: str, most: int, charge: Charge) -> list[str]:
        """Return distinct sentences that ask for the opposite of a wish."""
        answers = await self._writer.answers(opposite(wish), TRIES * most, {}, charge)
        sentences = filter(None, map(read_opposite, answers))
        return list(dict.fromkeys(sentences))[:most]
