"""Figures of a ledger combined with what its method knows, for commands and for the page.

Rule: the figures and the words are those of `ledger`; nothing is locked or written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tinker_claw.ledger.database import FILE, Rows, reading
from tinker_claw.ledger.figures import accepted_by, read_figures
from tinker_claw.ledger.firsts import read_firsts
from tinker_claw.ledger.outcome import plural, read_run, run_of
from tinker_claw.ledger.versions import read_versions
from tinker_claw.ledger.views import Record

LAST_STEPS = 5


def read_overview(directory: Path, batch_size: int) -> Record:
    """Return the figures of a data directory.

    Args:
        batch_size: samples of a step.

    Raises:
        LedgerError: it holds no ledger, or one that cannot be read.
    """
    with reading(directory / FILE) as ledger, ledger.moment():
        return overview(ledger, batch_size)


def overview(rows: Rows, batch_size: int) -> Record:
    """Return the figures of a ledger. `batch_size`: samples of a step."""
    figures = read_figures(rows, read_run(rows, batch_size), LAST_STEPS)
    return {"data_dir": str(rows.path.parent), "batch_size": batch_size, **figures}


# In words

DEFINED = (
    "Counted is the first turn of a session that its owner judged, by their next message or a "
    "rating: usually the reply after the tools. Neutral verdicts, and what tools and programs say, "
    "are nobody's judgement. In brackets the 95 % interval, which holds however often you look. "
    "Versions that a rollback has left behind do not count. What you ask changes over time as "
    "well: this is a record, no experiment."
)
"""Explanation of the accepted shares."""
_JUDGE_ALONE = (
    "nobody has rated a reply outright, so a judge that is always wrong would not show: "
    "rate a reply now and then (/good, /bad)"
)


def facts(seen: Record) -> Iterator[tuple[str, str]]:
    """Yield figures that fit on a line each, as name and text."""
    model, method, backend = (seen["run"].get(k, "?") for k in ("model", "method", "backend"))
    yield "records", f"{seen['data_dir']}: {method} on {model}, backend {backend}"
    if seen["policy_version"] is None:
        yield "policy", "no version yet: the run has not begun"
    else:
        pin = "" if seen["pinned"] is None else f"; v{seen['pinned']} answers, which is pinned"
        steps = plural(seen["step"], "step")
        yield "policy", f"v{seen['policy_version']}, {steps} from the base{pin}"
    if seen["held"]:
        yield "held", f"learning is held: {seen['held']}"
    if seen["gate"]:
        yield "gate", f"step {seen['gate'][0]['step']}: {seen['gate'][0]['told']}"
    queued, whole = seen["samples_waiting"], seen["batch_size"]
    yield "next step", f"{queued} of {whole} samples"
    private = f", {n} of them private now" if (n := seen["private_sessions"]) else ""
    turns = f"{seen['turns']['main']} main and {seen['turns']['side']} side turns"
    yield "turns", f"{turns} in {seen['sessions']} sessions{private}"
    if any((episodes := seen["episodes"]).values()):
        yield "episodes", f"{episodes['running']} running, {episodes['over']} ended"
    votes = ", ".join(f"{seen['verdicts'][name]} {name}" for name in ("good", "neutral", "bad"))
    none = f"{seen['verdicts']['none']} without a valid vote"
    yield "verdicts", f"{votes}, {none}; {seen['hints']} hints"
    said = seen["feedback"]
    if seen["verdicts"]["good"] and not any(said.values()):
        yield "feedback", _JUDGE_ALONE
    if any(said.values()):
        replies = "1 reply" if said["replies"] == 1 else f"{said['replies']} replies"
        told = f"{replies} and {plural(said['sessions'], 'session')} rated outright"
        yield "feedback", f"{told}; the judge disagreed on {said['unlike']} of the replies"
    if seen["lost_next_states"]:
        causes = seen["lost_next_states"]
        told = ", ".join(f"{n} {cause}" for cause, n in sorted(causes.items()))
        count = plural(sum(causes.values()), "message")
        yield "lost", f"{count} could not be tied to a reply: {told}"
    for client, n in sorted(seen["not_understood"].items()):
        of = client or "a client without a name"
        yield "unknown", f"{plural(n, 'message')} of {of} that are not understood: none teaches"
    if told := _strangers(seen["strangers"]):
        yield "others", told
    samples = ", ".join(f"{n} {state}" for state, n in sorted(seen["samples"].items()))
    yield "samples", samples or "none"
    if usd := seen["usd"]:
        told = ", ".join(f"{purpose} ${cost:.4f}" for purpose, cost in sorted(usd.items()))
        unpriced = f"; {n} bills without a price" if (n := seen["bills_without_price"]) else ""
        yield "spent", f"${sum(usd.values()):.4f}: {told}{unpriced}"


def _strangers(seen: Mapping[str, Sequence[str]]) -> str | None:
    """Describe who else writes to the agent, and how to let them teach it; None: nobody."""
    who = [f"others write in {channel}" for channel in seen["direct"]]
    who += [f"groups of {channel} use the agent" for channel in seen["groups"]]
    if not who:
        return None
    name = (*seen["direct"], *seen["groups"])[0]
    return (
        f"{', '.join(who)}; their words teach nothing, and in groups nobody's do. Say whose count: "
        f'owners = ["{name}:YOUR-ID"] in [gateway.chats]'
    )


# Versions


def read_kept(rows: Rows) -> list[Record]:
    """Return all versions of the ledger, oldest first, and which of their files are left.

    `state`: learning can go on from it; `sampler`: it can answer. None: only the service knows.
    `lost`: why learning cannot go back to it; None: it can, as far as known. `accepted`: share of
    its first judged turns that were accepted; None: it has none.
    """
    records, directory = read_versions(rows), rows.path.parent
    accepted = {one.version: one.record for one in accepted_by(read_firsts(rows))}
    local = run_of(rows).get("backend") == "local"
    for one in records:
        saved = one["state_ref"] is not None
        there = (directory / "states" / str(one["state_ref"])).is_dir() if local else None
        sampler = (directory / "adapters" / one["sampler_ref"]).is_dir() if local else None
        one |= {"saved": saved, "state": there if saved else False, "sampler": sampler}
        one["accepted"] = accepted.get(one["id"])
        one["lost"] = _lost(one)
    return records


def _lost(one: Record) -> str | None:
    """Return why learning cannot go back to a version; None: it can, as far as known."""
    if not one["saved"]:
        return "its state was not saved (--save-interval)"
    gone = [name for name in ("state", "sampler") if one[name] is False]
    return f"its {' and its '.join(gone)} {'are' if gone[1:] else 'is'} deleted" if gone else None


def usable(one: Record, *, with_state: bool = False) -> bool:
    """Return whether a version's weights, and its state if asked for, are there as far as known."""
    return one["sampler"] is not False and (one["state"] is not False or not with_state)
