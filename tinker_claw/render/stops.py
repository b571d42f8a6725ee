"""Where a request ends its reply before the model does.

Rule: the cut falls in the same place however the tokens were chunked: a service that answers in one
piece and a sampler that streams show the same reply. Only the reply is cut, never what was sampled.

A stop string counts where it is in the reply's text, as the client sees it: not in thinking, not in
a tool call, and not in white space that a reply's text is stripped of. Where one call is allowed,
the reply ends before the second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tinker_claw.render.stream import Delta, ReplyStream
from tinker_claw.types import Reply, Tokens


class CutStream:
    """A ReplyStream that may end early. Of one that cannot, it changes nothing."""

    def __init__(
        self, inner: ReplyStream, stop: Sequence[str] = (), *, one_call: bool = False
    ) -> None:
        self._inner = inner
        self._may_end_early = bool(stop) or one_call
        self._search = StopSearch(stop)
        self._one_call = one_call
        self._shown: list[Delta] = []
        self.cut_because: str | None = None
        """Set when the reply has ended: there is no use in sampling on."""

    def feed(self, tokens: Tokens) -> list[Delta]:
        if self.cut_because:
            return []
        deltas = self._inner.feed(tokens)
        return self._pass(deltas) if self._may_end_early else deltas

    def finish(self) -> tuple[list[Delta], Reply]:
        rest, reply = self._inner.finish()
        if not self._may_end_early:
            return rest, reply
        rest = [] if self.cut_because else self._pass(rest)
        if not self.cut_because:
            held = self._search.flush()
            return [*rest, Delta("text", held)] if held else rest, reply
        return rest, replace(
            reply,
            text="".join(delta.text for delta in self._shown if delta.kind == "text"),
            tool_calls=tuple(delta.call for delta in self._shown if delta.call),
        )

    def _pass(self, deltas: Sequence[Delta]) -> list[Delta]:
        """The deltas that are shown, up to a cut."""
        out: list[Delta] = []
        for delta in deltas:
            if delta.kind == "text":
                text = self._search.feed(delta.text)
                if text:
                    out.append(Delta("text", text))
                if self._search.found:
                    self.cut_because = "its text was cut at a stop string of the request"
            elif delta.call and self._one_call and self._called(out):
                self.cut_because = "it was ended before a second call, as the request asked"
            else:
                out.append(delta)
            if self.cut_because:
                break
        self._shown += out
        return out

    def _called(self, out: Sequence[Delta]) -> bool:
        return any(delta.call for delta in (*self._shown, *out))


class StopSearch:
    """Lets text through up to the stop string that is complete first."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._longest = max(map(len, stop), default=0)
        self._held = ""
        self.found = False

    def feed(self, text: str) -> str:
        """What can be shown for certain: a beginning of a stop string is held back."""
        if self.found:
            return ""
        text = self._held + text
        starts = {stop: text.find(stop) for stop in self._stop}
        # The one that ends first, as a reader of single characters would find it; of two that end
        # together the longer one.
        ends = [(at + len(stop), at) for stop, at in starts.items() if at >= 0]
        if ends:
            self.found, self._held = True, ""
            return text[: min(ends)[1]]
        self._held = self._beginning(text)
        return text[: len(text) - len(self._held)]

    def flush(self) -> str:
        """What was held back, now that nothing follows."""
        held, self._held = self._held, ""
        return held

    def _beginning(self, text: str) -> str:
        """The longest end of `text` that some stop string begins with."""
        for length in range(min(len(text), self._longest - 1), 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stop):
                return end
        return ""
