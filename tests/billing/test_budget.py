"""A budget stops judging and steps, over HTTP and over restarts; it never stops serving."""

from __future__ import annotations

import asyncio
import io
import json
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.support.fakes import FakeSampler, FakeTrainer, Script
from tests.support.gateways import MODEL, World, chat, gateway, spell
from tests.support.learning import Says
from tests.support.ledger import by_purpose, judgeable, of_turn, sql
from tests.support.waits import eventually
from tinker_claw.billing.budget import Spending
from tinker_claw.billing.prices import Price
from tinker_claw.config.load import load
from tinker_claw.config.settings import Budget, JudgeSettings, Run, Settings, Training
from tinker_claw.errors import ConfigError, LedgerError
from tinker_claw.judge.judge import Judge
from tinker_claw.learner.health import Health
from tinker_claw.learner.judging import Judging
from tinker_claw.learner.loop import Learner
from tinker_claw.learner.parts import LoopParts
from tinker_claw.learner.scoring import HintScorer
from tinker_claw.ledger.ledger import Ledger
from tinker_claw.ledger.spend import Bill, Purpose, SpendTable
from tinker_claw.methods import build
from tinker_claw.render.renderer import Renderer
from tinker_claw.telemetry import Telemetry, configure
from tinker_claw.turn_state import Reason
from tinker_claw.types import StopReason, Usage

DOLLAR = 1e6
"""Price in USD per million tokens at which a token costs a dollar."""
PRICE = Price(prefill=0.0, cached=0.0, sample=DOLLAR, train=DOLLAR)
"""Sampled and trained tokens cost a dollar each; prompts nothing."""
VERDICT = Usage(sampled=10)
SETTINGS = Settings(
    run=Run(method="binary"),
    training=Training(batch_size=2, max_staleness=50, gate="off"),
)


@dataclass
class Life:
    """One process: a gateway, and the loop behind it."""

    world: World
    trainer: FakeTrainer
    says: Says

    async def converse(self, number: int) -> None:
        """Send a turn, and the message that judges it; the second reply belongs to the next
        session."""
        first = await self.ask(number, "hi")
        await self.ask(number, "hi", first, "NO" if number % 2 else "YES")

    async def a_step(self) -> tuple[float, float, float]:
        """Hold two conversations and take the step that they make; return the bill, as `sums`
        does."""
        for number in range(2):
            await self.converse(number)
        await self.until(lambda: self.world.policy.current.version.id == 1)
        return sums(self.world)

    async def ask(self, number: int, *said: str) -> str:
        response = await self.world.ask(*said, headers={"X-Session-Id": str(number)})
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["message"]["content"]

    async def health(self) -> dict[str, Any]:
        response = await self.world.http.get(self.world.url.removesuffix("/v1") + "/healthz")
        return response.json()

    async def until(self, happened: Callable[[], bool]) -> None:
        await eventually(happened)

    async def paused(self) -> dict[str, Any]:
        async with asyncio.timeout(60):
            while not (health := await self.health())["spending_paused"]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        return health


def priced(**more: Any) -> Callable[[Ledger], Spending]:
    return lambda ledger: Spending(PRICE, ledger.spend, Telemetry(None), **more)


@asynccontextmanager
async def life(
    path: Path,
    renderer: Renderer,
    budget_usd: float | None,
    trainer: FakeTrainer | None = None,
) -> AsyncGenerator[Life]:
    spending = priced(budget=budget_usd and Budget(budget_usd))
    fine = spell(renderer, "fine")
    trainer = trainer or FakeTrainer(script=Script(fine), bills=True)
    serving = FakeSampler(fine, bills=True)
    async with gateway(path, renderer, serving, spending=spending) as world:
        says, base = Says(billed=VERDICT), FakeSampler()
        around = (Telemetry(None), Health(), world.spending, SETTINGS.training)
        parts = LoopParts(world.ledger, trainer, base, build("binary"), world.policy, *around)
        learner = Learner(parts, learning_rate=1e-3)
        judge = Judge(says, JudgeSettings(), most_hints=0)
        scorer = HintScorer(parts, renderer, context_tokens=trainer.context_tokens)
        judged = Judging(parts, judge, scorer, learner.wake, concurrency=4)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(part.run()) for part in (judged, learner)]
            watch = group.create_task(_wake(world, judged))
            yield Life(world, trainer, says)
            for task in (*tasks, watch):
                task.cancel()


