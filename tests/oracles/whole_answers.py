"""Whole answers to two problems: their scorers take a program from each, run it and judge its result.

The programs of standard input double an integer; the functions `double` do so with each integer of a list.
"""

from __future__ import annotations

import json
import os
import subprocess
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.conftest import absent

RECORDED = Path(__file__).parents[1] / "data" / "oracles" / "program_answers.json"
PROGRAM = Path(__file__).parent / "programs" / "judge_answers.py"
WHOLE_RULES = ("livecodebench", "nemo_gym", "skyrl_lcb", "prime_code")
"""Rules whose scorers take answers."""

STREAMS = (("2\n", "4\n"), ("-3\n", "-6\n"), ("0\n", "0\n"))
CALLS = (("[1, 2]", "[2, 4]"), ("[]", "[]"), ("[-3]", "[-6]"))
_PROGRAMS = {
    "plain": "print(int(input()) * 2)",
    "wrong": "print(int(input()) * 3)",
    "right by chance": "n = int(input())\nprint(n + 2)",
    "as a float": "print(int(input()) * 2.0)",
    "without a new line": "import sys\nsys.stdout.write(str(int(input()) * 2))",
    "with more space": "print('', int(input()) * 2, '\\n')",
    "a word more": "print('answer:', int(input()) * 2)",
    "an error after the output": "print(int(input()) * 2)\nraise ValueError",
    "an error": "print(int(input()) * undefined)",
    "no Python": "print int(input()) * 2",
    "exit by a code": "import sys\nprint(int(input()) * 2)\nsys.exit(1)",
    "exit before the output": "import sys\nn = int(input())\nsys.exit(0)\nprint(n * 2)",
    "exit in a function": "def main():\n    print(int(input()) * 2)\n    exit()\nmain()",
    "names without imports": "h = [int(input())]\nheapify(h)\nprint(heappop(h) * int(sqrt(4)))",
    "more names without imports": "c = Counter([int(input())])\nprint(sum(accumulate(c)) * gcd(2, 4))",
    "stdin": "from sys import stdin\nprint(int(stdin.readline()) * 2)",
    "read": "import sys\nprint(int(sys.stdin.read()) * 2)",
    "lines of stdin": "import sys\nfor line in sys.stdin:\n    print(int(line) * 2)",
    "readlines": "import sys\nprint(int(sys.stdin.readlines()[0]) * 2)",
    "bytes": "import sys\nprint(int(sys.stdin.buffer.readline()) * 2)",
    "bytes out": "import sys\nsys.stdout.buffer.write(b'%d' % (int(input()) * 2))",
    "open zero": "print(int(open(0).read()) * 2)",
    "descriptor": "import os\nos.write(1, str(int(input()) * 2).encode())",
    "end of file": "try:\n    while True:\n        print(int(input()) * 2)\nexcept EOFError:\n    pass",
    "main guard": "def main():\n    print(int(input()) * 2)\nif __name__ == '__main__':\n    main()",
    "other guard": 'def main():\n    print(int(input()) * 2)\nif "__main__" == __name__:\n    main()',
    "global": "n = 0\ndef read():\n    global n\n    n = int(input())\nread()\nprint(n * 2)",
    "closure": "n = int(input())\ndef twice():\n    return n * 2\nprint(twice())",
    "class": "class A:\n    def go(self):\n        return int(input()) * 2\nprint(A().go())",
    "comprehension": "n = int(input())\nk = 2\nprint(sum([n for _ in range(k)]))",
    "recursion": "def f(n):\n    return 0 if n == 0 else 1 + f(n - 1)\nprint(f(5000) - 5000 + int(input()) * 2)",
    "thread": "import threading\nt = threading.Thread(target=lambda: print(int(input()) * 2))\nt.start()\nt.join()",
    "many digits": "n = int(input())\nprint(n * 2 if len(str(10 ** 6000)) > 6000 else 0)",
    "star import": "from math import *\nprint(int(input()) * floor(e))",
    "annotations": "def f(n: List[int]) -> Optional[int]:\n    return n[0] * 2\nprint(f([int(input())]))",
    "unicode": "# \u2603\nprint(int(input()) * 2)",
}
_RETURNS = {
    "method": "return [x * 2 for x in a]",
    "wrong": "return [x * 3 for x in a]",
    "tuple": "return tuple(x * 2 for x in a)",
    "generator": "return (x * 2 for x in a)",
    "floats": "return [x * 2.0 for x in a]",
    "close": "return [x * 2.0000001 for x in a]",
    "error": "return a[0]",
    "names without imports": "return list(accumulate(a[:0])) + [x * 2 for x in a]",
    "prints": "print(a)\n        return [x * 2 for x in a]",
    "changes its argument": "a[:] = [x * 2 for x in a]\n        return a",
}
_FUNCTIONS = {
    **{
        name: f"class Solution:\n    def double(self, a: List[int]):\n        {text}" for name, text in _RETURNS.items()
    },
    "function": "def double(a):\n    return [x * 2 for x in a]",
    "of another name": "class Solution:\n    def twice(self, a):\n        return [x * 2 for x in a]",
}
_PLAIN = _PROGRAMS["plain"]
_FORMS = {
    "no fence": _PLAIN,
    "no language": f"So:\n```\n{_PLAIN}\n```\n",
    "python3": f"```python3\n{_PLAIN}\n```",
    "a title": f'```python title="a.py"\n{_PLAIN}\n```',
    "tildes": f"~~~python\n{_PLAIN}\n~~~",
    "in a list": "1. So:\n\n" + textwrap.indent(f"```python\n{_PLAIN}\n```", "   "),
    "in a list, one line": f"- ```python\n  {_PLAIN}\n  ```",
    "in a quote": textwrap.indent(f"```python\n{_PLAIN}\n```", "> "),
    "never closed": f"```python\n{_PLAIN}\n",
    "output after it": f"```python\n{_PLAIN}\n```\nIt prints\n```\n4\n```\n",
    "a trial after it": f"```python\n{_PLAIN}\n```\nTry it:\n```python\nprint(2 * 2)\n```\n",
    "a wrong one before it": f"```python\nprint(input())\n```\nBetter:\n```python\n{_PLAIN}\n```\n",
    "a wrong one after it": f"```python\n{_PLAIN}\n```\nOr:\n```python\nprint(input())\n```\n",
    "shell after it": f"```python\n{_PLAIN}\n```\nRun it:\n```bash\npython a.py\n```\n",
    "a fence within": f'```python\n"""\n```\n2\n```\n"""\n{_PLAIN}\n```\n',
    "reasoning before it": f"<think>\n```python\nprint(1)\n```\n</think>\n```python\n{_PLAIN}\n```",
    "C": "```cpp\nint main() {}\n```",
    "nothing": "I do not know.",
    "line ends of DOS": f"```python\r\n{_PLAIN}\r\n```\r\n",
}


