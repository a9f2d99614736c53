"""Pydantic AI with one tool, over chat completions; the task is its standard input."""

import os
import sys

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.usage import UsageLimits
from shell_tool import bash

agent = Agent(
    OpenAIChatModel(os.environ["MODEL"]),
    instructions="You work on the task in the current folder. Use the tool; say what you did when you are done.",
    tools=[bash],
)
limits = UsageLimits(request_limit=int(os.environ["MAX_TURNS"]))
print(agent.run_sync(sys.stdin.read(), usage_limits=limits).output)
