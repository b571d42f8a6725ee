"""Text that the real OpenClaw writes around a person's words, in every kind of chat."""

from __future__ import annotations

import pytest

from tests.npm import npm
from tests.openclaw_contexts import BAD, CONTEXTS, built
from tinker_claw.conversation.attribution import attribute, words_of
from tinker_claw.conversation.openclaw import _HEADER, LABELS, Sender, Surface
from tinker_claw.types import Writer

pytestmark = [
    pytest.mark.openclaw,
    pytest.mark.slow,
    pytest.mark.skipif(npm() is None, reason="npm is not installed: OpenClaw cannot be run"),
]
WORDS = "No, shorter.\n\nIn German, please."
CHANNELS_OWN = ("Poll:", "Chat window:")
"""Labels of the test's own: a channel may write any label."""


def test_words_are_told_from_all_that_openclaw_writes_around_them() -> None:
    cases = built(WORDS)
    assert [case.name for case in cases] == list(CONTEXTS)
    for case in cases:
        place = Surface("whatsapp", "whatsapp", group=case.group)
        message = {"role": "user", "content": case.text}

        def is_ann(sender: Sender) -> bool:
            return sender.id == "49170"

        pieces = attribute(message, place, is_ann)
        assert "".join(piece.text for piece in pieces) == case.text
        labels = {found["label"].strip() for found in _HEADER.finditer(case.text)}
        strange = labels - LABELS - {*CHANNELS_OWN}
        assert not strange, f"OpenClaw writes context of a new kind: {strange}"
        if case.foreign:
            assert WORDS in words_of(pieces, Writer.EXTERNAL), case
            assert words_of(pieces, Writer.OWNER, Writer.MEMBER, Writer.UNKNOWN) == "", case
            continue
        writer = Writer.MEMBER if case.group else Writer.OWNER
        assert words_of(pieces, writer) == WORDS, case
        assert words_of(pieces, *({*Writer} - {writer, Writer.QUOTATION, Writer.EXTERNAL})) == ""
        assert BAD not in words_of(pieces, writer)
        if not case.name.startswith("telegram r"):  # there its stripper leaves the quotation
            assert case.left.strip() == WORDS, case
        for name in ("Ann", "Bob", "Carol", "49170"):
            assert name not in "".join(piece.words for piece in pieces), (case.name, name)
