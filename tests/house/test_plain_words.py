"""`make check` refuses names and docstrings that say nothing, and a class name used twice."""

import ast

import pytest

from tests.lab import plain_words


@pytest.mark.parametrize(
    ("source", "part"),
    [
        ("told = 1", "the name told"),
        ("for one in range(3): pass", "the name one"),
        ("def read(*, found): pass", "the parameter found"),
        ('def read():\n    """Whether it is read."""', "imperative"),
        ('"""What this is."""', "imperative"),
    ],
)
def test_names_and_docstrings_that_say_nothing_are_refused(source: str, part: str) -> None:
    (line,) = plain_words.violations("a.py", ast.parse(source))
    assert line.startswith("a.py:1: ")
    assert part in line


def test_plain_names_and_docstrings_pass() -> None:
    source = 'def read(rows):\n    """Return the rows."""\n    for row in rows: total = row.one'
    assert [*plain_words.violations("a.py", ast.parse(source))] == []


def test_class_name_of_two_modules_is_refused() -> None:
    trees = {name: ast.parse("class Rows: ...\nclass _Own: ...") for name in ("a.py", "b.py")}
    assert [*plain_words.repeated_classes(trees)] == [
        "a.py:1, b.py:1: more than one class is named Rows"
    ]


def test_the_project_has_none() -> None:
    assert plain_words.main() == 0
