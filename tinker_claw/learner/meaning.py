"""The state of the parts as one sentence for the user: what works, and what waits. Pure."""

from __future__ import annotations

from collections.abc import Set

from tinker_claw.outages import Asking


def meaning(
    *,
    version: int,
    waiting: int,
    batch_size: int,
    away: Set[Asking],
    learner: str,
    judge: str,
    agreement: str,
    servers: str = "ok",
    upkeep: str = "ok",
    learning_ended: bool = False,
) -> str:
    """What the state means to the user right now. `learner` to `upkeep`: states of their parts."""
    found = (
        _sampling(away, servers),
        _judging(away, judge),
        _learning(away, learner, ended=learning_ended) or _agreeing(agreement),
        None if upkeep == "ok" else "what is too old or too much is kept for now",
    )
    troubles = [told for told in found if told]
    if "serving" in away:
        replies = (
            "Replies wait for the service, which is asked again and again; a request that it does "
            "not answer in time gets an error"
        )
    elif troubles:
        replies = f"Replies come from policy v{version} as before"
    else:
        queue = f"{waiting} of {batch_size} samples for the next step are queued"
        if learner == "finished":
            queue = "learning has taken all its steps"
        elif learner == "observing":
            queue = f"observing: nothing is trained, and {waiting} samples are queued"
        return f"Replies come from policy v{version}; {queue}."
    return "; ".join([replies, *troubles, _kept(waiting)]) + "."


def _sampling(away: Set[Asking], servers: str) -> str | None:
    if servers == "ok" or "serving" in away:
        return None
    return "some inference servers are away, and the others do their work"


def _judging(away: Set[Asking], judge: str) -> str | None:
    if judge == "failed":
        return "turns are recorded, and judged when judging has started again"
    if judge != "ok" or away & {"judging", "teaching"}:
        return "judging waits"
    return None


def _learning(away: Set[Asking], learner: str, *, ended: bool) -> str | None:
    if ended:
        return "learning has stopped until a restart"
    if learner == "failed":
        return "learning starts again by itself"
    if learner == "stalled" or "learning" in away:
        return "learning waits"
    if learner == "recovering":
        return "a step failed, and the state before it is being loaded"
    return None


def _agreeing(agreement: str) -> str | None:
    if agreement == "ok":
        return None
    return (
        "sampler and trainer did not agree on the last batch, and learning stops if they do not on "
        "the next"
    )


def _kept(waiting: int) -> str:
    if waiting == 0:
        return "nothing is lost"
    return f"{waiting} {'sample is' if waiting == 1 else 'samples are'} queued, none is lost"
