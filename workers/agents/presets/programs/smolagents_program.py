"""smolagents' tool-calling agent, over chat completions; the task is its standard input."""

import os
import sys

from shell_tool import bash
from smolagents import OpenAIModel, ToolCallingAgent, tool

model = OpenAIModel(os.environ["MODEL"], api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
agent = ToolCallingAgent([tool(bash)], model, max_steps=int(os.environ["MAX_TURNS"]), verbosity_level=0)
print(agent.run(sys.stdin.read()))
