"""Shared types as frozen records. Standard library only.

Rule: `None` and 0 mean different things, and the line under a field says which. Token arrays over
the same tokens are checked for length when a record is made; they are never padded or cut.

Shapes: T = sampled tokens of a completion, P = prompt tokens, k = candidates per token,
M = loss tokens of a datum.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from enum import StrEnum
from itertools import chain
from operator import add
from typing import Any, Literal, TypeAlias, TypeVar, get_args

from tinker_claw.errors import AlignmentError, same_length
from tinker_claw.turn_state import Reason, TurnRefusal

Message: TypeAlias = Mapping[str, Any]
"""One chat message as chat templates take it, validated by the format that it came in: `role`
(system, user, assistant, tool) and `content` as one string; an assistant's `tool_calls` and
`reasoning_content`, a tool's `tool_call_id`, and a `name`, where there are any."""

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""Reasoning efforts that a request may ask for, from the least on."""

Tool: TypeAlias = Mapping[str, Any]
"""A tool as chat templates take it: {"type": "function", "function": {"name", "parameters", ...}},
whose function may have a description, and may be strict."""


class KnownMessage(dict[str, Any]):
    """A message that caches what is computed from it; see `cached`."""

    __slots__ = ("notes", "parts")

    def __init__(self, message: Message, parts: Sequence[Any] = ()) -> None:
        """`parts`: those of its content, see `images.MessagePart`; (): it is a plain string."""
        super().__init__(message)
        self.parts = parts
        self.notes: dict[Any, Any] = {}


class KnownTools(tuple[Tool, ...]):
    """Tools that cache what is computed from them; see `cached`."""

    notes: dict[Any, Any]

    def __new__(cls, tools: Sequence[Tool]) -> KnownTools:
        instance = super().__new__(cls, tools)
        instance.notes = {}
        return instance


_About = TypeVar("_About", Message, Sequence[Tool])
_Note = TypeVar("_Note")


def cached(find_out: Callable[[_About], _Note], about: _About) -> _Note:
    """Return `find_out(about)`, computed once for messages and tools with a cache.

    Args:
        find_out: depends on nothing else; its result is never changed.
    """
    notes: dict[Any, Any] | None = getattr(about, "notes", None)
    if notes is None:
        return find_out(about)
    if find_out not in notes:
        notes[find_out] = find_out(about)
    return notes[find_out]


def is_cached(find_out: Callable[[_About], Any], about: _About) -> bool:
    """Return whether the result is cached."""
    return find_out in getattr(about, "notes", ())


Tokens: TypeAlias = Sequence[int]

LossName = Literal["ppo", "importance_sampling", "cross_entropy"]
Vote = Literal[-1, 0, 1]
RatedBy = Literal["judge", "user", "client"]
"""Who rated a reply: the judge, or explicitly the user or a program of theirs."""

HINT_TEMPLATE = "\n\nHint from the user, in hindsight: {hint}"
"""Suffix of the user's message that gives the teacher a hint."""


class Writer(StrEnum):
    """Who wrote a piece of a message."""

    OWNER = "owner"
    """The person the agent works for: has the gateway's key, or is named in `owners`."""
    MEMBER = "member"
    """Somebody who is not an owner, or of whom the session does not say that they are."""
    QUOTATION = "quotation"
    """Words of earlier messages, and attached files."""
    TOOL = "tool"
    HARNESS = "harness"
    """Text of the agent's program: context, reminders, summaries, prompts that nobody typed."""
    AGENT = "agent"
    """The model."""
    UNKNOWN = "unknown"
    """Text that may hold words of others; nothing is learned from it."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a message's text, by one writer."""

    writer: Writer
    text: str
    """Text exactly as it stands in the message."""
    what: str = ""
    """Name of the part, where it has one."""
    own_words: str | None = None
    """The writer's words, where they are only a part of `text`; None: all of `text`."""

    @property
    def words(self) -> str:
        """Words of the writer, without names, numbers and marks; empty for a harness."""
        if self.own_words is not None or self.writer is Writer.HARNESS:
            return self.own_words or ""
        return self.text.strip()


class Kind(StrEnum):
    """Kind of a turn: only a main one may be trained on."""

    MAIN = "main"
    """A turn of the agent's own conversation with its user."""
    SIDE = "side"
    """Recap, title, compaction, evaluation ...: served and recorded, never trained."""


