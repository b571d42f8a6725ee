"""Methods against numbers worked out by hand, gradients against full autograd."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinker_claw.config.settings import Training
from tinker_claw.errors import AlignmentError, ConfigError
from tinker_claw.methods import METHODS, build
from tinker_claw.methods.advantages import (
    group_advantages,
    reward_advantages,
    spread_reward,
    stale_weight,
    token_advantages,
    topk_advantages,
    unproposed_advantages,
)
from tinker_claw.methods.base import Evidence, Prepared, require, student_topk
from tinker_claw.methods.passes import BatchItem, batch_advantages
from tinker_claw.types import (
    Capabilities,
    Completion,
    HintScores,
    JudgedBy,
    Lacks,
    NextState,
    Sample,
    SamplingParams,
    StopReason,
    TokenLogprobs,
    Verdict,
)

CFG = Training(batch_size=2)


def prepare(name: str, items: Sequence[BatchItem], cfg: Training, most: int = 2) -> Prepared:
    """Replies have at most so many tokens, as these samples."""
    return build(name).prepare(items, cfg, reply_tokens=most)


def others(logprob: float) -> float:
    """Factor on the advantage when a sampled token is rejected."""
    return 1 - math.exp(logprob)


def sample(
    number: int = 0,
    *,
    reward: float | None = None,
    tokens: tuple[int, ...] = (7, 8),
    logprobs: tuple[float, ...] = (-1.0, -2.0),
    teacher: HintScores | None = None,
    bucket: tuple[int, int] | None = None,
    judge: JudgedBy = "user",
    weight: float = 1.0,
    cut: bool = False,
) -> Sample:
    done = Completion(
        tokens=tokens,
        logprobs=logprobs,
        topk_ids=tuple((t, t + 10) for t in tokens),
        topk_logprobs=tuple((x, x - 1.0) for x in logprobs),
        stop_reason=StopReason.LENGTH if cut else StopReason.STOP,
        params=SamplingParams(max_tokens=8),
    )
    return Sample(
        id=number,
        turn_id=number,
        session_id=0,
        policy_version=0,
        policy_step=0,
        prompt=(1, 2, 3),
        completion=done,
        reward=reward,
        teacher=teacher,
        bucket=bucket,
        judge=judge,
        weight=weight,
    )


def hinted(logprobs: tuple[float, ...], targets: tuple[tuple[float, ...], ...]) -> HintScores:
    return HintScores(hint="be brief", logprobs=logprobs, targets=targets)


TEACHER = hinted((-3.0, -3.0), ((-2.0, -1.0), (-2.0, -3.0)))


def equally_weighted(
    rewards: Sequence[float | None], cut: Sequence[bool] | None = None
) -> list[float]:
    return reward_advantages(rewards, [1.0] * len(rewards), cut or [False] * len(rewards))


class TestRewards:
    def test_where_all_agree_a_quarter_is_kept_of_acceptance_and_nothing_of_rejection(self) -> None:
        assert equally_weighted([1, 1, None]) == [0.25, 0.25, 0.0]
        assert equally_weighted([-1, -1, None]) == [0.0, 0.0, 0.0]
        assert reward_advantages([-0.7] * 3, [0.1, 1.0, 0.3], [False] * 3) == [0.0] * 3, (
            "to the last bit"
        )

    def test_where_all_are_rejected_only_those_that_were_cut_are_pushed_down(self) -> None:
        assert equally_weighted([-1, -1, None], cut=[False, True, True]) == [0.0, -0.25, 0.0]
        assert equally_weighted([-1, 1], cut=[True, False]) == [-1.0, 1.0]
        rejected = [sample(n, reward=-1, cut=n == 1) for n in range(3)]
        assert batch_advantages(rejected, CFG) == [0.0, -0.25, 0.0]

    def test_a_batch_of_rejections_alone_takes_no_step(self) -> None:
        rejected = [BatchItem(sample(n, reward=-1)) for n in range(3)]
        assert prepare("combine", rejected, CFG).passes == []

    def test_in_the_papers_recipe_a_verdict_is_the_advantage_of_every_token(self) -> None:
        tool = sample(2, reward=1, judge="tools")
        samples = [sample(0, reward=1), sample(1, reward=-1), tool, sample(3, reward=None)]
        cfg = Training(recipe="paper")
        found, _ = build("binary").advantages([BatchItem(one) for one in samples], cfg, None)
        assert [one.tokens for one in found] == [[1.0] * 2, [-1.0] * 2, [1.0] * 2, [0.0] * 2]
        grouped = [sample(n, reward=r, bucket=(1, 0)) for n, r in enumerate((2.0, 0.0))]
        assert batch_advantages(grouped, cfg) == [1.0, -1.0], "groups are standardised all the same"

    def test_a_rejection_says_the_less_of_a_token_the_surer_it_was(self) -> None:
        own = [math.log(0.5), math.log(0.96), math.log(0.1), 0.0]
        assert spread_reward(-0.5, own) == pytest.approx([-0.25, -0.02, -0.45, 0.0])
        assert spread_reward(0.5, own) == [0.5] * 4

    @given(st.lists(st.floats(-20, 0), min_size=1), st.floats(-2, 2).filter(bool))
    def test_no_token_is_pushed_further_than_its_reply_nor_the_other_way(
        self, own: list[float], advantage: float
    ) -> None:
        found = spread_reward(advantage, own)
        assert all(0 <= a / advantage <= 1 for a in found)
        by_surety = [a for _, a in sorted(zip(own, found, strict=True))]
        assert by_surety == sorted(found), "the surer, the less is it pushed down"

    def test_the_verdicts_weight_scales_the_advantage(self) -> None:
        goes_on, rejected = sample(0, reward=1, weight=0.3), sample(1, reward=-1)
        # mean = (0.3 - 1) / 1.3
        assert batch_advantages([goes_on, rejected], CFG) == pytest.approx([0.6 / 1.3, -0.6 / 1.3])
        assert batch_advantages([goes_on, sample(1, reward=1)], CFG) == pytest.approx([0.075, 0.25])
        for name in ("binary", "combine"):
            items = [BatchItem(goes_on), BatchItem(sample(1, reward=1))]
            found, _ = build(name).advantages(items, CFG, None)
            assert [one.sample for one in found] == pytest.approx([0.075, 0.25])
        grouped = [sample(n, reward=r, bucket=(1, 1), weight=0.3) for n, r in ((0, 1), (1, -1))]
        assert batch_advantages(grouped, CFG) == [1.0, -1.0], "a group's outcomes have no weight"

    def test_each_judge_has_a_mean_so_that_a_users_rejection_praises_no_tool_call(self) -> None:
        users = [sample(n, reward=-1) for n in range(7)] + [sample(7, reward=1)]
        tools = [sample(n, reward=1, judge="tools", weight=0.5) for n in range(8, 16)]
        outcomes = [
            sample(16, reward=2.0, judge="outcome"),
            sample(17, reward=0.0, judge="outcome"),
        ]
        found = batch_advantages([*users, *tools, *outcomes], CFG)
        assert found[:8] == pytest.approx([-0.25] * 7 + [1.75]), "their mean is -0.75"
        assert found[8:16] == [0.125] * 8, "as in a batch of their own"
        assert found[16:] == [1.0, -1.0]
        rejected = [sample(n, reward=-1) for n in range(8)]
        assert batch_advantages([*rejected, *tools], CFG) == [0.0] * 8 + [0.125] * 8

    def test_any_real_number_is_a_reward_and_zero_is_one(self) -> None:
        assert equally_weighted([1.5, 0.0, -0.5, None]) == pytest.approx(
            [7 / 6, -1 / 3, -5 / 6, 0.0]
        )


class TestGroups:
    """Two groups by hand: two sessions try task 1, four try task 2, whose last ends a step early.

    Outcomes and votes are those of the rewards; sd is the population's.
    """

    def test_each_step_is_measured_against_the_same_step_of_the_other_sessions(self) -> None:
        first = [(1, 0), (1, 1), (1, 0), (1, 1)]
        rewards = [2.0, 1 + 1 / 3, 0.0, -2 / 3]
        # step 0: mean 1, sd 1; step 1: mean 1/3, sd 1.
        assert group_advantages(rewards, first) == pytest.approx([1.0, 1.0, -1.0, -1.0])

        second = [(2, 0), (2, 0), (2, 0), (2, 0), (2, 1), (2, 1), (2, 1)]
        rewards = [1.0, 1.0, 1.0, -1.0, 2.0, 0.0, 1.0]
        # step 0: mean .5, sd sqrt(.75); step 1: mean 1, sd sqrt(2/3).
        a, b = math.sqrt(0.75), math.sqrt(2 / 3)
        wanted = [0.5 / a, 0.5 / a, 0.5 / a, -1.5 / a, 1 / b, -1 / b, 0.0]
        assert group_advantages(rewards, second) == pytest.approx(wanted)

    def test_groups_and_the_others_of_a_batch_do_not_touch_one_another(self) -> None:
        samples = [
            sample(1, reward=2.0, bucket=(1, 0)),
            sample(2, reward=1),
            sample(3, reward=0.0, bucket=(1, 0)),
            sample(4, reward=-1),
            sample(5, reward=-7.0, bucket=(2, 0)),
            sample(6, reward=-1),
        ]
        assert batch_advantages(samples, CFG) == pytest.approx(
            [1.0, 4 / 3, -1.0, -2 / 3, -7.0, -2 / 3]
        )

    def test_bucket_of_one_stays_raw_and_one_that_agrees_adds_nothing(self) -> None:
        assert group_advantages([0.75], [(1, 0)]) == [0.75]
        assert group_advantages([0.1 + 0.2, 0.3, 0.3], [(1, 0)] * 3) == [0.0, 0.0, 0.0]
        assert group_advantages([0.0, 2.0, None], [(1, 0)] * 3) == [-1.0, 1.0, 0.0]
        items = [BatchItem(sample(n, reward=1.0, bucket=(1, 0))) for n in range(2)]
        items.append(BatchItem(sample(3, reward=-1.0, bucket=(1, 1))))
        (ppo,) = prepare("binary", items, CFG).passes
        (datum,) = ppo.datums
        wanted = [-others(q) / (2 * 3) for q in (-1.0, -2.0)]
        assert datum.advantages == pytest.approx(wanted), "B is the true count"

    @given(
        st.lists(
            st.tuples(
                st.none() | st.integers(-4, 4).map(lambda n: n / 3),
                st.none() | st.tuples(st.integers(0, 2), st.integers(0, 2)),
                st.booleans(),
                st.booleans(),
            ),
            min_size=1,
            max_size=24,
        ),
        st.randoms(use_true_random=False),
    )
    def test_no_order_of_arrival_changes_an_advantage(self, rows: list[Any], random: Any) -> None:
        samples = [
            sample(n, reward=reward, bucket=bucket, judge="tools" if tool else "user", cut=cut)
            for n, (reward, bucket, tool, cut) in enumerate(rows)
        ]
        wanted = {s.id: a for s, a in zip(samples, batch_advantages(samples, CFG), strict=True)}
        random.shuffle(samples)
        assert {
            s.id: a for s, a in zip(samples, batch_advantages(samples, CFG), strict=True)
        } == wanted


class TestCutReplies:
    """A reply without a stop is only ever pushed down."""

    def test_only_a_negative_verdict_makes_it_a_sample(self) -> None:
        for name in METHODS:
            for value, told in ((1, ()), (0, ("hint",)), (None, ("hint",)), (1, ("hint",))):
                why = build(name).refuses(Verdict((value,), value), told, cut=True)
                assert why == "cut by its token limit, and not rejected"
        assert build("combine").refuses(Verdict((-1,), -1), (), cut=True) is None

    def test_in_a_group_it_is_measured_and_not_reinforced(self) -> None:
        samples = [
            sample(1, reward=2.0, bucket=(1, 0), cut=True),
            sample(2, reward=0.0, bucket=(1, 0)),
            sample(3, reward=2.0, bucket=(1, 1)),
            sample(4, reward=0.0, bucket=(1, 1), cut=True),
        ]
        found, _ = build("binary").advantages([BatchItem(one) for one in samples], CFG, None)
        assert [one.sample for one in found] == [0.0, -1.0, 1.0, -1.0]


class TestDistillation:
    def test_token_advantage_is_bounded_difference(self) -> None:
        assert token_advantages([-0.5, -9.0, 0.0], [-1.0, -1.0, -3.0], 1.0) == [0.5, -1.0, 1.0]
        assert token_advantages([-9.0], [-1.0], 0.0) == [-8.0]

    def test_length_mismatch_raises_with_both_lengths(self) -> None:
        with pytest.raises(AlignmentError, match=r"'teacher': 1, 'behaviour': 2"):
            token_advantages([-1.0], [-1.0, -1.0], 1.0)

    def test_topk_weights_are_the_students_softmax(self) -> None:
        own = [math.log(0.6), math.log(0.2)]
        teacher = [math.log(0.3), math.log(0.4)]
        expected = [0.75 * math.log(0.5), 0.25 * math.log(2.0)]
        assert topk_advantages(teacher, own, 1.0) == pytest.approx(expected)

    def test_the_teachers_own_candidates_are_raised_by_its_probability_and_never_lowered(
        self,
    ) -> None:
        teacher = [math.log(0.5), math.log(0.2), math.log(0.01)]
        expected = [0.5, 0.2 * math.log(2.0), 0.0]
        assert unproposed_advantages(teacher, math.log(0.1), 1.0) == pytest.approx(expected)


class TestStaleSamples:
    @pytest.mark.parametrize(
        ("advantage", "drift", "expected"),
        [
            (1.0, 0.1, math.exp(0.1)),
            (1.0, 0.3, 0.0),  # 1.35 > 1.28: no gradient for a positive advantage
            (1.0, -0.5, math.exp(-0.5)),
            (-1.0, -0.1, -math.exp(-0.1)),
            (-1.0, -0.3, 0.0),  # 0.74 < 0.8
            (-1.0, 0.5, -math.exp(0.5)),
            (-1.0, 0.8, 0.0),  # 2.2 > 2: left out, nothing else bounds it
            (-1.0, 9998.0, 0.0),  # a server that called the candidate impossible
        ],
    )
    def test_weight(self, advantage: float, drift: float, expected: float) -> None:
        weight = stale_weight(advantage, -1.0 + drift, -1.0)
        assert weight == pytest.approx(expected)

    def test_stale_token_with_a_large_ratio_is_left_out(self) -> None:
        now = TokenLogprobs(start=3, logprobs=(-1.0 + 0.8, -2.0))
        items = [BatchItem(sample(reward=-1), current=now), BatchItem(sample(1, reward=1))]
        (ppo,) = prepare("binary", items, CFG).passes
        assert ppo.datums[0].advantages == (0.0, pytest.approx(-1 / 4 * others(-2.0)))


class TestPasses:
    @pytest.mark.parametrize(("recipe", "second"), [("paper", -0.5), ("default", -0.25)])
    def test_binary_normalises_by_length_and_batch(self, recipe: str, second: float) -> None:
        items = [
            BatchItem(sample(1, reward=1)),
            BatchItem(sample(2, reward=-1, tokens=(9,), logprobs=(-0.5,))),
        ]
        cfg = CFG.model_copy(update={"recipe": recipe})
        (ppo,) = prepare("binary", items, cfg).passes
        factor = 1.0 if recipe == "paper" else others(-0.5)
        assert ppo.loss == "ppo"
        assert ppo.config == {"clip_low_threshold": 0.8, "clip_high_threshold": 1.28}
        assert ppo.datums[0].advantages == (0.25, 0.25)
        assert ppo.datums[1].advantages == pytest.approx((second * factor,))
        assert ppo.datums[0].tokens == (1, 2, 3, 7, 8)
        assert ppo.datums[0].start == 3
        assert ppo.datums[0].logprobs == (-1.0, -2.0)

    def test_all_are_divided_by_the_reply_budget_whatever_the_batch_holds(self) -> None:
        short = sample(2, reward=-1, tokens=(9,), logprobs=(-0.5,))
        for longest in (
            sample(1, reward=1),
            sample(1, reward=1, tokens=(7,) * 9, logprobs=(-1.0,) * 9),
        ):
            items = [BatchItem(longest), BatchItem(short)]
            (ppo,) = prepare("binary", items, CFG, most=10).passes
            assert ppo.datums[1].advantages == pytest.approx((-others(-0.5) / (10 * 2),))
            assert set(ppo.datums[0].advantages) == {1 / (10 * 2)}

    def test_opd_topk_sends_signed_weights_at_the_students_candidates(self) -> None:
        (ce,) = prepare("opd", [BatchItem(sample(reward=-1, teacher=TEACHER))], CFG).passes
        assert ce.loss == "cross_entropy"
        assert ce.datums[0].targets == ((7, 17), (8, 18))
        w = 1 / (1 + math.exp(-1.0))
        expected = [(w * -1.0 / 2, (1 - w) * 1.0 / 2), (0.0, 0.0)]
        assert [list(row) for row in ce.datums[0].weights] == [
            pytest.approx(list(row)) for row in expected
        ]

    def test_what_the_student_no_longer_proposes_is_raised_where_the_teacher_does(self) -> None:
        teacher = replace(
            TEACHER,
            topk_ids=((17, 40), (50, 8)),  # 17 and 8 are the student's own, too
            topk_logprobs=((-1.0, math.log(0.5)), (math.log(0.1), -2.0)),
        )
        item = BatchItem(sample(teacher=teacher))
        (ce,) = prepare("opd", [item], CFG).passes
        (datum,) = ce.datums
        assert datum.targets == ((7, 17, 17, 40), (8, 18, 50, 8))
        # The student's last candidates have -2 and -3 nats, the bound is one.
        raised = [[0.0, 0.5 / 2], [0.1 * (math.log(0.1) + 3.0) / 2, 0.0]]
        assert [list(row[2:]) for row in datum.weights] == [
            pytest.approx(list(row)) for row in raised
        ]
        alone = replace(teacher, topk_ids=(), topk_logprobs=())
        (without,) = prepare("opd", [BatchItem(sample(teacher=alone))], CFG).passes
        assert [row[:2] for row in datum.weights] == list(without.datums[0].weights)

    @pytest.mark.parametrize(("now", "weight"), [(-1.7, 0.0), (-1.8, 0.25), (-9.0, 0.25)])
    def test_of_a_stale_sample_it_is_raised_as_far_as_the_bound(
        self, now: float, weight: float
    ) -> None:
        teacher = HintScores(
            "be brief", (-3.0,), ((-2.0, -1.0),), topk_ids=((40,),), topk_logprobs=((-1.39,),)
        )
        one = sample(tokens=(7,), logprobs=(-1.0,), teacher=teacher)
        current = TokenLogprobs(start=3, logprobs=(-1.0,), targets=((-1.0, -2.0, now),))
        (ce,) = prepare("opd", [BatchItem(one, current=current)], CFG).passes
        # log 1.28 above -2 is -1.75; e^-1.39 is a quarter, 0.61 nats above -2.
        assert ce.datums[0].weights[0][2] == pytest.approx(weight * 0.61 / 2, rel=1e-2)

    def test_opd_ignores_the_verdict(self) -> None:
        good, bad = (
            prepare("opd", [BatchItem(sample(reward=r, teacher=TEACHER))], CFG).passes
            for r in (1, -1)
        )
        assert good == bad

    def test_combine_puts_a_hinted_sample_into_one_pass_with_its_reward(self) -> None:
        items = [
            BatchItem(sample(1, reward=1)),
            BatchItem(sample(2, reward=-1, teacher=TEACHER)),
            BatchItem(sample(3, reward=None, teacher=TEACHER)),
        ]
        cfg = CFG.model_copy(update={"w_rl": 2.0, "w_opd": 0.5})
        ppo, ce = prepare("combine", items, cfg).passes
        (plain,) = ppo.datums
        assert plain.advantages == (2 / 6, 2 / 6)
        both, hint = ce.datums
        assert both.targets == ((7, 17, 7), (8, 18, 8))
        wanted = [-2 / 6 * others(q) for q in (-1.0, -2.0)]
        assert [row[-1] for row in both.weights] == pytest.approx(wanted)
        assert hint.targets == ((7, 17), (8, 18))
        halves = prepare("combine", items, cfg.model_copy(update={"w_opd": 1.0})).passes[1]
        assert ce.datums[0].weights[0][1] == pytest.approx(halves.datums[0].weights[0][1] / 2)

    def test_combine_in_token_mode_sums_into_one_pass(self) -> None:
        teacher = hinted((-0.5, -9.0), ())
        cfg = CFG.model_copy(update={"opd_topk": 0})
        items = [BatchItem(sample(reward=-1, teacher=teacher)), BatchItem(sample(1, reward=1))]
        (ppo,) = prepare("combine", items, cfg).passes
        # The reward by 1 - p, the teacher's difference as it is: +0.5 and -1 nats.
        wanted = [(-others(-1.0) + 0.5) / 4, (-others(-2.0) - 1.0) / 4]
        assert ppo.datums[0].advantages == pytest.approx(wanted)

    def test_teacher_that_missed_a_position_raises(self) -> None:
        teacher = hinted((-3.0, -3.0), ((-2.0, -1.0),))
        with pytest.raises(AlignmentError, match="every position"):
            prepare("opd", [BatchItem(sample(teacher=teacher))], CFG)


def now(role: str, text: str) -> NextState:
    return NextState(role, text)  # type: ignore[arg-type]


class TestTeachers:
    """Teachers: their prompt decides which turns they are asked about."""

    CORRECTED = Evidence(
        Verdict((-1,), -1), ("be brief",), now("user", "No, shorter."), "A short one."
    )
    ACCEPTED = replace(CORRECTED, verdict=Verdict((1,), 1))
    FAILED = replace(CORRECTED, next_state=now("tool", "no such file"))

    @pytest.mark.parametrize(
        ("name", "known", "told"),
        [
            ("opd", ACCEPTED, ("be brief",)),
            ("sdpo", CORRECTED, ("No, shorter.",)),
            ("sdpo", FAILED, ("no such file",)),
            ("sdpo", ACCEPTED, ()),
            ("sdpo", replace(CORRECTED, verdict=Verdict((0,), 0)), ()),
            ("sdft", CORRECTED, ("A short one.",)),
            ("sdft", FAILED, ()),  # no user has corrected it
            ("sdft", ACCEPTED, ()),
            ("sdft", replace(CORRECTED, demonstration=None), ()),
        ],
    )
    def test_what_is_told(self, name: str, known: Evidence, told: tuple[str, ...]) -> None:
        method = build(name)
        assert method.teaching is not None
        assert method.teaching.tells(known) == told
        why = method.refuses(known.verdict, told)
        reasons = {"sdpo": "no correction", "sdft": "no demonstration"}
        if name in reasons:
            assert why == (None if told else reasons[name])

    def test_what_the_teacher_rules_out_leaves_every_weight_finite_without_a_bound(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("tinker_claw.methods.passes.DISTILLED_NATS", 0.0)
        never, cfg = -math.inf, CFG
        done = replace(sample().completion, topk_logprobs=((-0.1, -2000.0), (-0.1, never)))
        teacher = hinted((never, -1.0), ((-0.1, never), (never, never)))
        now = TokenLogprobs(2, (-9999.0, -1.0), ((-0.1, -9999.0),) * 2)
        item = BatchItem(replace(sample(teacher=teacher), completion=done), current=now)
        for mode in ("topk", "token"):
            training = cfg.model_copy(update={"opd_mode": mode})
            (done_pass,) = prepare("sdpo", [item], training).passes
            (datum,) = done_pass.datums
            found = [a for row in datum.weights for a in row] + [*datum.advantages]
            assert found
            assert all(map(math.isfinite, found)), mode


class TestAdmission:
    @pytest.mark.parametrize(
        ("method", "value", "hints", "refused"),
        [
            ("binary", 1, (), None),
            ("binary", 0, (), "neutral verdict"),
            ("binary", None, (), "no valid vote"),
            ("binary", 0, ("do it so",), "neutral verdict"),
            ("opd", -1, (), "no hint"),
            ("opd", -1, ("do it so",), None),
            ("combine", 0, (), "neutral verdict, no hint"),
            ("combine", None, (), "no valid vote, no hint"),
            ("combine", 0, ("do it so",), None),
            ("combine", -1, (), None),
        ],
    )
    def test_only_turns_with_a_signal_become_samples(
        self, method: str, value: int | None, hints: tuple[str, ...], refused: str | None
    ) -> None:
        verdict = Verdict(votes=(value,), value=value)
        record = build(method)
        told = record.teaching.tells(Evidence(verdict, hints)) if record.teaching else ()
        assert record.refuses(verdict, told) == refused


class TestNeeds:
    FULL = Capabilities(
        model="m",
        losses=frozenset({"ppo", "cross_entropy"}),
        two_d_targets=True,
        student_topk=True,
        context_tokens=1000,
    )

    def test_candidates_are_captured_only_where_they_are_used(self) -> None:
        assert student_topk(build("opd"), CFG) == 4
        assert student_topk(build("binary"), CFG) == 0
        assert student_topk(build("combine"), CFG) == 0, "its teacher writes"
        token = CFG.model_copy(update={"opd_topk": 0})
        assert student_topk(build("opd"), token) == 0

    def test_what_is_missing_is_named_with_the_setting_that_works(self) -> None:
        require(build("combine"), CFG, self.FULL)
        with pytest.raises(ConfigError, match=r"\[N, K\] targets.*--opd-topk 0"):
            require(build("combine"), CFG, replace(self.FULL, two_d_targets=False))


@pytest.mark.parametrize("name", ["combine", "binary", "opd", "sdpo", "sdft"])
def test_a_plain_acceptance_is_what_nobody_rejected_hinted_or_rated(name: str) -> None:
    method, cfg = METHODS[name], Training()
    alone = {"taught": False, "cut": False, "rated": False}
    compares = name in ("combine", "binary")  # without a reward pass nothing is compared
    assert method.lacks(1, cfg, **alone) == (Lacks.REJECTION if compares else None)
    assert method.lacks(-1, cfg, **alone) == (Lacks.BETTER if compares else None)
    assert method.lacks(-1, cfg, **alone | {"cut": True}) is None, "to end sooner is better"
    for reward in (1, -1):
        assert method.lacks(reward, cfg, **alone | {"taught": True}) is None
        assert method.lacks(reward, Training(recipe="paper"), **alone) is None
    assert method.lacks(0.5, cfg, **alone | {"rated": True}) is None
