"""The OpenAI-compatible endpoint that the agent talks to.

Rule: a turn is in the ledger before its client sees the end of the reply, and serving waits for
nothing but the sampler.
"""

from tinker_claw.gateway.app import create_app
from tinker_claw.gateway.deps import GatewayDeps, TurnObserver
from tinker_claw.gateway.fallback import lineage

__all__ = ["GatewayDeps", "TurnObserver", "create_app", "lineage"]
