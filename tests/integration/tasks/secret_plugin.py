"""A handler and agents that reveal their secrets wherever they can: to the model, in their output, to servers."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import ClassVar

from farm.records.rollout import Outcome
from tests.integration.tasks import task_plugin
from tests.integration.tasks.task_plugin import TaskHandler
from workers.agents.harness import Harness, HarnessAgent
from workers.plugins.interfaces import AgentContext, AgentResult

PROGRAM = """
import json, os, sys, urllib.request
def ask(model, text):
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": text}]}).encode()
    headers = {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    try:
        with urllib.request.urlopen(urllib.request.Request(sys.argv[1], body, headers)) as answer:
            return answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.read().decode()
print("the token is", os.environ.get("TOKEN"))
print(os.environ.get("TOKEN"), file=sys.stderr)
print(ask("policy", "my token is " + os.environ.get("TOKEN", "")))
print(ask("judge", "my token is " + os.environ.get("TOKEN", "")))
sys.exit(len(os.environ.get("FAIL", "")))
"""
TELLING = Harness(
    name="telling", command=lambda task: ["python3", "-c", PROGRAM, f"{task.base_url}/v1/chat/completions"]
)


def installed_in(folder: Path) -> dict[str, str]:
    """Return the environment of a farm for which these are installed, with those of `task_plugin`."""
    env = task_plugin.installed_in(folder)
    described = folder / "site" / "secret_plugin-1.dist-info"
    described.mkdir(parents=True)
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: secret_plugin\nVersion: 1\n")
    here = "tests.integration.tasks.secret_plugin"
    agents = f"[farm.agents]\ntelling = {here}:telling\nsearching = {here}:SearchingAgent\n"
    (described / "entry_points.txt").write_text(f"[farm.handlers]\nsearched = {here}:SearchedHandler\n{agents}")
    return env


def telling() -> HarnessAgent:
    return HarnessAgent(TELLING)


class SearchedHandler(TaskHandler):
    """Its only tool searches."""

    data_source: ClassVar[str] = "searched"
    tools: ClassVar[Collection[str]] = ("search",)


class SearchingAgent:
    """Searches, and answers with the result."""

    async def run(self, context: AgentContext) -> AgentResult:
        search = context.tools["search"]
        observation = await search.call(search.arguments(query="x"), 20.0)
        return AgentResult(Outcome.SUBMITTED, observation.text)
