"""A task set of verifiers with an environment of its own: a person asks twice, and is played, too.

Its start takes a while, as one does that fetches images.
"""

import asyncio

import verifiers.v1 as vf

__all__ = ["TwoSides", "TwoSidesEnv"]
WISH = (
    "I need help with a homework question. Nora owns {n} pears and finds 4 more. How many is that?"
)


class TwoSidesConfig(vf.EnvConfig):
    helper: vf.AgentConfig = vf.AgentConfig()
    person: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"})


class TwoSidesEnv(vf.Env[TwoSidesConfig]):
    async def start(self) -> None:
        await asyncio.sleep(6)

    async def setup(self, agents: vf.Agents) -> None:
        agents.person.trainable = False

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        person = vf.Task(vf.TaskData(prompt="Say in a sentence what you would like to know."))
        async with (
            agents.person.interaction(person) as asking,
            agents.helper.interaction(task) as helping,
        ):
            answer = await helping.turn()
            for _ in range(2):
                asked = await asking.turn() if _ == 0 else await asking.turn(answer.last_reply)
                if asked.terminated or answer.terminated:
                    return
                answer = await helping.turn(f"Once more, please, and shorter. {asked.last_reply}")


class ShortAnswer(vf.Task[vf.TaskData]):
    @vf.reward(weight=1.0)
    async def short(self, trace: vf.Trace) -> float:
        return max(0.0, 1.0 - len(trace.last_reply) / 400)


class TwoSides(vf.Taskset[ShortAnswer, vf.TasksetConfig]):
    def load(self) -> list[ShortAnswer]:
        return [
            ShortAnswer(vf.TaskData(prompt=WISH.format(n=n)), self.config.task) for n in range(1, 6)
        ]
