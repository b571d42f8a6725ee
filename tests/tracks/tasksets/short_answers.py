"""A task set of verifiers, as anybody would write one: homework, and the shorter the better.

verifiers imports it, in the environment where that is installed.
"""

import verifiers.v1 as vf

__all__ = ["ShortAnswers"]
QUESTION = (
    "I need help with a homework question. Nora owns {n} pears and finds 4 more. How many pears is "
    "that? Please show the work."
)


class ShortAnswer(vf.Task[vf.TaskData]):
    @vf.reward(weight=1.0)
    async def short(self, trace: vf.Trace) -> float:
        return max(0.0, 1.0 - len(trace.last_reply) / 400)


class ShortAnswers(vf.Taskset[ShortAnswer, vf.TasksetConfig]):
    def load(self) -> list[ShortAnswer]:
        return [
            ShortAnswer(vf.TaskData(prompt=QUESTION.format(n=n)), self.config.task)
            for n in range(1, 6)
        ]
