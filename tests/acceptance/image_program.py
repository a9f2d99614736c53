"""An agent program that shows its model an image in two messages, and its installation in a farm."""

from __future__ import annotations

from pathlib import Path

from tests.doubles.drawn_images import png, url_of
from tests.integration.tasks import task_plugin
from workers.agents.harness import Harness, HarnessAgent

IMAGE = png(140, 60)
QUESTION = "Which colour has this picture?"
PROGRAM = """
import json, os, sys, urllib.request
def image():
    return {"type": "image_url", "image_url": {"url": sys.argv[3]}}
messages = [{"role": "user", "content": [{"type": "text", "text": sys.argv[2]}, image()]}]
def ask():
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    headers = {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    with urllib.request.urlopen(urllib.request.Request(sys.argv[1], body, headers)) as answer:
        return json.load(answer)["choices"][0]["message"]
messages += [ask(), {"role": "user", "content": [image(), {"type": "text", "text": "And this one?"}]}]
print(ask()["content"])
"""
IMAGE_PROGRAM = Harness(
    name="image",
    command=lambda task: [
        *("python3", "-c", PROGRAM, f"{task.base_url}/v1/chat/completions"),
        *(QUESTION, url_of(IMAGE)),
    ],
)


def image_agent() -> HarnessAgent:
    return HarnessAgent(IMAGE_PROGRAM)


def installed_in(folder: Path) -> dict[str, str]:
    """Return the environment of a farm for which the program is installed, with the handlers of `task_plugin`."""
    env = task_plugin.installed_in(folder)
    described = folder / "site" / "image_program-1.dist-info"
    described.mkdir(parents=True)
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: image_program\nVersion: 1\n")
    (described / "entry_points.txt").write_text("[farm.agents]\nimage = tests.acceptance.image_program:image_agent\n")
    return env
