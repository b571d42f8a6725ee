"""The body of /healthz, which the page, `status`, `doctor` and `openclaw-config` read, too."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from tinker_claw.errors import LedgerError
from tinker_claw.gateway.deps import GatewayDeps
from tinker_claw.learner.health import Health
from tinker_claw.ledger.samples import read_queue, ready


def healthz(deps: GatewayDeps, parts: Health, batch_size: int) -> dict[str, Any]:
    """Return the body, as an admin sees it."""
    spending, policy, waiting = deps.spending, deps.policy, 0
    with suppress(LedgerError):  # which `records` tells
        waiting = ready(read_queue(deps.ledger.rows), batch_size)
    version = policy.current.version.id
    body = parts.snapshot(version=version, waiting=waiting, batch_size=batch_size)
    if paused := spending.paused():
        body["status"] = "paused" if body["status"] == "ok" else body["status"]
        for part in ("judge", "learner"):
            if body[part] != "failed":  # what has failed for good stays failed
                body |= {part: "paused", f"{part}_since": spending.paused_since}
    thinking, settings = deps.renderer.thinking, deps.settings
    return {
        **body,
        "pinned": policy.pinned is not None,
        "data_dir": str(deps.ledger.path.parent.absolute()),
        **spending.sums(),
        "spending_paused": paused,
        "private_near_misses": deps.privacy.near_misses,
        # What an agent's settings say of the model.
        "offers": {
            "model": deps.served_name,
            "context_tokens": deps.can.context_tokens,
            "max_reply_tokens": settings.max_reply_tokens,
            "images": settings.images != "off" and bool(deps.renderer.eyes) and deps.can.sees,
            "efforts": thinking.efforts,
            "may_think": thinking.off is not None and settings.thinking == "auto",
            "key": deps.keys.key_header,
        },
        "left_out": [*deps.left_out.kinds.values()],
        "unfit": [*deps.unfit.kinds.values()],
    }
