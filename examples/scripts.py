"""Scripts of the example problems for the scripted engine: right and wrong solutions, with real tool use.

Right and wrong scripts have about equal weights, so that rewards differ within a group, as a trainer needs.
`python -m examples.scripts FILE` writes the scripts of all example problems.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from examples.problems import humaneval_problems, math_problems, swe_problems
from farm.records.request import Instance
from workers.evaluators.patches import touched
from workers.testing.scripted_model import Branch, ScriptedCall, ScriptedProblem, ScriptedTurn

_SUM = "print({expression})"
_PROGRAMS = {
    "chain_sum": _SUM,
    "basic_arithmetic": _SUM,
    "products": _SUM,
    "gcd": "import math\nprint(math.gcd(*{numbers}))",
    "lcm": "import math\nprint(math.lcm(*{numbers}))",
    "prime_factorization": """\
n, factors, d = {number}, [], 2
while n > 1:
    while n % d == 0:
        factors.append(d)
        n //= d
    d += 1
print(" \\u00d7 ".join(map(str, factors)))""",
    "simple_equations": """\
left, right = "{equation}".split("=")
print(next(x for x in range(-10000, 10001) if eval(left, {{"{variable}": x}}) == eval(right)))""",
    "base_conversion": """\
n, digits = int("{source_repr}", {source_base}), ""
while n:
    n, digit = divmod(n, {target_base})
    digits = "0123456789abcdef"[digit] + digits
print(digits or 0)""",
}
_COUNT_WORDS = "question = {question!r}\nprint(len(question.split()), 'words')"
"""For families without a short calculation."""


def example_script(instances: Iterable[Instance], seed: int = 0) -> list[ScriptedProblem]:
    """Return the scripts of each instance. Raises KeyError for a data_source without scripts."""
    builders = {"math": _math, "code": _code, "swe": _swe}
    return [
        builders[instance.data_source](instance.fields, random.Random(f"{seed}/{index}"))
        for index, instance in enumerate(instances)
    ]


def write_script(problems: Sequence[ScriptedProblem], path: Path) -> Path:
    """Write JSON lines for `farm engine --scripted --book`."""
    path.write_text("".join(f"{problem.model_dump_json(by_alias=True)}\n" for problem in problems), encoding="utf-8")
    return path


def _math(fields: dict[str, Any], draw: random.Random) -> ScriptedProblem:
    answer = fields["answer"]
    wrong = _near_miss(answer, draw)
    program = _program(fields)
    return ScriptedProblem(
        match=fields["question"],
        branches=(
            Branch(name="reference", weight=2, turns=(_python(program, "Let me compute it."), _submit(answer))),
            Branch(
                name="reference_in_text", turns=(ScriptedTurn(content=f"This is easy.\n<answer>{answer}</answer>"),)
            ),
            Branch(name="slip", weight=2, turns=(_python(program, "Let me compute it."), _submit(wrong))),
            Branch(name="guess", turns=(ScriptedTurn(content=f"I think it is <answer>{wrong}</answer>"),)),
        ),
    )


def _program(fields: dict[str, Any]) -> str:
    """Return a Python program that computes and prints the answer."""
    return _PROGRAMS.get(fields["family"], _COUNT_WORDS).format(
        **(fields["metadata"] | {"question": fields["question"]})
    )


def _near_miss(answer: str, draw: random.Random) -> str:
    try:
        return str(int(answer) + draw.choice((-1, 1, 10)))
    except ValueError:
        return f"{answer} + {draw.randint(1, 9)}"


def _code(fields: dict[str, Any], draw: random.Random) -> ScriptedProblem:
    name, prompt = fields["entry_point"], fields["prompt"]
    right = prompt + fields["canonical_solution"]
    stub = f"{prompt}    return None\n"
    look = _bash("python3 -c 'import solution' && wc -l solution.py", "Does it load?")
    try_it = _python(f"import sys; sys.path.insert(0, '/workspace')\nfrom solution import {name}\n{name}.__name__")
    return ScriptedProblem(
        match=prompt,
        branches=(
            Branch(name="reference", weight=2, turns=(_write("solution.py", right), try_it, _submit())),
            Branch(name="careful_reference", turns=(_bash("ls -la"), _write("solution.py", right), look, _submit())),
            Branch(name="stub", weight=2, turns=(_write("solution.py", stub), try_it, _submit())),
            Branch(name="wrong_file", turns=(_write(draw.choice(("answer.py", "main.py")), right), _submit())),
        ),
    )


def _swe(fields: dict[str, Any], draw: random.Random) -> ScriptedProblem:
    source = touched(fields["patch"])
    tests = touched(fields["test_patch"])
    pythonpath = fields["environment"]["pythonpath"]
    look = _bash(f"ls && git log --oneline | head -3 && grep -n 'def ' {source[0]} | head -{draw.randint(10, 30)}")
    fix = _bash(f"git apply <<'END_OF_PATCH'\n{fields['patch']}\nEND_OF_PATCH\ngit diff --stat", "I see the fault.")
    test = _bash(f"PYTHONPATH={pythonpath} python -m pytest -q -o addopts= --timeout=20 {tests[0]} 2>&1 | tail -3")
    docstring = _bash(f'printf \'\\n"""Reviewed for the issue."""\\n\' >> {source[0]} && git diff --stat')
    return ScriptedProblem(
        match=fields["problem_statement"],
        branches=(
            Branch(name="reference", weight=2, turns=(look, fix, test, _submit())),
            Branch(name="hasty_reference", turns=(fix, _submit())),
            Branch(name="docstring", weight=2, turns=(look, docstring, test, _submit())),
            Branch(name="nothing_found", turns=(look, ScriptedTurn(content="I find nothing wrong with it."))),
        ),
    )


def _call(name: str, arguments: dict[str, Any], content: str = "") -> ScriptedTurn:
    return ScriptedTurn(content=content, tool_calls=(ScriptedCall(name=name, arguments=arguments),))


def _bash(command: str, content: str = "") -> ScriptedTurn:
    return _call("bash", {"command": command}, content)


def _python(code: str, content: str = "") -> ScriptedTurn:
    return _call("python", {"code": code}, content)


def _write(name: str, text: str) -> ScriptedTurn:
    return _bash(f"cd /workspace\ncat > {name} <<'END_OF_FILE'\n{text}\nEND_OF_FILE", f"I write {name}.")


def _submit(answer: str | None = None) -> ScriptedTurn:
    return _call("submit", {} if answer is None else {"answer": answer})


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the scripts of the example problems.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    instances = [*math_problems(seed=options.seed), *humaneval_problems(), *swe_problems()]
    write_script(example_script(instances, options.seed), options.file)


if __name__ == "__main__":
    main()
