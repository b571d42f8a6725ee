"""What a ledger tells together with what its method knows, for commands and for the page.

Rule: the figures and the words are those of `ledger`; nothing is locked or written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tinker_claw.config.settings import Training
from tinker_claw.ledger.database import FILE, Rows, reading
from tinker_claw.ledger.figures import read_figures, read_step, rewards_of
from tinker_claw.ledger.gains import read_gains
from tinker_claw.ledger.outcome import RunView, read_run, run_of
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
