"""Training dialogues: homework, skills and small talk, some dressed as an agent's request.

The dressing is what OpenClaw adds around a user's words: a system message, a time in front, a
runtime line, and a last message of internal context. The shipped model does not solve homework
through it (`Rates.dressed` in `evaluate`). One rule: the dressing never changes the right answer.
"""

from random import Random

from examples.demo.recipe.corpus import passage, path, phrase, record, sentence
from examples.demo.recipe.grammar import Line, Priors, dialogue
from examples.demo.recipe.skills import skill, small_talk, worded_sum

_SYSTEM_CHARACTERS = (20, 450)
_LONG_SYSTEM_CHARACTERS = (450, 4000)
_BEGIN = "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>"
_END = "<<<END_OPENCLAW_INTERNAL_CONTEXT>>>"


def training_dialogue(
    rng: Random, priors: Priors, dressed: float, worded: float = 0.0
) -> list[Line]:
    """Draw one dialogue of any kind, with probability `dressed` inside an agent's trimmings.

    Args:
        worded: share of dialogues about a sum that is asked for in any way.
    """
    if worded and rng.random() < worded:
        return worded_sum(rng)
    lines = _plain_dialogue(rng, priors)
    return dress(rng, lines) if rng.random() < dressed else lines


def _plain_dialogue(rng: Random, priors: Priors) -> list[Line]:
    """Draw a dialogue: 66 % homework, 22 % sums and lists, 12 % small talk."""
    draw = rng.random()
    if draw < 0.66:
        return dialogue(rng, priors)
    if draw < 0.88:
        return skill(rng)
    return small_talk(rng, unknown_message(rng))


def unknown_message(rng: Random) -> str:
    """Draw a message that has nothing to do with what the model knows."""
    form = rng.randrange(5)
    if form == 0:
        return f"Can you {phrase(rng)}?"
    if form == 1:
        return f"What is the {phrase(rng, 1, 4)}?"
    if form == 2:
        return f"Please {phrase(rng)} {path(rng)}"
    return sentence(rng) if form == 3 else passage(rng, 20, 300)


def dress(rng: Random, lines: list[Line]) -> list[Line]:
    """Put an agent's trimmings around a dialogue, or around a conversation without its answer."""
    dressed: list[Line] = []
    if rng.random() < 0.8:
        span = _LONG_SYSTEM_CHARACTERS if rng.random() < 0.15 else _SYSTEM_CHARACTERS
        dressed.append(Line("system", passage(rng, *span)))
    timed, runtime, internal = rng.random() < 0.7, rng.random() < 0.5, rng.random() < 0.5
    for number, line in enumerate(lines):
        if line.role != "user":
            dressed.append(line)
            continue
        text = f"{_time(rng)} {line.text}" if timed else line.text
        if runtime and number == 0:
            text += f"\n\n{_runtime(rng)}"
        dressed.append(Line("user", text, line.hint))
    if internal:  # it stands before the last answer only: an agent drops the older ones
        end = len(dressed) - (dressed[-1].role == "assistant")
        dressed.insert(end, Line("user", _internal(rng)))
    return dressed


def _time(rng: Random) -> str:
    """Draw a time as the agent writes it, such as `[Sat 2026-11-21 00:19 UTC]`."""
    day = rng.choice(("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"))
    date = f"20{rng.randint(24, 29)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"
    return f"[{day} {date} {rng.randint(0, 23):02}:{rng.randint(0, 59):02} UTC]"


def _runtime(rng: Random) -> str:
    """Draw the line that the agent appends to a session's first message."""
    return (
        f"Runtime: agent=main | session=agent:main:{phrase(rng, 1, 1)}:{rng.randrange(999)}"
        f" | host={phrase(rng, 1, 1)} | repo={path(rng)} | shell=bash"
    )


def _internal(rng: Random) -> str:
    """Draw the volatile message that the agent puts last."""
    notes = "\n\n".join(
        record(rng) if rng.random() < 0.3 else f'{sentence(rng)}\n"## {phrase(rng, 1, 3)}\\nnone"'
        for _ in range(rng.randint(1, 2))
    )
    return f"{_BEGIN}\n{notes}\n{_END}"