async def _wake(world: World, judging: Judging) -> None:
    """Connect next states to judging, as the wiring does."""
    while True:
        if world.woken:
            world.woken.clear()
            judging.wake()
        await asyncio.sleep(0.005)


def sums(world: World) -> tuple[float, float, float]:
    """Dollars for serving, judging and training."""
    spent = by_purpose(world.ledger)
    return spent["serve"].usd, spent["judge"].usd, spent["train"].usd


async def test_budget_stops_judging_and_steps_and_serving_goes_on(
    tmp_path: Path, renderer: Renderer
) -> None:
    async with life(tmp_path, renderer, None) as it:
        served, judged, trained = await it.a_step()
        health = await it.health()
        assert (health["status"], health["budget_usd"]) == ("ok", None)
        assert health["spent_usd"] == pytest.approx(served + judged + trained)
        assert health["spent_tokens"]["sampled"] == 4 * len(spell(renderer, "fine")) + 2 * 10
    budget = served + judged + trained + 0.5  # the next reply is dearer
    async with life(tmp_path, renderer, budget, it.trainer) as it:
        for number in (2, 3):
            await it.converse(number)
        health = await it.paused()
        assert (health["status"], health["judge"], health["learner"]) == ("paused",) * 3
        assert health["learner_since"] > 0
        assert health["budget_usd"] == pytest.approx(budget)
        assert "higher --budget-usd" in health["spending_paused"]
        before = sums(it.world)
        await it.converse(4)  # the gateway answers
        after = sums(it.world)
        assert after[0] > before[0], "which is billed, and counted"
        assert after[1:] == before[1:]
        assert before[1:] == (judged, trained)
        assert len(it.trainer.steps) == 1
        assert judgeable(it.world.ledger), "kept for later"
        assert [r for r in it.world.column("reason") if r] == [], "nothing refused"
        paused_at = (await it.health())["spent_usd"]

    async with life(tmp_path, renderer, budget, it.trainer) as it:
        assert (await it.paused())["spent_usd"] == paused_at, "a restart keeps the pause"
        await asyncio.sleep(0.1)
        assert sums(it.world)[1:] == before[1:]
        await it.ask(9, "still there?")

    async with life(tmp_path, renderer, budget * 10, it.trainer) as it:
        await it.until(lambda: not judgeable(it.world.ledger))
        await it.until(lambda: len(it.trainer.steps) == 2)
        health = await it.health()
        assert (health["status"], health["spending_paused"]) == ("ok", None)


async def test_budget_is_overrun_by_one_step_and_the_judge_calls_in_flight_at_most(
    tmp_path: Path, renderer: Renderer
) -> None:
    async with life(tmp_path, renderer, None) as it:
        _, judged, trained = await it.a_step()
        spent = sum(sums(it.world))
    serving, rest = 8 * 2 * len(spell(renderer, "fine")), 2.5 * 10
    async with life(tmp_path, renderer, spent + serving + rest, it.trainer) as it:
        await asyncio.gather(*(it.converse(number) for number in range(2, 10)))
        await it.paused()
        await asyncio.sleep(0.2)  # what is in flight ends
        _, more_judged, more_trained = sums(it.world)
        assert 0 < more_judged - judged <= rest + 4 * 10
        assert more_judged - judged + more_trained - trained <= rest + 4 * 10 + trained
        assert judgeable(it.world.ledger), "kept for later"


@pytest.mark.parametrize("stream", [False, True])
async def test_reply_that_nobody_waited_for_is_billed(
    tmp_path: Path, renderer: Renderer, stream: bool
) -> None:
    words = Script(spell(renderer, "one two three four five six seven"), holds_after=3)
    sampler = FakeSampler(words, bills=True)

    async with gateway(tmp_path, renderer, sampler, spending=priced()) as world:
        body = {"model": MODEL, "messages": chat("hi"), "stream": stream}
        asking = asyncio.create_task(world.http.post("/chat/completions", json=body))
        async with asyncio.timeout(60):
            await sampler.holding.wait()
            asking.cancel()
            while not world.observer.seen:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        (turn,) = world.turns()
        assert turn.completion.tokens == words.tokens[:3]
        assert turn.completion.stop_reason is StopReason.ABORT
        assert world.column("reason") == [Reason.HUNG_UP]
        billed = of_turn(world.ledger, turn.id)
        assert billed == Usage(prefill=len(turn.prompt), sampled=len(turn.completion.tokens))
        (seen,) = world.observer.seen
        assert seen["usd"] == billed.sampled


