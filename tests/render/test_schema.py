"""Types of arguments that chat formats write as bare text."""

from __future__ import annotations

from typing import Any

import pytest

from tinker_claw.render.schema import typed

TEXT, COUNT = {"type": "string"}, {"type": "integer"}
DEFS = {"text": TEXT, "count": COUNT, "both": {"anyOf": [{"$ref": "#/$defs/text"}, COUNT]}}
VALUES: list[tuple[Any, str, Any]] = [
    (TEXT, "12", "12"),
    (TEXT, " true\n", " true\n"),
    ({"type": ["string"]}, "12", "12"),
    ({"type": ["string", "null"]}, "12", "12"),
    ({"type": ["string", "null"]}, "null", "null"),
    ({"anyOf": [TEXT, {"type": "null"}]}, "[1]", "[1]"),
    ({"oneOf": [COUNT, TEXT]}, "1", "1"),
    ({"allOf": [{"anyOf": [TEXT, COUNT]}, TEXT]}, "1", "1"),
    ({"allOf": [{"anyOf": [TEXT, COUNT]}, COUNT]}, "1", 1),
    ({"const": "1"}, "1", "1"),
    ({"const": 1}, "1", 1),
    ({"const": True}, "1", "1"),
    ({"enum": ["1", 1]}, "1", "1"),
    ({"enum": [1, 2]}, "1", 1),
    ({"enum": ["a", "b"]}, '"a"', "a"),
    ({"type": "string", "enum": ["a"]}, "1", "1"),
    ({"$ref": "#/$defs/text"}, "1", "1"),
    ({"$ref": "#/$defs/count"}, "1", 1),
    ({"$ref": "#/$defs/both"}, "1", "1"),
    ({"$ref": "#/$defs/nowhere"}, "1", "1"),
    ({"$ref": "other.json"}, "1", "1"),
    ({"$ref": "#"}, '{"a": 1}', {"a": 1}),
    ({}, "1", "1"),
    ({"description": "Anything."}, "null", "null"),
    (True, "1", "1"),
    ({"properties": {}}, '{"a": "1"}', {"a": "1"}),
    ({"items": TEXT}, '["1"]', ["1"]),
    (COUNT, "7", 7),
    (COUNT, " 7 ", 7),
    (COUNT, "7.0", 7.0),
    (COUNT, "7.5", "7.5"),
    (COUNT, "seven", "seven"),
    (COUNT, "true", "true"),
    ({"type": "number"}, "1e3", 1000.0),
    ({"type": "number"}, "1e999", "1e999"),
    ({"type": "number"}, "NaN", "NaN"),
    ({"type": "integer"}, "9" * 5000, "9" * 5000),
    ({"type": "boolean"}, "true", True),
    ({"type": "boolean"}, "True", True),
    ({"type": "boolean"}, "False", False),
    ({"type": "boolean"}, "1", "1"),
    ({"type": "null"}, "None", None),
    ({"type": ["integer", "null"]}, "null", None),
    ({"type": "integer", "nullable": True}, "None", None),
    ({"type": "array"}, '[1, "a"]', [1, "a"]),
    ({"type": "array"}, "[" * 3000, "[" * 3000),
    ({"type": "object"}, '{"a": {"b": null}}', {"a": {"b": None}}),
    ({"type": "object"}, "[1]", "[1]"),
    ({"type": "strange"}, "1", "1"),
    ({"type": 3, "enum": 4, "anyOf": 5}, "1", "1"),
]


@pytest.mark.parametrize(("schema", "text", "value"), VALUES)
def test_what_a_schema_allows_as_text_stays_text(schema: Any, text: str, value: Any) -> None:
    parameters = {"type": "object", "properties": {"it": schema}, "$defs": DEFS}
    found = typed(text, "it", parameters)
    assert found == value
    assert type(found) is type(value)


def test_arguments_that_no_property_describes() -> None:
    assert typed("1", "it", {}) == "1"
    assert typed("1", "it", None) == "1"
    assert typed("1", "it", {"properties": {"at": COUNT}}) == "1"
    assert typed("1", "it", {"additionalProperties": COUNT}) == 1
    assert typed("1", "it", {"additionalProperties": False}) == "1"


def test_a_schema_that_refers_to_itself_ends() -> None:
    endless = {"anyOf": [{"$ref": "#/$defs/it"}]}
    assert typed("1", "it", {"properties": {"it": endless}, "$defs": {"it": endless}}) == "1"
