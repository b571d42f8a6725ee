"""A small ledger with a turn in every state that there is, and the command line over it."""

from __future__ import annotations

import os
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from subprocess import CompletedProcess
from unittest.mock import patch

from tests.support.ledger import COMPLETION, new_turn
from tinker_claw.cli import main
from tinker_claw.config.settings import Training
from tinker_claw.ledger.feedback import About, Feedback
from tinker_claw.ledger.ledger import Ledger
from tinker_claw.ledger.samples import STEPS_FAILED
from tinker_claw.ledger.steps import Void
from tinker_claw.methods import COMBINE, BatchItem
from tinker_claw.turn_state import Reason, TurnRefusal
from tinker_claw.types import HintScores, Kind, NextState, PolicyVersion, Vote

SECRET = "SECRET"
"""A text that is part of everything that a user, a model, a tool or the judge wrote."""
RULE = {
    "method": "combine",
    **{"w_rl": 1.0, "w_opd": 0.5, "opd_topk": 2},
    "recipe": "default",
}
CFG = Training(**{name: value for name, value in RULE.items() if name != "method"})
METRICS = {"samples": 2, "hinted": 1, "losses": [0.25, -0.5], "grad_norm": 1.5, "reward_mean": 0.0}
METRICS |= {"agreement_k3": 0.03125, "agrees": True}
METRICS |= {"clip_share": 0.125, "usd": 0.0625, "rule": RULE}
TEACHER = HintScores(
    hint=f"{SECRET} hint",
    logprobs=(-0.2, -1.0, -0.5),
    # Differences from the student's candidates: +0.5 and -1; +3 (cut to 1) and 0; 0 and 0.
    targets=((0.4, -4.0), (1.7654321098765433, -1.5), (-1e-9, -20.0)),
    overlap=3,
)


Done = CompletedProcess[str]
"""A command that has ended."""


def run(*flags: str, directory: Path | None = None, **env: str) -> Done:
    """Run a command as `run.py` does, in this process: to start one takes longer than most."""
    where = () if directory is None else ("--data-dir", str(directory))
    own = {k: v for k, v in os.environ.items() if not k.startswith("TINKER_CLAW_")} | env
    out, err = StringIO(), StringIO()
    with (
        patch.dict(os.environ, own, clear=True),
        patch("sys.stdin", StringIO()),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        status = main.main([*flags, *where])
    return Done(flags, status, out.getvalue(), err.getvalue())


class Told:
    """Writes turns through the real ledger, and takes each as far as asked."""

    def __init__(self, directory: Path) -> None:
        self.ledger = Ledger(directory)
        self.ledger.bind({"model": "demo", "method": "combine", "backend": "local"})
        self.version = self.ledger.versions.newest() or self.ledger.versions.add_first(
            state_ref="s0", sampler_ref="p0"
        )

    def turn(self, key: str = "s", **changes: object) -> int:
        """Capture a turn, and no more."""
        texts = {"request_text": f"{SECRET} request", "reply_text": f"{SECRET} reply"}
        changes = (
            {"policy_version": self.version.id, "request_kind": "plain request"} | texts | changes
        )
        return self.ledger.turns.add(new_turn(self.ledger, key, **changes))

    def followed(self, key: str = "s", **changes: object) -> int:
        turn = self.turn(key, **changes)
        self.ledger.turns.add_next_state(turn, NextState("user", f"{SECRET} answer"))
        return turn

    def judged(self, key: str, value: Vote | None, *hints: str, **changes: object) -> int:
        turn = self.followed(key, **changes)
        self.judge(turn, value, *hints)
        return turn

    def judge(self, turn: int, value: Vote | None, *hints: str) -> None:
        self.ledger.judgements.add(
            turn,
            value=value,
            ballots=[(f"{SECRET} vote", value)] * 3,
            hints=hints,
        )

    def sampled(self, key: str, value: Vote, teacher: HintScores | None = None) -> tuple[int, int]:
        """Add a turn and its sample."""
        turn = self.judged(key, value, *([teacher.hint] if teacher else []))
        return turn, self.ledger.samples.add(turn, value, teacher)

    def step(self, *samples: int) -> tuple[int, PolicyVersion]:
        step = self.ledger.steps.begin(self.version.id, samples)
        taken = [BatchItem(one) for one in self.ledger.samples.load(samples)]
        self.ledger.steps.store_advantages(step, COMBINE.prepare(taken, CFG).stored, None)
        self.version = self.ledger.steps.commit(
            step,
            self.version,
            state_ref=f"s{step}",
            sampler_ref=f"p{step}",
            metrics=METRICS,
        )
        return step, self.version


def every_state(directory: Path) -> dict[str, int]:
    """Add a turn in each state; return the turns by the state's name."""
    told = Told(directory)
    ledger, turns = told.ledger, dict[str, int]()
    turns["trained"], first = told.sampled("trained", 1, TEACHER)
    turns["trained on its verdict"], second = told.sampled("trained 2", -1)
    turns["expired"], _ = told.sampled("expired", 1)
    told.step(first, second)
    assert ledger.samples.expire(5, 4) == 1
    turns["quarantined"], bad = told.sampled("bad", 1)
    ledger.steps.void(ledger.steps.begin(told.version.id, [bad]), "it makes no sense")
    ledger.samples.refuse([bad], STEPS_FAILED)
    turns["side"] = told.turn(
        "side", kind=Kind.SIDE, untrained_because=TurnRefusal(Reason.SIDE, "recap")
    )
    turns["refused when captured"] = told.turn(
        "hung up", untrained_because=TurnRefusal(Reason.HUNG_UP)
    )
    turns["passed over"] = told.turn("goes on")
    turns["waits for a next state"] = told.turn("goes on")
    turns["lost"] = told.turn("is compacted")
    turns["answers nobody knows what"] = told.turn("is compacted", lost=True)
    turns["ended"] = told.turn("over")
    ledger.turns.close([ledger.turns.session("me", "over")])
    turns["waits for the judge"] = told.followed("unjudged")
    turns["waits for the teacher"] = told.judged("hinted", -1, f"{SECRET} hint")
    turns["waits to be queued"] = told.judged("judged", 1)
    turns["refused when judged"] = told.judged("neutral", 0)
    ledger.turns.refuse(turns["refused when judged"], TurnRefusal("neutral verdict, no hint"))
    turns["no verdict"] = told.judged("no verdict", None)
    ledger.turns.refuse(turns["no verdict"], TurnRefusal("no valid vote, no hint"))
    turns["queued"], _ = told.sampled("queued", 1)
    turns["queued again"], again = told.sampled("again", -1)
    ledger.steps.void(ledger.steps.begin(told.version.id, [again]), "away", Void.AWAY)
    turns["in training"], now = told.sampled("now", 1)
    ledger.steps.begin(told.version.id, [now])
    turns["by another version"] = told.turn("fell back", fallback="v1 failed: no adapter")
    said = ledger.feedback
    said.give("me", About("turn", turns["trained"]), Feedback(0.5, f"{SECRET} end", final=True))
    told_off = Feedback(-0.5, f"{SECRET} reason", "client", key=f"{SECRET} key")
    said.give("me", About("turn", turns["trained on its verdict"]), told_off)
    assert COMPLETION.tokens == (5, 151_000, 7), "the advantages expected of it are made for it"
    ledger.close()
    return turns
