"""Binary: reinforce what the user accepted, discourage what they rejected.

With --baseline none this is REINFORCE with a clipped ratio.
"""

from __future__ import annotations

from tinker_claw.methods.base import Method, Signal

BINARY = Method("binary", "verdicts", frozenset({Signal.REWARD}), reward=1.0)
