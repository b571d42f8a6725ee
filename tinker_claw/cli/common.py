"""Shared by the commands: flags, access to the running gateway, lines and tables.

Rule: a command reads the ledger itself, and changes it only where no gateway has the directory;
else the gateway is told to. A line or cell has no control characters: clients choose parts of it.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import textwrap
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, PrivateAttr, ValidationError

from tinker_claw.app.orders import address, order, url
from tinker_claw.config.flags import wrong
from tinker_claw.config.load import CONFIG, load_given, names_run
from tinker_claw.config.settings import Settings
from tinker_claw.errors import ConfigError, LedgerError
from tinker_claw.ledger.database import FILE, Outside, is_locked, open_read_only
from tinker_claw.ledger.ledger import Ledger
from tinker_claw.words import printable

# Commands


class Command(BaseModel):
    """A command of tinker-claw: the fields are its flags, and `run` does it.

    The docstring is the command's help, in which the title of a field is its value's placeholder.
    """

    model_config = ConfigDict(frozen=True, validate_by_name=True, hide_input_in_errors=True)

    MORE: ClassVar[str] = ""
    """Last paragraph of the command's help."""
    _parsed: Mapping[str, Any] = PrivateAttr(default_factory=dict[str, Any])

    @classmethod
    def of(cls, parsed: Mapping[str, Any]) -> Self:
        """Create from parsed command-line values, tinker-claw's flags included; None: not given.

        Raises:
            ConfigError: a value has the wrong type, or is out of bounds; names the flag.
        """
        own = {k: v for k, v in parsed.items() if k in cls.model_fields and v is not None}
        try:
            command = cls.model_validate(own)
        except ValidationError as error:
            problems = [(str(problem["loc"][0]), problem) for problem in error.errors()]
            sentences = (
                wrong(at, cls.model_fields[at], own[at], problem) for at, problem in problems
            )
            raise ConfigError("; ".join(sentences)) from error
        command._parsed = parsed
        return command

    def run(self) -> int:
        """Run the command; returns the exit status.

        Raises:
            ClawError: it cannot be done; one sentence.
        """
        raise NotImplementedError

    @cached_property
    def settings(self) -> Settings:
        """The settings that tinker-claw would have with the same flags.

        Raises:
            ConfigError: a setting is wrong.
        """
        return load_given(self._parsed)


_DATA_DIR = "run__data_dir"
_HELD = {
    "model": "run__model_name",
    "method": "run__method",
    "backend": "run__backend",
    "lora_rank": "training__lora_rank",
}
"""What a ledger holds of its run, and the flag for each."""


class RunCommand(Command):
    """A command about one run: that of these flags, or of the data directory alone."""

    @cached_property
    def settings(self) -> Settings:
        """The settings; where --data-dir alone says what runs, with those of its run."""
        settings = super().settings
        others = {name: value for name, value in self._parsed.items() if name != _DATA_DIR}
        file = settings.run.directory / FILE
        alone = self._parsed.get(_DATA_DIR) is not None and not names_run(others)
        alone = alone and not self._parsed.get(CONFIG)
        if not alone or not file.exists():
            return settings
        with open_read_only(file) as rows:
            held = rows.pairs("SELECT key, value FROM meta")
        own = {flag: held[key] for key, flag in _HELD.items() if key in held}
        return load_given({**self._parsed, **own})


class LedgerCommand(Command):
    """A command about one data directory."""

    MORE: ClassVar[str] = (
        "Reads the data directory that --data-dir names, or else the one that these flags and the "
        "settings file start with."
    )

    @cached_property
    def ledger(self) -> Path:
        """The ledger's file.

        Raises:
            LedgerError: there is none.
        """
        file = self.settings.run.directory / FILE
        if not file.is_file():
            raise LedgerError(
                f"{file.parent} holds no ledger; name the directory with --data-dir, or give "
                "the flags that tinker-claw was started with (--config, --model-name, --method)"
            )
        return file

    @contextmanager
    def rows(self) -> Generator[Outside]:
        """Open the ledger at one moment, to be read."""
        with open_read_only(self.ledger) as ledger, ledger.moment():
            yield ledger

    def carry_out(
        self, name: str, arguments: Mapping[str, Any], offline: Callable[[Ledger], Any]
    ) -> tuple[Any, bool]:
        """Ask the running gateway to do it, or call `offline` on the ledger where none runs.

        Returns the result, and whether a gateway runs.

        Raises:
            ClawError: it cannot be done; the sentence says why.
        """
        directory = self.ledger.parent
        if is_locked(directory):
            return order(directory, name, arguments, _waits), True
        with closing(Ledger(directory)) as ledger:
            return offline(ledger), False


