"""Check that a server answers with the right weights: both sides score a few tokens.

The trainer scores the ends of a few prompts once, as a table of the likeliest tokens at each place.
A server samples a few tokens after each of those prefixes; the logprobs that it reports must be
those of the table. So one pass of the trainer serves for all servers, and again when one of them
comes back.

With d the server's logprob of a token minus the trainer's, two things are a fault:

* the mean |d| is beyond a tolerance: another model, other numbers altogether;
* the wrong weights explain d better than the right ones. Suppose other weights (the base, the
  version before) would have moved the logprobs by -u, as computed by the trainer. The share of u
  that is there, 1 + <d, u> / <u, u>, is 1 if the adapter is applied, 0 if those other weights
  answer (not applied, or the keys of an old prefix), 1/2 or 2 if alpha is wrong. Its standard error
  is noise / |u|, so over 64 tokens a change as small as the rounding (0.05 nats in bfloat16) is
  seen. A smaller one cannot be told from rounding, and does no harm if it is missing. A server that
  applies no adapters would pass with each of them: so it is first examined on a random adapter that
  is large enough to be seen (`Exam.decisive`).

Rule: only first tokens are asked for here; what follows them is compared by the learner, on every
batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

from local_gpu.halves import Facts, Score, ScoreAsk
from local_gpu.sample.vllm import VllmServer
from local_gpu.tasks import together
from tinker_claw.types import SamplingParams, Tokens

PLACES: Final = 8
"""Positions compared at the end of each prompt."""
_DRAWS: Final = 4
"""Tokens drawn at each position."""
_LIKELIEST: Final = 256
"""Likeliest tokens kept per position; any other counts at most as likely as the last of them."""
_SLACK: Final = 0.3
"""Tolerance of the share around 1 on any number of tokens: it is a first-order figure."""
_ERRORS: Final = 6.0
"""Standard errors of further tolerance: a publish must not fail by bad luck."""
_LEAST_NOISE: Final = 0.005
"""Smallest change that counts, in nats, even where both sides compute in float32."""
_LARGEST: Final = 50.0
"""Largest difference before exp, in nats."""

Row = Mapping[int, float]
"""Logprobs of the likeliest tokens at one place, in nats."""
Rows = tuple[tuple[Row, ...], ...]
"""Rows as [prompt][place]."""


@dataclass(frozen=True, slots=True)
class Exam:
    """Prompts, and the right logprobs after them."""

    ref: str
    prompts: tuple[tuple[int, ...], ...]
    right: Rows
    wrong: Mapping[str, Rows]
    """Rows that other weights would give, by the weights' names; the base's under `BASE_REF`."""
    advice: str
    """Sentence on what to look for where a server fails."""
    decisive: bool = False
    """Whether a server also fails if the right weights cannot be told from the wrong ones."""
    temperature: float = 1.0
    student_topk: int = 0
    """Top-k logprobs to ask for with each token: servers refuse more than they were started for."""


@dataclass(frozen=True, slots=True)
class ExamSample:
    """A token that a server sampled after a prefix of a prompt, and its logprob."""

    prompt: int
    place: int
    token: int
    logprob: float


async def table(score: Score, facts: Facts, ref: str, prompts: Sequence[Tokens]) -> Rows:
    """The trainer's logprobs at the last `PLACES` of each prompt."""
    asks = [
        ScoreAsk.of(facts, prompt, len(prompt) - PLACES, None, _LIKELIEST) for prompt in prompts
    ]
    scored = await together(score(ref, ask) for ask in asks)
    return tuple(
        tuple(
            dict(zip(ids, logprobs, strict=True))
            for ids, logprobs in zip(one.topk_ids, one.topk_logprobs, strict=True)
        )
        for one in scored
    )


