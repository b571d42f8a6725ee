"""The real OpenClaw without its gateway: each message is a run of `openclaw agent --local`."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from typing import Any

from examples.day import DayError
from examples.day.openclaw import OpenClaw


@dataclass(frozen=True)
class LocalOpenClaw(OpenClaw):
    """One user's OpenClaw, asked from a terminal."""

    def say(self, session: str, message: str, *flags: str) -> str:
        """Send one user turn, as `openclaw agent` does; return what the user would read."""
        process = self.begin(session, message, *flags)
        try:
            out, errors = process.communicate(timeout=360)
        finally:
            process.kill()
        if process.returncode:
            raise DayError(f"OpenClaw failed: {errors[-2000:]}")
        answer = json.JSONDecoder().raw_decode(out[out.index("{") :])[0]
        return "\n".join(part.get("text") or "" for part in answer.get("payloads", [])).strip()

    def begin(self, session: str, message: str, *flags: str) -> subprocess.Popen[str]:
        """Start sending a user turn; return the running process."""
        words = ("agent", "--local", "--json", "--session-id", session, "--timeout", "300")
        return self.start(*words, "-m", message, *flags)

    def check_config(self) -> dict[str, Any]:
        """Check the configuration with OpenClaw itself: whether it is valid, and warnings."""
        found = json.loads(self.start("config", "validate", "--json").communicate(timeout=360)[0])
        return {"valid": found["valid"], "warnings": found.get("warnings", [])}
