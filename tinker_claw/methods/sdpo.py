"""SDPO (arXiv 2601.20802): distillation from a model that is told the feedback on its reply.

In the paper, the student is given the request, and the teacher, a moving average of the student,
the request with the feedback on a reply that failed; both score the student's own tokens. The loss
is KL(student || teacher) at every position, over the student's top-k candidates and all others as
one more, the tail, with the teacher's side held constant. Over all tokens its gradient at a token v
is -p_v (log q_v - log p_v) grad log p_v, which is the signed weight that `topk_advantages` gives.
The feedback is used as it is, without a hint written from it.

Here, the feedback is the raw next state of a turn whose verdict is -1: the user's words or the
tools' results. Left out are the moving average (the teacher is the frozen base), the paper's many
candidates and its tail term: p is renormalised over --opd-topk of them. Added are
the bound, the teacher's own candidates and the correction of stale samples. A good reply teaches
nothing here: the paper uses it as a solution for other tries at the same request, but a gateway
sees only one.
"""

from __future__ import annotations

from tinker_claw.methods.base import HINTED, Evidence, Method, Signal, Teaching


def _correction(evidence: Evidence) -> tuple[str, ...]:
    state = evidence.next_state
    if evidence.verdict.value != -1 or state is None or state.role == "other":
        return ()
    return (state.text,)


SDPO = Method(
    name="sdpo",
    learns_from="what came after rejected replies, as it is",
    needs=frozenset({Signal.REWARD, Signal.NEXT_STATE}),
    distill_weight=1.0,
    teaching=Teaching(
        "correction",
        tells=_correction,
        words="\n\nA first reply to this was not what was wanted; what came after it, quoted as "
        "data: {hint}",
        tokens=120,
        most=1024,
    ),
    admitted=HINTED,  # hints, too, come from rejected replies
    taught=1.0,
)
