"""Whether a text looks like machinery: written by a harness that no table knows.

Rule: a text is doubted for what it says of conversations, tools, other models and answers that a
machine reads, and for speaking of "the user" to somebody; never for its style, its capitals or its
wishes. Signs add up, and a person who speaks of themselves takes from the sum. By a doubted text
nothing is learned, in either direction.
"""

from __future__ import annotations

import re
from typing import Final

MOST_CHARS: Final = 6_000
"""Characters of a text's beginning that are looked at, and as many of its end."""
ENOUGH: Final = 2.0
"""Sum of weights from which on a text is doubted."""

_TAG: Final = re.compile(r"\s*<([a-z]+(?:[-_:][a-z]+)+)(?:\s[^>]{0,200})?>")
"""A tag of several words, as harnesses wrap notes in."""
_BRACKET: Final = re.compile(
    r"\s*\[(?:SYSTEM|System|INTERNAL|ERROR|AUTO|AUTOMATED|TASK|CONTEXT|TOOL)"
    r"(?:[ _:-][^\]\n]{0,60})?"
    r"\]\s*(?=(?:This|The|You|Your|No|Call|Continue|Do|It|Please)\b|Tool|Error)"
)
"""A system's word in brackets, and behind it a sentence to the model."""
_TRANSCRIPT: Final = re.compile(
    r"\s*(?:# )?USER:?\s.*^(?:# )?ASSISTANT:?\s", re.DOTALL | re.MULTILINE
)

