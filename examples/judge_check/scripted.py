"""A rule-based judge over HTTP, in six languages, that records what each answer means.

It stands in for a judge model in the measurement of how judges are read: it sees what the prompt
shows it, decides by rules that a reader can check, and answers in the many forms in which models
answer, some of which give no rating at all. What it meant by each is kept beside it. Rule: it was
written before the cases, and is not changed for one of them.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from fastapi import FastAPI
from fastapi.responses import JSONResponse

from examples.demo.judge import case_of
from tinker_claw.types import Vote

REJECTED: Final = re.compile(
    # English
    r"\b(?:no|nope|nah|wrong|incorrect|again|redo|rewrite|instead|rather|don't|do not|didn't"
    r"|did not|doesn't|not what|not right|isn't|too (?:long|short|formal|vague|much|many)|fix"
    r"|change|useless|terrible|awful|bad|still (?:fails|broken|wrong)|missed|missing|forgot"
    r"|shorter|longer|simpler|without|stop|undo|revert|broken|fails|failed)\b"
    # German
    r"|\b(?:nein|nicht|falsch|nochmal|noch mal|noch einmal|stattdessen|lieber|anders|zu lang"
    r"|zu kurz|kürzer|länger|einfacher|ohne|ändere|änder|korrigiere|fehlt|vergessen|schlecht"
    r"|kaputt|stimmt nicht|unbrauchbar)\b"
    # French
    r"|\b(?:non|faux|fausse|incorrecte?|encore une fois|recommence|refais|plutôt|au lieu|trop long"
    r"|trop longue|trop court|plus court|plus courte|plus simple|sans|corrige|change|ne .{1,20} pas"
    r"|n'est pas|pas ça|manque|oublié|mauvais|nul|inutile)\b"
    # Spanish
    r"|\b(?:no|incorrecto|incorrecta|mal|otra vez|de nuevo|repite|rehaz|mejor|en vez|en lugar"
    r"|demasiado|más corto|más corta|más breve|más simple|sin|corrige|cambia|falta|olvidaste"
    r"|inútil|equivocado|equivocada)\b"
    # Russian
    r"|\b(?:нет|неверно|неправильно|не так|не то|ещё раз|еще раз|снова|переделай|перепиши|вместо"
    r"|лучше|слишком|короче|длиннее|проще|без|исправь|измени|забыл|забыла|плохо|не работает"
    r"|ошибся|ошиблась)\b"
    # Chinese
    r"|不对|不是|不行|错了|错误|重新|再来|再写|重写|改成|改一下|改为|太长|太短|太正式|简短|不要|别用|没有"
    r"|不能|漏了|忘了|应该|而不是|有问题|还是不",
    re.IGNORECASE,
)
"""Words of a user who wants it otherwise. A polite correction counts."""
ACCEPTED: Final = re.compile(
    r"\b(?:thanks|thank you|thx|cheers|great|perfect|nice|good|ok|okay|fine|love it|lovely|yes|yep"
    r"|cool|done|works|worked|excellent|awesome|exactly|brilliant|wonderful|super)\b"
    r"|\b(?:danke|dankeschön|prima|toll|klasse|genau|gut|passt|stimmt|ja|wunderbar|perfekt"
    r"|ausgezeichnet|läuft|funktioniert|spitze)\b"
    r"|\b(?:merci|parfait|parfaite|super|génial|géniale|bien|oui|exact|exactement|excellent"
    r"|excellente|ça marche|d'accord|impeccable)\b"
    r"|\b(?:gracias|perfecto|perfecta|genial|bien|vale|sí|exacto|excelente|estupendo|funciona"
    r"|listo|buenísimo)\b"
    r"|\b(?:спасибо|отлично|хорошо|прекрасно|да|супер|точно|работает|идеально|замечательно"
    r"|молодец|благодарю)\b"
    r"|谢谢|多谢|感谢|很好|太好了|完美|不错|好的|可以了|没问题|正是|对的|棒|明白了|成功了",
    re.IGNORECASE,
)
FAILED: Final = re.compile(
    r"\b(?:error|errors|failed|failure|not found|no such file|traceback|exception|denied|invalid"
    r"|refused|fatal|cannot|unable|undefined|timed out|timeout|unknown option|usage:)\b"
    r"|exit (?:code|status):? [1-9]|\b[45]\d\d (?:not found|forbidden|bad request|internal|service)"
    r"|fehler|erreur|错误|失败|ошибка",
    re.IGNORECASE,
)
"""Words of a tool's error."""
_WORD: Final = re.compile(r"[^\W\d_]{4,}|[\u4e00-\u9fff]{2}")
_NEW_WORDS: Final = 4
"""Least number of words for a new topic, none of which stood in request or reply."""


def verdict(role: str, said: str, before: str) -> Vote:
    """Judge a reply by the next state.

    Args:
        before: request and reply.
    """
    if role == "tool":
        return -1 if FAILED.search(said) else 1
    found = len(REJECTED.findall(said)), len(ACCEPTED.findall(said))
    if found[0]:
        return -1
    if found[1]:
        return 1
    words = {word.lower() for word in _WORD.findall(said)}
    known = {word.lower() for word in _WORD.findall(before)}
    return 1 if len(words) >= _NEW_WORDS and not words & known else 0


