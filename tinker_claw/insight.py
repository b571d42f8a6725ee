"""What a ledger tells together with what its method knows, for commands and for the page.

Rule: the figures and the words are those of `ledger`; nothing is locked or written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tinker_claw.config.settings import Training
from tinker_claw.ledger.database import FILE, Rows, reading
from tinker_claw.ledger.figures import read_figures, read_step, rewards_of
from tinker_claw.ledger.gains import read_gains
from tinker_claw.ledger.outcome import RunView, plural, read_run, run_of
from tinker_claw.ledger.versions import read_versions
from tinker_claw.ledger.views import Contents, Record, TurnView
from tinker_claw.methods import METHODS
from tinker_claw.methods.advantages import spread_reward, token_advantages
from tinker_claw.methods.base import Evidence, Method
from tinker_claw.methods.passes import reward_parts
from tinker_claw.methods.teachability import teachability
from tinker_claw.types import NextState, Verdict

LAST_STEPS = 5


def read_run_view(rows: Rows, batch_size: int) -> RunView:
    """What the outcomes of a ledger's turns depend on, its method's teacher included.

    Args:
        batch_size: samples of a step, where none was taken yet.
    """
    method = METHODS.get(run_of(rows).get("method", ""))

    def told(turn: TurnView) -> str | None:
        if method is None or method.teaching is None or not turn.has_hint_place:
            return None
        known = Evidence(
            Verdict(turn.votes, turn.verdict),
            # Whether there is something to tell, not what it says.
            ("hint",) * turn.hints,
            NextState("user" if turn.next_role == "user" else "tool", "said"),
            "shown" if turn.demonstrated else None,
        )
        return method.teaching.what if method.tells(known) else None

    return read_run(rows, batch_size, told)


def read_overview(directory: Path, batch_size: int) -> Record:
    """The figures of a data directory.

    Args:
        batch_size: samples of a step.

    Raises:
        LedgerError: it holds no ledger, or one that cannot be read.
    """
    with reading(directory / FILE) as ledger, ledger.moment():
        return overview(ledger, batch_size)


def overview(rows: Rows, batch_size: int) -> Record:
    """The figures of a ledger. `batch_size`: samples of a step."""
    figures, gains = (
        read_figures(rows, read_run_view(rows, batch_size), LAST_STEPS),
        read_gains(rows),
    )
    method = METHODS.get(figures["run"].get("method", ""))
    rewards = method is None or method.reward > 0
    taught = dict[str, Record]()
    for user, found in gains.items():
        known = teachability(found.accepted, found.rejected)
        weight = known.weight(rewards=rewards)
        taught[user] = asdict(known)
        taught[user] |= {"teaches": known.teaches, "weight": weight, "meaning": str(known)}
    return {
        **{"data_dir": str(rows.path.parent), "batch_size": batch_size, **figures},
        # By user, whether what the teacher is told of their turns teaches.
        "teachability": taught,
    }


# In words

_DEFINED = (
    "Good: a verdict of +1, among turns with a verdict. Accepted: the first reply of a session "
    "whose verdict is not -1. In brackets the 95 % interval. Versions that a rollback has left "
    "behind do not count. What you ask changes over time as well: this is a record, no experiment."
)
_DEFINED_TOO = " Episode outcomes: 0 % where all were -1, 100 % where all were +1."
_JUDGE_ALONE = (
    "none, and no feedback: a judge that always says the opposite cannot be told from a user of "
    "the opposite taste"
)
_FOLLOWS = {
    1.0: "they count in full",
    0.0: "they are weighted to nothing, rewards count as ever",
}


def facts(seen: Record) -> Iterator[tuple[str, str]]:
    """What fits into a line each: its name, and the line."""
    model, method, backend = (seen["run"].get(k, "?") for k in ("model", "method", "backend"))
    here, directory = Path.cwd(), Path(seen["data_dir"])
    near = directory.relative_to(here) if directory.is_relative_to(here) else directory
    yield "records", f"{near}: {method} on {model}, backend {backend}"
    if seen["policy_version"] is None:
        yield "policy", "no version yet: the run has not begun"
    else:
        pin = "" if seen["pinned"] is None else f"; v{seen['pinned']} answers, which is pinned"
        pin = pin.replace("answers", "answers one session in two") if seen["compared"] else pin
        steps = plural(seen["step"], "step")
        yield "policy", f"v{seen['policy_version']}, {steps} from the base{pin}"
    if seen["held"]:
        yield "held", f"learning waits for a rollback: {seen['held']}"
    if compared := seen["compared"]:
        yield "compared", f"accepted first replies: {compared['meaning']}"
    if seen["gate"]:
        yield "gate", f"step {seen['gate'][0]['step']}: {seen['gate'][0]['told']}"
    queued, whole = seen["samples_waiting"], seen["batch_size"]
    yield "next step", f"{queued} of {whole} samples"
    private = f", {n} of them private now" if (n := seen["private_sessions"]) else ""
    turns = f"{seen['turns']['main']} main and {seen['turns']['side']} side turns"
    yield "turns", f"{turns} in {seen['sessions']} sessions{private}"
    if any((episodes := seen["episodes"]).values()):
        yield "episodes", f"{episodes['running']} running, {episodes['over']} over"
    votes = ", ".join(f"{seen['verdicts'][name]} {name}" for name in ("good", "neutral", "bad"))
    none = f"{seen['verdicts']['none']} without a valid vote"
    yield "verdicts", f"{votes}, {none}; {seen['hints']} hints"
    said = seen["feedback"]
    if seen["verdicts"]["good"] and not seen["auditor"]["audited"] and not any(said.values()):
        yield "auditor", _JUDGE_ALONE
    if audited := (heard := seen["auditor"])["audited"]:
        told = f"agrees with {heard['agree']} of {plural(audited, 'verdict')}"
        yield "auditor", f"{told}, and says the opposite of {heard['opposed']}"
    if any(said.values()):
        told = f"replies {said['replies']}, sessions {said['sessions']}"
        yield "feedback", f"{told}; of {said['unlike']} replies the judge had found otherwise"
    for user, known in seen["teachability"].items():
        follows = _FOLLOWS.get(known["weight"], f"they count {known['weight']:g}")
        yield "hints", f"of {user}: {known['meaning']}; {follows}"
    if seen["lost_next_states"]:
        yield "lost", lost(seen["lost_next_states"])
    samples = ", ".join(f"{n} {state}" for state, n in sorted(seen["samples"].items()))
    yield "samples", samples or "none"
    if usd := seen["usd"]:
        told = ", ".join(f"{purpose} ${cost:.4f}" for purpose, cost in sorted(usd.items()))
        unpriced = f"; {n} bills without a price" if (n := seen["bills_without_price"]) else ""
        yield "spent", f"${sum(usd.values()):.4f}: {told}{unpriced}"


def defined(helps: Mapping[str, Record]) -> str:
    """What the shares of these measures are."""
    return _DEFINED + _DEFINED_TOO * ("episode_outcomes" in helps)


def lost(causes: Mapping[str, int]) -> str:
    """What users said that nobody judges, by cause."""
    told = ", ".join(f"{n} {cause}" for cause, n in sorted(causes.items()))
    return f"{plural(sum(causes.values()), 'answer')} that could not be tied to a reply: {told}"


# What is left, and what trained


def read_kept(rows: Rows) -> list[Record]:
    """All versions of the ledger, oldest first, and what is left of each.

    `state`: learning can go on from it; `sampler`: it can answer. None: the service knows.
    """
    records, directory = read_versions(rows), rows.path.parent
    local = run_of(rows).get("backend") == "local"
    for one in records:
        saved = one["state_ref"] is not None
        there = (directory / "states" / str(one["state_ref"])).is_dir() if local else None
        sampler = (directory / "adapters" / one["sampler_ref"]).is_dir() if local else None
        one |= {"saved": saved, "state": there if saved else False, "sampler": sampler}
    return records


def usable(one: Record, *, with_state: bool = False) -> bool:
    """Whether its weights (and its state) are there, as far as one can see."""
    return one["sampler"] is not False and (one["state"] is not False or not with_state)


@dataclass(frozen=True, slots=True)
class Trained:
    """By what a step trained a sample."""

    step: int
    parent: int
    """The version that it began with."""
    method: Method
    cfg: Training
    recorded: bool
    """`cfg` is what the step recorded; else it is today's."""
    metrics: Mapping[str, Any]


