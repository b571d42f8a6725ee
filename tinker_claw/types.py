"""The words of the project as frozen records. Standard library only.

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
from typing import Any, Literal, TypeAlias, TypeVar

from tinker_claw.errors import AlignmentError, same_length

Message: TypeAlias = Mapping[str, Any]
"""One chat message as chat templates take it, validated by the format that it came in: `role`
(system, user, assistant, tool) and `content` as one string; an assistant's `tool_calls` and
`reasoning_content`, a tool's `tool_call_id`, and a `name`, where there are any."""

Tool: TypeAlias = Mapping[str, Any]
"""A tool as chat templates take it: {"type": "function", "function": {"name", "parameters", ...}},
whose function may have a description, and may be strict."""


class KnownMessage(dict[str, Any]):
    """A message that remembers what was found out about it; see `noted`."""

    __slots__ = ("notes",)

    def __init__(self, message: Message) -> None:
        super().__init__(message)
        self.notes: dict[Any, Any] = {}


class KnownTools(tuple[Tool, ...]):
    """Tools that remember what was found out about them; see `noted`."""

    notes: dict[Any, Any]

    def __new__(cls, tools: Sequence[Tool]) -> KnownTools:
        made = super().__new__(cls, tools)
        made.notes = {}
        return made


_About = TypeVar("_About", Message, Sequence[Tool])
_Note = TypeVar("_Note")


def noted(find_out: Callable[[_About], _Note], about: _About) -> _Note:
    """What `find_out` makes of a message or of tools; of those that are known it is asked once.

    Args:
        find_out: goes by nothing else, and nobody changes what it has returned.
    """
    notes: dict[Any, Any] | None = getattr(about, "notes", None)
    if notes is None:
        return find_out(about)
    if find_out not in notes:
        notes[find_out] = find_out(about)
    return notes[find_out]


Tokens: TypeAlias = Sequence[int]

LossName = Literal["ppo", "importance_sampling", "cispo", "cross_entropy"]
Vote = Literal[-1, 0, 1]
Source = Literal["judge", "user", "client"]
"""Who said what a reply was like: the judge, or outright the user or a program of theirs."""

HINT_TEMPLATE = "\n\n[hint from the user, in hindsight: {hint}]"
"""How a hint stands at the end of the user's message in the teacher's prompt."""


class Writer(StrEnum):
    """Who wrote a piece of a message."""

    OWNER = "owner"
    """Whoever the agent works for: a person with the gateway's key, or named in `owners`."""
    MEMBER = "member"
    """Another person in a group or channel."""
    QUOTATION = "quotation"
    """Words of earlier messages: what is replied to, forwarded, or shown as history."""
    EXTERNAL = "external"
    """Mail, hooks and pages of the web."""
    TOOL = "tool"
    HARNESS = "harness"
    """The agent's program: context, reminders, summaries, prompts that nobody typed."""
    AGENT = "agent"
    """The model."""
    UNKNOWN = "unknown"
    """It looks like a harness's text, of a kind that is not known. Nothing is learned by it."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a message's text, by one writer."""

    writer: Writer
    text: str
    """As it stands in the message."""
    what: str = ""
    """Its name, where it has one."""
    said: str | None = None
    """The words in it, where they are fewer than its text; None: the text."""

    @property
    def words(self) -> str:
        """What its writer says with it, without names, numbers and marks; "" of a harness's."""
        if self.said is not None or self.writer is Writer.HARNESS:
            return self.said or ""
        return self.text.strip()


class Kind(StrEnum):
    """Whether a turn may be trained on."""

    MAIN = "main"
    """A turn of the agent's own conversation with its user."""
    SIDE = "side"
    """Recap, title, compaction, evaluation ...: served and recorded, never trained."""


class Lost(StrEnum):
    """Why what a user said could not be tied to the turn that it answers."""

    COMPACTED = "compacted"
    """A summary stands for the history, and no reply of the session before the new message."""
    EDITED = "edited"
    """The reply is one of the session's, but what leads to it has been changed."""
    UNKNOWN = "unknown reply"
    """The reply before the new message is none of the last that the session got."""


