"""The gate: how much a version may lose before it serves, and what follows."""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, cast

import pytest

from tests.learner.test_rollback import undoing
from tests.support.fakes import LOGPROB, FakeSampler, FakeTrainer
from tests.support.learning import World, world
from tests.support.ledger import of_step, sample_counts, sql
from tests.support.scripted_users import demo_run
from tinker_claw.billing.budget import Spending
from tinker_claw.billing.estimate import GATE_TOKENS
from tinker_claw.billing.prices import Price
from tinker_claw.cli.explain import explained
from tinker_claw.config.canaries import in_force, read
from tinker_claw.config.load import load
from tinker_claw.errors import (
    BackendError,
    ConfigError,
    OutageError,
    SamplerError,
)
from tinker_claw.learner import gate as module
from tinker_claw.learner.gate import (
    BOUND,
    FEWEST,
    WHOLE_BOUND,
    Answers,
    Gate,
    Question,
    canary_questions,
    loss,
)
from tinker_claw.learner.parts import LoopParts
from tinker_claw.ledger.database import open_read_only
from tinker_claw.ledger.figures import read_overview
from tinker_claw.ledger.steps import VoidStepError
from tinker_claw.policy import Sampler
from tinker_claw.render.renderer import Renderer
from tinker_claw.render.switches import Decides
from tinker_claw.shipped import CANARIES, DEMO_CANARIES, MODEL_DIR
from tinker_claw.turn_state import Reason
from tinker_claw.types import (
    Charge,
    TokenLogprobs,
    Tokens,
    Usage,
)

# What is a loss

KEYS = [f"c{n}" for n in range(12)]


def some(change: Callable[[int], float]) -> Answers:
    return {key: change(n) for n, key in enumerate(KEYS)}


HALF = math.log(0.5)


