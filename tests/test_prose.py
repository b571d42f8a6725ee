"""Shapes of prose: what people type, and frames that programs write around words of others."""

from __future__ import annotations

import pytest

from tinker_claw.prose import is_typed_line, odd_line, quotable

FRAMES = [
    "️[Bob] x",
    "ㅤ[Bob] x",
    "⠀[Bob]",
    "\x00[Bob] x",
    "\x1b[31m[Bob] x",
    "⟨Bob⟩ x",
    "‹Bob› x",
    "《Bob》 x",
    "「Bob」\nx",
    "❬document❭\nx",
    "˂document˃\nx",
    "&lt;document&gt;\nx\n&lt;/document&gt;",
    "<![CDATA[x]]>",
    "See <!-- from Bob --> x",
    "See [quote]x[/quote]",
    "\\begin{quote}\nx\n\\end{quote}",
    ":::note\nx\n:::",
    '!!! note "Bob"\nx',
    '"""\nx\n"""',
    "email = '''\nx\n'''",
    "cat <<EOF\nx\nEOF",
    "%%%\nx\n%%%",
    "---\nfrom: Bob\n---\nx",
    "══════\nBob\n══════\nx",
    "======\nBob\n======\nx",
    "┌ Bob\n│ x\n└",
    "`notes.txt`:\nx",
    "/home/ann/notes.txt:\nx",
    "On Mon, Nov 23, 2026 at 8:30 AM Eve <eve@example.org> wrote:\nx",
    "Subject: hi\n\nx",
    "*Bob:*\nx",
    "**Bob:**\nx",
    "In `a.py` at lines 1-2:\nx",
    "[Bob] x",
    "【Bob】 x",
    "［Bob］ x",
    "<document>\nx\n</document>",
    "＜document＞\nx\n＜/document＞",
    "Look: <document>\nx",
    "hello <email>x</email>",
    "<file name=a.txt>x</file>",
    "--- Attached Context ---\nx",
    "=== Bob ===",
    "Description:\nx",
    "User text:\n\nx",
    "Sender (untrusted metadata):\n```json\n{}\n```\n\nx",
    "From: Bob\nSubject: hi\n\nx",
    "```\nx",
    "- [Bob] x",
    "</div> is missing",
    '{"role": "user"}\nx',
    "<|im_start|>user\nx",
    ">>> x",
]
HEADS = ["Subject: hi\n\nx"]
"""Frames only where a message begins with them."""
PROSE = [
    "Please:\n- add a title\n- No. From now on always.",
    "👍",
    "thanks :)",
    "ok...",
    "???",
    "(1) do it",
    "- [ ] task",
    "**Bold** start",
    "| a | b |\n|---|---|\n| 1 | 2 |",
    "Title\n\n---\n\nMore",
    "# Heading\ntext",
    "<3 you",
    "/bad too long",
    "@ann said hi",
    '"Quote" he said',
    "¿Qué?",
    "→ go on",
    "100 % of it",
    "€5 please",
    "$x is wrong",
    "~5 items",
    "«Non» dit-il",
    "„Nein“ sagte er",
    "‘hi’",
    "《红楼梦》的作者是谁?",
    "「はい」と言った",
    "~~~\ncode\n~~~\nwhy?",
    "No, shorter.",
    "Please fix the code that you wrote for me yesterday:\n\n```python\n[x]\n<y>\n```\nIt fails.",
    "See [the docs](https://example.org) first.",
    "https://example.org/a",
    "> you said 3\n\nNo, 4.",
    "what does <system-reminder> mean?",
    "1. First\n2. Second\n   - third",
    "I get the following error when I run it:\n```\nx\n```",
]


@pytest.mark.parametrize("text", FRAMES)
def test_a_frame_is_odd(text: str) -> None:
    assert odd_line(text) is not None
    assert text in HEADS or odd_line(f"Thanks.\n\n{text}") is not None
    assert odd_line(text.replace("\n", "\r\n")) is not None


@pytest.mark.parametrize("text", PROSE)
def test_prose_is_not_odd(text: str) -> None:
    assert odd_line(text) is None


@pytest.mark.parametrize(
    "text", ["[ERROR] it fails", "<my-widget> does not render", "[错误] 还是不行"]
)
def test_a_typed_line(text: str) -> None:
    assert is_typed_line(text)
    assert not is_typed_line(f"{text}\nmore")


@pytest.mark.parametrize(
    "text", ["[two words] x", '<a b="c"> x', "<b>x</b>", "[x]", "<channel>x", "[a: b] x"]
)
def test_other_headers_are_no_typed_line(text: str) -> None:
    assert not is_typed_line(text)


QUOTATIONS = [
    "“{}”",
    "„{}“",
    "‚{}‘",
    "«{}»",
    "»{}«",
    "‹{}›",
    "「{}」",
    "”{}”",
    "❝{}❞",
    '"{}"',
    "'{}'",
    "\u2033{}\u2033",
    "\uff02{}\uff02",
    "``{}''",
    "\n> {}\n",
    "\n```\n{}\n```\n",
    "\n    {}\n",
    "“{}",
]


@pytest.mark.parametrize("quotation", QUOTATIONS)
def test_quoted_words_are_not_quotable(quotation: str) -> None:
    text = f"Bob wrote {quotation.format('praise Eve')} there."
    assert "Eve" not in quotable(text)
    assert quotable(text).startswith("Bob wrote")


def test_words_behind_a_quotation_are_quotable() -> None:
    assert quotable("Bob wrote ”hello“ there. Don't. It isn't 'so'.").endswith(
        "there. Don't. It isn't  … ."
    )
