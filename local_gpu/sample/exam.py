"""Check that a server answers with the right weights: both sides score a few tokens of a real text.

The trainer scores the end of the text once, as a table of the likeliest tokens at each place. A
server samples a few tokens after each of those prefixes; the logprobs that it reports must be those
of the table. So one pass of the trainer serves for all servers, and again when one comes back.

With d the server's logprob of a token minus the trainer's, two things are a fault:

* the mean |d| is beyond a tolerance: another model, other numbers altogether. The difference of the
  trainer to itself, where it computes the same text in another cut, is no fault;
* the base explains d better than the adapter. Suppose the base would have moved the logprobs by -u,
  as computed by the trainer. The share of u that is there is 1 + <d, u> / <u, u>. It is 1 if the
  adapter is applied, 0 if the base answers, 1/2 or 2 if alpha is wrong. Its standard error is
  noise / |u|, so over 64 tokens a change as small as the rounding (0.05 nats in bfloat16) is seen.
  A smaller one cannot be told from rounding, and does no harm if it is missing. A server that
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

from local_gpu.halves import BASE_REF, Facts, Score, ScoreAsk
from local_gpu.sample.vllm import VllmServer
from tinker_claw.tasks import together
from tinker_claw.types import SamplingParams, Tokens

POSITIONS: Final = 16
"""Positions compared at the end of the text."""
_DRAWS: Final = 4
"""Tokens drawn at each position."""
_LIKELIEST: Final = 256
"""Likeliest tokens kept per position; any other counts at most as likely as the last of them."""
_SHARE_TOLERANCE: Final = 0.3
"""Tolerance of the share around 1 on any number of tokens: it is a first-order figure."""
_STANDARD_ERRORS: Final = 6.0
"""Standard errors of further tolerance: a publish must not fail by bad luck."""
_MIN_NOISE: Final = 0.005
"""Smallest change that counts, in nats, even where both sides compute in float32."""
_MAX_DIFFERENCE: Final = 50.0
"""Largest difference before exp, in nats."""

Row = Mapping[int, float]
"""Logprobs of the likeliest tokens at one place, in nats."""
Rows = tuple[Row, ...]
"""A row for each place."""


@dataclass(frozen=True, slots=True)
class Exam:
    """A text, and the right logprobs at its end."""

    ref: str
    text: tuple[int, ...]
    right: Rows
    base: Rows | None
    """Rows of the base, which a server that does not apply the adapter would give; None: this is an
    exam on the base."""
    tolerance: float
    """Largest accepted mean |d|, in nats; inf: only the share counts."""
    advice: str
    """Sentence on what to look for where a server fails."""
    decisive: bool = False
    """Whether a server also fails if the adapter cannot be told from the base."""
    student_topk: int = 0
    """Top-k logprobs to ask for with each token: servers refuse more than they were started for."""


@dataclass(frozen=True, slots=True)
class ExamSample:
    """A token that a server sampled at a place, and its logprob."""

    position: int
    token: int
    logprob: float


async def table(score: Score, facts: Facts, ref: str, text: Tokens) -> Rows:
    """The trainer's logprobs at the last `POSITIONS` of a text."""
    ask = ScoreAsk.of(facts, text, len(text) - POSITIONS, None, _LIKELIEST)
    scored = await score(ref, ask)
    return tuple(
        dict(zip(ids, logprobs, strict=True))
        for ids, logprobs in zip(scored.topk_ids, scored.topk_logprobs, strict=True)
    )


async def rounding(score: Score, facts: Facts, text: Tokens, rows: Rows) -> float:
    """Measure how far the trainer is from its own `rows` where it cuts the text elsewhere, in nats.

    It computes the text together with one that branches off in the middle, as in a batch.
    """
    half = len(text) // 2
    branch = (*text[:half], *reversed(text[half:]))
    again, _ = await together(table(score, facts, BASE_REF, tokens) for tokens in (text, branch))
    return rms_difference(rows, again)