class StopReason(StrEnum):
    """Reason why a completion ended."""

    STOP = "stop"
    """The model sampled a stop token, which is part of the completion."""
    LENGTH = "length"
    """`max_tokens` was reached."""
    ABORT = "abort"
    """The client disconnected, or its format failed. The tokens are kept, and not trained."""
    CUT = "cut"
    """The request ended the reply before the model did: at a stop string, or at a second call where
    one was allowed. The sampled tokens, perhaps more than were shown, are kept, and not trained."""


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """An image in a prompt, whose tokens there are all the same placeholder."""

    at: int
    """Index of its first token."""
    tokens: int
    data: bytes = field(repr=False)
    """The file, without metadata."""
    format: Literal["png", "jpeg"]


Images: TypeAlias = tuple[PlacedImage, ...]
"""Images in a prompt, in order."""


def moved(images: Images, at: int, by: int) -> Images:
    """Return the images of a prompt in which those from index `at` on moved by `by` tokens."""
    return tuple(replace(image, at=image.at + by) if image.at >= at else image for image in images)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Settings by which a completion is sampled."""

    max_tokens: int
    temperature: float = 1.0
    """0 means argmax."""
    top_p: float = 1.0
    top_k: int | None = None
    """Sample among the k likeliest tokens; None samples among all."""
    seed: int | None = None
    """None draws one from the operating system."""
    stop_tokens: tuple[int, ...] = ()
    student_topk: int = 0
    """Capture the k likeliest candidates at every position while sampling."""
    stop: tuple[str, ...] = ()
    """Strings before which the reply's text ends. Samplers ignore them: the reader of the stream
    cuts the text, closes the stream, and sets CUT."""
    cache_salt: str | None = None
    """Key of the prompt cache: computed prompts are reused under the same salt only, so that
    neither the time of an answer nor its cached tokens reveal what others said. A backend that
    cannot separate them reports no cached tokens for a salted prompt. None: one group only, or
    no user asked (judge, exams)."""
    images: Images = ()
    """Images in the prompt; only for samplers that take them, see `Capabilities`. Not kept with the
    parameters of a turn."""
    person: bool = False
    """Whether a person waits: samplers serve it before episodes and judges. The sampled tokens do
    not change."""

    def to_learn_from(self, max_tokens: int, student_topk: int) -> SamplingParams:
        """Return these settings for a reply that is trained and for which nobody waits: at
        temperature 1, of all tokens, and no longer than `max_tokens`."""
        return replace(
            self,
            max_tokens=min(self.max_tokens, max_tokens),
            temperature=1.0,
            top_p=1.0,
            top_k=None,
            seed=None,
            student_topk=student_topk,
            stop=(),
            person=False,
        )

    def unfit_because(self) -> TurnRefusal | None:
        """Reason why a completion sampled like this is not trainable, or None."""
        if self.temperature != 1.0:
            return TurnRefusal(Reason.SAMPLING, f"temperature {self.temperature:g}, not 1")
        if self.top_p != 1.0:
            return TurnRefusal(Reason.SAMPLING, f"top_p {self.top_p:g}, not 1")
        if self.top_k is not None:
            return TurnRefusal(Reason.SAMPLING, f"top_k {self.top_k}")
        return None


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """Tokens sampled since the last chunk."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Logprobs in nats under the distribution sampled from; untempered at temperature 0."""
    topk_ids: tuple[tuple[int, ...], ...] = ()
    topk_logprobs: tuple[tuple[float, ...], ...] = ()
    stop_reason: StopReason | None = None
    """Why sampling ended; set on the last chunk only."""
    cached_tokens: int = 0
    """Prompt tokens taken from the prompt cache; meaningful on the last chunk."""