# The gateway that runs


def url_of(settings: Settings) -> str:
    """URL of the gateway for callers on its own machine, without /v1.

    Raises:
        ConfigError: the port is not known.
    """
    host, port = address(settings.run.directory) or (settings.gateway.host, settings.gateway.port)
    if port == 0:
        raise ConfigError("--port 0 lets the gateway choose: give the port that it chose")
    return url(host, port)


def _waits() -> None:
    print(
        "Waiting for the gateway: a step in hand ends first, which may take minutes (`tinker-claw "
        "status` shows it). Ctrl-C leaves; forgetting continues all the same.",
        file=sys.stderr,
        flush=True,
    )


@contextmanager
def room_beside(target: Path) -> Generator[Path]:
    """Yield a private temporary folder beside `target`, for what is then renamed to `target`.

    Raises:
        ConfigError: it cannot be made, or what is done with it fails.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as room:
            yield Path(room)
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error.strerror or error}") from error


# Lines and tables

WIDTH = 100
"""Line width of sentences, in characters."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its heading, and what it shows of a record. Numbers are right-aligned."""

    name: str
    of: str | Callable[[Any], Any] | None = None
    """The record's field, or a function of the record; None: the field of the column's name."""
    show: Callable[[Any], Any] | None = None
    """Formats the value; None: the value is shown as it is."""
    wraps: bool = False
    """Whether its text takes more lines on a terminal that is too narrow for all columns."""

    def value(self, record: Any) -> Any:
        value = self.of(record) if callable(self.of) else record[self.of or self.name]
        return value if self.show is None else self.show(value)


def table(columns: Sequence[Column], records: Iterable[Any]) -> list[str]:
    """Return the heading, bold on a terminal, and one line per record, however long, unless a
    column wraps."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    cells = [[column.value(record) for column in columns] for record in records]
    terminal = sys.stdout.isatty()
    wraps = terminal and any(column.wraps for column in columns)
    for column, *values in zip(columns, *cells, strict=True):
        numbers = any(type(value) in (int, float) for value in values)
        grid.add_column(
            column.name,
            justify="right" if numbers else "left",
            min_width=len(column.name),
            no_wrap=not (wraps and column.wraps),
        )
    for row in cells:
        grid.add_row(*(Text(printable(_cell(value))) for value in row))
    width = shutil.get_terminal_size().columns if wraps else 100_000
    console = Console(width=width, force_terminal=terminal, color_system=None, highlight=False)
    with console.capture() as printed:
        console.print(grid)
    return [line.rstrip() for line in printed.get().splitlines()]


def _cell(value: Any) -> str:
    if value is None or value is False or value == "":
        return "-"
    if value is True:
        return "yes"
    return number(value) if isinstance(value, float) else str(value)


def write(lines: Iterable[str]) -> None:
    """Print lines as they come, and flush at the end."""
    for line in lines:
        print(line)
    sys.stdout.flush()


def write_json(records: Iterable[Any]) -> None:
    """Print one JSON object a line."""
    write(json.dumps(record) for record in records)


def note(message: str) -> None:
    """Print a note to standard error, apart from the output itself."""
    print(f"tinker-claw: {message}", file=sys.stderr)


def wrapped(sentence: str, indent: str = "") -> list[str]:
    """Wrap a sentence to lines."""
    return textwrap.wrap(
        printable(sentence), WIDTH, initial_indent=indent, subsequent_indent=indent
    )


def field_lines(name: str, value: str) -> list[str]:
    """Wrap a named value to lines, with the name before the first."""
    first, *rest = wrapped(value, " " * 11) or [""]
    return [f"{name:<11}{first[11:]}".rstrip(), *rest]


def short(length: int, text: str | None) -> str:
    """Shorten a text to at most `length` characters."""
    text = text or ""
    return text if len(text) <= length else text[: length - 1] + "…"


def span(seconds: float) -> str:
    """A time span in words: 12 s, 4 min, 3 h, 2 d."""
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if abs(seconds) >= 2 * size:
            return f"{abs(seconds) / size:.0f} {unit}"
    return f"{abs(seconds):.0f} s"


def version(value: int | None) -> str | None:
    """Format a version: v3."""
    return None if value is None else f"v{value}"


def number(value: float | None) -> str:
    """Format a number with three significant digits; `-` where it is not known."""
    return "-" if value is None else f"{value:z.3g}"
