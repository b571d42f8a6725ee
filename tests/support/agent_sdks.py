"""Agent frameworks from PyPI and npm, in environments of their own."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping

from examples.day import npm
from tests.support.environments import installed

PACKAGES = (
    "pydantic-ai-slim[openai]==2.68.0",
    "openai-agents==0.24.0",
    "langchain-openai==1.7.3",
)
AUTOGEN = ("autogen-agentchat==0.7.5", "autogen-ext[openai]==0.7.5")
INSTRUCTOR = ("instructor==1.17.0",)
"""Installed apart: it needs another release of the `openai` package."""
AI_SDK = ("ai@7.0.173", "@ai-sdk/openai-compatible@3.0.92")
AI_SDK_4 = ("ai@4.3.6", "@ai-sdk/openai-compatible@0.2.9", "zod@3")
"""The last release whose generateObject has a mode that uses tools."""

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
"""Programs that ask a question whose answer takes a tool call, and print the answer."""


_PLACE = """
from pydantic import BaseModel

class Place(BaseModel):
    "A place, and for how long."
    city: str
    days: int
"""
STRUCTURED: Mapping[str, str] = {
    "pydantic-ai": f"""{_PLACE}
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

model = OpenAIChatModel("demo", provider=OpenAIProvider(base_url=URL, api_key="none"))
print(Agent(model, output_type=Place).run_sync(ASKED).output.model_dump_json())
""",
    "pydantic-ai, Responses": f"""{_PLACE}
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

model = OpenAIResponsesModel("demo", provider=OpenAIProvider(base_url=URL, api_key="none"))
print(Agent(model, output_type=Place).run_sync(ASKED).output.model_dump_json())
""",
    "langchain": f"""{_PLACE}
from langchain_openai import ChatOpenAI

model = ChatOpenAI(model="demo", base_url=URL, api_key="none")
print(model.with_structured_output(Place, method="function_calling").invoke(ASKED)
    .model_dump_json())
""",
    "instructor": f"""{_PLACE}
import instructor
from openai import OpenAI

client = instructor.from_openai(OpenAI(base_url=URL, api_key="none"), mode=instructor.Mode.TOOLS)
print(client.chat.completions.create(
    model="demo", response_model=Place, messages=[{{"role": "user", "content": ASKED}}]
).model_dump_json())
""",
    "ai-sdk 4": """
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, jsonSchema } from "ai";

const model = createOpenAICompatible({ name: "claw", baseURL: URL, apiKey: "none" })("demo");
const schema = jsonSchema({
  type: "object",
  properties: { city: { type: "string" }, days: { type: "integer" } },
  required: ["city", "days"],
});
const { object } = await generateObject({
  model, schema, mode: "tool", prompt: ASKED, temperature: 1,
});
console.log(JSON.stringify(object));
""",
    "ai-sdk": """
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, tool } from "ai";

const model = createOpenAICompatible({ name: "claw", baseURL: URL, apiKey: "none" })("demo");
const inputSchema = jsonSchema({
  type: "object",
  properties: { city: { type: "string" }, days: { type: "integer" } },
  required: ["city", "days"],
});
const { toolCalls } = await generateText({
  model, prompt: ASKED, toolChoice: { type: "tool", toolName: "place" },
  tools: { place: tool({ description: "A place.", inputSchema }) },
});
console.log(JSON.stringify(toolCalls[0].input));
""",
}
"""Programs that want an object as the answer, through a forced tool call, and print it as JSON."""
ASKED = "Where to, and for how long?"


AUTOGEN_PAIR = """
import asyncio
from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.conditions import MaxMessageTermination
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_ext.models.openai import OpenAIChatCompletionClient

INFO = {
    "family": "unknown", "vision": False, "function_calling": True, "json_output": False,
    "structured_output": False,
}

async def main():
    client = OpenAIChatCompletionClient(
        model="demo", base_url=URL, api_key="none", model_info=INFO
    )
    for names in (("writer", "critic"), ("alone",)):
        agents = [AssistantAgent(name, model_client=client) for name in names]
        team = RoundRobinGroupChat(agents, termination_condition=MaxMessageTermination(3))
        result = await team.run(task=ASKED)
        print("; ".join(f"{m.source}: {m.content}" for m in result.messages))

asyncio.run(main())
"""
"""A team of two, and one of one agent, which answers its own answer."""


def run_autogen(base_url: str) -> str:
    """Run AUTOGEN_PAIR; return its output."""
    program = f"URL = {base_url!r}\nASKED = {ASKED!r}\n{AUTOGEN_PAIR}"
    return _run_python("autogen", AUTOGEN, program)


def run(name: str, base_url: str) -> str:
    """Run the program of that name over the gateway at `base_url`; return its output."""
    return _run_python("agents", PACKAGES, f"URL = {base_url!r}\n{PROGRAMS[name]}")


def run_structured(name: str, base_url: str) -> str:
    """Run a program of STRUCTURED; return its output."""
    program = STRUCTURED[name]
    if not name.startswith("ai-sdk"):
        environment = ("instructor", INSTRUCTOR) if name == "instructor" else ("agents", PACKAGES)
        return _run_python(*environment, f"URL = {base_url!r}\nASKED = {ASKED!r}\n{program}")
    packages = AI_SDK_4 if name == "ai-sdk 4" else AI_SDK
    folder = npm.installed(packages[0].replace("@", "-sdk-"), *packages)
    (at := folder / f"{os.getpid()}.mjs").write_text(
        f"const URL = {json.dumps(base_url)}, ASKED = {json.dumps(ASKED)};\n{program}"
    )
    try:
        return _said(["node", str(at)], os.environ | {"PATH": npm.on_path(folder)})
    finally:
        at.unlink()


def _run_python(name: str, packages: tuple[str, ...], program: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return _said([str(installed(name, *packages) / "python"), "-c", program], environment)


def _said(command: list[str], environment: Mapping[str, str]) -> str:
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, (done.stdout + done.stderr)[-2000:]
    return done.stdout.strip()
