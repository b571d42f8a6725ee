"""`python -m benchmarks.cost`: what learning from an agent's turns is billed, beside a naive loop.

Both run over the wire: the Tinker adapter and SDK against `python -m local_gpu.tinker` with a
random two-layer model, which bills tokens as Tinker does. Turns have OpenClaw's size (prompts of
11,000 tokens). Ours is method combine as shipped: one request for m votes, the teacher on hinted
turns only, and one pass over each sample. Naive: every vote a request of its own, and three hints
scored on every turn; it trains on the same, hinted turns in two passes (one for rewards, one for
hints). Serving costs the same in both and is listed apart.

Rule: tokens are counted where they are billed; dollars are those counts times configs/prices.toml.
No prompt cache helps either side, except that further votes of one request find their prompt.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.cost_run import Bills, Shape, bench_on, naive, ours, serve_turns
from benchmarks.tiny_server import server
from tinker_claw.billing import prices
from tinker_claw.billing.prices import Price
from tinker_claw.telemetry import configure
from tinker_claw.types import Usage

MODEL = "Qwen/Qwen3-8B"
SHARES = (0.1, 0.3, 0.6)
_PARTS = ("judge", "teacher", "train")


@dataclass(frozen=True)
class Row:
    """One scheme at one share of hinted turns."""

    hinted: float
    scheme: str
    bills: Mapping[str, Usage]
    turns: int

    @property
    def total(self) -> Usage:
        return sum(self.bills.values(), Usage())

    def usd(self, price: Price) -> float:
        """Cost of judge, teacher and step in dollars, over the whole batch."""
        usd = price.usd(self.total)
        if usd is None:
            raise LookupError(f"a price of {MODEL} is not known")
        return usd


async def measure(shape: Shape, threads: int, say: Callable[[str], None]) -> tuple[list[Row], Row]:
    """Measure both schemes at every share; return their rows and the row of serving."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with server(folder, shape.context, threads) as url:
            bench = bench_on(url, folder, shape)
            say("serving the turns")
            turns, served = await serve_turns(bench)
            say("naive: judge and teacher")
            plain = await naive(bench, turns)
            for share in SHARES:
                say(f"ours: {share:.0%} hinted")
                hinted = round(share * shape.turns)
                bills = await ours(bench, turns, hinted)
                again = Usage(trained=hinted * (shape.prompt + shape.reply - 1))
                two_passes: Bills = {**plain, "train": bills["train"] + again}
                schemes = {"ours": bills, "naive": two_passes}
                rows += [
                    Row(share, name, _parts(bills), shape.turns) for name, bills in schemes.items()
                ]
    return rows, Row(0.0, "serving", {"serve": served}, shape.turns)


def _parts(bills: Bills) -> dict[str, Usage]:
    return {part: bills[part] for part in _PARTS}


def show(console: Console, rows: list[Row], serving: Row, price: Price) -> None:
    """Print tokens in thousands and dollars per 1,000 turns."""
    table = Table(
        *("hinted", "", "prefill k", "cached k", "sampled k", "trained k"),
        *("judge $", "teacher $", "step $", "all $", "of naive"),
        title=f"per 1,000 turns, at the prices of {MODEL} of {price.as_of}",
    )
    for row in [*rows, serving]:
        scale = 1000 / row.turns
        kinds = [f"{count * scale / 1000:,.0f}" for count in asdict(row.total).values()]
        parts = [
            f"{(price.usd(row.bills[part]) or 0.0) * scale:.2f}" if part in row.bills else ""
            for part in _PARTS
        ]
        compared = f"{_ratio(row, rows, price):.0%}" if row.scheme == "ours" else ""
        share = f"{row.hinted:.0%}" if row.scheme != "serving" else ""
        table.add_row(share, row.scheme, *kinds, *parts, f"{row.usd(price) * scale:.2f}", compared)
    console.print(table)


def _ratio(row: Row, rows: list[Row], price: Price) -> float:
    (other,) = [r for r in rows if r.hinted == row.hinted and r.scheme == "naive"]
    return row.usd(price) / other.usd(price)


def document(rows: list[Row], serving: Row, price: Price, shape: Shape) -> dict[str, Any]:
    """All figures as JSON; tokens and dollars of the whole batch."""
    return {
        "model": MODEL,
        "prices": {k: str(v) if k == "as_of" else v for k, v in asdict(price).items()},
        "shape": asdict(shape),
        "serving": {"tokens": asdict(serving.total), "usd": serving.usd(price)},
        "rows": [
            {
                "hinted": row.hinted,
                "scheme": row.scheme,
                "tokens": {part: asdict(usage) for part, usage in row.bills.items()},
                "usd": row.usd(price),
                "of_naive": _ratio(row, rows, price),
            }
            for row in rows
        ],
    }


def _timed(line: str, started: float) -> str:
    return f"{time.monotonic() - started:4.0f} s  {line}"


def main() -> None:
    """Read flags, measure, print a table and, where asked, a JSON file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cost", description=__doc__)
    parser.add_argument("--turns", type=int, default=10, help="turns of the batch (default 10)")
    parser.add_argument("--prompt", type=int, default=11_000, help="tokens per prompt (11,000)")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default 1)")
    parser.add_argument("--json", type=Path, help="write everything here, too")
    arguments = parser.parse_args()
    configure(io.StringIO())
    console, started = Console(width=120), time.monotonic()
    shape = Shape(turns=arguments.turns, prompt=arguments.prompt)
    rows, serving = asyncio.run(
        measure(
            shape, arguments.threads, lambda line: console.print(_timed(line, started), style="dim")
        )
    )
    price = prices.load()[MODEL]
    show(console, rows, serving, price)
    console.print(f"{time.monotonic() - started:.0f} s", style="dim")
    if arguments.json:
        arguments.json.write_text(
            json.dumps(document(rows, serving, price, shape), indent=2) + "\n"
        )


if __name__ == "__main__":
    sys.exit(main())
