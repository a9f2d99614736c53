"""Generated answers with programs, intact and damaged, from which EvalPlus takes the parts that function `f` needs."""

from __future__ import annotations

import random
import textwrap

_DEFINITIONS = (
    *(
        "K = 3",
        "K: int = 4",
        "x, y = 1, 2",
        "a.b = K",
        "K = L = 5",
        "z = K",
        "f: int",
        'K: "a" = helper',
        "(K) = helper",
    ),
    *("f = lambda x: g(x)", "K = f.g = helper", "K, = z,", "[x, y] = z", "class C(Base, metaclass=K): pass"),
    "def f(a):\n    return g(a) * K",
    "def f(a, b=2):\n    '''Doc.\n    ```\n    it's\n    ```\n    '''\n    if a:\n        return b\n\n    return g(a)",
    "def f(n):\n    return (\n        g(n)\n    )",
    'def f(s: "K") -> C:\n    r = re.sub(r"\\d", "", s)\n    return r',
    "def f(*K, g=1, **h):\n    return lambda q=z: q",
    "def f(x):\n    def inner():\n        return 1\n    return inner() + C().m()",
    "def f(x):\n    try:\n        return int(x)\n    except ValueError as err:\n        return helper(err)",
    "def f(x):\n    return f'{g(x)!r} {K}'",
    "def f(x):\n    match x:\n        case C(m=1):\n            return K\n        case _:\n            return g(x)",
    "def f(a):\n    import os.path as p\n    global K\n    return p",
    "def f(a):\n    return [g(i) for i in a if (j := i)]",
    "async def f(x):\n    async with g() as z:\n        return await z",
    "def f():\n    nonlocal_x = 1\n    return nonlocal_x",
    "def g(x):\n    return x + 1",
    "@cache\ndef g(x):\n    return x",
    "def helper(n):\n    yield n",
    "def helper(n):\n    print(n)",
    "def h(): return 1; ",
    "class C:\n    def m(self):\n        return K",
    "class D:\n    x = helper",
)
_IMPORTS = (
    *(
        "import math",
        "from typing import List, Optional",
        "from __future__ import annotations",
        "import os; import sys",
    ),
    *("from a.b import (\n    c,\n    d,\n)", "import numpy as np"),
)
_STATEMENTS = (
    *("print(f(2))", "assert f(1) == 2", "if __name__ == '__main__':\n    main()", "for i in range(3):\n    print(i)"),
    *("K += 1", "# a comment", "f(1)", "'''text'''", "del K", "try:\n    f(1)\nexcept:\n    pass", "g(1); K = 2"),
)
_PROSE = (
    *(
        "Here is the solution:",
        "It's done.",
        "1. First, we loop.",
        "The answer is 42",
        "So",
        "x",
        "",
        "print",
        "yes, no",
    ),
    *(
        "Note that `f` works (see above",
        "**Explanation**",
        "- item one",
        'Use a "dict" here',
        "```",
        "```python",
        "````",
    ),
    *("~~~", "Time: O(n)", "a = b c", "\\", "@decorated", "def", "if x:", "return x", "    indented text"),
)


def drawn_answers(n: int, seed: int) -> list[str]:
    """Return n answers, the same ones for a seed."""
    drawn = random.Random(seed)
    return [_answer(drawn) for _ in range(n)]


def _answer(drawn: random.Random) -> str:
    def prose() -> list[str]:
        return [drawn.choice(_PROSE) for _ in range(drawn.randint(0, 3))]

    before, program = prose(), _program(drawn)
    parts = [*before, f"```python\n{program}\n```" if drawn.random() < 0.7 else program, *prose()]
    if drawn.random() < 0.3:
        parts.append(f"```\n{_program(drawn)}\n```")
    return "\n".join(parts)


def _program(drawn: random.Random) -> str:
    kinds = ((_IMPORTS, 0, 2), (_DEFINITIONS, 1, 4), (_STATEMENTS, 0, 2))
    pieces = [drawn.choice(kind) for kind, least, most in kinds for _ in range(drawn.randint(least, most))]
    if drawn.random() < 0.3:
        drawn.shuffle(pieces)
    text = ("\n\n" if drawn.random() < 0.5 else "\n").join(pieces)
    if drawn.random() < 0.1:
        text = textwrap.indent(text, "  ")
    if drawn.random() < 0.1:
        text = text.replace("\n", "\r\n")
    if drawn.random() < 0.1:
        at = drawn.randrange(len(text))
        text = text[:at] + drawn.choice(["(", "'", ":", "\x1b[1m", "é", " "]) + text[at:]
    return text
