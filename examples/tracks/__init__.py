"""Tracks: agents that finish tasks train through the gateway, many at a time.

- track.py: what a track is, as a file in configs/tracks/ says it
- environments.py: what every environment has: tasks, attempts at them, tools, a grade
- tool_call.py: arithmetic with a calculator
- sandbox.py: where a command runs that a model typed
- bounds.py: how much of the machine it may take there
- terminal.py: small jobs in a shell
- swe.py: bugs in little repositories
- gui.py: errands in a web page
- screen.py: icons on a screenshot
- client.py: the gateway, over HTTP: replies, outcomes, and coming back when it is busy
- episode.py: what one try asks, written down so that it is asked once
- state.py: what has happened, on disk, so that a run that was killed goes on
- runner.py: episodes in groups, side by side; exams of fixed versions
- report.py: the results
- compare.py: gateway and tracks from one command, with several seeds and rewards
- with_verifiers.py: task sets and harnesses of verifiers, in an environment of their own
- with_openenv.py: worlds of OpenEnv, whose server is running

Rule: nothing here imports the product. docs/agents.md describes the same for any language.
"""

from examples import StoppedError


class TrackError(StoppedError):
    """An error that stops a run."""


class TooLongError(TrackError):
    """Raised when a conversation is longer than the model's context. It stops a run only where a
    task's first messages are."""


class BrokenError(TrackError):
    """Raised where an environment fails in one episode, which then has no outcome; the others go
    on."""
