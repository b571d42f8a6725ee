"""What servers are examined on: written by the half that learns, once for all of them.

Rule: a version is examined on two prompts that servers have cached under the version before: one
that never changes, and the prefix that most requests share. A cache that is not keyed on the
version shows there, and an adapter's change shows best on what people really ask.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from local_gpu.parts import BASE_REF, Facts, Score
from local_gpu.servers.member import PoolOptions
from local_gpu.servers.probe import PLACES, Exam, table, tempered
from tinker_claw.errors import BackendError
from tinker_claw.types import Tokens

_FIXED_TOKENS: Final = 512 + PLACES
"""Some blocks of any server's prefix cache: they are of 16 to 128 tokens."""
_HOT_TOKENS: Final = 1024
"""At most: the trainer scores them under three weights at each publish."""
_TEMPERATURE: Final = 0.7
_OTHER_MODEL: Final = (
    "Is it another base model than the trainer's, or quantised where the trainer is not?"
)
_RAW: Final = (
    "Start vLLM with --logprobs-mode processed_logprobs, and SGLang without "
    "SGLANG_RETURN_ORIGINAL_LOGPROB: training needs the logprobs that tokens were drawn with."
)
_NOT_APPLIED: Final = (
    "Was the adapter not applied, or with another alpha, or does the server answer from a prefix "
    "cache of older weights?"
)


class Examiner:
    """Writes exams."""

    def __init__(self, facts: Facts, score: Score, options: PoolOptions) -> None:
        self._facts = facts
        self._score = score
        self._options = options

    async def base(self) -> tuple[Exam, Exam]:
        """On the base model: at temperature 1, and at another, where raw logprobs would show."""
        prompts = (self._fixed(),)
        rows = await table(self._score, self._facts, BASE_REF, prompts)
        shaped = tempered(rows, _TEMPERATURE, self._facts.vocabulary)
        return (
            Exam(
                BASE_REF,
                prompts,
                rows,
                {},
                advice=_OTHER_MODEL,
                student_topk=self._options.student_topk,
            ),
            Exam(
                BASE_REF,
                prompts,
                shaped,
                {"logprobs before temperature": rows},
                advice=_RAW,
                temperature=_TEMPERATURE,
            ),
        )

    async def adapter(self, ref: str, hot: Sequence[Tokens], before: str | None) -> Exam | None:
        """On a version, against the base and the version before, if there is one.

        None: the trainer has had no time. Serving does not wait for a step that runs.

        Raises:
            BackendError: the trainer cannot score under it.
        """
        prompts = (self._fixed(), *(tuple(prefix[:_HOT_TOKENS]) for prefix in hot))
        try:
            if self._options.steps():
                raise TimeoutError
            async with asyncio.timeout(self._options.score_s):
                right = await table(self._score, self._facts, ref, prompts)
                wrong = {BASE_REF: await table(self._score, self._facts, BASE_REF, prompts)}
                if before is not None:
                    with suppress(BackendError):  # its files may be gone
                        wrong[before] = await table(self._score, self._facts, before, prompts)
        except TimeoutError:
            self._options.say(f"{ref} serves without being compared: the trainer is busy.")
            return None
        return Exam(ref, prompts, right, wrong, advice=_NOT_APPLIED)

    def _fixed(self) -> tuple[int, ...]:
        """Any tokens will do. Those that control a chat mostly stand at a vocabulary's end."""
        length = min(_FIXED_TOKENS, self._facts.context_tokens // 2)
        half = max(2, self._facts.vocabulary // 2)
        return tuple((i * i * 7919 + i * 104_729 + 11) % half for i in range(length))
