"""A task set of verifiers with a tool server that does not start."""

import verifiers.v1 as vf
from with_tools import Calculator, Sum

__all__ = ["TornTools"]


class Torn(Calculator):
    async def setup(self) -> None:
        raise RuntimeError("its database is away")


class TornTools(vf.Taskset[Sum, vf.TasksetConfig]):
    def load(self) -> list[Sum]:
        return [Sum(vf.TaskData(prompt=f"What is {n} + 4?"), self.config.task) for n in range(1, 6)]

    @classmethod
    def toolsets(cls, config: vf.TasksetConfig) -> list[vf.Toolset]:
        return [Torn(vf.SharedToolsetConfig())]


if __name__ == "__main__":
    Torn.run()
