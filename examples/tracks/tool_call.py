"""Arithmetic with a calculator: the model is asked for a result, may call a tool, and answers.

Rule: only the number that the last reply ends with counts, however it was found.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar

from examples.tracks.environments import options, tool
from examples.tracks.track import Track

CALCULATOR = tool("calculator", "Works out an expression.", expression="such as 3 + 4 * 5")
_EXAMPLE = (
    {
        "role": "system",
        "content": "You have a calculator. To use it, reply with the expression in a fenced block. "
        "When you have its result, say it.",
    },
    {"role": "user", "content": "What is 6 + 2?"},
    {"role": "assistant", "content": "```\n6 + 2\n```"},
    {"role": "user", "content": "8"},
    {"role": "assistant", "content": "It is 8."},
)
"""Messages that show how a model without a format for tools calls the calculator."""
_LONGEST = 200
"""Most characters of an expression."""
_LARGEST = 10**12
_NUMBER = re.compile(r"-?\d+")


@dataclass(frozen=True, slots=True)
class Sum:
    """A task, and every attempt at it: a calculator has no state."""

    expression: str

    @property
    def name(self) -> str:
        return self.expression.replace(" ", "")

    @property
    def messages(self) -> Sequence[Mapping[str, Any]]:
        return ({"role": "user", "content": f"What is {self.expression}?"},)

    @asynccontextmanager
    async def attempt(self) -> AsyncGenerator[Sum]:
        yield self

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        if name != "calculator":
            return f"error: there is no tool {name}, but calculator"
        expression = arguments.get("expression")
        if not isinstance(expression, str):
            return "error: expression must be a text"
        return calculate(expression)

    async def solved(self, answer: str) -> bool:
        numbers = _NUMBER.findall(answer)
        return bool(numbers) and numbers[-1] == calculate(self.expression)


class GradedSum(Sum):
    """A sum each of whose calls is scored: right is one that returns the sum's result."""

    def grade(self, returned: str) -> float:
        return 1.0 if returned == calculate(self.expression) else -1.0


@dataclass(frozen=True, slots=True)
class ToolCall:
    """Environment of sums of `numbers` numbers, of up to `digits` digits each."""

    seed: int
    numbers: int = 3
    digits: int = 2
    kind: ClassVar[type[Sum]] = Sum

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        return (CALCULATOR,)

    @classmethod
    def of(cls, track: Track) -> ToolCall:
        return cls(track.seed, **options(track, numbers=3, digits=2))

    def task(self, number: int) -> Sum:
        return self._drawn(number, held_out=False)

    def held_out(self, number: int) -> Sum:
        return self._drawn(number, held_out=True)

    def _drawn(self, number: int, *, held_out: bool) -> Sum:
        """Draw an expression. Those whose digits add up to a multiple of five are held out."""
        rng = Random(f"{self.seed} {number} {held_out}")
        while True:
            parts = [str(rng.randrange(1, 10**self.digits))]
            for _ in range(self.numbers - 1):
                parts += [rng.choice("+-"), str(rng.randrange(1, 10**self.digits))]
            expression = " ".join(parts)
            if (sum(map(int, re.findall(r"\d", expression))) % 5 == 0) == held_out:
                return self.kind(expression)


class Fenced(ToolCall):
    """The same for a model whose format has no tools; each call is scored."""

    kind = GradedSum
    demonstration = _EXAMPLE


def calculate(expression: str) -> str:
    """Evaluate an expression of numbers, + - * / and brackets, or say what is wrong with it."""
    if len(expression) > _LONGEST:
        return f"error: an expression has at most {_LONGEST} characters"
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return "error: this is no expression in numbers, + - * / and brackets"
    except ZeroDivisionError:
        return "error: division by zero"
    return str(int(value)) if value == int(value) else f"{value:.6g}"


def _value(node: ast.expr) -> float:
    value = _computed(node)
    if not abs(value) <= _LARGEST:
        raise ValueError("too large")
    return value


def _computed(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_value(inner)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(left), _value(right))
        case _:
            raise ValueError(type(node).__name__)


_OPERATORS: Mapping[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