def stream_answers() -> Mapping[str, str]:
    """Return answers with programs of standard input, by name."""
    blocks = {name: f"Here it is.\n\n```python\n{text}\n```\n" for name, text in _PROGRAMS.items()}
    return blocks | {f"in a form: {name}": text for name, text in _FORMS.items()}


def call_answers() -> Mapping[str, str]:
    """Return answers with functions, by name."""
    return {f"function: {name}": f"```python\n{text}\n```\n" for name, text in _FUNCTIONS.items()}


WRONG = (
    *("wrong", "right by chance", "a word more", "an error after the output", "an error", "no Python"),
    *("exit before the output", "in a form: C", "in a form: nothing", "in a form: a wrong one after it"),
    *("function: wrong", "function: generator", "function: close", "function: error", "function: of another name"),
)
"""Answers that are wrong."""
NO_BLOCK = "in a form: no fence"
"""An answer that is right only if the authors accept an answer without a block as a program."""


def tests_of(name: str) -> dict[str, Any]:
    """Return the tests of an answer, in the form that most of these data sets have."""
    is_call = name in call_answers()
    inputs, outputs = zip(*(CALLS if is_call else STREAMS), strict=True)
    return {"inputs": list(inputs), "outputs": list(outputs), "fn_name": "double" if is_call else None}


def row_of(rule: str, name: str) -> dict[str, Any]:
    """Return a row of a form with these tests."""
    tests = tests_of(name)
    if rule == "nemo_gym":
        return {"question": "q", "verifier_metadata": {"unit_tests": tests}}
    if rule == "prime_code":
        return {"question": "q", "reward_model": {"ground_truth": json.dumps(tests)}}
    kind = "functional" if tests["fn_name"] else "stdin"
    pairs = zip(tests["inputs"], tests["outputs"], strict=True)
    cases = [{"input": given, "output": expected, "testtype": kind} for given, expected in pairs]
    metadata = json.dumps({"func_name": tests["fn_name"]})
    if rule == "skyrl_lcb":
        return {"question": "q", "metadata": metadata, "reward_spec": {"ground_truth": json.dumps(cases)}}
    return {"question_content": "q", "metadata": metadata, "public_test_cases": json.dumps(cases)}


_WITHIN = "their program runs within a function"
_MOCKS = "their standard input and output are objects of Python"
REASONS = (
    (("global", "other guard"), WHOLE_RULES, _WITHIN),
    (("star import",), ("prime_code",), _WITHIN),
    (("descriptor",), WHOLE_RULES, _MOCKS),
    (("open zero",), ("livecodebench", "nemo_gym", "prime_code"), _MOCKS),
    (("bytes out",), ("livecodebench", "skyrl_lcb", "prime_code"), _MOCKS),
    (("bytes",), ("skyrl_lcb", "prime_code"), _MOCKS),
    (("lines of stdin",), ("livecodebench",), _MOCKS),
    (("exit in a function",), ("prime_code",), "theirs takes `exit` away"),
    (("recursion",), ("skyrl_lcb",), "theirs allows Python's usual depth of recursion"),
)
"""Answers that are wrong for the scorers but right for the reward `authors`, by rule; and the reason."""


def is_right(rule: str, name: str) -> bool:
    """Tell whether an answer is right."""
    return name not in WRONG and (name != NO_BLOCK or rule == "prime_code")


def is_known(rule: str, name: str, theirs: float, ours: float) -> bool:
    """Tell whether a difference has a reason."""
    return theirs < 1.0 == ours and any(name in names and rule in rules for names, rules, _ in REASONS)


def answers() -> Mapping[str, str]:
    """Return all answers by name."""
    return {**stream_answers(), **call_answers()}


def judged() -> dict[str, dict[str, float]]:
    """Return the scores of the scorers, by rule and name. Skips the test if they are not installed."""
    folder = Path(os.environ["FARM_TEST_ORACLES"]) / "judges"
    if not (folder / ".venv").exists():
        absent("the scorers of programs are not installed: tests/oracles/judges_environment.sh says why")
    requested = {name: {"answer": answer, "tests": tests_of(name)} for name, answer in answers().items()}
    command = [folder / ".venv" / "bin" / "python", PROGRAM, folder]
    done = subprocess.run(command, input=json.dumps(requested), capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, dict[str, float]] = json.loads(done.stdout)
    return found