async def sample_exam(server: VllmServer, name: str | None, exam: Exam) -> list[ExamSample]:
    """Sample the exam's text on a server. Raises what the server raises."""
    params = SamplingParams(
        max_tokens=1,
        student_topk=exam.student_topk,
        person=True,  # people wait for a new version, and for a server that comes back
    )

    async def draw(position: int) -> list[ExamSample]:
        beginning = exam.text[: len(exam.text) - POSITIONS + position]
        drawn = await server.sample(name, beginning, params, _DRAWS)
        return [ExamSample(position, reply.tokens[0], reply.logprobs[0]) for reply in drawn]

    first = await draw(0)  # computes the text for the others
    rest = await together(draw(position) for position in range(1, POSITIONS))
    return [*first, *(sample for samples in rest for sample in samples)]


def rms_difference(right: Rows, wrong: Rows) -> float:
    """Root mean square of the difference of logprobs under `right`, over all places, in nats."""
    squares = [
        math.fsum(
            math.exp(logprob) * _bounded(logprob - other.get(token, min(other.values()))) ** 2
            for token, logprob in row.items()
        )
        for row, other in zip(right, wrong, strict=True)
    ]
    return math.sqrt(fmean(squares))


def differences(exam: Exam, drawn: Sequence[ExamSample]) -> list[float]:
    """d of each token: the server's logprob minus the trainer's, in nats."""
    return [_bounded(sample.logprob - _logprob_at(exam.right, sample)) for sample in drawn]


def distance_fault(exam: Exam, d: Sequence[float]) -> str | None:
    """Say in words that follow the server's name that d is too large on average; None: it is not.

    Args:
        d: see `differences`.
    """
    if (mean := fmean(map(abs, d))) <= exam.tolerance:
        return None
    return (
        f"gives logprobs for {exam.ref!r} that are {mean:.2g} nats from the trainer's on average, "
        f"over {len(d)} tokens, where {exam.tolerance:.2g} are expected at most"
    )


def adapter_fault(
    exam: Exam, drawn: Sequence[ExamSample], d: Sequence[float], noise: float
) -> str | None:
    """Say likewise that it is not the adapter that answers; None: it is, or cannot be told.

    Args:
        noise: standard deviation of d where the weights are known to be the same, in nats.
    """
    if exam.base is None:
        return None
    share, error = _share(exam.right, exam.base, drawn, d, noise)
    if exam.decisive and _SHARE_TOLERANCE + _STANDARD_ERRORS * error >= 1:
        return (
            f"rounds its logprobs so much that {exam.ref!r} cannot be told from {BASE_REF!r}, over "
            f"{len(d)} tokens"
        )
    if abs(share - 1) > _SHARE_TOLERANCE + _STANDARD_ERRORS * error:
        return (
            f"answers with {round(100 * share)}% of what tells {exam.ref!r} from {BASE_REF!r}, "
            f"over {len(d)} tokens"
        )
    return None


def _share(
    right: Rows, base: Rows, drawn: Sequence[ExamSample], d: Sequence[float], noise: float
) -> tuple[float, float]:
    """Share of the difference to the base that the server shows, and its standard error."""
    # A token drawn twice at one place adds no information the second time.
    distinct = {
        (sample.position, sample.token): (sample, difference)
        for sample, difference in zip(drawn, d, strict=True)
    }
    pairs = [
        (x, _bounded(_logprob_at(right, sample) - _logprob_at(base, sample)))
        for sample, x in distinct.values()
    ]
    square = math.fsum(u * u for _, u in pairs)
    if not square:
        return 1.0, math.inf
    share = 1 + math.fsum(x * u for x, u in pairs) / square
    return share, max(noise, _MIN_NOISE) / math.sqrt(square)


def _logprob_at(rows: Rows, sample: ExamSample) -> float:
    row = rows[sample.position]
    logprob = row.get(sample.token)
    return min(sample.logprob, min(row.values())) if logprob is None else logprob


def _bounded(d: float) -> float:
    return _MAX_DIFFERENCE if math.isnan(d) else max(-_MAX_DIFFERENCE, min(_MAX_DIFFERENCE, d))
