"""The OpenAI Agents SDK with one tool, over the Responses API; the task is its standard input."""

import os
import sys

from agents import Agent, Runner, function_tool
from shell_tool import bash

agent = Agent(
    name="agent",
    instructions="You work on the task in the current folder. Use the tool; say what you did when you are done.",
    model=os.environ["MODEL"],
    tools=[function_tool(bash)],
)
print(Runner.run_sync(agent, sys.stdin.read(), max_turns=int(os.environ["MAX_TURNS"])).final_output)