async def test_attempts_that_failed_are_billed_with_the_turn_or_without_one(
    tmp_path: Path, renderer: Renderer
) -> None:
    good = spell(renderer, "fine")
    broken = Script(good, fail_after=0)
    sampler = FakeSampler(broken, Script(good), bills=True)

    async with gateway(tmp_path, renderer, sampler, spending=priced()) as world:
        await world.ask("hi")
        (turn,) = world.turns()
        served = of_turn(world.ledger, turn.id)
        assert served == Usage(prefill=2 * len(turn.prompt), sampled=len(good))
        sampler.say(broken)
        assert (await world.ask("hi")).status_code == 503
        total = world.ledger.spend.total().usage
        assert total.prefill == 5 * len(turn.prompt), "three more attempts, and no turn"
        rows = sql(world.ledger).rows("SELECT turn_id, usd FROM spend ORDER BY id")
        assert [row["turn_id"] for row in rows] == [turn.id, None]
        sampler.say(Script(good, holds_after=0))
        asking = asyncio.create_task(world.ask("hi"))
        async with asyncio.timeout(60):
            await sampler.holding.wait()
            asking.cancel()
            while world.ledger.spend.total().usage.prefill == total.prefill:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert len(world.turns()) == 1


async def test_bill_that_cannot_be_written_takes_no_private_reply(
    tmp_path: Path, renderer: Renderer
) -> None:
    sampler = FakeSampler(spell(renderer, "fine"), bills=True)

    async with gateway(tmp_path, renderer, sampler, spending=priced()) as world:
        sql(world.ledger).rows("PRAGMA query_only = ON")
        answer = await world.ask("/private\nhi")
        assert answer.status_code == 200, "nothing of it would be lost"
        assert (await world.ask("hi")).status_code == 503
        sql(world.ledger).rows("PRAGMA query_only = OFF")
        assert world.ledger.spend.total().usage == Usage()
        await world.ask("hi")
        (turn,) = world.turns()
        served = of_turn(world.ledger, turn.id)
        await world.spending.room()
        assert world.ledger.spend.total().usage.sampled > served.sampled, "written later"


def test_late_bill_that_takes_some_of_an_earlier_one_back_is_written(tmp_path: Path) -> None:
    """The service had the prompt in its cache, and only says so when nobody waits any more."""
    ledger = Ledger(tmp_path)
    spending = Spending(PRICE, ledger.spend, Telemetry(None))
    with spending.paying("judge") as account:
        account.add(Usage(prefill=40))
    account.add(Usage(prefill=-30, cached=30, sampled=5))
    assert ledger.spend.total().usage == Usage(prefill=10, cached=30, sampled=5)
    assert spending.spent_usd == ledger.spend.total().usd == 5
    ledger.close()


class Full(SpendTable):
    """A ledger whose disk is full until told otherwise."""

    full = True

    def add(self, bill: Bill, *, turn_id: int | None = None, step_id: int | None = None) -> None:
        if self.full:
            raise LedgerError("the disk is full")
        super().add(bill, turn_id=turn_id, step_id=step_id)


async def test_bill_that_cannot_be_written_counts_and_nothing_more_is_bought(
    tmp_path: Path,
) -> None:
    ledger = Ledger(tmp_path)
    table = Full(sql(ledger))
    spending = Spending(PRICE, table, Telemetry(None), budget=Budget(1e9))

    async def ask() -> None:
        await spending.room()
        with spending.paying("judge") as account:
            account.add(VERDICT)

    for _ in range(3):
        with pytest.raises(LedgerError, match="full"):
            await ask()
    assert spending.spent_usd == VERDICT.sampled, "once asked, and counted at once"
    assert ledger.spend.total().usage == Usage()
    table.full = False
    await ask()
    assert spending.spent_usd == ledger.spend.total().usd == 2 * VERDICT.sampled
    ledger.close()


# A budget of each month


@dataclass
class Clock:
    """A local clock that a test sets."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now

    def set(self, when: str) -> None:
        self.now = datetime.fromisoformat(when).timestamp()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    """A clock in a zone in which the month begins ten hours before Greenwich's."""
    monkeypatch.setenv("TZ", "Australia/Brisbane")
    time.tzset()
    yield Clock()
    monkeypatch.undo()
    time.tzset()


@pytest.fixture
def book(tmp_path: Path) -> Iterator[Ledger]:
    ledger = Ledger(tmp_path / "book")
    yield ledger
    ledger.close()


