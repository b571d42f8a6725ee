"""A task set of verifiers with a tool server: sums, and a calculator that works them out."""

import verifiers.v1 as vf

__all__ = ["WithTools"]


class Calculator(vf.Toolset[vf.SharedToolsetConfig, vf.State]):
    @vf.tool
    async def calculator(self, expression: str) -> str:
        """Works out an expression."""
        try:
            return str(sum(int(part) for part in expression.split("+")))
        except ValueError:
            return "error: this is no sum"


class Sum(vf.Task[vf.TaskData]):
    @vf.reward(weight=1.0)
    async def short(self, trace: vf.Trace) -> float:
        """The shorter the better, where the tool was offered."""
        offered = any("calculator" in tool.name for tool in trace.nodes[0].tools)
        return max(0.0, 1.0 - len(trace.last_reply) / 400) if offered else 0.0


class WithTools(vf.Taskset[Sum, vf.TasksetConfig]):
    def load(self) -> list[Sum]:
        return [Sum(vf.TaskData(prompt=f"What is {n} + 4?"), self.config.task) for n in range(1, 6)]

    @classmethod
    def toolsets(cls, config: vf.TasksetConfig) -> list[vf.Toolset]:
        return [Calculator(vf.SharedToolsetConfig())]


if __name__ == "__main__":
    Calculator.run()