def trained_by(rows: Rows, turn: TurnView, run: RunView, training: Training) -> Trained | None:
    """None: no step has trained it, or one by a method that is not known here.

    Args:
        training: settings, for what the ledger does not say.
    """
    number = turn.trained_in_step
    if number is None or (step := read_step(rows, number)) is None:
        return None
    parent, metrics = step
    rule = dict(metrics.get("rule") or {})
    method = METHODS.get(rule.pop("method", run.names.get("method")))
    if method is None:
        return None
    cfg = Training(**rule) if rule else training
    return Trained(number, parent, method, cfg, bool(rule), metrics)


def advantages(rows: Rows, turn: TurnView, known: Contents, by: Trained) -> tuple[float, ...]:
    """Of each token of a reply, by its reward and by what the teacher said of the token itself;
    without what hangs on the weights of that time. () where the tokens are gone."""
    done, weights = known.completion, by.method.weights(by.cfg)
    rewards = rewards_of(rows, by.step)
    at = next(n for n, one in enumerate(rewards) if one.turn_id == turn.id)
    reward = 0.0
    if weights.reward and rewards[at].reward is not None:
        reward = weights.reward * reward_parts(rewards, by.cfg)[at]
    taught = (0.0,) * len(done.tokens)
    if (teacher := known.teacher) is not None and weights.distill:
        told = token_advantages(teacher.logprobs, done.logprobs, by.cfg.opd_clip)
        taught = tuple(weights.distill * teacher.weight * one for one in told)
    spread = spread_reward(reward, done.logprobs)
    return tuple(one + more for one, more in zip(spread, taught, strict=True))