@pytest.fixture(autouse=True)
def counts_from_half(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let canaries count from half: what these samplers say is hardly surer."""
    monkeypatch.setattr(module, "CERTAIN", HALF)


WELL = some(lambda n: -0.5)


def test_loss_of_a_step_is_too_large_by_its_mean_and_not_in_the_other_direction() -> None:
    worse = some(lambda n: -0.7)
    assert loss(worse, WELL).mean == pytest.approx(0.2)
    assert loss(worse, WELL).is_too_large()
    assert not loss(WELL, dict.fromkeys(KEYS, -0.65)).is_too_large()
    assert not loss(some(lambda n: -0.64), WELL).is_too_large(), "0.14 does not matter"


def test_loss_of_a_step_that_may_be_chance_is_not_too_large() -> None:
    one_alone = some(lambda n: -5.5 if n == 0 else -0.5)
    assert not loss(one_alone, WELL).is_too_large(), "0.42 in the mean, all of it by one of twelve"
    few = dict(list(some(lambda n: -9.0).items())[: FEWEST - 1])
    assert not loss(few, WELL).is_too_large()
    assert not loss(few, WELL).is_too_far()


def test_chance_alone_is_hardly_ever_too_large() -> None:
    """Where no question has lost anything in the mean, over as many questions as are shipped."""
    rng, fired = Random(3), 0
    for _ in range(1000):
        fired += loss(some(lambda n: -0.5 - rng.gauss(0, 1)), WELL).is_too_large()
    assert fired <= 12, "of 1000; 6 are meant: Student's t with 11 degrees of freedom beyond 3"


@pytest.mark.parametrize(("lost", "spent"), [(5, False), (6, True)])
def test_whole_way_is_spent_by_several_canaries_and_not_by_few(lost: int, spent: bool) -> None:
    before = {str(n): -0.1 for n in range(36)}
    after = before | {str(n): -9.0 for n in range(lost)}
    assert loss(after, before, 1.0).is_too_far() is spent
    assert not loss(before, after, 1.0).is_too_far()


def test_questions_whose_right_reply_was_not_certain_do_not_count() -> None:
    unsure = some(lambda n: -0.5 if n else module.CERTAIN - 0.1)
    assert loss(some(lambda n: -3.0), unsure).each.keys() == {*KEYS[1:]}
    assert loss(some(lambda n: -3.0 if n else -0.1), unsure).mean == pytest.approx(2.5)


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer.load(str(MODEL_DIR), "qwen3")


@pytest.mark.parametrize("file", [CANARIES, DEMO_CANARIES])
def test_shipped_canaries_are_short_and_have_two_wordings_each(
    file: Path, renderer: Renderer
) -> None:
    canaries = read(file)
    assert {*Counter((one.call, *one.replies) for one in canaries).values()} == {2}
    assert "homework" not in str(canaries), "the demo's users teach that"
    questions = canary_questions(canaries, renderer)
    assert len({question.key for question in questions}) == len(canaries) >= 2 * FEWEST
    for question in questions:
        assert len(question.prompt) < 400
        for reply in question.replies:
            assert len(reply) <= 40
            assert reply[-1] == renderer.stop_tokens[0] or "tool_call" in renderer.decode(reply)
    assert sum(question.tokens for question in questions) < GATE_TOKENS / 4


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("canary = 3", "canary: "),
        ("[[canary]]\nmessages = ['a']", "canary.0: "),
        ("[[canary]]\nmessages = ['a', 'b']\nreplies = ['c']", "canary.0.messages"),
        ("[[canary]]\nmessages = ['a']\nreplies = ['']", "canary.0.replies.0"),
        (f"canary = {'[' * 9999}", "TOML"),
        ("[[canary]]\nmessages = ['a']\nreplies = ['b']\nweight = 2", "canary.0.weight"),
        ("[[canary]]\nmessages = ['a']\ntools = {f = 'does'}\ncall = 'g'", "none of its tools"),
    ],
)
def test_wrong_file_is_named_with_what_is_wrong(
    text: str, says: str, tmp_path: Path, renderer: Renderer
) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=f"--canaries .*mine.toml.*{says}"):
        read(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        read(tmp_path / "none.toml")
    file.write_text("# none")
    assert canary_questions(read(file), renderer) == []
    twice = tmp_path / "twice.toml"
    twice.write_text(2 * "[[canary]]\nmessages = ['a']\nreplies = ['b', 'b']\n")
    (question,) = canary_questions(read(twice), renderer)
    assert len(question.replies) == 1


def test_canaries_in_force_are_those_of_the_flag_else_of_the_model(tmp_path: Path) -> None:
    def many(*flags: str) -> int:
        return len(in_force(load(list(flags))))

    file = tmp_path / "mine.toml"
    file.write_text("[[canary]]\nmessages = ['a']\nreplies = ['b']")
    assert (many(), many("--model-name", "demo")) == (38, 36)
    assert many("--model-name", "demo-tracks") == 0
    assert many("--model-name", "demo-tracks", "--canaries", str(file)) == 1
    assert many("--gate", "off") == 0


def test_file_with_more_than_the_gate_asks_is_refused(tmp_path: Path, renderer: Renderer) -> None:
    """More canaries would leave no room for the user's own, and every step would pay for them."""
    file = tmp_path / "mine.toml"
    much = " one" * (GATE_TOKENS // 2)
    file.write_text(f"[[canary]]\nmessages = ['a']\nreplies = ['{much}', 'a{much}']")
    with pytest.raises(ConfigError, match=f"the gate asks {GATE_TOKENS} at most"):
        canary_questions(read(file), renderer)


# In a run

ASKED = tuple(Question(f"c{n}", f"{n}?", (1, 2, n + 3), ((70, 71, 9),)) for n in range(12))


def gated(parts: LoopParts, asked: Sequence[Question] = ASKED, seconds: float = 60) -> Gate:
    return Gate(parts, asked, seconds=seconds)


class LosingTrainer(FakeTrainer):
    """A trainer whose versions give the canaries' replies this many nats less than the first."""

    def __init__(self, *falls: float, bills: bool = False) -> None:
        super().__init__(bills=bills)
        self.falls = falls
        self.mute = self.slow = self.broken = 0
        self.failures = 1000
        """Number of scorings of a broken version that fail."""
        self.sick_at: Tokens = ()
        self.sick: BackendError | None = None
        """Error of every request with this prompt."""

    async def publish(self) -> Sampler:
        ref = (await super().publish()).ref
        number = self.asked["publish"] - 2  # the first is no step's
        less = self.falls[min(number, len(self.falls) - 1)] if number >= 0 else 0.0
        if number >= 0 and self.mute:
            self.mute, less = self.mute - 1, math.nan
        published = self.samplers[ref] = FakeSampler(
            self.script,
            ref=ref,
            bills=self.bills,
            opinion=lambda token: -less / 2 if token in (70, 71) else LOGPROB,
        )
        scores = published.logprobs

        async def logprobs(tokens: Tokens, *, start: int, **more: Any) -> TokenLogprobs:
            if self.sick and tokens[:start] == self.sick_at:
                raise self.sick
            return await scores(tokens, start=start, **more)

        published.logprobs = logprobs  # type: ignore[method-assign]
        if number >= 0 and self.slow:
            self.slow -= 1
            published.logprobs = _never  # type: ignore[method-assign]
        if number >= 0 and self.broken:
            self.broken -= 1
            published.fail_logprobs = self.failures
        return published


async def _never(tokens: Tokens, **asked: Any) -> TokenLogprobs:
    await asyncio.Event().wait()
    raise AssertionError("nobody sets it")


def four(w: World) -> None:
    for number in range(4):
        w.turn("YES" if number % 2 else "NO", session=f"s{number}")


def warned(w: World) -> list[str]:
    """What `status` says about the newest versions, where it is nothing good."""
    found = read_overview(w.ledger.path.parent, 4)["gate"]
    return [one["told"] for one in found if not one["well"]]


def errors(w: World) -> list[str | None]:
    return [row["error"] for row in sql(w.ledger).rows("SELECT error FROM steps ORDER BY id")]


async def test_version_that_lost_something_answers_nobody_and_its_batch_is_set_aside(
    tmp_path: Path,
) -> None:
    async with world(tmp_path, trainer=LosingTrainer(1.0, 0.0), gate=gated, gate_is="on") as w:
        first = w.policy.current
        four(w)
        await w.until(lambda: sample_counts(w.ledger)["quarantined"] == 4)
        assert w.policy.current is first
        with open_read_only(w.ledger.path) as rows:
            told = " ".join(" ".join(explained(rows, 1, text=False)).split())
        assert Reason.STEPS_FAILED in told
        (said,) = errors(w)
        assert said is not None
        assert said.startswith("the gate refused the version: right replies to canaries are 1.00")
        assert w.trainer.weights == 0, "the state before is loaded"
        assert warned(w) == [said]
        assert b'tinker_claw_steps_total{status="void"} 1.0' in w.telemetry.exposition()
        four(w)
        await w.version(1)
        (line,) = [json.loads(line) for line in w.metrics.read_text().splitlines()]
        assert line["gate"] == {"asked": 12, "loss": 0, "moved": 0, "whole": 0}
        assert warned(w) == [said], "of the newest step there is nothing to say"


class Thinker(FakeTrainer):
    """A trainer of a model that begins each reply with thinking, as Qwen3-8B does: what stands
    right behind the assistant's mark is beyond it, before a step and after."""

    def __init__(self, renderer: Renderer, *falls: float) -> None:
        super().__init__()
        self.text, self.falls = renderer.decode, falls

    async def publish(self) -> Sampler:
        published = await super().publish()
        number = self.asked["publish"] - 2
        less = self.falls[number] if number >= 0 else 0.0

        async def logprobs(tokens: Tokens, *, start: int, **more: Any) -> TokenLogprobs:
            thought = "</think>" in self.text(tokens[:start])
            each = -0.001 - less if thought else -20.0
            return TokenLogprobs(start, (each,) * (len(tokens) - start))

        published.logprobs = logprobs  # type: ignore[attr-defined]
        return published


@pytest.mark.parametrize("thinking", ["auto", "on"])
async def test_a_thinking_models_canaries_are_asked_where_its_text_begins(
    tmp_path: Path, thinker: Renderer, thinking: Decides
) -> None:
    asked = canary_questions(read(CANARIES), thinker, thinking)
    assert len(asked) == 38
    for one in asked:
        assert thinker.decode(one.prompt).endswith("<think>\n\n</think>\n\n")
        assert "think" not in thinker.decode(one.replies[0])
    trainer = Thinker(thinker, 0.0, 1.0)

    def gate(parts: LoopParts) -> Gate:
        return gated(parts, asked)

    async with world(tmp_path, trainer=trainer, gate=gate, gate_is="on") as w:
        four(w)
        await w.version(1)
        (line,) = [json.loads(line) for line in w.metrics.read_text().splitlines()]
        assert line["gate"] == {"asked": 38, "loss": 0, "moved": 0, "whole": 0}, (
            "nothing has changed"
        )
        four(w)
        await w.until(lambda: any(errors(w)))
        assert "less likely (38 questions)" in (errors(w)[1] or "")
        assert w.policy.current.version.id == 1


async def test_two_refusals_in_a_row_hold_learning_and_outlive_the_process(tmp_path: Path) -> None:
    trainer = LosingTrainer(0.0, 1.0)
    async with world(tmp_path, trainer=trainer, gate=gated, gate_is="on") as w:
        undoing(w)
        four(w)
        await w.version(1)
        for refused in (4, 8):
            four(w)
            await w.until(lambda n=refused: sample_counts(w.ledger)["quarantined"] == n)
        assert w.health.learner.state == "waiting", "the first had momentum from the step before"
        assert trainer.kept_moments == [False, False]
    async with world(tmp_path, trainer=trainer, gate=gated, gate_is="on") as w:
        undoing(w)
        four(w)
        await w.until(lambda: w.health.learner.state == "held")
        assert "Their batches are set aside" in (w.health.learner.error or "")
        assert w.policy.current.version.id == 1, "it lost nothing, and serves on"
        four(w)
        await w.settled()
        assert w.health.learner.state == "held"
        assert (await undoing(w).roll_back(1)).id == 2
        await w.until(lambda: w.health.learner.state != "held")


async def test_hold_after_two_refusals_ends_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = LosingTrainer(1.0, 1.0, 0.0)
    async with world(tmp_path, trainer=trainer, gate=gated, gate_is="on") as w:
        monkeypatch.setattr(module, "AGAIN_S", 2.0)
        for _ in range(3):
            four(w)
        await w.until(lambda: w.health.learner.state == "held")
        assert sample_counts(w.ledger)["quarantined"] == 8
        assert sample_counts(w.ledger)["queued"] == 4, "no new sample comes"
        await w.version(1)
        await w.until(lambda: w.health.learner.state != "held")


async def test_refused_batch_is_set_aside_although_the_state_before_cannot_be_had(
    tmp_path: Path,
) -> None:
    """Otherwise a process that ends meanwhile would begin with it, and it would count as the second
    batch."""
    trainer = LosingTrainer(1.0)
    trainer.load_state = _away  # type: ignore[method-assign]
    async with world(tmp_path, trainer=trainer, gate=gated, gate_is="on") as w:
        four(w)
        await w.until(lambda: w.health.outages.attempts("learning") > 0)
        assert sample_counts(w.ledger)["quarantined"] == 4


async def _away(ref: str, *, moments: bool = True) -> None:
    raise OutageError("the service is away, as told")


@pytest.mark.parametrize(
    ("fault", "seconds", "error", "warning"),
    [
        ({"slow": 1}, 0.05, None, "could not ask it: it took too long"),
        ({"broken": 2}, 60, None, "scoring fails, as told"),  # nor does the last one answer
        ({"broken": 1}, 60, "it does not answer", "it does not answer"),
        ({"broken": 1, "failures": 12}, 60, None, None),  # a server has only just loaded it
        ({"mute": 1}, 60, "5.00 nats less likely", "5.00 nats less likely"),
    ],
    ids=["slow", "both are broken", "broken", "fails once", "no numbers"],
)
async def test_gate_that_gets_no_answer(
    tmp_path: Path, fault: dict[str, int], seconds: float, error: str | None, warning: str | None
) -> None:
    """Nobody is kept out where the gate cannot ask; a version that lost its voice is refused."""
    trainer = LosingTrainer(0.0)
    vars(trainer).update(fault)

    def gate(parts: LoopParts) -> Gate:
        return gated(parts, seconds=seconds)

    async with world(tmp_path, trainer=trainer, gate=gate, gate_is="on") as w:
        if fault.get("broken") == 2:
            trainer.samplers[w.policy.current.sampler.ref].fail_logprobs = 1000
        four(w)
        await w.until(lambda: any(errors(w)) or w.policy.current.version.id == 1)
        assert [bool(line) for line in errors(w)] == [error is not None]
        assert (error or "") in (errors(w)[0] or "")
        assert len(warned(w)) == (warning is not None)
        assert (warning or "") in "".join(warned(w))


async def test_outage_lets_nobody_in_and_is_waited_for(tmp_path: Path) -> None:
    trainer = LosingTrainer(0.0)
    async with world(tmp_path, trainer=trainer, gate=gated, gate_is="on") as w:
        sampler = w.policy.current.sampler
        assert isinstance(sampler, FakeSampler)
        sampler.away = 7  # the one that serves is asked, too, as no step has asked it
        four(w)
        await w.version(1)
        said = errors(w)
        assert said[0] == "the service is away, as told"
        assert said[-1] is None
        assert sample_counts(w.ledger)["trained"] == 4, "of the same samples"


@pytest.mark.parametrize("error", [OutageError("HTTP 500"), SamplerError("refused")])
@pytest.mark.parametrize("falls", [0.0, 1.0])
async def test_one_question_that_cannot_be_asked_leaves_the_others(
    tmp_path: Path, error: BackendError, falls: float
) -> None:
    """For example a prompt that is too long for a server: it is not away, nor is the gate
    silent."""
    trainer = LosingTrainer(falls)
    trainer.sick_at, trainer.sick = ASKED[3].prompt, error
    async with world(tmp_path, trainer=trainer, gate=gated, gate_is="on") as w:
        four(w)
        await w.until(lambda: w.policy.current.version.id == 1 or any(errors(w)))
        if falls:
            assert "less likely (11 questions)" in (errors(w)[0] or "")
        else:
            (line,) = [json.loads(line) for line in w.metrics.read_text().splitlines()]
            assert line["gate"] == {"asked": 11, "loss": 0, "moved": 0, "whole": 0}


# Over many steps


SLOW = (0.7 * WHOLE_BOUND, 1.2 * WHOLE_BOUND)
"""Losses since the first version, of which no step makes more than a version may lose."""


async def test_small_losses_add_up_and_pause_learning_until_their_owner_acts(
    tmp_path: Path,
) -> None:
    assert SLOW[1] - SLOW[0] < BOUND
    trainer = LosingTrainer(*SLOW)
    async with world(tmp_path, trainer=trainer, gate=gated, gate_is="on") as w:
        four(w)
        await w.version(1)
        assert w.health.learner.state != "held"
        four(w)
        await w.version(2)
        await w.until(lambda: w.health.learner.state == "held")
    async with world(tmp_path, trainer=trainer, gate=gated, gate_is="on") as w:
        undoing(w)
        four(w)
        await w.until(lambda: w.health.learner.state == "held")
        held = w.health.learner.error or ""
        assert f"{SLOW[1]:.2f} nats less likely than with v0" in held
        assert "`tinker-claw rollback v0`" in held, "v1 had lost more than half of it"
        assert "`tinker-claw accept` keeps v2" in held
        assert read_overview(tmp_path, 4)["held"] == held.removesuffix(".")
        assert len(warned(w)) == 1
        assert sample_counts(w.ledger)["queued"] == 4, "they wait"
        assert await undoing(w).accept() == 2
        await w.version(3)
        assert w.health.learner.state != "held"
        *_, line = [json.loads(line) for line in w.metrics.read_text().splitlines()]
        assert line["gate"]["whole"] == 0, "v2 is the reference"
        assert read_overview(tmp_path, 4)["held"] is None


async def test_rollback_ends_the_pause_and_keeps_the_reference(tmp_path: Path) -> None:
    trainer = LosingTrainer(0.3 * WHOLE_BOUND, 1.2 * WHOLE_BOUND, 0.4 * WHOLE_BOUND)
    async with world(tmp_path, trainer=trainer, gate=gated, gate_is="on") as w:
        for number in (1, 2):
            four(w)
            await w.version(number)
        await w.until(lambda: w.health.learner.state == "held")
        assert "`tinker-claw rollback v1`" in (w.health.learner.error or "")
        assert (await undoing(w).roll_back(2)).id == 3
        four(w)
        await w.settled()
        assert w.health.learner.state == "held", "the same weights"
        assert (await undoing(w).roll_back(1)).id == 4
        four(w)
        await w.version(5)
        *_, line = [json.loads(line) for line in w.metrics.read_text().splitlines()]
        assert line["gate"]["whole"] == pytest.approx(0.4 * WHOLE_BOUND, abs=1e-5)


async def test_base_is_asked_once_where_the_gate_begins_later(tmp_path: Path) -> None:
    trainer = LosingTrainer(0.0)
    async with world(tmp_path, trainer=trainer) as w:
        four(w)
        await w.version(1)
    base = FakeSampler(ref="base", opinion=lambda token: 0.0 if token in (70, 71) else LOGPROB)
    trainer.samplers["base"] = base
    for number in (2, 3):
        async with world(tmp_path, trainer=trainer, gate=gated, gate_is="on") as w:
            four(w)
            await w.version(number)
            assert len(base.scored) == 12


@pytest.mark.parametrize("asked", [(), ASKED[: FEWEST - 1]])
async def test_too_little_to_ask_is_no_gate(tmp_path: Path, asked: Sequence[Question]) -> None:
    async with world(tmp_path, gate=lambda parts: gated(parts, asked), gate_is="on") as w:
        four(w)
        await w.version(1)
        (line,) = [json.loads(line) for line in w.metrics.read_text().splitlines()]
        assert "gate" not in line


async def test_what_asking_bills_is_charged_to_the_step(tmp_path: Path) -> None:
    price = Price(1.0, 0.5, 2.0, 4.0)
    trainer = LosingTrainer(0.0, bills=True)
    async with world(
        tmp_path,
        trainer=trainer,
        gate=gated,
        gate_is="on",
        method="binary",
        spending=lambda ledger, telemetry: Spending(price, ledger.spend, telemetry),
    ) as w:
        four(w)
        await w.version(1)
        billed = of_step(w.ledger, 1)
        tokens, replies = ASKED[0].tokens, len(ASKED[0].replies)
        assert billed.prefill == 24 * tokens, "of both, as nobody has asked the first"
        assert 0 < billed.sampled <= 24 * replies
        four(w)
        await w.version(2)
        assert of_step(w.ledger, 2).prefill == 12 * tokens


async def test_what_a_service_goes_on_with_after_the_time_limit_is_billed_to_the_step(
    tmp_path: Path,
) -> None:
    done, each = asyncio.Event(), Usage(prefill=6, sampled=1)

    class Late(LosingTrainer):
        async def publish(self) -> Sampler:
            published = await super().publish()
            assert isinstance(published, FakeSampler)
            published.logprobs = at_a_service  # type: ignore[method-assign]
            return published

    async def at_a_service(tokens: Tokens, charge: Charge, **asked: Any) -> TokenLogprobs:
        async def computes() -> None:
            await done.wait()
            charge(each)

        serving = asyncio.create_task(computes())
        await asyncio.wait((serving,))
        raise AssertionError("nobody waits any more")

    async with world(
        tmp_path,
        trainer=Late(0.0),
        gate=lambda parts: gated(parts, seconds=0.05),
        gate_is="on",
        spending=lambda ledger, telemetry: Spending(Price(), ledger.spend, telemetry),
    ) as w:
        four(w)
        await w.version(1)
        assert of_step(w.ledger, 1) == Usage()
        done.set()
        twelve = Usage(prefill=12 * each.prefill, sampled=12 * each.sampled)
        await w.until(lambda: of_step(w.ledger, 1) == twelve)
        assert w.spending.spent_usd is None, "its price is not known, and it counts"


# On the demo's model


@pytest.mark.slow
async def test_damaged_weights_are_refused_and_sound_ones_are_not(tmp_path: Path) -> None:
    async with demo_run(tmp_path) as run:
        renderer = Renderer.load(str(MODEL_DIR), "qwen3")
        asked = canary_questions(read(DEMO_CANARIES), renderer)
        gate = Gate(run.parts, asked)
        told = await gate.ask(run.parts.base)
        assert told["gate"]["asked"] == len(asked)
        with pytest.raises(VoidStepError, match="less likely"):
            await gate.ask(cast("Sampler", _Deaf(run.parts.base)))


class _Deaf:
    """Weights that only depend on the end of a prompt."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self.ref = sampler.ref

    async def logprobs(self, tokens: Tokens, *, start: int, **more: Any) -> TokenLogprobs:
        scores = await self._sampler.logprobs(tuple(tokens[start - 3 :]), start=3, **more)
        return replace(scores, start=start)