@dataclass(frozen=True, slots=True)
class Completion:
    """Sampled tokens with all data for training that cannot be recomputed later."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    topk_ids: tuple[tuple[int, ...], ...]
    """[T, k] top-k ids of the student, or () when none were asked for."""
    topk_logprobs: tuple[tuple[float, ...], ...]
    stop_reason: StopReason
    params: SamplingParams
    cached_tokens: int = 0

    def __post_init__(self) -> None:
        same_length("completion", tokens=self.tokens, logprobs=self.logprobs)
        if self.topk_ids or self.topk_logprobs:
            same_length(
                "completion top-k",
                tokens=self.tokens,
                topk_ids=self.topk_ids,
                topk_logprobs=self.topk_logprobs,
            )

    @classmethod
    def collect(
        cls,
        chunks: Sequence[TokenChunk],
        params: SamplingParams,
        *,
        aborted: bool = False,
        cut: bool = False,
    ) -> Completion:
        """Join the chunks of one stream, which may have been left early: `aborted` or `cut`."""
        last = StopReason.CUT if cut else chunks[-1].stop_reason if chunks else None
        if last is None and not aborted:
            raise AlignmentError("a stream ended without a stop reason")

        def joined(rows: str) -> tuple[Any, ...]:
            return tuple(chain.from_iterable(getattr(chunk, rows) for chunk in chunks))

        return cls(
            tokens=joined("tokens"),
            logprobs=joined("logprobs"),
            topk_ids=joined("topk_ids"),
            topk_logprobs=joined("topk_logprobs"),
            stop_reason=StopReason.ABORT if aborted else last or StopReason.ABORT,
            params=params,
            cached_tokens=chunks[-1].cached_tokens if chunks else 0,
        )


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Logprobs of given tokens under some weights, from position `start` on, in nats."""

    start: int
    logprobs: tuple[float, ...]
    """[len(tokens) - start] logprob of each token given all before it."""
    targets: tuple[tuple[float, ...], ...] = ()
    """[len(tokens) - start, k] logprobs at the requested ids, or ()."""
    topk_ids: tuple[tuple[int, ...], ...] = ()
    topk_logprobs: tuple[tuple[float, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Datum:
    """Tokens with a loss on the tail `tokens[start:]`; the tokens before it carry none.

    A backend shifts it by one: position `start - 1` predicts `tokens[start]`. Loss arrays have one
    row per loss token, M = len(tokens) - start.
    """

    tokens: tuple[int, ...]
    start: int
    """Index of the first loss token, at least 1."""
    logprobs: tuple[float, ...] = ()
    """[M] behaviour logprobs q, for ppo and importance_sampling."""
    advantages: tuple[float, ...] = ()
    """[M], normalisation already applied: losses are sums."""
    targets: tuple[tuple[int, ...], ...] = ()
    """[M, K] ids for cross_entropy; () means the sampled tokens themselves, K = 1."""
    weights: tuple[tuple[float, ...], ...] = ()
    """[M, K] signed weights for cross_entropy."""
    images: Images = ()
    """Images before `start`; only for backends that train on them, see `Capabilities`."""

    def __post_init__(self) -> None:
        if not 1 <= self.start < len(self.tokens):
            raise AlignmentError(f"datum: start {self.start} outside 1..{len(self.tokens) - 1}")
        if any(image.at + image.tokens > self.start for image in self.images):
            raise AlignmentError("datum: an image does not stand before the first loss token")
        tail = self.tokens[self.start :]
        for name in ("logprobs", "advantages", "targets", "weights"):
            if rows := getattr(self, name):
                same_length("datum", tail=tail, **{name: rows})


@dataclass(frozen=True, slots=True)
class LossPass:
    """One forward-backward over some datums. Gradients of all passes of a step add up."""

    loss: LossName
    datums: tuple[Datum, ...]
    config: Mapping[str, float] = field(default_factory=dict[str, float])
    """Options of ppo: clip_low_threshold and clip_high_threshold, absolute ratios."""


@dataclass(frozen=True, slots=True)
class Adam:
    """Adam settings of one optimizer step."""

    learning_rate: float
    beta1: float = 0.9
    beta2: float = 0.98
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_clip_norm: float = 1.0
    """Largest gradient norm; 0 switches clipping off."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """Result of one optimizer step."""

    losses: tuple[float, ...]
    """Loss of each pass, a sum over its tokens."""
    logprobs: tuple[tuple[tuple[float, ...], ...], ...]
    """[pass][datum][M] the trainer's own logprobs of the sampled tokens, before the step."""
    grad_norm: float | None
    """Gradient norm before clipping; None where the backend does not report it."""
    tokens: int
    """Tokens that went through forward and backward, over all passes."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts as a service bills them."""

    prefill: int = 0
    """Prompt tokens that were computed."""
    cached: int = 0
    """Prompt tokens from the prompt cache, which cost less."""
    sampled: int = 0
    trained: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(*map(add, astuple(self), astuple(other)))


Charge: TypeAlias = Callable[[Usage], None]
"""Adds what a service bills to the account of the turn or the step that pays it. It is called once
per request, also later, when nobody waits for the request any more."""


def uncharged(usage: Usage) -> None:
    """Charge nobody."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Features of a backend, compared with a method's needs before anything is served."""

    model: str
    losses: frozenset[str]
    two_d_targets: bool
    """Whether cross_entropy takes [N, K] targets."""
    student_topk: bool
    """Whether samplers return their own top-k while sampling."""
    context_tokens: int
    target_logprobs: bool = True
    """Whether samplers score given tokens at given ids."""
    sees: bool = False
    """Whether samplers take images."""
    trains_images: bool = False
    """Whether the trainer takes them in datums, and samplers in what they score."""
    score_fresh: bool = False
    """Whether samples of the current version are scored before a step too, as stale ones are.

    For a backend that samples in one engine and scores in the trainer's, unbilled: bfloat16
    rounding alone makes a ratio large now and then. False trusts the sampler's logprobs.
    """
    ended: str | None = None
    """Why nothing is trained any more, as a sentence; None: it trains."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call by the model."""

    id: str
    name: str
    arguments: str
    """Arguments as compact JSON."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A completion as the agent sees it."""

    text: str
    reasoning: str | None = None
    """Text of the thinking block; None without one, empty where it is empty."""
    tool_calls: tuple[ToolCall, ...] = ()

    @property
    def deltas(self) -> list[Delta]:
        """The reply as the pieces of a stream."""
        texts = (Delta("reasoning", self.reasoning or ""), Delta("text", self.text))
        calls = (Delta("tool_call", call=call) for call in self.tool_calls)
        return [*(delta for delta in texts if delta.text), *calls]


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of a reply that is still arriving."""

    kind: Literal["text", "reasoning", "tool_call"]
    text: str = ""
    call: ToolCall | None = None
    """The whole call, handed out when its closing token has arrived."""


_RESULT = re.compile(r"^\[result \d+ of \d+, (.*)\]$", re.MULTILINE)
"""Line above a tool's result."""


@dataclass(frozen=True, slots=True)
class NextState:
    """The message after a turn, by which the turn is judged."""

    role: Literal["user", "tool", "other"]
    text: str
    """The owner's words, all tool results in order, or what others said."""
    beside: tuple[tuple[Writer, str], ...] = ()
    """Texts beside the owner's words, each with its writer: mostly quotations."""

    @classmethod
    def of_tools(cls, results: Sequence[tuple[str, str]]) -> NextState:
        """Join tool results to one text, each (name, text) under a line that names its tool.

        A line in a result that looks like such a line gets a blank in front.
        """
        parts = (
            f"[result {n} of {len(results)}, {' '.join(name.split())}]\n"
            + _RESULT.sub(r" \g<0>", text)
            for n, (name, text) in enumerate(results, 1)
        )
        return cls("tool", "\n\n".join(parts))

    @property
    def results(self) -> tuple[tuple[str, str], ...]:
        """The tools' (name, text) pairs, as `of_tools` joined them; () for people's words."""
        if self.role != "tool":
            return ()
        heads = list(_RESULT.finditer(self.text))
        if not heads or heads[0].start() > 0:
            return (("tool", self.text),)
        ends = [head.start() - 2 for head in heads[1:]] + [len(self.text)]
        return tuple(
            (head[1], self.text[head.end() + 1 : end])
            for head, end in zip(heads, ends, strict=True)
        )


@dataclass(frozen=True, slots=True)
class Attempt:
    """A client's description of a session in which an agent works on a task."""

    task: str | None = None
    group: str | None = None
    """Group of sessions that try the same task and are compared with one another."""
    size: int | None = None
    """Number of sessions in the group; None without a group."""
    episode: bool = False
    """Whether the session has an outcome, which is a part of the reward of each of its steps."""


@dataclass(frozen=True, slots=True)
class Wish:
    """An owner's wish for all replies from now on."""

    text: str
    """The owner's own sentence or sentences."""
    words: str
    """Those of the owner's words that show that it lasts; "" where they wrote it as a lesson."""


@dataclass(frozen=True, slots=True)
class LessonBlock:
    """Lessons in a prompt: what its user said in earlier sessions."""

    lessons: tuple[int, ...]
    """Their ids; (): they were forgotten, and taken out."""
    at: int
    """Index of their first token."""
    tokens: int
    """Number of their tokens."""
    instead: tuple[int, ...] = ()
    """Tokens that stand there without them, as of a system prompt that the chat format adds."""

    def without(self, prompt: tuple[int, ...]) -> tuple[int, ...]:
        """Return the prompt as it would have been without them."""
        return prompt[: self.at] + self.instead + prompt[self.at + self.tokens :]


@dataclass(frozen=True, slots=True)
class Turn:
    """A captured turn as the ledger keeps it."""

    id: int
    session_id: int
    index: int
    kind: Kind
    policy_version: int
    prompt: tuple[int, ...]
    completion: Completion
    hint_at: int | None
    """Index in `prompt` where a hint is inserted; None when the user wrote nothing in it."""
    request_text: str
    """The last message to the agent before the reply."""
    reply_text: str
    """The reply as text, tool calls included, for the judge."""
    asked_by: Writer = Writer.OWNER
    """Writer of the request."""
    client: str = ""
    """The agent's program, as far as it is known."""
    episode: bool = False
    """Whether its session is an episode: see `Attempt`."""
    lesson_block: LessonBlock | None = None
    """Lessons in the prompt; None: there are none."""
    images: Images = ()
    """Images in the prompt, where they were kept."""
    secret: bool = False
    """Whether its prompt holds a secret."""

    @property
    def cut(self) -> bool:
        """Return whether the reply was cut by its token limit."""
        return self.completion.stop_reason is StopReason.LENGTH


@dataclass(frozen=True, slots=True)
class Verdict:
    """The judge's votes and their majority, or an explicit rating."""

    votes: tuple[Vote | None, ...]
    """Votes; None stands for an answer that could not be parsed."""
    value: Vote | None
    """Majority of the votes; None without a valid vote, which is never the same as 0."""
    source: RatedBy = "judge"
    score: float | None = None
    """Explicit rating from -1 to 1, of which `value` is the sign; None: the judge's verdict."""
    weight: float = 1.0
    """Share of the advantage that the verdict gives its reply."""


@dataclass(frozen=True, slots=True)
class HintScores:
    """Scores of a teacher that was told one hint: of the student's reply, or of one that it wrote
    itself (`reply`)."""

    hint: str
    logprobs: tuple[float, ...]
    """[T] logprobs of the reply's tokens, under the hinted prompt."""
    targets: tuple[tuple[float, ...], ...] = ()
    """[T, k] logprobs at the student's own candidates; () in token mode."""
    overlap: int = 0
    """Number of the student's top-k candidates that are in the teacher's top k, summed over
    positions."""
    topk_ids: tuple[tuple[int, ...], ...] = ()
    """[T, k] the teacher's own top-k ids; () in token mode."""
    topk_logprobs: tuple[tuple[float, ...], ...] = ()
    reply: tuple[int, ...] = ()
    """[T] tokens of the reply that the teacher wrote; (): it scored the student's."""
    text: str = ""
    """Text of that reply, thinking included."""


JudgedBy = Literal["user", "tools", "outcome"]
"""Who judged a turn: a user, or a program that rates; tools' results, or people other than the
owner; or how its episode ended."""
JUDGES: tuple[JudgedBy, ...] = get_args(JudgedBy)


class Lacks(StrEnum):
    """Samples of the same judge without which a sample teaches nothing.

    `Method.lacks` says it of each sample, `samples.usable` and `batch.choose` heed it.
    """

    BETTER = "a better reply"
    """It is a bare rejection, one without a hint: that does not say what would be better."""
    REJECTION = "a rejection, a hint or a rating"
    """It is a plain acceptance, which nobody rated outright: that a user goes on does not say what
    would be better either."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A turn with its training signal, ready to train."""

    id: int
    turn_id: int
    session_id: int
    policy_version: int
    policy_step: int
    """Committed steps up to that version along the lineage, for staleness."""
    prompt: tuple[int, ...]
    completion: Completion
    reward: float | None
    """+1 or -1 from the verdict; for an episode's step the outcome and the mean of its votes, zeros
    included. None when the sample carries a hint only."""
    teacher: HintScores | None
    """The teacher's scores; None without a hint."""
    bucket: tuple[int, int] | None = None
    """Group and index of the step: the reward is compared with the same step in the group's other
    sessions. None: with the samples of its batch that belong to no group."""
    judge: JudgedBy = "user"
    """Who judged it: its reward is compared with those of the same judge."""
    weight: float = 1.0
    """Weight of its verdict; 1 for an episode's step."""
    user: str = ""
    """User of the session."""
    lesson_block: LessonBlock | None = None
    """Lessons in the prompt; None: there are none."""
    images: Images = ()
    """Images in the prompt."""

    @property
    def cut(self) -> bool:
        """Return whether the reply was cut by its token limit."""
        return self.completion.stop_reason is StopReason.LENGTH


@dataclass(frozen=True, slots=True)
class PolicyVersion:
    """One set of serving weights. Ids only ever grow; a rollback is a new version."""

    id: int
    parent: int | None
    step: int
    """Committed steps since the base, along the lineage; a practice is one."""
    state_ref: str
    """Reference for loading weights and optimizer."""
    sampler_ref: str
