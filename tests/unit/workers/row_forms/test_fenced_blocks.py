"""The program in an answer, by Markdown's rules and by the requested function."""

from __future__ import annotations

import textwrap
import time

import pytest

from workers.row_forms.fenced_blocks import AUTHORS_PROGRAM, fenced_program

READS = "n = int(input())\nprint(n * 2)\n"
DEFINES = "def f(x):\n    return x\n"


@pytest.mark.parametrize(
    ("answer", "program"),
    [
        ("```python\na\n```\nor\n```python\nb\n```", "b\n"),
        ("```python\na\n```\n```\noutput\n```", "a\n"),
        ("```\na\n```", "a\n"),
        ("```cpp\na\n```", ""),
        ("<think>```python\na\n```</think>", ""),
        ("```python\na", "a\n"),
        ("print(1)", ""),
        ("Write ```print(1)``` here", ""),
        (None, ""),
    ],
)
def test_program_of_an_answer_is_its_last_block(answer: str | None, program: str) -> None:
    assert fenced_program(answer) == program


@pytest.mark.parametrize(
    "before",
    [
        "```python",
        "```Python",
        "``` python",
        "```python3",
        "```py",
        '```python title="solution.py"',
        "```python:solution.py",
        "```{.python .numberLines}",
        "```solution.py",
        "```",
        "````python",
        "~~~python",
        "~~~~~",
    ],
)
def test_fences_of_all_kinds_mark_a_program(before: str) -> None:
    mark = before[: len(before) - len(before.lstrip("`~"))]
    assert fenced_program(f"So:\n{before}\n{READS}{mark}\nThat is all.") == READS
    assert fenced_program(f"So:\n{before}\n{READS}{mark}\n".replace("\n", "\r\n")) == READS
    assert fenced_program(f"{before}\n{READS}") == READS


@pytest.mark.parametrize(
    ("first", "others"),
    [
        ("1. ", "   "),
        ("- ", "  "),
        ("* ", "  "),
        ("10) ", "    "),
        ("> ", "> "),
        ("> - ", ">   "),
        ("\t", "\t"),
    ],
)
@pytest.mark.parametrize("text", [READS, "if input():\n    if 1:\n        print(1)\n"])
def test_fences_in_lists_and_quotes_mark_a_program(first: str, others: str, text: str) -> None:
    lines = ["```python", *text.splitlines(), "```"]
    inline = first + lines[0] + "\n" + textwrap.indent("\n".join(lines[1:]), others) + "\nAfter."
    below = first + "Read it:\n\n" + textwrap.indent("\n".join(lines), others) + "\n\nAfter."
    assert fenced_program(inline) == text
    assert fenced_program(below) == text


def test_end_of_a_quote_ends_its_block() -> None:
    assert fenced_program(f"> ```python\n> input()\n\nNot that:\n```python\n{READS}```\n") == READS


@pytest.mark.parametrize("mark", ["```", "~~~", "````"])
@pytest.mark.parametrize("indent", ["", "  ", "    "])
@pytest.mark.parametrize("quotes", ['"""', "'''"])
def test_fence_in_a_docstring_does_not_end_the_block(mark: str, indent: str, quotes: str) -> None:
    example = f"{indent}{mark}\n{indent}f(1)\n{indent}{mark}\n"
    text = f"def f(x):\n    {quotes}An example:\n\n{example}    {quotes}\n    return x\n"
    assert fenced_program(f"```python\n{text}```\nDone.\n```\n1\n```", "f") == text


@pytest.mark.parametrize("text", ['x = \'"""\'\ninput()\n', '# it\'s """\ninput()\n', "s = 'don\\'t'\ninput()\n"])
def test_quotes_that_open_no_string_do_not_hide_a_fence(text: str) -> None:
    assert fenced_program(f"```python\n{text}```\n\n```\nit's the output\n```\n") == text


def test_unterminated_string_does_not_hide_the_first_fence() -> None:
    assert fenced_program('```python\ninput("""\n```\nand\n```text\n1\n```') == 'input("""\n'


@pytest.mark.parametrize(
    "trial",
    [
        "```python\nprint(f(3))\n```",
        "```python\nassert f(3) == 3\nprint('ok')\n```",
        "```\n3\n```",
        "```bash\npython3 solution.py\n```",
        "```python\nimport io, sys\nsys.stdin = io.StringIO('3')\nmain()\n```",
    ],
)
def test_trial_of_the_program_is_not_the_program(trial: str) -> None:
    assert fenced_program(f"```python\n{DEFINES}```\nTry it:\n{trial}\n", "f") == DEFINES
    assert fenced_program(f"```python\n{READS}```\nTry it:\n{trial}\n") == READS


def test_last_program_counts_and_a_marked_one_takes_precedence() -> None:
    better = "def f(x): return x + 0\n"
    assert fenced_program(f"```python\n{DEFINES}```\nBetter:\n```python\n{better}```\n", "f") == better
    assert fenced_program(f"```python\n{DEFINES}```\nBetter:\n```\n{better}```\n", "f") == DEFINES
    assert fenced_program(f"```\n{DEFINES}```\nTry it:\n```python\nf(1)\n```\n", "f") == DEFINES
    assert (
        fenced_program("```python\nclass Solution:\n    def f(self): pass\n```\n```python\nSolution().f()\n```", "f")[
            :5
        ]
        == "class"
    )


@pytest.mark.parametrize(
    "text",
    [
        "```\n" * 30_000,
        '```python\n"""\n```\n' * 10_000,
        " " * 200_000,
        "> " * 60_000 + "```",
        "- " * 60_000,
        "'" * 200_000,
    ],
)
def test_long_answer_is_parsed_in_one_pass(text: str) -> None:
    began = time.process_time()
    fenced_program(text, "f")
    assert time.process_time() - began < 2.0


@pytest.mark.parametrize(
    ("rule", "answer", "program"),
    [
        ("livecodebench", "a\n```python\nb\n```\nc\n```\nd\n```", "d"),
        ("livecodebench", "a ```x``` b\n```python\nb", "```python"[:0]),
        ("livecodebench", "```python\nb", ""),
        ("nemo_gym", "```python\nb\n  ```", "b"),
        ("skyrl_lcb", "```python\n b \n```\n```\nc\n```", "c"),
        ("skyrl_lcb", "```python title\nb\n```", ""),
        ("prime_code", "b", "b"),
        ("prime_code", "```python\na\n```\n```python\nb\n```\n```\nc\n```", "\nb\n"),
        ("prime_code", "```\na\n```", ""),
        (
            "evalplus",
            "It's so:\nimport math\ndef f(a):\n    return a\n\nprint(f(1))\nSo it is.",
            "import math\ndef f(a):\n    return a",
        ),
        ("evalplus", "I do not know.", ""),
        ("evalplus", "```python\n@cache\ndef f(a):\n    return a\n```", "@cache\ndef f(a):\n    return a"),
    ],
)
def test_authors_rules_choose_the_program_of_their_scorers(rule: str, answer: str, program: str) -> None:
    assert AUTHORS_PROGRAM[rule](answer, "f") == program
