"""Actions of VeRL-Tool's clients: the tool of each, and the form of the observation returned to it."""

from __future__ import annotations

import time

import pytest

from farm.api.verl_tool.verl_tool_verbs import action_of, shown


@pytest.mark.parametrize(
    ("text", "tool", "code", "observation"),
    [
        ("so: <bash>ls</bash>", "bash", "ls", "\n<o>\nX\n</o>\n"),
        ("<bash>ls</bash>\n<o>", "bash", "ls", "\nX\n</o>\n"),
        ("<bash>a</bash> and <bash> b </bash>", "bash", "a\nb", "\n<o>\nX\n</o>\n"),
        ("```bash\nls\n```", "bash", "ls", "\n```output\nX\n```\n"),
        ("```bash\nls\n```\n```output", "bash", "ls", "\nX\n```\n"),
        ("```sh\nls\n```\n```", "bash", "ls", "output\nX\n```\n"),
        ("```shell\nls\n```", "bash", "ls", "\n```output\nX\n```\n"),
        ("```terminal\nls\n```", "bash", "ls", "\n```output\nX\n```\n"),
        ("<python>1</python>", "python", "1", "\n<output>\nX\n</output>\n"),
        ("<python>1</python><output>", "python", "1", "\nX\n</output>\n"),
        ("```python\n1\n```\n```output", "python", "1", "\nX\n```\n"),
        ("```py\n1\n```", "python", "1", "\n```output\nX\n```\n"),
        ("```python\n1\n```<|calling system for feedback|>", "python", "1", "\n```output\nX\n```\n"),
        ('<tool_call>{"name": "python", "arguments": {"code": "1"}}</tool_call>', "python", "1", "\nX\n"),
        ('<tool_call>{"name": "bash", "arguments": {"command": "ls"}}</tool_call>', "bash", "ls", "\nX\n"),
        ("<search>a</search> <search> b </search>", "search", "b", "\n\n<information>X</information>\n\n"),
        # the last block decides the tool
        ("as in ```python\n1\n``` <bash>ls</bash>", "bash", "ls", "\n<o>\nX\n</o>\n"),
        ("<bash>cat <<E\n```python\n1\n```\nE</bash>", "bash", "cat <<E\n```python\n1\n```\nE", "\n<o>\nX\n</o>\n"),
    ],
)
def test_form_of_an_action_decides_its_tool(text: str, tool: str, code: str, observation: str) -> None:
    action = action_of(text)
    assert action is not None
    assert (action.tool, list(action.arguments.values())) == (tool, [code])
    assert shown(text, action, "\nX \n") == observation


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no action",
        "<bash>ls",
        "ls</bash>",
        "```bash ls",
        "```bashful\nls\n```",
        "<tool_call>{</tool_call>",
        "<tool_call>[]</tool_call>",
        '<tool_call>{"name": ["python"], "arguments": {"code": "1"}}</tool_call>',
        '<tool_call>{"name": "python", "arguments": {"code": 1}}</tool_call>',
        '<tool_call>{"name": "python", "arguments": "1"}</tool_call>',
        "<tool_call>\ud800</tool_call>",
        f"<tool_call>{'[' * 100_000}</tool_call>",
    ],
)
def test_text_without_an_action_is_none(text: str) -> None:
    assert action_of(text) is None


def test_answer_calls_no_tool() -> None:
    action = action_of("<search>a</search> … <answer>b</answer>")
    assert action is not None
    assert action.tool == "answer"


@pytest.mark.parametrize("opening", ["<bash>", "```bash\n", "<python>", "<search>", "<tool_call>", "``` "])
def test_time_grows_linearly_with_the_length_of_a_text(opening: str) -> None:
    def spent(n: int) -> float:
        began = time.thread_time()
        action_of(opening * n)
        return time.thread_time() - began

    spent(1)
    # with quadratic time the quotient would be 400
    assert spent(200_000) < 100 * max(spent(10_000), 1e-4)
