"""Types of arguments that chat formats write as bare text."""

from __future__ import annotations

from typing import Any

import pytest

from tinker_claw.render.schema import typed

TEXT, COUNT = {"type": "string"}, {"type": "integer"}
ITSELF = {"$ref": "#/$defs/it"}
DEFS = {"text": TEXT, "count": COUNT, "both": {"anyOf": [{"$ref": "#/$defs/text"}, COUNT]}}
VALUES: list[tuple[Any, str, Any]] = [
    (TEXT, "12", "12"),
    (TEXT, " true\n", " true\n"),
    ({"type": ["string", "null"]}, "null", "null"),
    ({"anyOf": [TEXT, {"type": "null"}]}, "[1]", "[1]"),
    ({"oneOf": [COUNT, TEXT]}, "1", "1"),
    ({"allOf": [{"anyOf": [TEXT, COUNT]}, TEXT]}, "1", "1"),
    ({"allOf": [{"anyOf": [TEXT, COUNT]}, COUNT]}, "1", 1),
    ({"const": "1"}, "1", "1"),
    ({"const": 1}, "1", 1),
    ({"const": True}, "1", "1"),
    ({"enum": ["1", 1]}, "1", "1"),
    ({"enum": ["a", "b"]}, '"a"', "a"),
    ({"$ref": "#/$defs/text"}, "1", "1"),
    ({"$ref": "#/$defs/count"}, "1", 1),
    ({"$ref": "#/$defs/both"}, "1", "1"),
    ({"$ref": "#/$defs/nowhere"}, "1", "1"),
    ({"$ref": "#"}, '{"a": 1}', {"a": 1}),
    ({}, "1", "1"),
    ({"items": TEXT}, '["1"]', ["1"]),
    (COUNT, " 7 ", 7),
    (COUNT, "7.0", 7.0),
    (COUNT, "7.5", "7.5"),
    ({"type": "number"}, "1e3", 1000.0),
    ({"type": "number"}, "1e999", "1e999"),
    ({"type": "number"}, "NaN", "NaN"),
    ({"type": "integer"}, "9" * 5000, "9" * 5000),
    ({"type": "boolean"}, "True", True),
    ({"type": "boolean"}, "1", "1"),
    ({"type": "null"}, "None", None),
    ({"type": ["integer", "null"]}, "null", None),
    ({"type": "integer", "nullable": True}, "None", None),
    ({"type": "array"}, '[1, "a"]', [1, "a"]),
    ({"type": "array"}, "[" * 3000, "[" * 3000),
    ({"type": "object"}, '{"a": {"b": null}}', {"a": {"b": None}}),
    ({"type": "object"}, "[1]", "[1]"),
    ({"type": 3, "enum": 4, "anyOf": 5}, "1", "1"),
]


@pytest.mark.parametrize(("schema", "text", "value"), VALUES)
def test_what_a_schema_allows_as_text_stays_text(schema: Any, text: str, value: Any) -> None:
    parameters = {"type": "object", "properties": {"it": schema}, "$defs": DEFS}
    found = typed(text, "it", parameters)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("parameters", "value"),
    [
        (None, "1"),
        ({"properties": {"at": COUNT}}, "1"),
        ({"additionalProperties": COUNT}, 1),
        ({"additionalProperties": False}, "1"),
        (
            {"properties": {"it": {"$ref": "#/$defs/it"}}, "$defs": {"it": {"$ref": "#/$defs/it"}}},
            "1",
        ),
    ],
    ids=["none", "another", "any other", "no other", "one that refers to itself"],
)
def test_arguments_that_no_schema_describes(parameters: Any, value: Any) -> None:
    assert typed("1", "it", parameters) == value
