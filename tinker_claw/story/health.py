"""What /healthz says, in a few lines. Pure.

Rule: what is wrong, since when, and what that means to the user, before any figures.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from tinker_claw.privacy import NEAR_MISS

KEY_VARIABLE = "TINKER_CLAW_GATEWAY__API_KEY"
_FINE = {
    "backend": ("ok",),
    "learner": ("waiting", "training", "observing", "finished", "paused"),
    "judge": ("ok", "paused"),
    "agreement": ("ok",),
    "servers": ("ok",),
    "upkeep": ("ok",),
}


def describe(health: Mapping[str, Any], url: str, now: float) -> list[str]:
    """The lines for a terminal. `now`: seconds since 1970."""
    if "user" in health:
        return [
            f"tinker-claw at {url}: {health['status']}",
            f"{health['user']}: {health['turns']} turns since the start; tokens: "
            f"{health['prompt_tokens']} of prompts, {health['completion_tokens']} of replies",
            'It tells more to admins: role = "admin" in [[users]], or --api-key.',
        ]
    if "policy_version" not in health:
        more = "It tells more to who sends a key: name its settings file with --config, or set "
        return [f"tinker-claw at {url}: {health['status']}", f"{more}{KEY_VARIABLE}."]
    return [
        f"tinker-claw at {url}: {health['status']}",
        *_wrong(health, now),
        *([health["meaning"]] if health.get("meaning") else []),
        ", ".join(_figures(health)),
    ]


def _wrong(health: Mapping[str, Any], now: float) -> Iterator[str]:
    for part, fine in _FINE.items():
        state = health.get(part, fine[0])
        if state in fine:
            continue
        line = f"  {part}: {state} since {_when(health[f'{part}_since'], now)}"
        wait_s = health.get(f"{part}_next_try_s")
        if part == "learner" and state == "stalled":
            times = health["learner_attempts"]
            line += f", after {times} attempt{'s' if times > 1 else ''}"
            line += f"; next try in {wait_s:.0f} s" if wait_s is not None else "; trying now"
        elif state == "failed" and wait_s is not None:
            line += f"; starting again in {wait_s:.0f} s"
        yield line
        error = health.get(f"{part}_error")
        # What the backend's outage says, the parts that wait for it need not say again.
        if error and (part == "backend" or state != "stalled"):
            yield f"    {error}"
    if taken := health.get("private_near_misses"):
        yield f"  private: {taken} time{'s' if taken > 1 else ''} since the start"
        yield f"    {NEAR_MISS}"
    if paused := health.get("spending_paused"):
        yield f"  spending: paused since {_when(health['learner_since'], now)}"
        yield f"    {paused}"


def _figures(health: Mapping[str, Any]) -> Iterator[str]:
    yield f"policy v{health['policy_version']}"
    yield f"{health['samples_waiting']}/{health['batch_size']} samples waiting"
    spent, budget = health.get("spent_usd"), health.get("budget_usd")
    if spent:
        yield f"${spent:.4f} spent" + (f" of ${budget:g}" if budget else "")


def _when(since: float, now: float) -> str:
    """Local time, with the day where it was another one, and how long ago."""
    began, today = datetime.fromtimestamp(since), datetime.fromtimestamp(now).date()
    shown = began.strftime("%H:%M:%S" if began.date() == today else "%Y-%m-%d %H:%M:%S")
    ago = max(0, int(now - since))
    for unit, seconds in (("d", 86_400), ("h", 3600), ("min", 60)):
        if ago >= 2 * seconds:
            return f"{shown} ({ago // seconds} {unit} ago)"
    return f"{shown} ({ago} s ago)"
