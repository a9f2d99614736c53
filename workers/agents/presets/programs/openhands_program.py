"""The OpenHands SDK with its terminal and its editor, in the sandbox itself; the task is its standard input."""

import os
import sys

from openhands.sdk import LLM, Agent, Conversation, Tool
from openhands.tools.file_editor import FileEditorTool
from openhands.tools.terminal import TerminalTool

llm = LLM(
    model=f"openai/{os.environ['MODEL']}",
    base_url=os.environ["OPENAI_BASE_URL"],
    api_key=os.environ["OPENAI_API_KEY"],
    usage_id="agent",
    max_output_tokens=int(os.environ["MAX_OUTPUT_TOKENS"]),
)
agent = Agent(llm=llm, tools=[Tool(name=TerminalTool.name), Tool(name=FileEditorTool.name)])
conversation = Conversation(
    agent=agent,
    workspace=os.getcwd(),
    max_iteration_per_run=int(os.environ["MAX_TURNS"]),
    visualizer=None,
)
conversation.send_message(sys.stdin.read())
conversation.run()
print(conversation.state.execution_status.value)
