"""Agent frameworks from PyPI, in an environment of their own."""

from __future__ import annotations

import os
import subprocess

from tests.environments import installed

PACKAGES = ("pydantic-ai-slim[openai]==2.68.0", "openai-agents==0.24.0")

PROGRAMS = {
    "pydantic-ai": """
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

model = OpenAIChatModel("demo", provider=OpenAIProvider(base_url=URL, api_key="none"))
agent = Agent(model)

@agent.tool_plain
def add(a: int, b: int) -> int:
    "Add two numbers."
    return a + b

print(agent.run_sync("What is 3 plus 4?").output)
""",
    "openai-agents": """
from agents import Agent, AsyncOpenAI, OpenAIChatCompletionsModel, Runner, function_tool
from agents import set_tracing_disabled

set_tracing_disabled(True)

@function_tool
def add(a: int, b: int) -> int:
    "Add two numbers."
    return a + b

client = AsyncOpenAI(base_url=URL, api_key="none")
model = OpenAIChatCompletionsModel(model="demo", openai_client=client)
agent = Agent(name="adder", instructions="Use the tool.", tools=[add], model=model)
print(Runner.run_sync(agent, "What is 3 plus 4?").final_output)
""",
}
"""Each asks a question whose answer takes a call of a tool, and prints the answer."""


def run(name: str, base_url: str) -> str:
    """What the program of that name prints, asked over the gateway at `base_url`."""
    program = f"URL = {base_url!r}\n{PROGRAMS[name]}"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(installed("agents", *PACKAGES) / "python"), "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()