class StopReason(StrEnum):
    """Why a completion ended."""

    STOP = "stop"
    """The model sampled a stop token, which is part of the completion."""
    LENGTH = "length"
    """`max_tokens` was reached."""
    ABORT = "abort"
    """The client hung up. What was sampled is kept, and not trained."""
    CUT = "cut"
    """The request ended the reply before the model did: at a stop string, or at a second call where
    one was allowed. What was sampled, perhaps more than was shown, is kept, and not trained."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a completion is sampled."""

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
    """Strings before which the reply's text ends. Samplers know nothing of them: whoever reads the
    stream cuts the text, closes the stream, and calls the completion CUT."""
    schema: str | None = None
    """JSON Schema of what is sampled, as JSON; "": it is not kept. None: anything may be sampled.
    Only for samplers that constrain; see `Capabilities`."""
    cache_salt: str | None = None
    """What was computed of a prompt is used again for prompts with the same salt only: how long an
    answer takes, and how much of it was cached, tells nothing of what others have said. Whoever
    cannot keep them apart tells no cached tokens of a salted prompt. None: nobody has to be kept
    apart, or no user has asked (judge, exams)."""
    person: bool = False
    """A person waits for the reply: samplers serve it before those of episodes, judges and exams.
    What is drawn stays the same."""

    def unfit_because(self) -> str | None:
        """Why a completion sampled like this is not trainable, or None."""
        if self.temperature != 1.0:
            return f"sampled at temperature {self.temperature:g}, not 1"
        if self.top_p != 1.0:
            return f"sampled at top_p {self.top_p:g}, not 1"
        if self.top_k is not None:
            return f"sampled at top_k {self.top_k}"
        if self.schema is not None:
            return "its text was constrained to a schema"
        return None


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """What a sampler has produced since the last chunk."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Nats, of the distribution the token was drawn from; untempered at temperature 0."""
    topk_ids: tuple[tuple[int, ...], ...] = ()
    topk_logprobs: tuple[tuple[float, ...], ...] = ()
    stop_reason: StopReason | None = None
    """Set on the last chunk and only there."""
    cached_tokens: int = 0
    """Prompt tokens that were not computed again; meaningful on the last chunk."""