def hint(role: str, said: str, before: str) -> str | None:
    """Hint on what should have been done, where a dissatisfied user says more than that."""
    if role != "user" or verdict(role, said, before) != -1 or len(said) < 25:
        return None
    return f"The user wants this: {' '.join(said.split())[:300]}"


@dataclass(frozen=True, slots=True)
class Said:
    """One answer."""

    meant: Vote | None
    """Rating that the answer gives; None: it gives none."""
    text: str | None
    finish: str = "stop"
    hint: str | None = None
    """Hint that the answer gives."""


Form = Callable[[dict[str, Any], str, str], tuple[str | None, str, bool]]
"""Formats an answer: from the answer, another rating and a quotation to the text, the finish
reason, and whether it gives the rating."""


def _whole(text: str) -> tuple[str, str, bool]:
    return text, "stop", True


def _none(text: str | None, finish: str = "stop") -> tuple[str | None, str, bool]:
    return text, finish, False


FORMS: Final[tuple[Form, ...]] = (
    lambda said, _, q: _whole(json.dumps(said)),
    lambda said, _, q: _whole(json.dumps(said | {"reasoning": q}, indent=2)),
    lambda said, o, q: _whole(json.dumps(said | {"reasoning": f'Not {{"rating": {o}}}: {q}'})),
    lambda said, _, q: _whole(f"```json\n{json.dumps(said, ensure_ascii=False)}\n```"),
    lambda said, o, q: _whole(f'<think>{{"rating": {o}}}? No.</think>\n{json.dumps(said)}'),
    lambda said, _, q: _whole(json.dumps(said | {"rating": float(said["rating"])})),
    lambda said, _, q: _whole(json.dumps(said | {"reasoning": "a|b"}).replace("|", "\n")),
    lambda said, _, q: _whole(f"It thought. </think> {json.dumps(said)}\n"),
    lambda said, o, q: _none(f'<think>It says: {q}. So it may be {{"rating": {o}}}'),
    lambda said, o, q: _none(f'{{"reasoning": "So it is {o}", "rat', "length"),
    lambda said, o, q: _none(f"{json.dumps(said)} or not"),
    lambda said, o, q: _none(json.dumps(said | {"rating": None})),
    lambda said, o, q: _none(json.dumps(said | {"rating": str(o)})),
    lambda said, o, q: _none(f"\\boxed{{{o}}}"),
    lambda said, o, q: _none("I'm sorry, I cannot rate that."),
    lambda said, o, q: _none(None),
)


@dataclass
class ScriptedJudge:
    """A judge server that records all its answers."""

    takes_json: bool = True
    """Whether it accepts requests with a JSON schema."""
    said: list[Said] = field(default_factory=list[Said])
    refused: int = 0

    def answers(self, messages: Sequence[Mapping[str, Any]], n: int) -> None:
        """Append n answers to one prompt to `said`.

        Raises:
            ValueError: the messages are no judge prompt.
        """
        known = [dict(message) for message in messages]
        found = case_of(known)
        if found is None:
            raise ValueError("this judge answers judge prompts only")
        role, came_next, whole = found
        before = whole[: whole.index(" next state, ")]
        chance = zlib.crc32(f"{before}{came_next}".encode(errors="replace"))
        asks_hint = "\nhint: " in str(known[0]["content"])
        told = hint(role, came_next, before) if asks_hint else None
        meant, quoted = verdict(role, came_next, before), " ".join(came_next.split())[:200]
        answer = {"reasoning": "Clear.", "quote": quoted if told else "", "hint": told or ""}
        for at in range(n):
            form = FORMS[(chance // 7 + at * 5) % len(FORMS)]
            other = "1" if meant == -1 else "-1"
            text, finish, rated = form({**answer, "rating": meant}, other, quoted)
            given = told if rated and meant != 1 else None
            self.said.append(Said(meant if rated else None, text, finish, given))

    def app(self) -> FastAPI:
        """Make an OpenAI-compatible app that serves the judge."""
        app = FastAPI(title="scripted judge")

        @app.post("/v1/chat/completions")
        async def chat(body: dict[str, Any]) -> Any:  # pyright: ignore[reportUnusedFunction]
            if "response_format" in body and not self.takes_json:
                self.refused += 1
                error = {"message": "response_format is not supported", "param": "response_format"}
                return JSONResponse({"error": error}, 400)
            before = len(self.said)
            try:
                self.answers(body["messages"], int(body.get("n") or 1))
            except (KeyError, TypeError, ValueError) as error:
                return JSONResponse({"error": {"message": str(error)}}, 400)
            choices = [
                {
                    "index": at,
                    "finish_reason": one.finish,
                    "message": {"role": "assistant", "content": one.text},
                }
                for at, one in enumerate(self.said[before:])
            ]
            return {"object": "chat.completion", "model": body.get("model"), "choices": choices}

        return app
