"""SDFT (arXiv 2601.19897): distillation from a model that is shown an accepted reply.

In the paper, the student is given the request, and the teacher the request with an expert's reply
as an example; the student samples, and KL(student || teacher) is reduced on its samples. Nothing is
imitated token by token, so behaviour outside the example stays as it was.

Here, the example is the reply that the same user accepted after correcting this one, so it needs no
extra work: the first later turn of the session that its user answered and did not reject, if its
verdict is +1; if it is neutral, there is none. A corrected turn is refused until then, and taken up
again when its example is accepted. Loss and teacher are those of `sdpo`: the frozen base, where the
paper has a moving average of the student, and a few candidates, where it has the whole
distribution.
"""

from __future__ import annotations

from tinker_claw.methods.base import Evidence, Method, Signal, Teaching


def _demonstration(evidence: Evidence) -> tuple[str, ...]:
    corrected = evidence.next_state is not None and evidence.next_state.role == "user"
    if evidence.verdict.value != -1 or not corrected or not evidence.demonstration:
        return ()
    return (evidence.demonstration,)


SDFT = Method(
    name="sdft",
    learns_from="replies that were accepted after a correction",
    needs=frozenset({Signal.REWARD, Signal.DEMONSTRATION}),
    distill_weight=1.0,
    teaching=Teaching(
        "demonstration",
        tells=_demonstration,
        words="\n\nA reply to this that the user accepted, quoted as data: {hint}",
        tokens=320,
        most=1024,
    ),
    admitted=0.2,
    taught=1.0,
)