@dataclass(frozen=True, slots=True)
class Completion:
    """Sampled tokens with everything that training needs and that cannot be had later."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    topk_ids: tuple[tuple[int, ...], ...]
    """[T, k] the student's own likeliest candidates, or () when none were asked for."""
    topk_logprobs: tuple[tuple[float, ...], ...]
    stop_reason: StopReason
    params: SamplingParams
    cached_tokens: int = 0

    def with_topk(self, k: int) -> Completion:
        """With the k likeliest candidates only, of those that there are."""
        if k == self.params.student_topk:
            return self
        return replace(
            self,
            topk_ids=tuple(row[:k] for row in self.topk_ids) if k else (),
            topk_logprobs=tuple(row[:k] for row in self.topk_logprobs) if k else (),
            params=replace(self.params, student_topk=k),
        )

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
        return cls(
            tokens=tuple(chain.from_iterable(c.tokens for c in chunks)),
            logprobs=tuple(chain.from_iterable(c.logprobs for c in chunks)),
            topk_ids=tuple(chain.from_iterable(c.topk_ids for c in chunks)),
            topk_logprobs=tuple(chain.from_iterable(c.topk_logprobs for c in chunks)),
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
    """[len(tokens) - start, k] logprobs at exactly the ids that were asked for, or ()."""
    topk_ids: tuple[tuple[int, ...], ...] = ()
    topk_logprobs: tuple[tuple[float, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Datum:
    """One token record with its loss on the tail `tokens[start:]`; all before it carries none.

    A backend shifts it by one: position `start - 1` predicts `tokens[start]`. Loss arrays have one
    row per loss token, M = len(tokens) - start.
    """

    tokens: tuple[int, ...]
    start: int
    """Index of the first loss token, at least 1."""
    logprobs: tuple[float, ...] = ()
    """[M] behaviour logprobs q, for ppo, importance_sampling and cispo."""
    advantages: tuple[float, ...] = ()
    """[M], normalisation already applied: losses are sums."""
    targets: tuple[tuple[int, ...], ...] = ()
    """[M, K] ids for cross_entropy; () means the sampled tokens themselves, K = 1."""
    weights: tuple[tuple[float, ...], ...] = ()
    """[M, K] signed weights for cross_entropy."""

    def __post_init__(self) -> None:
        if not 1 <= self.start < len(self.tokens):
            raise AlignmentError(f"datum: start {self.start} outside 1..{len(self.tokens) - 1}")
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
    """For ppo and cispo: clip_low_threshold and clip_high_threshold, absolute ratios."""


@dataclass(frozen=True, slots=True)
class Adam:
    """One optimizer step."""

    learning_rate: float
    beta1: float = 0.9
    beta2: float = 0.98
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_clip_norm: float = 1.0
    """0 switches clipping off."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one optimizer step did."""

    losses: tuple[float, ...]
    """One sum per pass."""
    logprobs: tuple[tuple[tuple[float, ...], ...], ...]
    """[pass][datum][M] the trainer's own logprobs of the sampled tokens, before the step."""
    grad_norm: float | None
    """Before clipping; None where the backend does not tell."""
    tokens: int
    """Tokens that went through forward and backward, over all passes."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens as a service bills them."""

    prefill: int = 0
    """Prompt tokens that were computed."""
    cached: int = 0
    """Prompt tokens that came from a cache, which cost less."""
    sampled: int = 0
    trained: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(*map(add, astuple(self), astuple(other)))


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can do; a method's needs are compared with it before anything is served."""

    model: str
    losses: frozenset[str]
    two_d_targets: bool
    """cross_entropy takes [N, K] targets."""
    student_topk: bool
    """Samplers return their own top-k while sampling."""
    context_tokens: int
    target_logprobs: bool = True
    """Samplers score given tokens at given ids."""
    constrains: bool = False
    """Samplers sample what fits a JSON Schema."""
    score_fresh: bool = False
    """Samples of the current version are to be scored before a step, too, as stale ones are.

    For a backend that samples in one engine and scores in the trainer's, unbilled: rounding in
    bfloat16 alone makes a ratio large now and then. False takes what was sampled at its word.
    """


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model asked for."""

    id: str
    name: str
    arguments: str
    """Compact JSON."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A completion as the agent sees it."""

    text: str
    reasoning: str | None = None
    """None: there was no thinking block. "": there was an empty one."""
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of a reply that is still arriving."""

    kind: Literal["text", "reasoning", "tool_call"]
    text: str = ""
    call: ToolCall | None = None
    """Whole: a call is handed out when its closing token has arrived."""


_RESULT = re.compile(r"^\[result \d+ of \d+, (.*)\]$", re.MULTILINE)
"""The line above a tool's result."""


@dataclass(frozen=True, slots=True)
class NextState:
    """What arrived after a turn and judges it."""

    role: Literal["user", "tool", "other"]
    text: str
    """The owner's words, all tool results in order, or what others said."""
    beside: tuple[tuple[Writer, str], ...] = ()
    """What stands beside the owner's words, each with its writer: quotations above all."""

    @classmethod
    def of_tools(cls, results: Sequence[tuple[str, str]]) -> NextState:
        """Results as one text, each (name, text) under a line that says whose it is.

        A line in a result that looks like one of those gets a blank in front.
        """
        parts = (
            f"[result {n} of {len(results)}, {' '.join(name.split())}]\n"
            + _RESULT.sub(r" \g<0>", text)
            for n, (name, text) in enumerate(results, 1)
        )
        return cls("tool", "\n\n".join(parts))

    @property
    def results(self) -> tuple[tuple[str, str], ...]:
        """The tools' (name, text), as `of_tools` has joined them; () for what people said."""
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
    """What a client says of a session that an agent finishes a task in."""

    task: str | None = None
    group: str | None = None
    """Sessions of one group try the same task, and are compared with one another."""
    size: int | None = None
    """Sessions of that group; None where there is none."""
    episode: bool = False
    """The session has an outcome, which is a part of the reward of each of its steps."""


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
    """Index in `prompt` where a hint is spliced in; None when the user wrote nothing in it."""
    request_text: str
    """What was said to the agent last before the reply."""
    reply_text: str
    """The reply as text, tool calls included, for the judge."""
    asked_by: Writer = Writer.OWNER
    """Who wrote the request."""
    episode: bool = False
    """Its session is one: see `Attempt`."""

    @property
    def cut(self) -> bool:
        """The reply was cut by its token limit."""
        return self.completion.stop_reason is StopReason.LENGTH


@dataclass(frozen=True, slots=True)
class Verdict:
    """The majority of the votes, with the votes, or what somebody said outright."""

    votes: tuple[Vote | None, ...]
    """None: an answer that could not be parsed."""
    value: Vote | None
    """None: no valid vote, hence no verdict. Never the same as 0."""
    source: Source = "judge"
    score: float | None = None
    """From -1 to 1, as it was given outright; the value is its sign. None: the judge's verdict."""


@dataclass(frozen=True, slots=True)
class HintScores:
    """What the teacher says about the sampled tokens, given one hint."""

    hint: str
    logprobs: tuple[float, ...]
    """[T] of the sampled tokens, under the hinted prompt."""
    targets: tuple[tuple[float, ...], ...] = ()
    """[T, k] at the student's own candidates; () in token mode."""
    overlap: int = 0
    """Summed over positions: how many of the student's k candidates are in the teacher's top k."""
    weight: float = 1.0
    """Of its distillation, 0 to 1: by how well such texts teach (methods/teachability.py)."""
    topk_ids: tuple[tuple[int, ...], ...] = ()
    """[T, k] the teacher's own likeliest candidates; () in token mode."""
    topk_logprobs: tuple[tuple[float, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Sample:
    """A turn with its training signal, ready to train."""

    id: int
    turn_id: int
    session_id: int
    policy_version: int
    policy_step: int
    """Optimizer steps of that version along the lineage, for staleness."""
    prompt: tuple[int, ...]
    completion: Completion
    reward: float | None
    """+1 or -1 from the verdict; of an episode's step its outcome and the mean of its votes, of
    which 0 is one, too. None when the sample carries a hint only."""
    teacher: HintScores | None
    """None when there is no hint."""
    bucket: tuple[int, int] | None = None
    """Group and index of the step: its reward is measured against those of the same step in the
    group's other sessions. None: against those of its batch that are of no group."""
    tool: bool = False
    """The results of tools have judged it, and no user."""
    user: str = ""
    """Whose session it is."""

    @property
    def cut(self) -> bool:
        """The reply was cut by its token limit."""
        return self.completion.stop_reason is StopReason.LENGTH


@dataclass(frozen=True, slots=True)
class PolicyVersion:
    """One set of serving weights. Ids only ever grow; a rollback is a new version."""

    id: int
    parent: int | None
    step: int
    """Optimizer steps since the base, along the lineage."""
    state_ref: str | None
    """Where weights and optimizer can be loaded from; None when this step was not saved."""
    sampler_ref: str