def spend(ledger: Ledger, clock: Clock, when: str, usd: float, purpose: Purpose = "judge") -> None:
    """Bill dollars at a time, and leave the clock there."""
    clock.set(when)
    ledger.spend.add(Bill(purpose, Usage(sampled=1), usd))
    with sql(ledger).transaction() as tx:
        tx.execute("UPDATE spend SET created_at = ? WHERE id = (SELECT MAX(id) FROM spend)",
                   (clock.now,))  # fmt: skip


def monthly(ledger: Ledger, clock: Clock, usd: float = 20.0, **more: Any) -> Spending:
    budget = Budget(usd, monthly=True)
    return Spending(PRICE, ledger.spend, Telemetry(None), budget=budget, now=clock, **more)


def test_budget_of_a_month_holds_to_its_end_by_the_local_clock(book: Ledger, clock: Clock) -> None:
    spend(book, clock, "2026-10-31T23:59:00", 500.0)
    spend(book, clock, "2026-11-01T00:00:00", 12.0)
    spend(book, clock, "2026-11-20T12:00:00", 8.0, "serve")
    spending = monthly(book, clock)
    told = spending.paused()
    assert told is not None
    for part in ("of the budget of $20 a month", "until 2026-12-01 00:00", "(serving: $8.00 in"):
        assert part in told
    clock.set("2026-11-30T23:59:59")
    assert spending.paused() is not None
    clock.set("2026-12-01T00:00:00")
    assert spending.paused() is None, "the same process goes on"
    assert monthly(book, clock).paused() is None, "and one that is started then"
    assert spending.sums()["month_usd"] == 0.0
    assert spending.spent_usd == 520.0, "of all months"
    spending.count(Bill("train", Usage(trained=1), 21.0))
    assert spending.paused() is not None, "what is billed while it runs counts in its month"


def test_clock_that_is_turned_back_makes_no_room(book: Ledger, clock: Clock) -> None:
    spend(book, clock, "2026-11-20T12:00:00", 5.0)
    spend(book, clock, "2026-12-05T12:00:00", 19.0)
    spending = monthly(book, clock)
    assert spending.paused() is None
    clock.set("2026-11-28T12:00:00")
    assert spending.paused() is not None, "what December was billed counts in November, too"
    clock.set("2026-12-06T12:00:00")
    assert spending.paused() is None


def test_it_warns_once_at_four_fifths_and_at_all_of_it(book: Ledger, clock: Clock) -> None:
    stream = io.StringIO()
    configure(stream)
    spend(book, clock, "2026-11-20T12:00:00", 15.9)
    spending = monthly(book, clock)
    assert (spending.paused(), spending.near()) == (None, None)
    spending.count(Bill("serve", Usage(), 0.2))
    for _ in range(3):
        assert spending.paused() is None
    assert "$16.1000 of the budget of $20 a month are spent" in spending.near()
    spending.count(Bill("train", Usage(), 5.0))
    for _ in range(3):
        assert spending.paused() is not None
    assert spending.near() is None
    events = [json.loads(line)["event"] for line in stream.getvalue().splitlines()]
    assert events == ["spend.near", "spend.paused"]


async def test_serving_stops_with_the_budget_where_that_is_asked_for(
    tmp_path: Path, renderer: Renderer
) -> None:
    spending = priced(budget=Budget(3), stops_serving=True)
    sampler = FakeSampler(spell(renderer, "fine"), bills=True)
    async with gateway(tmp_path, renderer, sampler, spending=spending) as world:
        assert (await world.ask("hi")).status_code == 200  # at some five dollars
        answer = await world.ask("hi")
        assert answer.status_code == 402
        said = answer.json()["error"]
        assert said["code"] == "insufficient_quota"
        assert "no request is answered (--budget-serving stops)" in said["message"]
        assert len(world.turns()) == 1
        assert (await world.http.get("/models")).status_code == 200


@pytest.mark.parametrize(
    "given", ["0", "-5", "0/month", "-1/month", "nan", "inf", "ten", "20/week", "20/", "/month", ""]
)
def test_budget_that_is_none_is_refused_with_a_sentence(given: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load([f"--budget-usd={given}"])
    assert "--budget-usd" in str(refused.value)
    assert "a sum above 0" in str(refused.value)


def test_budgets_are_read_from_flags_and_files() -> None:
    assert load(["--budget-usd", "5"]).spend.budget == Budget(5.0)
    assert load(["--budget-usd", "20/month"]).spend.budget == Budget(20.0, monthly=True)
    assert load([]).spend.budget is None
