"""LangGraph's agent with one tool, over chat completions; the task is its standard input."""

import os
import sys

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from shell_tool import bash

agent = create_agent(
    ChatOpenAI(model=os.environ["MODEL"]),
    [bash],
    system_prompt="You work on the task in the current folder. Use the tool; say what you did when you are done.",
)
# A turn is two steps of the graph: the model, and its tools.
ended = agent.invoke(
    {"messages": [{"role": "user", "content": sys.stdin.read()}]},
    {"recursion_limit": 2 * int(os.environ["MAX_TURNS"]) + 1},
)
print(ended["messages"][-1].text)