# Weights are round on purpose: two strong signs are enough, one never is.
_STRONG, _WEAK, _ALONE = 1.5, 1.0, 2.5
_SIGNS: Final = tuple(
    (weight, re.compile(pattern, re.IGNORECASE | re.DOTALL))
    for weight, patterns in (
        (
            _ALONE,
            (
                r"^\s*\[[^\]\n]{0,60}\bby (?:the )?user\b[^\]\n]{0,60}\]\s*$",
                r"^\s*# \S+\.md instructions\b",
                r"⟦\w+(?::\w+)+⟧",
            ),
        ),
        (
            _STRONG,
            (
                # How a conversation is kept.
                r"\bcontext (?:window|checkpoint|compaction)\b|\bran out of context\b",
                r"\bwas compacted\b",
                r"\b(?:another|next|other|future) (?:LLM|language model|model|agent|instance)s?\b",
                r"\b(?:files?|contents?)\*? .{0,30}\b(?:to|in) the chat\b",
                r"\btrust this message\b|\b(?:other|following) messages in the chat\b",
                r"\b(?:write|generate|create) (?:a|the) (?:\w+ )?title\b"
                r".{0,60}\b(?:conversation|session|thread)\b",
                # What a program tells of itself.
                r"\b(?:automated|automatic|automatically generated|system-generated"
                r"|background[- ]task|internal)"
                r" (?:event|message|prompt|notification|note|notice|reminder|context)\b",
                r"\bnot (?:a message|user input|sent to you|written by|from) ?(?:from )?"
                r"(?:the )?user\b",
                r"\b(?:sub-?agent|memory (?:director|file|extraction)|managed memory|todo list)",
                r"^\s*(?:you are (?:performing|now acting|the component|a component"
                r"|an? (?:sub-?agent|summar))"
                r"|your task is to (?:create|produce|generate|write|summarize) )",
                r"\b(?:output[- ]token|token limit|mid-response|mid-stream|mid-thought)\b",
                r"\btool-call safety\b",
                r"^\s*\[(?-i:[A-Z]{3,}(?:(?: -)? [A-Z]{2,})+)[^\]\n]{0,80}\]?",
                r"^\s*\[(?-i:[a-z]+(?:-[a-z]+)+)\]",
                r"\b(?:session|task|thread|conversation) title\b",
                r"\bno (?:visible|apology|recap)\b|\bresume directly\b|\bterminated because\b",
                r"\bread[- ]only\b.{0,80}\breference\b",
                r"^\s*(?:context|conversation|session) summary:",
                # An answer that a machine reads.
                r"\byou must (?:return|use|respond|output|reply|produce|call)\b"
                r".{0,120}\b(?:entire|format|block|tool|file|xml|json)\b",
            ),
        ),
        (
            _WEAK,
            (
                # A text for a model, about its user.
                r"\bthe user(?:'s|s)?\b(?! (?:guide|manual|table|story|interface|id)\b)",
                r"\b(?:conversation|session|thread|history)\b.{0,40}"
                r"\b(?:so far|above|below|earlier|previous|prior|continued)\b",
                r"\byour (?:previous|last|prior) (?:response|turn|tool call|output|message)\b",
                r"\b(?:task|turn|run|tool call|tool execution) (?:was|has|is|have)\b.{0,40}"
                r"\b(?:interrupted|terminated|stopped|aborted|rejected|failed|paused|pending)\b",
                r"^\s*\w+ ?\w* hook (?:feedback|output|error|success|stopped|context)\b",
                r"^\s*(?-i:System:) (?:this|the|your|you|no)\b(?! are)",
                r"\b(?:background|scheduled|resumption|continuation|handover|subtask) "
                r"(?:task|run|job|note|agent|process)\b",
                r"\b(?:previous|prior|recent|partial|earlier|this)"
                r" (?:conversation|session|transcript|attempt)\b",
                r"\b(?:summary (?:above|below|of)|the following summary|handoff summary"
                r"|summarizes? (?:a|the|this) )",
                r"\b(?:resume|continue|continuing|proceed)\b"
                r".{0,60}\b(?:task|work|steps?|working|transcript)\b",
                r"\bdo not (?:acknowledge|mention|re-?introduce|greet|recap|respond to|reply to)\b",
                r"\bthe following (?:skills?|tools?|files?|messages?|context|environment)\b"
                r".{0,80}\b(?:available|reachable|shown|provided|generated|below)\b",
                r"\b(?:tool|function) (?:calls?|results?|use)\b|\bcalled the \w+ tool\b"
                r"|\bterminal completion\b",
                r"\b(?:do not|don't|must not|never) (?:call|use|invoke)"
                r" (?:any |other )*(?:tools?|functions?)\b",
                r"\bcall (?:one of|the appropriate|exactly one)\b.{0,60}\btools?\b",
                r"\b(?:block|wrapped|inside|produce|output|in) (?:your |the |an? )?<\w+>",
                r"</?(?:analysis|summary|conversation|state_snapshot|transcript|session|scope)>",
                r"\b(?:respond with|output|reply with) (?:text|json|only|exactly|the)\b"
                r".{0,40}\bonly\b",
                r"\b(?:must use this|use exactly this)\b.{0,60}\bformat\b",
                r"\b(?:fenced|search/replace|file listing|valid json|json schema)\b",
                r"^\s*(?:#+ )?(?:\d+ )?[A-Z][^\n]{0,80}\bfailed to\b",
                r"\bwith the following (?:input|arguments|parameters)\b",
                r"\bask for clarification\b|\bunsure how to proceed\b",
                r"\b(?:executed|run|triggered|sent|stopped|interrupted) by the user\b",
                r"\b(?:do not|don't) (?:edit|propose changes to|consider)"
                r" (?:these|those|the above)\b",
                r"^\s*(?:critical|important|note|reminder|caveat):",
            ),
        ),
    )
    for pattern in patterns
)
_NOUNS: Final = re.compile(
    r"\b(user|assistant|agent|subagent|model|tool|hook|skill|session|conversation|transcript|context"
    r"|summary|turn|response|history|memory|instructions|task|schema|reminder)s?\b",
    re.IGNORECASE,
)
"""What harnesses speak of; a person names one or two of these at a time."""
_NOUN_WEIGHT, _NOUN_MOST = 0.5, 5
_SELF: Final = re.compile(
    r"(?<![\w'])(?:I(?:'m|'ve|'d|'ll)?|me|my|mine|we|our|us|ich|mir|mein\w*|wir|je|moi|mon|yo|mi)"
    r"(?![\w'])"
)
_SELF_WEIGHT, _SELF_MOST = 0.75, 2.0
_COMPACTION: Final = re.compile(
    r"\b(?:summar(?:y|ize|izes|ise|ises)|compact(?:ion|ed)?|checkpoint|hand-?off|condense)\b",
    re.IGNORECASE,
)


def looks_like_machinery(text: str) -> bool:
    """Whether a text should teach nothing, of which nothing shows that a person typed it."""
    if len(text) > 2 * MOST_CHARS:
        text = f"{text[:MOST_CHARS]}\n{text[-MOST_CHARS:]}"
    if (tag := _TAG.match(text)) and f"</{tag[1]}>" in text:
        return True
    return bool(_BRACKET.match(text) or _TRANSCRIPT.match(text)) or weight(text) >= ENOUGH


def weight(text: str) -> float:
    """How much in a text speaks for machinery."""
    nouns = {noun.lower() for noun in _NOUNS.findall(text)}
    found = sum(weight for weight, sign in _SIGNS if sign.search(text))
    found += _NOUN_WEIGHT * max(0, min(_NOUN_MOST, len(nouns)) - 1)
    return found - min(_SELF_MOST, _SELF_WEIGHT * len(_SELF.findall(text)))


def about_compaction(text: str) -> bool:
    """Whether a doubted text asks for a summary: the conversation goes on behind it."""
    return _COMPACTION.search(text) is not None
