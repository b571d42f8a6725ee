"""What the gate makes of users whose wishes may cost other skills.

    python -m tests.lab.slow_harm plain configs/personalize/tiny/note.toml --seeds 20 21

The demo's model learns from each user, with the gate, for 16 steps or until learning is paused. A
row has the steps, what canaries have lost since the base and how often versions were refused, first
replies accepted, and the shares of right lists (as the canaries ask for them, in other words) and
equations. The first row of a user is the base's.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import tempfile
from pathlib import Path
from random import Random

import structlog

from examples.demo import skills
from examples.demo.scoring import Check, RuleExam, Skills, demo_skills, score_version
from examples.personalize.judges import honest
from examples.personalize.scenario import of_demo, read
from examples.personalize.users import USERS
from tests.support.scripted_users import demo_run
from tinker_claw.learner.gate import REFUSED
from tinker_claw.ledger.database import FILE, open_read_only
from tinker_claw.ledger.reference import read_fallen

STEPS = 16
PROBLEMS = 128
TURNS = 1500
"""Turns without a step after which a run ends."""


def drawn(rng: Random, _: int) -> Skills:
    """Draw the demo's skills, and lists asked for in other words."""
    tasks = [skills.new_shopping(rng) for _ in range(PROBLEMS)]
    other = [
        Check(rng.choice(skills.LIST_FORMS).format(task=task), task.is_right) for task in tasks
    ]
    return {**demo_skills(rng, PROBLEMS), "other": other}


def losses(folder: Path) -> tuple[float, int]:
    """Return the newest version's loss since the base, and how many versions were refused."""
    with open_read_only(folder / FILE) as rows:
        whole = rows.column(
            "SELECT metrics ->> '$.gate.whole' FROM steps WHERE status = 'committed' ORDER BY id"
        )
        refused = rows.one("SELECT COUNT(*) FROM steps WHERE error LIKE ? || '%'", REFUSED)
    return whole[-1] if whole else 0.0, refused


async def learn(name: str, seed: int) -> None:
    """Print the rows of one user."""
    scenario = of_demo(name) if name in USERS else read(Path(name).stem, Path(name))
    exam = RuleExam.draw(scenario.speaker(), PROBLEMS, drawn)
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        async with demo_run(folder, honest([scenario]), gate="on", seed=seed) as run:
            reached = begun = 0

            def enough() -> bool:
                nonlocal reached, begun
                if run.step > reached:
                    reached, begun = run.step, run.turns
                return run.held or run.step >= STEPS or run.turns - begun > TURNS

            for until in ("base", "end"):
                if until == "end":
                    await run.talk(scenario.speaker(), enough)
                score = await score_version(run.client, run.step, exam)
                shares = " | ".join(f"{score.shares[of]:.2f}" for of in ("lists", "other", "work"))
                whole, refused = losses(folder)
                pause = read_fallen(run.parts.ledger.rows)
                print(
                    f"| {Path(name).stem} {seed} | {run.step} | {whole:.3f} | {refused} | "
                    f"{score.accepted:.2f} | {shares} | {pause or ''}",
                    flush=True,
                )


def main() -> None:
    """Print the table."""
    top = argparse.ArgumentParser(description=__doc__)
    top.add_argument("users", nargs="+", help="the demo's by name, others by their file")
    top.add_argument("--seeds", type=int, nargs="+", default=[0])
    given = top.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    print("| user | steps | canaries | refused | accepted | lists | other | equations | pause |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    for seed in given.seeds:
        for name in given.users:
            asyncio.run(learn(name, seed))


if __name__ == "__main__":
    main()
