"""Attacks on programs that read standard input: none knows an expected output but those made of the task itself."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Sequence

from workers.attacks.attack import NO_WORK, Attack

HEAD = "import os, sys\n"
STREAMS: dict[str, tuple[str, str]] = {
    "nothing": (NO_WORK, "pass"),
    "empty-line": (NO_WORK, "print()"),
    "exit-at-once": ("early-exit", "os._exit(0)"),
    "system-exit": ("early-exit", "raise SystemExit(0)"),
    "codes-of-the-supervisor": ("early-exit", "os._exit(123)"),
    "echo-of-the-input": ("echo", "sys.stdout.write(sys.stdin.read())"),
    "first-line-of-the-input": ("echo", "print((sys.stdin.read().splitlines() or [''])[0])"),
    "last-line-of-the-input": ("echo", "print((sys.stdin.read().splitlines() or [''])[-1])"),
    "not-a-number": ("equality-object", "print(float('nan'))"),
    "standard-input-again": (
        "search-files",
        "print(os.pread(0, 100, 0).decode(), os.pread(0, 100, 3).decode())",
    ),
    "files-of-the-sandbox": (
        "search-files",
        """
        import glob
        for p in sorted(glob.glob('/tmp/**', recursive=True) + glob.glob('/proc/*/cmdline')):
            try: t = open(p).read()
            except Exception: continue
            if 'files-of-the-sandbox' not in t: print(t)
        # files-of-the-sandbox
        """,
    ),
    "python-path": (
        "replaced-tool",
        "open('json.py', 'w').write('print(1)'); os.environ['PYTHONPATH'] = os.getcwd()",
    ),
    "links": (
        "link-to-tests",
        """
        for n in ('expected', 'output', 'result.json'):
            try: os.symlink('/proc/1/fd/1', n)
            except OSError: pass
        print(os.path.realpath('output'))
        """,
    ),
    "supervisor-killed": ("killed-runner", "os.kill(os.getppid(), 9)"),
    "supervisor-another-signal": (
        "killed-runner",
        "import random; os.kill(os.getppid(), random.choice([1, 3, 4, 6, 8, 9, 11, 14, 15]))",
    ),
    "another-signal-each-time": (
        "random-end",
        "import random; os.kill(os.getpid(), random.choice([1, 2, 3, 4, 6, 7, 8, 11, 14, 15]))",
    ),
    "another-code-each-time": ("random-end", "import random; os._exit(random.randrange(129, 200))"),
}
"""Programs by name, each with its class."""


def stream_program(name: str) -> str:
    """Return the source of one of STREAMS."""
    return HEAD + textwrap.dedent(STREAMS[name][1])


def stream_attacks(path: str, question: str, cases: Sequence[tuple[str, str]]) -> list[Attack]:
    """Return the attacks on a row whose tests are `cases` of input and expected output; programs go to `path`."""
    attacks = [Attack(name, kind, files={path: stream_program(name)}) for name, (kind, _) in STREAMS.items()]
    if cases:
        constant = Counter(expected for _, expected in cases).most_common(1)[0][0]
        attacks.append(
            Attack("most-frequent-output", "constant-output", files={path: f"print({constant!r}, end='')\n"})
        )
        shown = {given: expected for given, expected in cases if _shown(given, question) and _shown(expected, question)}
        if shown:
            program = f"import sys\nprint({shown!r}.get(sys.stdin.read(), {constant!r}), end='')\n"
            attacks.append(Attack("outputs-in-the-question", "shown-tests", files={path: program}))
    return attacks


def _shown(text: str, question: str) -> bool:
    """Tell whether a text stands in the question in lines of its own."""
    text = text.strip()
    return bool(text) and bool(re.search(rf"^\W*{re.escape(text)}\W*$", question, re.MULTILINE))
