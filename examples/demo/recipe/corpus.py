"""General text in the form of an agent's requests, made from `words` by templates.

The tokenizer learns English, markdown, JSON and paths from it. In training dialogues it is a system
message to be ignored. The sentences mean nothing, on purpose. Rule: all randomness is passed in.
"""

import json
import re
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
_FIELD = re.compile(r"\{(\w+)(?: (\d+) (\d+))?\}")
_SENTENCES = (
    "{start}, {phrase}; {phrase}.",
    "{start} (`{identifier}`), {phrase}.",
    "{start}: {phrase}, {phrase} / {phrase 1 2}.",
    "{start} => `{identifier}({term}=<{term}>)`. {phrase}?",
    'Do not {phrase}. If {phrase}, use "{phrase 1 3}".',
    "{start} {path} {phrase} {number 0 2000} {phrase 1 3}.",
    "{start}, {phrase}.",
    "{start}.",
    "{start}.",
)
_ITEMS = ("{term}: {phrase}", "{identifier} ({term})", "{bold}: {sentence}", "{sentence}")


def fill(rng: Random, template: str) -> str:
    """Fill the fields of a template from left to right.

    A field names one of `_DRAWS`, and may give it the fewest and the most words, or a range.
    """

    def draw(field: re.Match[str]) -> str:
        name, *bounds = field.groups()
        return _DRAWS[name](rng, *(int(bound) for bound in bounds if bound))

    return _FIELD.sub(draw, template)


def _term(rng: Random) -> str:
    """Draw a technical word, all with the same probability."""
    return rng.choice(_TECHNICAL)


def _word(rng: Random) -> str:
    """Draw a word, earlier ones of the lists more often."""
    words = _TECHNICAL if rng.random() < 0.45 else _COMMON
    return words[int(len(words) * rng.random() ** 1.8)]


def _phrase(rng: Random, low: int = 2, high: int = 6) -> str:
    """Draw `low` to `high` words, some with a prefix or a suffix."""
    return " ".join(
        rng.choice(PREFIXES) + _word(rng) + rng.choice(SUFFIXES)
        if rng.random() < 0.12
        else _word(rng)
        for _ in range(rng.randint(low, high))
    )


def _bold(rng: Random) -> str:
    """Draw a phrase in bold."""
    return f"**{_phrase(rng, 1, 2).capitalize()}**"


def _number(rng: Random, low: int, high: int) -> str:
    """Draw a number from a range."""
    return str(rng.randint(low, high))


def _identifier(rng: Random) -> str:
    """Draw a name as code has them: `read_file`, `maxSize`, `LOG_LEVEL` or `run-test`."""
    first, *others = (_term(rng) for _ in range(rng.randint(1, 3)))
    match rng.randrange(5):
        case 0:
            return first + "".join(part.capitalize() for part in others)
        case 1:
            return "_".join((first, *others)).upper()
        case 2:
            return "-".join((first, *others))
        case _:
            return "_".join((first, *others[:1]))


def _path(rng: Random) -> str:
    """Draw a file path."""
    names = "/".join(_term(rng) for _ in range(rng.randint(1, 3)))
    stem = _identifier(rng) if rng.random() < 0.7 else _term(rng).upper()
    return f"{rng.choice(ROOTS)}/{names}/{stem}.{rng.choice(EXTENSIONS)}"


def _sentence(rng: Random) -> str:
    """Draw a sentence with the punctuation of technical prose."""
    template, start = rng.choice(_SENTENCES), _phrase(rng, 3, 8)
    return fill(rng, template.replace("{start}", start[0].upper() + start[1:]))


def _bullets(rng: Random) -> str:
    """Draw a markdown section with a list."""
    mark = rng.choice(("-", "-", "*", "  -"))
    heading = f"{'#' * rng.randint(1, 3)} {_phrase(rng, 1, 3).title()}"
    items = (fill(rng, f"\n{mark} {rng.choice(_ITEMS)}") for _ in range(rng.randint(2, 6)))
    return heading + "".join(items)


def _schema(rng: Random) -> str:
    """Draw a tool's JSON schema, on one line or indented."""
    types = ("string", "string", "string", "number", "boolean", "integer", "array", "object")
    fields: dict[str, object] = {}
    for _ in range(rng.randint(1, 4)):
        field: dict[str, object] = {"type": rng.choice(types), "description": _sentence(rng)}
        if rng.random() < 0.3:
            field["enum"] = [_term(rng) for _ in range(rng.randint(2, 4))]
        if rng.random() < 0.2:
            field[rng.choice(("minimum", "maximum", "maxLength"))] = rng.randint(0, 1000)
        fields[_identifier(rng)] = field
    parameters = {"type": "object", "required": list(fields)[:1], "properties": fields}
    function = {"name": _identifier(rng), "description": _sentence(rng), "parameters": parameters}
    tool = {"type": "function", "function": function}
    return json.dumps(tool, indent=2 if rng.random() < 0.2 else None)


def _record(rng: Random) -> str:
    """Draw a small JSON object."""
    keys = [rng.choice(JSON_KEYS) if rng.random() < 0.5 else _term(rng) for _ in range(4)]
    values = (_phrase(rng, 1, 3), rng.randint(0, 99), rng.random() < 0.5, [_term(rng)])
    return json.dumps(dict(zip(keys, values, strict=True)))


def _code(rng: Random) -> str:
    """Draw a fenced block of code or shell."""
    name, other = _identifier(rng), _identifier(rng)
    if rng.random() < 0.5:
        return fill(rng, "```bash\n{term} --{term} {path} | {term} -n 1\n```")
    head = f"```python\ndef {name}({other}: str) -> None:\n    if {other} is None:\n"
    body = f'        return "{{phrase 1 3}}"\n    {{term}} = {other}.{{term}}()\n```'
    return head + fill(rng, body)


def _tagged(rng: Random) -> str:
    """Draw an XML-like block or a labelled line."""
    tag = _identifier(rng)
    if rng.random() < 0.5:
        return fill(rng, f"<{tag}>\n  <{{term}}>{{phrase}}</{{term}}>\n</{tag}>")
    return _term(rng).capitalize() + fill(rng, ": {term}={term} | {identifier}={path}")


def _prose(rng: Random) -> str:
    """Draw a paragraph."""
    return " ".join(_sentence(rng) for _ in range(rng.randint(1, 4)))


def passage(rng: Random, low: int, high: int) -> str:
    """Draw blocks of all kinds until `low` to `high` characters are reached, cut there."""
    size, text = rng.randint(low, high), rng.choice(_BLOCKS)(rng)
    while len(text) < size:
        text += "\n" * rng.randint(1, 2) + rng.choice(_BLOCKS)(rng)
    return text[:size].rstrip()


_BLOCKS = [_prose] * 3 + [_bullets] * 2 + [_schema] * 2 + [_record, _code, _tagged]
_DRAWS: dict[str, Callable[..., str]] = {
    "bold": _bold,
    "identifier": _identifier,
    "number": _number,
    "passage": passage,
    "path": _path,
    "phrase": _phrase,
    "record": _record,
    "sentence": _sentence,
    "term": _term,
}
"""What a field of a template can be."""