async def sit(server: VllmServer, name: str | None, exam: Exam) -> list[ExamSample]:
    """Sample the exam's prompts on a server. Raises what the server raises."""
    params = SamplingParams(
        max_tokens=1,
        temperature=exam.temperature,
        student_topk=exam.student_topk,
        person=True,  # people wait for a new version, and for a server that comes back
    )

    async def draw(prompt: int, place: int) -> list[ExamSample]:
        tokens = exam.prompts[prompt]
        beginning = tokens[: len(tokens) - PLACES + place]
        drawn = await server.sample(name, beginning, params, _DRAWS)
        return [ExamSample(prompt, place, one.tokens[0], one.logprobs[0]) for one in drawn]

    async def answer(prompt: int) -> list[ExamSample]:
        first = await draw(prompt, 0)  # computes the prompt for the others
        rest = await together(draw(prompt, place) for place in range(1, PLACES))
        return [*first, *(drawn for some in rest for drawn in some)]

    answers = await together(answer(prompt) for prompt in range(len(exam.prompts)))
    return [drawn for some in answers for drawn in some]


def tempered(rows: Rows, temperature: float, vocabulary: int) -> Rows:
    """The same at another temperature T below 1: softmax(log p / T).

    What lies beyond the table weighs at most (1 - sum p) * p_last^(1/T - 1); half of that is added.
    """

    def one(row: Row) -> Row:
        scaled = {token: logprob / temperature for token, logprob in row.items()}
        total = math.fsum(map(math.exp, scaled.values()))
        if len(row) < vocabulary:
            beyond = max(0.0, 1 - math.fsum(map(math.exp, row.values())))
            total += beyond * math.exp(min(row.values()) * (1 / temperature - 1)) / 2
        return {token: value - math.log(total) for token, value in scaled.items()}

    return tuple(tuple(map(one, places)) for places in rows)


def moved(right: Rows, wrong: Rows) -> float:
    """Root mean square of the difference of logprobs under `right`, over all places, in nats."""
    squares = [
        math.fsum(
            math.exp(logprob) * _bounded(logprob - other.get(token, min(other.values()))) ** 2
            for token, logprob in row.items()
        )
        for rows, others in zip(right, wrong, strict=True)
        for row, other in zip(rows, others, strict=True)
    ]
    return math.sqrt(fmean(squares))


def differences(exam: Exam, drawn: Sequence[ExamSample]) -> list[float]:
    """d of each token: the server's logprob minus the trainer's, in nats."""
    return [_bounded(one.logprob - _at(exam.right, one)) for one in drawn]


def judge(
    exam: Exam, drawn: Sequence[ExamSample], d: Sequence[float], *, noise: float, tolerance: float
) -> str | None:
    """Return what is wrong in words that follow the server's name, or None.

    Args:
        d: see `differences`.
        noise: standard deviation of d where the weights are known to be the same, in nats.
        tolerance: of the mean |d|, in nats.
    """
    for name, rows in exam.wrong.items():
        share, error = _share(exam, rows, drawn, d, noise)
        if exam.decisive and _SLACK + _ERRORS * error >= 1:
            return (
                f"rounds its logprobs so much that {exam.ref!r} cannot be told from {name!r}, over "
                f"{len(d)} tokens"
            )
        if abs(share - 1) > _SLACK + _ERRORS * error:
            return (
                f"answers with {round(100 * share)}% of what tells {exam.ref!r} from {name!r}, "
                f"over {len(d)} tokens"
            )
    if (mean := fmean(map(abs, d))) > tolerance:
        return (
            f"gives logprobs for {exam.ref!r} that are {mean:.2g} nats from the trainer's on "
            f"average, over {len(d)} tokens"
        )
    return None


def _share(
    exam: Exam, other: Rows, drawn: Sequence[ExamSample], d: Sequence[float], noise: float
) -> tuple[float, float]:
    """Share of the difference to `other` that the server shows, and its standard error."""
    # A token drawn twice at one place adds no information the second time.
    once = {(one.prompt, one.place, one.token): (one, x) for one, x in zip(drawn, d, strict=True)}
    pairs = [(x, _bounded(_at(exam.right, one) - _at(other, one))) for one, x in once.values()]
    square = math.fsum(u * u for _, u in pairs)
    if not square:
        return 1.0, math.inf
    share = 1 + math.fsum(x * u for x, u in pairs) / square
    return share, max(noise, _LEAST_NOISE) / math.sqrt(square)


def _at(rows: Rows, drawn: ExamSample) -> float:
    row = rows[drawn.prompt][drawn.place]
    known = row.get(drawn.token)
    return min(drawn.logprob, min(row.values())) if known is None else known


def _bounded(d: float) -> float:
    return _LARGEST if math.isnan(d) else max(-_LARGEST, min(_LARGEST, d))
