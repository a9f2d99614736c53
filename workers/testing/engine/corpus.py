"""The text on which the double's tokenizer is trained: a page of everything that agents read and write.

Changing it changes the tokenizer: previously recorded ids then have other meanings.
"""

PROSE = """\
The farm plays every rollout in a sandbox of its own: the policy reads the problem, calls a tool, reads what the tool
gave back, and goes on until it submits an answer. I will look at the files first, then write a test that fails, then
mend the function, and then run all of the tests again. Let me compute it. Let me think about this step by step.
The answer is the sum of the two numbers. You are a helpful assistant. You may call one or more functions to assist
with the user query. Here are the tools that you can use. What is the greatest common divisor of the numbers below?
Give your final answer between the answer tags: <answer>42</answer>. I am not sure whether this is right, so I check it.
Die Straße führt über den Fluss; où est la bibliothèque? Größe, Übung, café, naïve. 今天天气很好。
我们去公园。 Привет, мир!
"""

CODE = """\
from __future__ import annotations

import json
import sys
from collections.abc import Sequence


def solution(numbers: Sequence[int], threshold: float = 0.5) -> list[int]:
    \"\"\"Return the numbers that are larger than the threshold, in order.\"\"\"
    result: list[int] = []
    for index, number in enumerate(numbers):
        if number > threshold and index % 2 == 0:
            result.append(number)
    return result


class Counter:
    def __init__(self, name: str) -> None:
        self.name = name
        self.values: dict[str, int] = {}

    def add(self, key: str, value: int = 1) -> None:
        self.values[key] = self.values.get(key, 0) + value
        if self.values[key] is None:
            raise ValueError(f"no value for {key}")


if __name__ == "__main__":
    print(json.dumps({"numbers": solution([1, 2, 3, 4, 5, 6, 7, 8, 9, 10])}), file=sys.stderr)
    assert solution([1, 2, 3]) == [1, 3], "the function is wrong"
"""

SHELL = """\
$ cd /workspace && ls -la && cat solution.py | head -20
$ grep -rn "def test_" tests/ | wc -l
$ git status && git diff --stat && git log --oneline | head -3
$ PYTHONPATH=/workspace python3 -m pytest -q tests/test_solution.py 2>&1 | tail -3
FAILED tests/test_solution.py::test_one - AssertionError: assert 2 == 3
Traceback (most recent call last):
  File "/workspace/solution.py", line 12, in <module>
ModuleNotFoundError: No module named 'solution'
exit code 1
drwxr-xr-x 2 root root 4096 Nov 21 17:12 .
"""

CALLS = """\
{"type": "function", "function": {"name": "bash", "description": "Run a command in a persistent shell.", "parameters": \
{"type": "object", "properties": {"command": {"type": "string"}, "timeout_s": {"type": "number", "default": 60}}, \
"required": ["command"], "additionalProperties": false}}}
{"name": "bash", "arguments": {"command": "ls -la"}}
{"name": "python", "arguments": {"code": "print(sum(range(10)))"}}
{"name": "submit", "arguments": {"answer": "42"}}
{"name": "search", "arguments": {"query": "how to read a file", "limit": 10}}
[1, 2, 3] [true, false, null] 0.25 -17 1e-3 1995 2024 100 1000
"""

CORPUS: tuple[str, ...] = tuple(f"{PROSE}{CODE}{SHELL}{CALLS}".splitlines(keepends=True))
