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
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import click

from tinker_claw.app.orders import address, order, url
from tinker_claw.config.load import ELSEWHERE, flags, load_given
from tinker_claw.config.settings import Settings
from tinker_claw.errors import ConfigError, LedgerError
from tinker_claw.ledger.database import FILE, Outside, is_locked, open_read_only
from tinker_claw.ledger.ledger import Ledger
from tinker_claw.words import printable

# Commands


FOLDER = click.Path(path_type=Path)
READS = (
    "Reads the data directory that --data-dir names, or else the one that these flags and the "
    "settings file start with."
)
"""Last paragraph of most commands' help."""


class FlagsCommand(click.Command):
    """A command that also takes tinker-claw's flags. --help shows its own, --help-all every one.

    Names of tinker-claw's flags have two underscores: `run__method`.
    """

    visible_flags: Collection[str | None] = ()
    """Those of tinker-claw's flags that the help shows."""

    def __init__(
        self, name: str, *, params: Sequence[click.Parameter] = (), **options: Any
    ) -> None:
        every = click.Option(
            ["--help-all"],
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=self._help_all,
            help="show every flag, those of tinker-claw, too",
        )
        own_flags = {flag for parameter in params for flag in parameter.opts}
        others = [flag for flag in flags() if not own_flags & {*flag.opts}]
        settings = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
        super().__init__(
            name, params=[*params, *others, every], context_settings=settings, **options
        )

    def _help_all(self, context: click.Context, _: click.Parameter, wanted: bool) -> None:
        if wanted and not context.resilient_parsing:
            self.visible_flags = [parameter.name for parameter in self.params]
            click.echo(f"{self.get_help(context)}\n\n{ELSEWHERE}")
            context.exit()

    def get_help_option(self, ctx: click.Context) -> click.Option | None:
        option = super().get_help_option(ctx)
        if option is not None:
            option.hidden = True  # a screen has no line for what was just typed
        return option

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for option in self.params:
            if isinstance(option, click.Option):
                # Hidden here only: completion leaves hidden ones out.
                option.hidden = _is_flag(option.name) and option.name not in self.visible_flags
        super().format_options(ctx, formatter)

    def invoke(self, ctx: click.Context) -> int:
        """Call the command with its invocation, and its own parameters by name; return its exit
        status, or 0 where it returns none."""
        values = {name: value for name, value in ctx.params.items() if value is not None}
        own = {name: value for name, value in ctx.params.items() if not _is_flag(name)}
        assert self.callback is not None
        return self.callback(Invocation(ctx.find_root().params | values), **own) or 0


def _is_flag(name: str | None) -> bool:
    """Return whether a parameter is one of tinker-claw's flags."""
    return "__" in (name or "")


def command(name: str, epilog: str = READS) -> Callable[[Callable[..., Any]], FlagsCommand]:
    """Return a decorator that makes a command of a function; its docstring is the help."""
    return click.command(name, cls=FlagsCommand, epilog=epilog)


AS_JSON = click.option("--json", "as_json", is_flag=True, help="one JSON object a line")


_AFTER_A_STEP = ("rollback", "accept", "forget-turn", "forget-session")
"""Orders that wait for a step in progress."""


@dataclass(frozen=True)
class Invocation:
    """The flags of tinker-claw that a command was given, and the data directory that they name."""

    parsed: Mapping[str, Any]

    @cached_property
    def settings(self) -> Settings:
        """The settings that tinker-claw would have with the same flags.

        Raises:
            ConfigError: a setting is wrong.
        """
        return load_given(self.parsed)

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
            if name in _AFTER_A_STEP:
                note("waiting for the gateway: a step in hand ends first (Ctrl-C leaves)")
            return order(directory, name, arguments), True
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

    def value(self, record: Any) -> Any:
        value = self.of(record) if callable(self.of) else record[self.of or self.name]
        return value if self.show is None else self.show(value)


def table(columns: Sequence[Column], records: Iterable[Any]) -> list[str]:
    """Return the heading, bold on a terminal, and one line per record; on a terminal that is too
    narrow cells take more lines."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    cells = [[column.value(record) for column in columns] for record in records]
    for column, *values in zip(columns, *cells, strict=True):
        numbers = any(type(value) in (int, float) for value in values)
        grid.add_column(column.name, justify="right" if numbers else "left")
    for row in cells:
        grid.add_row(*(Text(printable(_cell(value))) for value in row))
    terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if terminal else 100_000
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


def version_name(value: int | None) -> str | None:
    """Format a version: v3."""
    return None if value is None else f"v{value}"


def number(value: float | None) -> str:
    """Format a number with three significant digits; `-` where it is not known."""
    return "-" if value is None else f"{value:z.3g}"
