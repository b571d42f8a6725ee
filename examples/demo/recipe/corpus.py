"""General text, made from `words`, in the form of an agent's requests.

The tokenizer learns English, markdown, JSON and paths from it, and in training dialogues it is a
system message to be ignored. The sentences mean nothing, on purpose. One rule: all randomness is
passed in.
"""

import json
from collections.abc import Callable
from random import Random

from examples.demo.recipe.words import (
    COMMON,
    EXTENSIONS,
    JSON_KEYS,
    PREFIXES,
    ROOTS,
    SUFFIXES,
    TECHNICAL,
)

_COMMON = tuple(dict.fromkeys(COMMON.split()))
_TECHNICAL = tuple(dict.fromkeys(TECHNICAL.split()))


def word(rng: Random) -> str:
    """Draw a word, earlier ones of the lists more often."""
    words = _TECHNICAL if rng.random() < 0.45 else _COMMON
    return words[int(len(words) * rng.random() ** 1.8)]


def _term(rng: Random) -> str:
    """Draw a technical word, all with the same probability."""
    return rng.choice(_TECHNICAL)


def phrase(rng: Random, low: int = 2, high: int = 6) -> str:
    """Draw `low` to `high` words, some with a prefix or a suffix."""
    return " ".join(
        rng.choice(PREFIXES) + word(rng) + rng.choice(SUFFIXES)
        if rng.random() < 0.12
        else word(rng)
        for _ in range(rng.randint(low, high))
    )


def identifier(rng: Random) -> str:
    """Draw a name as code has them: `read_file`, `maxSize`, `LOG_LEVEL` or `run-test`."""
    parts = [_term(rng) for _ in range(rng.randint(1, 3))]
    form = rng.randrange(5)
    if form == 0:
        return parts[0] + "".join(part.capitalize() for part in parts[1:])
    if form == 1:
        return "_".join(parts).upper()
    if form == 2:
        return "-".join(parts)
    return "_".join(parts[:2])


def path(rng: Random) -> str:
    """Draw a file path."""
    names = "/".join(_term(rng) for _ in range(rng.randint(1, 3)))
    stem = identifier(rng) if rng.random() < 0.7 else _term(rng).upper()
    return f"{rng.choice(ROOTS)}/{names}/{stem}.{rng.choice(EXTENSIONS)}"


def sentence(rng: Random) -> str:
    """Draw a sentence with the punctuation of technical prose."""
    form = rng.randrange(9)
    start = phrase(rng, 3, 8)
    start = start[0].upper() + start[1:]
    if form == 0:
        return f"{start}, {phrase(rng)}; {phrase(rng)}."
    if form == 1:
        return f"{start} (`{identifier(rng)}`), {phrase(rng)}."
    if form == 2:
        return f"{start}: {phrase(rng)}, {phrase(rng)} / {phrase(rng, 1, 2)}."
    if form == 3:
        return f"{start} => `{identifier(rng)}({_term(rng)}=<{_term(rng)}>)`. {phrase(rng)}?"
    if form == 4:
        return f'Do not {phrase(rng)}. If {phrase(rng)}, use "{phrase(rng, 1, 3)}".'
    if form == 5:
        return f"{start} {path(rng)} {phrase(rng)} {rng.randint(0, 2000)} {phrase(rng, 1, 3)}."
    return f"{start}, {phrase(rng)}." if form == 6 else f"{start}."


def bullets(rng: Random) -> str:
    """Draw a markdown section with a list."""
    mark = rng.choice(("-", "-", "*", "  -"))
    lines = [f"{'#' * rng.randint(1, 3)} {phrase(rng, 1, 3).title()}"]
    for _ in range(rng.randint(2, 6)):
        form = rng.randrange(4)
        if form == 0:
            lines.append(f"{mark} {_term(rng)}: {phrase(rng)}")
        elif form == 1:
            lines.append(f"{mark} {identifier(rng)} ({_term(rng)})")
        elif form == 2:
            lines.append(f"{mark} **{phrase(rng, 1, 2).capitalize()}**: {sentence(rng)}")
        else:
            lines.append(f"{mark} {sentence(rng)}")
    return "\n".join(lines)


def schema(rng: Random) -> str:
    """Draw a tool's JSON schema, on one line or indented."""
    types = ("string", "string", "string", "number", "boolean", "integer", "array", "object")
    fields: dict[str, object] = {}
    for _ in range(rng.randint(1, 4)):
        field: dict[str, object] = {"type": rng.choice(types), "description": sentence(rng)}
        if rng.random() < 0.3:
            field["enum"] = [_term(rng) for _ in range(rng.randint(2, 4))]
        if rng.random() < 0.2:
            field[rng.choice(("minimum", "maximum", "maxLength"))] = rng.randint(0, 1000)
        fields[identifier(rng)] = field
    parameters = {"type": "object", "required": list(fields)[:1], "properties": fields}
    function = {"name": identifier(rng), "description": sentence(rng), "parameters": parameters}
    tool = {"type": "function", "function": function}
    return json.dumps(tool, indent=2 if rng.random() < 0.2 else None)


def record(rng: Random) -> str:
    """Draw a small JSON object."""
    keys = [rng.choice(JSON_KEYS) if rng.random() < 0.5 else _term(rng) for _ in range(4)]
    values = (phrase(rng, 1, 3), rng.randint(0, 99), rng.random() < 0.5, [_term(rng)])
    return json.dumps(dict(zip(keys, values, strict=True)))


def code(rng: Random) -> str:
    """Draw a fenced block of code or shell."""
    name, other = identifier(rng), identifier(rng)
    if rng.random() < 0.5:
        return f"```bash\n{_term(rng)} --{_term(rng)} {path(rng)} | {_term(rng)} -n 1\n```"
    return (
        f"```python\ndef {name}({other}: str) -> None:\n    if {other} is None:\n"
        f'        return "{phrase(rng, 1, 3)}"\n    {_term(rng)} = {other}.{_term(rng)}()\n```'
    )


def tagged(rng: Random) -> str:
    """Draw an XML-like block or a labelled line."""
    tag = identifier(rng)
    if rng.random() < 0.5:
        return f"<{tag}>\n  <{_term(rng)}>{phrase(rng)}</{_term(rng)}>\n</{tag}>"
    return f"{_term(rng).capitalize()}: {_term(rng)}={_term(rng)} | {identifier(rng)}={path(rng)}"


def prose(rng: Random) -> str:
    """Draw a paragraph."""
    return " ".join(sentence(rng) for _ in range(rng.randint(1, 4)))


_KINDS: tuple[Callable[[Random], str], ...] = (
    prose,
    prose,
    prose,
    bullets,
    bullets,
    schema,
    schema,
    record,
    code,
    tagged,
)


def passage(rng: Random, low: int, high: int) -> str:
    """Draw blocks of all kinds until `low` to `high` characters are reached, cut there."""
    size = rng.randint(low, high)
    text = rng.choice(_KINDS)(rng)
    while len(text) < size:
        text += "\n" * rng.randint(1, 2) + rng.choice(_KINDS)(rng)
    return text[:size].rstrip()
